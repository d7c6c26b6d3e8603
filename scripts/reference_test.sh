#!/usr/bin/env bash
# train_gpt against PyTorch + transformers, live: the same model, the same batches, 50 steps of real text.
#   scripts/reference_test.sh [build/train_gpt]      `make test-reference` runs it
# The work is left in build/reference_test: logs, dumps, checkpoint, curves.png.
set -euo pipefail
cd "$(dirname "$0")/.."

trainer=${1:-build/train_gpt}
python=${PYTHON:-.venv/bin/python}
python_hf4=${PYTHON_HF4:-.venv/hf4/bin/python}
work=build/reference_test
steps=50
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

[[ -x $trainer ]] || { echo "$trainer: not built; run make" >&2; exit 1; }
rm -rf "$work"
mkdir -p "$work"
cat > "$work/config.json" <<JSON
{ "model":      {"path": "test/fixtures/stories260k"},
  "data":       {"train": ["test/fixtures/shakespeare.jsonl"], "seq_len": 512, "packing": "best_fit", "seed": 1},
  "batch":      {"micro_batch_size": 2, "global_batch_size": 4},
  "optimizer":  {"lr": 1e-3},
  "schedule":   {"name": "cosine", "warmup_steps": 10},
  "train":      {"steps": $steps, "device": "cpu", "dtype": "fp32"},
  "checkpoint": {"dir": "$work/checkpoints", "resume": "never"},
  "log":        {"file": "$work/train_gpt.jsonl"},
  "debug":      {"dump_dir": "$work/dump", "dump_steps": $steps} }
JSON

echo "== train_gpt, $steps steps"
"$trainer" "$work/config.json" > "$work/train_gpt.out"
tail -n 1 "$work/train_gpt.jsonl"

echo "== the reference, on the same batches"
"$python" scripts/reference_train.py "$work/config.json" --batches "$work/dump" --log "$work/reference.jsonl" \
  --dump "$work/reference_dump" --debug.dump_steps 1 > "$work/reference.out"
tail -n 1 "$work/reference.jsonl"

echo "== loss curves within 1e-3; the first step's loss, gradients and new weights within 1e-4"
"$python" scripts/compare_curves.py "$work/train_gpt.jsonl" "$work/reference.jsonl" --tolerance 1e-3 --lines 11 \
  --names train_gpt "PyTorch + transformers" --out "$work/curves.png"
"$python" scripts/compare_curves.py "$work/train_gpt.jsonl" "$work/reference.jsonl" --key lr --tolerance 1e-12 --lines 1
"$python" scripts/compare_dumps.py "$work/dump" "$work/reference_dump" --steps 1 --tolerance 1e-4 --worst 5

if command -v mpirun >/dev/null; then
  echo "== 4 ranks, 2 data-parallel x 2 sequence-parallel, against the same reference"
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 mpirun --oversubscribe --bind-to none -n 4 \
    "$trainer" "$work/config.json" --parallel.sp_size 2 --checkpoint.dir "$work/ranks" --log.file "$work/ranks.jsonl" \
    --debug.dump_dir "$work/ranks_dump" --debug.dump_steps 1 --batch.micro_batch_size 1 > "$work/ranks.out"
  "$python" scripts/compare_curves.py "$work/ranks.jsonl" "$work/reference.jsonl" --tolerance 1e-3 --lines 11 \
    --names "4 ranks" "PyTorch + transformers" --out "$work/ranks.png"
  "$python" scripts/compare_dumps.py "$work/ranks_dump" "$work/reference_dump" --only 'grad/*' --steps 1 --tolerance 1e-4 --worst 5
fi

echo "== the saved directory opens in transformers 5 and 4 with the logits that train_gpt has"
checkpoint=$(printf '%s/checkpoints/step_%06d' "$work" "$steps")
"$trainer" "$work/config.json" --model.path "$checkpoint" --train.steps 1 --schedule.warmup_steps 0 --checkpoint.dir "$work/again" \
  --log.file "$work/again.jsonl" --debug.dump_dir "$work/again_dump" --debug.dump_steps 1 --debug.dump_logits true \
  > "$work/again.out"
for hf in "$python" "$python_hf4"; do
  "$hf" scripts/check_checkpoint.py "$checkpoint" --expected "$work/again_dump/step_000001.safetensors" --tolerance 1e-4
done

echo "== every kind of checkpoint: trained a step, saved, opened, with the logits that train_gpt has"
# Tokens of the small vocabulary of the fixtures.
for document in 1 2 3 4 5 6 7 8; do
  echo "{\"input_ids\": [$(seq -s, "$document" 7 $((20 + 9 * document)))]}"
done > "$work/small.jsonl"
# As the first checkpoints of Qwen2-VL: the keys of text_config at the top level.
cp -r test/fixtures/qwen2_5_vl "$work/qwen2_5_vl_flat.model"
mv "$work/qwen2_5_vl_flat.model/config_v4.json" "$work/qwen2_5_vl_flat.model/config.json"
families=(mistral qwen2 qwen3 smollm3 olmo2 phi3 gemma2 gemma3_text cohere2 glm glm4_biases granite mixtral qwen2_moe qwen3_moe qwen3_moe_unnormalised glm4_moe deepseek_v3 gemma3 qwen2_vl
  qwen2_5_vl qwen2_5_vl_flat qwen3_vl qwen3_vl_moe)
only_hf5=(gpt_oss mixtral_fused gemma3_untied qwen3_chunked)  # version 4 has no other limit of the gate, no fused experts, other names; packed.py
saved=() dumps=() originals=()
for family in "${families[@]}" "${only_hf5[@]}"; do
  options=(--data.train "$work/small.jsonl" --data.seq_len 32 --train.steps 1 --schedule.warmup_steps 0 )
  original=test/fixtures/$family
  [[ -d $original ]] || original=$work/$family.model
  "$trainer" "$work/config.json" "${options[@]}" --model.path "$original" \
    --checkpoint.dir "$work/$family" --log.file "$work/$family.jsonl" --debug.dump_dir "$work/$family.first" > "$work/$family.out"
  "$trainer" "$work/config.json" "${options[@]}" --model.path "$work/$family/step_000001" \
    --checkpoint.dir "$work/$family.again" --log.file "$work/$family.again.jsonl" \
    --debug.dump_dir "$work/$family.dump" --debug.dump_steps 1 --debug.dump_logits true > "$work/$family.again.out"
  saved+=("$work/$family/step_000001") dumps+=("$work/$family.dump/step_000001.safetensors") originals+=("$original")
done
"$python" scripts/check_checkpoint.py "${saved[@]}" --expected "${dumps[@]}" --original "${originals[@]}" --tolerance 1e-4
n=${#families[@]}
"$python_hf4" scripts/check_checkpoint.py "${saved[@]::n}" --expected "${dumps[@]::n}" --original "${originals[@]::n}" --tolerance 1e-4
