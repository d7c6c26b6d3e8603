"""Tests of the scripts themselves: `make test-reference` runs them. Plain asserts; every test is a claim.

    .venv/bin/python scripts/test_scripts.py [part of a test's name]
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).resolve().parent
FIXTURES = SCRIPTS.parent / "test" / "fixtures"
TEXT = "the cat sat on the mat\nthe dog sat on the log\n\na second paragraph\n"
CHATML = ("{% for m in messages %}<|{{ m.role }}|>GEN{{ m.content }}<|end|>END{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>{% endif %}")  # fmt: skip


def run(script: str, *args: Any, code: int = 0) -> str:
    """The output of a script that must end with `code`. In this process: torch is imported once, not twenty times."""
    argv, sys.argv = sys.argv, [str(SCRIPTS / script), *map(str, args)]
    out, got = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        got = e.code or 0
    finally:
        sys.argv = argv
    assert got == code, f"{script} {args}: exit code {got}, not {code}\n{out.getvalue()}"
    return out.getvalue()


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_tokenizer(directory: Path, template: str | None = None, adds_bos: bool = False) -> Any:
    """A byte-level BPE of a few words, saved as a tokenizer directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([TEXT] * 5, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet))
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer


# ---- schedule


def schedules_end_exactly_where_they_say(tmp: Path) -> None:
    from schedule import NAMES, lr_at

    for name in NAMES:
        rates = [lr_at(s, 100, 2.0, name, warmup_steps=10, min_lr_ratio=0.1, decay_ratio=0.2) for s in range(100)]
        assert rates[0] == 0.2 and rates[9] == 2.0 and rates[10] == 2.0, (name, rates[:11])
        assert rates[99] == (2.0 if name == "constant" else 0.2), (name, rates[99])
        assert all(a >= b for a, b in zip(rates[9:], rates[10:])), name
    golden = {"linear": 1.1, "cosine": 1.1, "wsd": 2.0, "constant": 2.0}  # half-way of an odd number of steps
    for name, value in golden.items():
        assert math.isclose(lr_at(50, 101, 2.0, name, 0, 0.1, 0.2), value), name
    wsd = [lr_at(s, 10, 1.0, "wsd", 0, 0.0, 0.3) for s in range(10)]
    assert np.allclose(wsd, [1, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0]), wsd
    assert math.isclose(lr_at(30, 121, 1.0, "cosine", 0, 0.0), 0.5 + 0.5 * math.cos(math.pi / 4))


def short_and_odd_schedules_stay_in_range(tmp: Path) -> None:
    from schedule import NAMES, lr_at

    for name in NAMES:
        for steps in range(1, 7):
            for warmup in range(0, 9):
                for decay_ratio in (0.0, 0.4, 1.0):
                    rates = [lr_at(s, steps, 1.0, name, warmup, 0.1, decay_ratio) for s in range(steps)]
                    assert all(0 < rate <= 1 for rate in rates), (name, steps, warmup, rates)
    assert lr_at(0, 1, 1.0, "cosine") == 1.0


# ---- run config


def overrides_and_human_numbers_are_understood(tmp: Path) -> None:
    from run_config import human_number, load_run_config

    assert human_number("128k") == 128000 and human_number("64Ki") == 65536 and human_number("1e-5") == 1e-5
    assert human_number("x") is None and human_number("3q") is None
    path = tmp / "c.json"
    path.write_text('{"data": {"train": ["a"], "shuffle": true}, "optimizer": {"lr": 0.1}}')
    overrides = ["--data.seq_len", "2k", "--data.shuffle", "false", "--optimizer.betas", "0.9,0.99", "--train.steps", "3"]
    config = load_run_config(path, overrides)
    assert config["data"]["seq_len"] == 2000 and config["data"]["shuffle"] is False and config["optimizer"]["lr"] == 0.1
    assert config["optimizer"]["betas"] == [0.9, 0.99] and config["train"]["steps"] == 3
    out = run("reference_train.py", path, "--optimiser.lr", "1", code=1)
    assert "did you mean optimizer.lr?" in out, out


# ---- packing, and the reference on it


def packing_loses_no_token(tmp: Path) -> None:
    from packed import PADDING, pack_rows
    from reference_train import fit_length, pack

    rng = np.random.default_rng(0)
    documents = [(list(map(int, rng.integers(1, 90, n))),) * 2 for n in (5, 1, 16, 7, 30, 2, 9)]
    total = sum(len(ids) for ids, _ in documents)
    for packing in ("none", "concat", "best_fit"):
        pieces = [p for d in documents for p in fit_length(d, 16, "split", "")]
        rows = pack(pieces if packing != "concat" else documents, 16, packing)
        batch = pack_rows(rows, 16, 0)
        assert batch.num_tokens == total, packing
        for row, begin, end in batch.documents():
            assert batch.positions[row, begin:end].tolist() == list(range(end - begin))
            assert batch.targets[row, end - 1] == -100
            assert (batch.targets[row, begin : end - 1] == batch.input_ids[row, begin + 1 : end]).all()
    assert [len(ids) for row in pack([([1] * n,) * 2 for n in (9, 10, 6, 7)], 16, "best_fit") for ids, _ in row] == [9, 7, 10, 6]
    tail = pack_rows([[([3, 4, 5], [3, 4, 5])]], 6, 0)
    assert tail.positions.tolist() == [[0, 1, 2, 3, 4, 5]] and tail.document_ids[0, 3] == PADDING


def packed_documents_do_not_see_each_other(tmp: Path) -> None:
    import torch
    from packed import PADDING, alone_logits, packed_logits, read_batch, relative_l2
    from transformers import AutoModelForCausalLM

    for name, attention in (("mistral", "sdpa"), ("mistral", "eager"), ("gemma3_text", "sdpa"), ("qwen2", "sdpa"), ("cohere2", "sdpa")):
        batch = read_batch(FIXTURES / name / "expected.safetensors")
        model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            packed, alone = packed_logits(model, batch), alone_logits(model, batch)
        valid = torch.from_numpy(batch.document_ids != PADDING)
        error = relative_l2(packed[valid], alone[valid])
        assert error < 2e-6, (name, attention, error)  # fp32: eps 6e-8, a few hundred roundings


def dynamic_rope_depends_on_this_batch_alone(tmp: Path) -> None:
    import torch
    from packed import pack_rows, packed_logits
    from transformers import AutoModelForCausalLM

    used, *fresh = (AutoModelForCausalLM.from_pretrained(FIXTURES / "llama_dynamic", dtype=torch.float32) for _ in range(4))
    batches = [pack_rows([[(list(range(6, 6 + n)),) * 2]], n, 0) for n in (20, 10, 5)]  # P = 8
    with torch.no_grad():
        for batch, model in zip(batches, fresh):
            assert torch.equal(packed_logits(used, batch), packed_logits(model, batch)), len(batch.input_ids[0])


def fixtures_are_what_their_script_makes(tmp: Path) -> None:
    names = ("llama", "llama_dynamic", "phi3_longrope_short", "gemma3_text", "cohere2", "granite")
    run("make_fixtures.py", "--out", tmp, "--only", *names)
    for name in names:
        for file in ("config.json", "config_v4.json"):
            assert (tmp / name / file).read_text() == (FIXTURES / name / file).read_text(), (name, file)
        for file in ("model.safetensors", "expected.safetensors"):  # another CPU may round otherwise
            run("compare_dumps.py", tmp / name / file, FIXTURES / name / file, "--tolerance", 1e-6)


def a_run_on_dumped_batches_repeats_the_run(tmp: Path) -> None:
    path = tmp / "c.json"
    config = {"model": {"path": str(FIXTURES / "llama")}, "data": {"train": [str(tmp / "d.jsonl")], "seq_len": 24, "shuffle": False},
              "batch": {"micro_batch_size": 1, "global_batch_size": 2}, "optimizer": {"lr": 0.01}, "train": {"steps": 4},
              "debug": {"dump_steps": 4, "dump_logits": True}}  # fmt: skip
    path.write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    write_jsonl(tmp / "d.jsonl", [{"input_ids": rng.integers(0, 97, n).tolist()} for n in (30, 5, 9, 24, 2, 3, 11)])
    run("reference_train.py", path, "--dump", tmp / "a", "--log", tmp / "a.jsonl", "--save", tmp / "model")
    run("reference_train.py", path, "--batches", tmp / "a", "--dump", tmp / "b", "--log", tmp / "b.jsonl",
        "--batch.micro_batch_size", 2)  # fmt: skip
    run("compare_curves.py", tmp / "a.jsonl", tmp / "b.jsonl", "--tolerance", 1e-5, "--out", tmp / "curves.png")
    assert (tmp / "curves.png").read_bytes()[:4] == b"\x89PNG"
    run("compare_dumps.py", tmp / "a", tmp / "b")
    assert "FAILED" in run("compare_dumps.py", tmp / "a", tmp / "b", "--tolerance", 1e-12, code=1)
    run("compare_dumps.py", tmp / "a" / "step_000001.safetensors", tmp / "a" / "step_000002.safetensors", code=1)
    keys = {"step", "loss", "grad_norm", "lr", "num_tokens", "num_loss_tokens", "tokens_per_s", "step_ms"}
    assert all(set(record) == keys for record in read_jsonl(tmp / "a.jsonl"))

    run("reference_train.py", path, "--model.path", tmp / "model", "--dump", tmp / "c", "--log", tmp / "c.jsonl")
    run("check_checkpoint.py", tmp / "model", "--expected", tmp / "c" / "step_000001.safetensors")
    out = run("check_checkpoint.py", tmp / "model", "--expected", tmp / "a" / "step_000001.safetensors", code=1)
    assert "FAILED" in out, out
    assert "shuffle" in run("reference_train.py", path, "--data.shuffle", "true", code=1)


def the_reference_step_is_that_of_torch(tmp: Path) -> None:
    """Clipping and AdamW's groups against torch's own, and the loss against the fixture's."""
    import torch
    from packed import read_batch
    from reference_train import backward, clip_gradients, make_optimizer
    from run_config import DEFAULTS
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    expected = load_file(FIXTURES / "llama_biases" / "expected.safetensors")
    batch = read_batch(FIXTURES / "llama_biases" / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "llama_biases", dtype=torch.float32)
    loss, _ = backward(model, batch, 1, False)
    assert math.isclose(loss, expected["loss"].item(), rel_tol=1e-6)
    worst = max((p.grad - expected[f"grad/{n}"]).norm() / p.grad.norm() for n, p in model.named_parameters())
    assert worst < 1e-5, worst
    grads = [p.grad.clone() for p in model.parameters()]
    norm = clip_gradients(model, 0.5)
    clipped = [p.grad.clone() for p in model.parameters()]
    for p, g in zip(model.parameters(), grads):
        p.grad = g
    assert math.isclose(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item(), rel_tol=1e-6)
    assert all(torch.allclose(p.grad, g, rtol=1e-5) for p, g in zip(model.parameters(), clipped))
    decayed, plain = make_optimizer(model, DEFAULTS["optimizer"]).param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert plain["weight_decay"] == 0 and all("norm" in names[id(p)] or "bias" in names[id(p)] for p in plain["params"])
    assert decayed["weight_decay"] == 0.1 and len(decayed["params"]) == 1 + 2 * 7


# ---- comparing curves


def curves_beyond_the_tolerance_fail(tmp: Path) -> None:
    a = write_jsonl(tmp / "a.jsonl", [{"step": s, "loss": 3.0} for s in range(1, 6)])
    near = write_jsonl(tmp / "near.jsonl", [{"step": s, "loss": 3.0 + 1e-4 * s} for s in range(1, 6)])
    far = write_jsonl(tmp / "far.jsonl", [{"step": s, "loss": 3.0 + (0.01 if s == 3 else 0)} for s in range(1, 6)])
    short = write_jsonl(tmp / "short.jsonl", [{"step": s, "loss": 3.0} for s in range(1, 4)])
    hole = write_jsonl(tmp / "hole.jsonl", [{"step": s, "loss": None if s == 2 else 3.0} for s in range(1, 6)])
    run("compare_curves.py", a, near)
    assert "at step 3" in run("compare_curves.py", a, far, code=1)
    run("compare_curves.py", a, far, "--tolerance", 0.1)
    run("compare_curves.py", a, short, code=1)
    run("compare_curves.py", a, short, "--common")
    assert "nan at step 2" in run("compare_curves.py", a, hole, code=1)
    with (tmp / "a.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # half written
    run("compare_curves.py", a, near)
    run("compare_curves.py", a, tmp / "none.jsonl", code=1)


# ---- tokenising


def text_comes_back_from_jsonl_and_from_megatron(tmp: Path) -> None:
    tokenizer = make_tokenizer(tmp / "tok", adds_bos=True)
    (tmp / "t.txt").write_text(TEXT)
    run("tokenize_data.py", tmp / "t.txt", "--tokenizer", tmp / "tok", "--split", "paragraph", "--out", tmp / "t.jsonl")
    documents = [record["input_ids"] for record in read_jsonl(tmp / "t.jsonl")]
    paragraphs = [p.strip() for p in TEXT.split("\n\n")]
    assert [tokenizer.decode(ids[1:-1]) for ids in documents] == paragraphs
    assert all(ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id for ids in documents)
    run("tokenize_data.py", tmp / "t.txt", "--tokenizer", tmp / "tok", "--split", "line", "--out", tmp / "t.bin",
        "--bos", "never", "--eos", "never")  # fmt: skip
    lines = [line for line in TEXT.splitlines() if line]
    assert [tokenizer.decode(ids) for ids in read_megatron(tmp / "t.bin")] == lines
    assert not list(tmp.glob("*.tmp"))


def read_megatron(path: Path) -> list[list[int]]:
    """By the format's text, not by the writer's code."""
    index = path.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00" and struct.unpack_from("<Q", index, 9) == (1,)
    code, sequences, documents = struct.unpack_from("<BQQ", index, 17)
    dtype = {8: np.uint16, 4: np.int32}[code]
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    offsets = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    ends = np.frombuffer(index, np.int64, documents, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * documents and ends.tolist() == list(range(sequences + 1))
    data = path.read_bytes()
    assert len(data) == lengths.sum() * np.dtype(dtype).itemsize
    return [np.frombuffer(data, dtype, n, o).tolist() for n, o in zip(lengths, offsets)]


def only_assistant_turns_have_loss(tmp: Path) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"},
                {"role": "user", "content": "the"}, {"role": "assistant", "content": "mat"}]  # fmt: skip
    chats = write_jsonl(tmp / "c.jsonl", [{"messages": messages}])
    marked = CHATML.replace("GEN", "{% if m.role == 'assistant' %}{% generation %}").replace(
        "{{ m.content }}<|end|>END", "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}")  # fmt: skip
    plain = CHATML.replace("GEN", "").replace("END", "")
    results = []
    for name, template in (("plain", plain), ("marked", marked)):
        tokenizer = make_tokenizer(tmp / name, template)
        run("tokenize_data.py", chats, "--tokenizer", tmp / name, "--out", tmp / f"{name}.jsonl")
        record = read_jsonl(tmp / f"{name}.jsonl")[0]
        learnt = [token for token, label in zip(record["input_ids"], record["labels"]) if label == token]
        assert tokenizer.decode(learnt) == "sat on<|end|>mat<|end|>", (name, tokenizer.decode(learnt))
        assert all(label in (-100, token) for token, label in zip(record["input_ids"], record["labels"]))
        results.append(record)
    assert results[0] == results[1]
    out = run("tokenize_data.py", chats, "--tokenizer", tmp / "plain", "--out", tmp / "c.bin", code=1)
    assert "labels" in out and not list(tmp.glob("*.tmp")), out


def a_template_that_rewrites_earlier_turns_is_refused(tmp: Path) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    make_tokenizer(tmp / "tok", template)
    messages = [{"role": r, "content": "the cat"} for r in ("user", "assistant", "user", "assistant")]
    chats = write_jsonl(tmp / "c.jsonl", [{"messages": messages}])
    out = run("tokenize_data.py", chats, "--tokenizer", tmp / "tok", "--out", tmp / "o.jsonl", code=1)
    assert "c.jsonl:1" in out and "rewrites" in out and not (tmp / "o.jsonl").exists(), out


def datasets_on_disk_are_read(tmp: Path) -> None:
    from datasets import Dataset

    tokenizer = make_tokenizer(tmp / "tok", CHATML.replace("GEN", "").replace("END", ""))
    Dataset.from_dict({"body": ["the cat", "the dog"]}).save_to_disk(tmp / "texts")
    run("tokenize_data.py", tmp / "texts", "--column", "body", "--tokenizer", tmp / "tok", "--out", tmp / "t.jsonl")
    assert [tokenizer.decode(r["input_ids"][:-1]) for r in read_jsonl(tmp / "t.jsonl")] == ["the cat", "the dog"]
    assert "body" in run("tokenize_data.py", tmp / "texts", "--tokenizer", tmp / "tok", "--out", tmp / "x.jsonl", code=1)
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    Dataset.from_dict({"messages": [chat]}).save_to_disk(tmp / "chats")
    run("tokenize_data.py", tmp / "chats", "--column", "messages", "--tokenizer", tmp / "tok", "--out", tmp / "c.jsonl")
    labels = read_jsonl(tmp / "c.jsonl")[0]["labels"]
    assert tokenizer.decode([label for label in labels if label >= 0]) == "sat<|end|>"


# ---- exporting logs


def scalars_of(directory: Path, key: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    points = [(e.step, e.value) for e in events.Scalars(key)] if key in events.Tags()["scalars"] else []
    assert len(dict(points)) == len(points), f"a step is there twice: {points}"
    return dict(points)


def a_log_becomes_events(tmp: Path) -> None:
    log = write_jsonl(tmp / "log.jsonl", [{"step": s, "loss": float(s), "mfu": None} for s in range(1, 4)])
    with log.open("a") as file:
        file.write('{"step": 3, "eval_loss": 9.0}\n{"step": 4, "loss"')
    run("export_log.py", log, "--out", tmp / "tb")
    assert scalars_of(tmp / "tb", "loss") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert scalars_of(tmp / "tb", "eval_loss") == {3: 9.0}
    run("export_log.py", log, "--out", tmp / "tb")  # again: the same, not twice
    assert scalars_of(tmp / "tb", "loss") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert "log.jsonl:1" in run("export_log.py", write_jsonl(log, [{"loss": 1}]), "--out", tmp / "x", code=1)


def a_followed_log_may_grow_and_be_resumed(tmp: Path) -> None:
    log, out = tmp / "log.jsonl", tmp / "tb"
    lines = [json.dumps({"step": s, "loss": float(s)}) + "\n" for s in range(1, 8)]
    command = [sys.executable, str(SCRIPTS / "export_log.py"), str(log), "--out", str(out), "--follow", "--every", "0.1"]
    # A shell starts background jobs with SIGINT ignored, and that is inherited.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def wait_for(expected: dict[int, float]) -> None:
        deadline = time.monotonic() + 120
        while not out.is_dir() or scalars_of(out, "loss") != expected:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, (expected, out.is_dir() and scalars_of(out, "loss"))
            time.sleep(0.1)

    try:
        log.write_text("".join(lines[:4]) + lines[4][:9])
        wait_for({1: 1, 2: 2, 3: 3, 4: 4})
        with log.open("a") as file:
            file.write(lines[4][9:])
        wait_for({1: 1, 2: 2, 3: 3, 4: 4, 5: 5})
        log.write_text("".join(lines[:2]) + '{"step": 3, "loss": 30.0}\n')  # resumed after step 2
        wait_for({1: 1, 2: 2, 3: 30})
        with log.open("a") as file:
            file.write('{"step": 4, "loss": 40.0}\n{"step": 5, "loss": 50.0}\n{"step": 6, "loss": 60.0}\n')
        wait_for({1: 1, 2: 2, 3: 30, 4: 40, 5: 50, 6: 60})
        process.send_signal(signal.SIGINT)
        assert "6 steps" in process.communicate(timeout=120)[0] and process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wandb_gets_every_step_on_its_own_axis(tmp: Path) -> None:
    fake = tmp / "fake"
    fake.mkdir()
    (fake / "wandb.py").write_text(
        "class Run:\n"
        "    def define_metric(self, *a, **k): pass\n"
        "    def log(self, d): print('WANDB', d['train_step'], d['loss'])\n"
        "    def finish(self): print('WANDB done')\n"
        "def init(project, name): print('WANDB', project, name); return Run()\n")  # fmt: skip
    log = write_jsonl(tmp / "log.jsonl", [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}])
    sys.path.insert(0, str(fake))
    try:
        out = run("export_log.py", log, "--out", tmp / "tb", "--wandb", "p")
    finally:
        sys.path.remove(str(fake))
        sys.modules.pop("wandb", None)
    assert "WANDB p log\nWANDB 1 5.0\nWANDB 2 4.0\nWANDB done" in out, out


TESTS = [schedules_end_exactly_where_they_say, short_and_odd_schedules_stay_in_range, overrides_and_human_numbers_are_understood,
         packing_loses_no_token, packed_documents_do_not_see_each_other, the_reference_step_is_that_of_torch,
         dynamic_rope_depends_on_this_batch_alone, fixtures_are_what_their_script_makes,
         a_run_on_dumped_batches_repeats_the_run, curves_beyond_the_tolerance_fail, text_comes_back_from_jsonl_and_from_megatron,
         only_assistant_turns_have_loss, a_template_that_rewrites_earlier_turns_is_refused, datasets_on_disk_are_read,
         a_log_becomes_events, a_followed_log_may_grow_and_be_resumed, wandb_gets_every_step_on_its_own_axis]  # fmt: skip


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for test in TESTS:
        if wanted in test.__name__:
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as tmp:
                test(Path(tmp))
            print(f"ok  {test.__name__} ({time.monotonic() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
