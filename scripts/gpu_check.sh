#!/usr/bin/env bash
# Everything that needs a GPU, in one command and without a network: builds for this card, compares every layer, the
# instructions that they are made of, and short runs with the CPU (and with PyTorch, where that is), looks for memory
# errors, and measures layers, tokens/s and MFU (beside PyTorch). Prints a table, writes OUT/gpu_check.json.
#   scripts/gpu_check.sh [OUT]         default build/gpu_check
#   scripts/gpu_check.sh --carry       where Debian's packages are: copies the headers that the GPU's machine may lack to
#                                      build/carry, which travels with the tree (make finds it)
# CUDA's compiler has to be there; cuDNN and NCCL are found in the toolkit or among Python's nvidia packages.
# shellcheck disable=SC2317 # functions are called by verdict
set -euo pipefail
cd "$(dirname "$0")/.."

carry() {
  local lib=/usr/lib/x86_64-linux-gnu
  rm -rf build/carry
  mkdir -p build/carry/include build/carry/lib
  cp -rL /usr/include/{fmt,CLI,nlohmann,gtest} build/carry/include/
  cp $lib/libfmt.a $lib/libgtest.a $lib/libgtest_main.a build/carry/lib/
  if [ -d build/cudnn_frontend/include ]; then cp -r build/cudnn_frontend/include/. build/carry/include/; fi
  du -sh build/carry
}
if [ "${1:-}" = --carry ]; then
  carry
  exit
fi

out=${1:-build/gpu_check}
mkdir -p "$out" build/carry/include build/carry/lib
rows=()
failed=0
# row NAME VALUE: a line of the table, and of the JSON
row() {
  printf '%-60s %s\n' "$1" "$2"
  rows+=("$(printf '  "%s": "%s"' "$1" "$2")")
}
verdict() { # verdict NAME COMMAND...: ok or FAILED; its output goes to a file
  local name=$1 log="$out/${1// /_}.log"
  shift
  if "$@" >"$log" 2>&1; then
    row "$name" ok
  else
    row "$name" "FAILED, see $log"
    failed=1
  fi
}

# What Python's nvidia packages have, where make looks.
for dir in $(python3 -c 'import nvidia; print(" ".join(nvidia.__path__))' 2>/dev/null || true); do
  for package in cudnn nccl; do
    [ -d "$dir/$package/include" ] || continue
    ln -sf "$dir/$package"/include/* build/carry/include/
    for file in "$dir/$package"/lib/*.so.*; do
      ln -sf "$file" build/carry/lib/
      base=$(basename "$file")
      ln -sf "$file" "build/carry/lib/${base%%.so*}.so"
    done
  done
done

card=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader | head -1)
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
row card "$card"
row commit "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
row date "$(date -u +%FT%TZ)"
options=(CUDA=1 CUDA_ARCHS="$arch" CUDNN_FRONTEND=build/carry)
verdict build make -j"$(nproc)" "${options[@]}" all gpu-bench unit-test-programs
trainer=build/train_gpt
[ -x $trainer ] || exit 1
verdict selftest $trainer --selftest
sed -n '/^layer/,$p' "$out/selftest.log"
if command -v compute-sanitizer >/dev/null; then
  verdict "selftest under compute-sanitizer memcheck" timeout 120 compute-sanitizer --error-exitcode 9 $trainer --selftest
  verdict "selftest under compute-sanitizer racecheck" timeout 120 compute-sanitizer --tool racecheck --error-exitcode 9 $trainer --selftest
fi

verdict "unit tests" make "${options[@]}" run-unit-tests TEST_JOBS=4

# The same 30 steps on both devices, and in PyTorch.
cat >"$out/learn.json" <<J
{"model": {"path": "test/fixtures/stories260k"}, "train": {"steps": 30}, "optimizer": {"lr": 1e-3},
 "data": {"train": ["test/fixtures/shakespeare.jsonl"], "seq_len": 512, "cache_dir": "$out/cache"},
 "batch": {"micro_batch_size": 2, "global_batch_size": 4}}
J
learn() { # learn NAME OPTIONS...
  local dir="$out/learn_$1"
  shift
  rm -rf "$dir"
  $trainer "$out/learn.json" --checkpoint.dir "$dir" "$@"
}
has_torch() { python3 -c 'import torch, transformers' 2>/dev/null; }
compare() { python3 scripts/compare_curves.py "$out/learn_$1/log.jsonl" "$out/learn_$2/log.jsonl" --tolerance "$3" --lines 5; }
rm -rf "$out/dump"
verdict "30 steps on the CPU" learn cpu --train.device cpu --debug.dump_dir "$out/dump" --debug.dump_steps 30
verdict "30 steps, fp32" learn fp32 --train.device cuda --train.dtype fp32
verdict "30 steps, bf16" learn bf16 --train.device cuda
verdict "30 steps again, bf16" learn again --train.device cuda
verdict "fp32 as the CPU, 1e-3" compare cpu fp32 1e-3
verdict "bf16 as the CPU, 3e-2" compare cpu bf16 3e-2
verdict "bf16 bit-equal when repeated" cmp "$out"/learn_{bf16,again}/step_000030/model.safetensors
if has_torch; then
  mkdir -p "$out/learn_torch"
  verdict "30 steps, PyTorch" python3 scripts/reference_train.py "$out/learn.json" --batches "$out/dump" --log "$out/learn_torch/log.jsonl"
  verdict "fp32 as PyTorch, 1e-3" compare torch fp32 1e-3
fi

# Layers: bandwidth against a copy, products against the peak.
verdict "bench of layers" "$(make -s "${options[@]}" gpu-bench-path)"
while IFS=$'\t' read -r name value; do row "$name" "$value"; done < <(sed -E 's/ {2,}/\t/; s/ {2,}/, /g' "$out/bench_of_layers.log")

# Tokens/s and MFU: some steps of a model with random weights, then it is killed, since there is nothing to save.
speed() { # speed MODEL SEQ_LEN MICRO_BATCH OPTIONS...
  local name="$1, $2 x $3 tokens" dir="$out/speed" log="$out/speed.log" pid
  local peer=(scripts/gpu_peer.py "configs/models/$1.json" "$2" "$3")
  local options=(--model.path "configs/models/$1.json" --data.seq_len "$2" --batch.micro_batch_size "$3" --batch.global_batch_size "$3")
  shift 3
  rm -rf "$dir"
  $trainer "${options[@]}" --model.init random --data.train test/fixtures/shakespeare.jsonl --data.packing concat \
    --data.cache_dir "$out/cache" --train.steps 1000 --schedule.warmup_steps 0 --train.device cuda --checkpoint.dir "$dir" "$@" >"$log" 2>&1 &
  pid=$!
  for _ in $(seq 150); do
    sleep 0.5
    kill -0 $pid 2>/dev/null || break
    [ -e "$dir/log.jsonl" ] && [ "$(wc -l <"$dir/log.jsonl")" -ge 12 ] && break
  done
  kill -9 $pid 2>/dev/null || true
  wait $pid 2>/dev/null || true
  row "$name" "$(python3 - "$dir/log.jsonl" "$log" <<'P'
import json, statistics, sys
try:
    lines = [json.loads(line) for line in open(sys.argv[1])][2:]
    print("%.0f tokens/s, MFU %.1f%%" % (statistics.median(l["tokens_per_s"] for l in lines), 100 * statistics.median(l["mfu"] for l in lines)))
except Exception:
    print("no figure: " + (open(sys.argv[2]).read().strip().splitlines() or [""])[-1].replace('"', "'")[:160])
P
  )"
  if [[ " $* " != *" --memory.offload "* ]] && has_torch; then
    [[ " $* " != *" --memory.recompute block "* ]] || peer+=(--recompute)
    row "$name, PyTorch all in bf16" "$(timeout 60 python3 "${peer[@]}" 2>&1 | tail -1 | tr '"' "'" | cut -c1-160)"
  fi
}
speed qwen2.5_0.5b 1024 16
speed qwen2.5_1.5b 1024 8
speed qwen2.5_3b 1024 4
speed qwen2.5_7b 1024 4 --memory.recompute block --train.grad_dtype bf16 # 113 GiB of weights, gradients and moments
speed qwen2.5_1.5b 32768 1 --memory.recompute block
speed qwen2.5_1.5b 32768 1 --memory.recompute block --memory.offload block_inputs

{
  echo '{'
  for i in "${!rows[@]}"; do
    [ "$i" = 0 ] || echo ','
    printf '%s' "${rows[$i]}"
  done
  printf '\n}\n'
} >"$out/gpu_check.json"
echo "written to $out/gpu_check.json"
exit $failed
