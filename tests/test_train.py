"""The loop: which tokens, which rate, what is logged; stopping, saving and going on as if nothing had happened."""
import collections
import fnmatch
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    TINY,
    checkpoint,
    column,
    finish,
    rows,
    same_tensors,
    sentences,
    start,
    train,
    train_here,
    write_data,
)

import prepare
import process
import train as script
from config import Refused, load
from model import Shape, Transformer, load_weights, newest_verified


@pytest.fixture(scope="module")
def straight(data_dir, tmp_path_factory):
    """An uninterrupted run of 8 steps with dropout, saved at 4 and 8."""
    out = str(tmp_path_factory.mktemp("straight"))
    assert train_here(data_dir, out, "--dropout=0.1") == 0
    return out


def settings(*words):
    return load(script.Config, [*TINY, *words])


# ---- which tokens a step sees

@pytest.mark.parametrize("n, block", [(1, 4), (5, 4), (64, 32), (1000, 7)])
def test_an_epoch_sees_every_window_once_and_the_next_one_in_another_order(n, block):
    first = script.window_offsets(0, n, n, block, seed=1)
    shift = first.min()
    assert 0 <= shift < block and sorted(first - shift) == [i * block for i in range(n)]
    second = script.window_offsets(n, n, n, block, seed=1)
    assert sorted(second - second.min()) == sorted(first - shift)
    if n > 5:
        assert list(second) != list(first) != list(script.window_offsets(0, n, n, block, seed=2))


def test_the_windows_of_a_step_depend_on_its_place_in_the_sequence_alone():
    whole = script.window_offsets(0, 100, 30, 8, seed=1)
    pieces = np.concatenate([script.window_offsets(i, 7, 30, 8, seed=1) for i in range(0, 98, 7)])
    assert np.array_equal(whole[:98], pieces)


def test_no_window_reads_past_the_end_of_the_file():
    for tokens in range(16, 40):  # n = (L - T) // T windows of T + 1 ids behind an offset under T
        n = (tokens - 8) // 8
        offsets = script.window_offsets(0, 50 * n, n, 8, seed=3)
        assert offsets.max() + 8 <= tokens - 1


def test_the_logged_crc_is_that_of_the_windows_in_the_file(straight, data_dir):
    ids = np.fromfile(f"{data_dir}/train.bin", dtype="<u2")
    n = (len(ids) - 32) // 32
    for step, logged in enumerate(column(straight, "batch_crc")):
        offsets = script.window_offsets(step * 12, 12, n, 32, seed=1337)
        assert logged == sum(zlib.crc32(ids[o:o + 33].astype("<u4").tobytes()) for o in offsets) % 2**32


def test_an_epoch_counter_goes_on_over_a_small_corpus_and_max_epochs_refuses(tmp_path, capsys):
    data = write_data(str(tmp_path / "data"), ["x" * 60] * 4, val_share=0.25)
    tokens = sum(s["tokens"] for s in prepare.Corpus(data).sources("train").values())
    assert train_here(data, tmp_path / "out", "--global_batch_tokens=64", "--max_steps=20", "--guard=off") == 0
    assert column(tmp_path / "out", "epoch")[-1] == 20 * 2 / ((tokens - 32) // 32)
    assert "warning: the data is read" in capsys.readouterr().out
    with pytest.raises(Refused, match="max_epochs=1"):
        train_here(data, tmp_path / "b", "--global_batch_tokens=64", "--max_steps=20", "--max_epochs=1")


def test_a_corpus_of_less_than_one_window_is_refused(tmp_path):
    data = write_data(str(tmp_path / "data"), ["x" * 10] * 4, val_share=0.25)
    with pytest.raises(Refused, match="less than one window"):
        train_here(data, tmp_path / "out")


# ---- rates

@pytest.mark.parametrize("words", ["--warmup_steps=0", "--warmup_steps=8", "--max_steps=1 --warmup_steps=0",
                                   "--lr_schedule=wsd", "--warmup_steps=3"])
def test_the_planned_rate_is_the_logged_one_and_stays_inside_its_bounds(data_dir, tmp_path, words):
    assert train_here(data_dir, tmp_path, *words.split(), "--save_interval=0") == 0
    plan, logged = rows(tmp_path, "plan")[0]["plan"], rows(tmp_path)
    assert plan == [[row["step"], row["lr"]] for row in logged]
    assert np.isclose(max(rate for _, rate in plan), 1e-2) and not os.path.exists(tmp_path / "ckpt")


def test_the_schedules_have_the_shape_their_names_say():
    c = settings("--max_steps=100", "--warmup_steps=10")
    curve = [script.learning_rate(s, c) for s in range(1, 101)]
    assert np.allclose(curve[:10], np.linspace(1e-3, 1e-2, 10)) and np.isclose(curve[-1], 1e-3)
    assert all(a >= b for a, b in zip(curve[9:], curve[10:], strict=False))
    assert np.isclose(curve[10 + 45 - 1], (1e-2 + 1e-3) / 2, rtol=0.03)
    wsd = [script.learning_rate(s, settings("--max_steps=100", "--warmup_steps=10", "--lr_schedule=wsd"))
           for s in range(1, 101)]
    assert wsd[9:80] == [1e-2] * 71 and np.isclose(wsd[89], 5.5e-3) and np.isclose(wsd[-1], 1e-3)


# ---- the step

def test_one_update_equals_adamw_on_the_mean_loss_of_the_whole_batch(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path, "--max_steps=1", "--warmup_steps=0", "--grad_clip=0.5") == 0
    c, corpus = settings("--max_steps=1"), prepare.Corpus(data_dir)
    torch.manual_seed(c.seed)
    model = Transformer(Shape.of(c, corpus.vocab_size, corpus.eot_id))
    n = (corpus.tokens("train") - 32) // 32
    ids = np.stack([corpus.read("train", o, 33) for o in script.window_offsets(0, 12, n, 32, c.seed)])
    ids = torch.from_numpy(ids)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    row = rows(tmp_path)[0]
    assert abs(row["loss"] - loss.item()) < 1e-5 and abs(row["grad_norm"] / norm.item() - 1) < 1e-4
    saved = checkpoint(tmp_path, 1)
    for name, p in model.named_parameters():  # AdamW's first step, written out: m/(1-b1) = g, v/(1-b2) = g^2
        g = p.grad * min(1.0, 0.5 / norm.item())
        decayed = p * (1 - 1e-2 * 0.1) if p.dim() == 2 else p
        expected = decayed - 1e-2 * g / (g.abs() + 1e-8)
        clear = g.abs() > 1e-5  # where rounding does not decide the sign
        assert torch.allclose(saved["model"][name][clear], expected[clear], atol=1e-5), name
        assert torch.allclose(saved["optimizer"][name]["exp_avg"], 0.1 * g, atol=1e-7)


def test_accumulation_and_micro_batch_change_nothing_but_rounding(data_dir, straight, tmp_path):
    for micro in (1, 12):
        out = tmp_path / str(micro)
        assert train_here(data_dir, out, f"--micro_batch_size={micro}") == 0
        assert column(out, "batch_crc") == column(straight, "batch_crc")
    one, twelve = (column(tmp_path / name, "loss") + column(tmp_path / name, "grad_norm") for name in ("1", "12"))
    assert np.allclose(one, twelve, rtol=1e-4)


def test_loss_falls_and_the_last_save_is_labelled_with_the_steps_made(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path, "--max_steps=7", "--save_interval=5") == 0
    assert sorted(os.listdir(tmp_path / "ckpt")) == [f"step_0000000{n}.{e}" for n in (5, 7) for e in ("json", "pt")]
    saved, losses = checkpoint(tmp_path, 7), column(tmp_path, "loss")
    assert {int(m["step"]) for m in saved["optimizer"].values()} == {7} and saved["windows"] == 7 * 12
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6, 7] and losses[-1] < losses[0] - 1
    record = json.load(open(tmp_path / "run.json"))
    assert (record["status"], record["exit_code"], record["steps"], record["updates"]) == ("finished", 0, 7, 7)
    assert abs(record["initial_loss"] - math.log(257) - 1 / 8) < 0.1 and record["n_params"] == 26816


def test_a_nan_weight_stops_with_code_3_before_any_update_or_save(data_dir, tmp_path, monkeypatch):
    rate = script.learning_rate

    def poison(step, c):
        calls.append(step)
        if calls.count(3) == 2:  # the first time it is planned, the second made
            script_model[0].layers[1].wq.weight.data[0, 0] = math.nan
        return rate(step, c)
    script_model, calls = [], []
    monkeypatch.setattr(script, "parameter_groups", lambda model, decay, real=script.parameter_groups: (
        script_model.append(model), real(model, decay))[1])
    monkeypatch.setattr(script, "learning_rate", poison)
    assert train_here(data_dir, tmp_path, "--save_interval=2") == 3
    assert newest_verified(tmp_path)[0] == 2 and column(tmp_path, "step") == [1, 2]
    assert all(t.isfinite().all() for t in checkpoint(tmp_path, 2)["model"].values())
    assert json.load(open(tmp_path / "run.json"))["status"] == "guard" and rows(tmp_path, "alarm")[0]["step"] == 3


def test_float16_on_a_cpu_and_bfloat16_train_and_log_the_scale(data_dir, tmp_path):
    for dtype in ("float16", "bfloat16"):
        assert train_here(data_dir, tmp_path / dtype, f"--dtype={dtype}") == 0
        assert column(tmp_path / dtype, "loss")[-1] < 5
    first, last = rows(tmp_path / "float16")[0], json.load(open(tmp_path / "float16" / "run.json"))
    skipped = sum(row["skipped"] for row in rows(tmp_path / "float16"))
    assert first["loss_scale"] > 1 and last["steps"] == 8 and last["updates"] == 8 - skipped


@pytest.mark.parametrize("lacks, package", [("compiler", "g++"), ("header", "python3-dev"), ("triton", "triton")])
def test_what_torch_compile_lacks_is_named_a_cpu_goes_on_eagerly_and_a_gpu_is_refused(
        data_dir, tmp_path, monkeypatch, capsys, lacks, package):
    import torch._inductor.config  # it keeps the CXX of its import for every later test
    if lacks == "compiler":
        monkeypatch.setenv("CC", "no-such-compiler -O2")
        monkeypatch.setenv("CXX", "no-such-compiler -O2")
    elif lacks == "header":
        monkeypatch.setattr(process.shutil, "which", lambda name: name)
        monkeypatch.setattr(process.sysconfig, "get_paths", lambda: dict(include="/nowhere"))
    with monkeypatch.context() as patch, pytest.raises(Refused, match=re.escape(package)):
        patch.setattr(process.importlib.util, "find_spec", lambda name: lacks != "triton")
        process.why_no_compile(torch.device("cuda"))
    if lacks != "triton":
        assert train_here(data_dir, tmp_path, "--compile=True", "--max_steps=1") == 0
        assert f"not compiled: {process.why_no_compile(torch.device('cpu'))}" in capsys.readouterr().out
        assert package in process.why_no_compile(torch.device("cpu"))
        assert rows(tmp_path, "run_start")[0]["compiled"] == "eager"


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/nvidia3"])
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(monkeypatch, device):
    monkeypatch.setattr(process.glob, "glob", lambda pattern: fnmatch.filter([device], pattern))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match="CUDA does not work"):
        process.pick_device(settings(), 0)
    assert process.pick_device(settings("--device=cpu"), 0).type == "cpu"


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_ends_in_one_line_that_names_the_settings(data_dir, tmp_path, monkeypatch, capsys, kind):
    def full(*_):
        raise kind("CUDA out of memory. Tried ...\nlong" if kind is torch.OutOfMemoryError else
                   "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    monkeypatch.setattr(script, "batch_crc", full)
    assert train_here(data_dir, tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rank 0 is out of memory: lower --micro_batch_size, then --loss_chunks" in said
    assert rows(tmp_path, "alarm")[0]["kind"] == "out_of_memory"
    assert json.load(open(tmp_path / "run.json"))["status"] == "crashed"


# ---- evaluation

def reference_evaluation(out, data, step):
    """{source: (loss, bits per byte)} by scoring every token of val.bin once, one row at a time."""
    state, shape, _ = load_weights(f"{out}/ckpt/step_{step:08d}.pt")
    model, corpus, result = Transformer(shape), prepare.Corpus(data), {}
    model.load_state_dict(state)
    model.eval()
    for name, s in corpus.sources("val").items():
        if s["tokens"] == 0:
            continue
        stream = np.concatenate([[corpus.eot_id], corpus.read("val", s["offset"], s["tokens"])])
        nats = 0.0
        for at in range(0, s["tokens"], 32):
            x, y = stream[at:at + 32][:len(stream) - 1 - at], stream[at + 1:at + 33]
            with torch.no_grad():
                logits = model(torch.from_numpy(x)[None])[0].double()
            nats += F.cross_entropy(logits, torch.from_numpy(y), reduction="sum").item()
        text_bytes = sum(1 for i in stream[1:] if i < 256)
        result[name] = nats / s["tokens"], nats / math.log(2) / max(1, text_bytes)
    return result


def test_evaluation_scores_every_token_once_whatever_the_micro_batch(data_dir, straight, tmp_path):
    expected = reference_evaluation(straight, data_dir, 8)
    final = rows(straight, "eval")[-1]
    for name, (loss, bpb) in expected.items():
        assert abs(final["sources"][name]["val_loss"] / loss - 1) < 1e-5
        assert abs(final["sources"][name]["val_bpb"] / bpb - 1) < 1e-5
        assert abs(final["sources"][name]["val_ppl"] / math.exp(loss) - 1) < 1e-4
    tokens = {n: s["tokens"] for n, s in prepare.Corpus(data_dir).sources("val").items()}
    mean = sum(expected[name][0] * tokens[name] for name in tokens) / sum(tokens.values())
    assert abs(final["val_loss"] / mean - 1) < 1e-5


def test_a_long_evaluation_is_no_hang(data_dir, tmp_path, monkeypatch):
    alive, real, seen = process.Log.alive, script.evaluate, []
    monkeypatch.setattr(process.Log, "alive", lambda *a: (seen.append(a[1:]), alive(*a))[1])
    monkeypatch.setattr(script, "evaluate", lambda *a: (seen.clear(), real(*a))[1])
    assert train_here(data_dir, tmp_path, "--max_steps=1", "--warmup_steps=0", "--micro_batch_size=1") == 0
    windows = [-(-s["tokens"] // 32) for s in prepare.Corpus(data_dir).sources("val").values()]
    assert len(seen) == sum(windows) > 10 and set(seen) == {()}


def test_evaluating_at_every_step_changes_no_training_loss(data_dir, straight, tmp_path):
    assert train_here(data_dir, tmp_path, "--dropout=0.1", "--eval_interval=1", "--eval_tokens=100") == 0
    assert column(tmp_path, "loss") == column(straight, "loss") and len(rows(tmp_path, "eval")) == 8


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
def test_a_val_split_of_one_token_one_window_and_one_more_is_evaluated(tmp_path, tokens):
    data = write_data(str(tmp_path / "data"), ["x" * (tokens - 1)] * 2 + sentences(10), val_share=0.1)
    assert train_here(data, tmp_path / "out", "--max_steps=1", "--warmup_steps=0") == 0
    (name, (loss, bpb)), = reference_evaluation(tmp_path / "out", data, 1).items()
    final = rows(tmp_path / "out", "eval")[-1]
    assert list(final["sources"]) == [name] and abs(final["val_loss"] / loss - 1) < 1e-5


# ---- resume

def stop_after(monkeypatch, step, signum=signal.SIGTERM):
    """Sends this process a signal while it makes its `step`-th step."""
    real, calls = script.batch_crc, []

    def with_signal(x, y):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signum)
        return real(x, y)
    monkeypatch.setattr(script, "batch_crc", with_signal)


@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_stopped_run_goes_on_bit_for_bit(data_dir, straight, tmp_path, monkeypatch, step):
    stop_after(monkeypatch, step)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 143
    assert newest_verified(tmp_path)[0] == step and json.load(open(tmp_path / "run.json"))["status"] == "stopped"
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
    for key in ("step", "loss", "lr", "grad_norm", "batch_crc", "tokens"):
        assert column(tmp_path, key) == column(straight, key), key
    a, b = checkpoint(tmp_path, 8), checkpoint(straight, 8)
    assert same_tensors(a, b) and a["rng"][0]["python"] == b["rng"][0]["python"]


def test_a_signal_before_the_first_update_ends_at_once_and_saves_nothing(data_dir, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 1)
    assert train_here(data_dir, tmp_path) == 143 and "there was nothing to save" in capsys.readouterr().out
    assert [row["reason"] for row in rows(tmp_path, "stop")] == ["SIGTERM"]
    assert newest_verified(tmp_path) is None and json.load(open(tmp_path / "run.json"))["status"] == "stopped"
    assert train_here(data_dir, tmp_path, "--max_steps=2") == 0


def test_a_lost_connection_is_a_signal_under_torchrun_and_nothing_where_nohup_ignores_it(monkeypatch):
    kept = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    try:
        for before, launcher, taken in ((signal.SIG_DFL, "", True), (signal.SIG_IGN, "", False),
                                        (signal.SIG_IGN, "x", True)):
            signal.signal(signal.SIGHUP, before)
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher) if launcher else monkeypatch.delenv(
                "TORCHELASTIC_RUN_ID", raising=False)
            stop = process.StopSignal()
            stop.ready = True
            os.kill(os.getpid(), signal.SIGHUP) if before or taken else None
            assert stop.signum == (signal.SIGHUP if taken else 0)
    finally:
        for s, handler in kept:
            signal.signal(s, handler)


def test_a_clock_that_is_set_right_makes_no_hours(tmp_path, monkeypatch):
    log, real = process.Log(settings(f"--out_dir={tmp_path}"), process.Ranks()), time.time
    monkeypatch.setattr(process.time, "time", lambda: real() + 8 * 3600)
    assert 0 <= log.device_hours() < 0.1


def test_the_report_of_a_running_run_leaves_the_processors_to_it(tmp_path):
    log = process.Log(settings(f"--out_dir={tmp_path}"), process.Ranks())
    log.start_report()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    while log.reporter.poll() is None and os.getpriority(os.PRIO_PROCESS, log.reporter.pid) == mine < 19:
        time.sleep(0.001)
    assert log.reporter.poll() is None
    log.reporter.kill()
    log.reporter.wait()


def test_a_report_that_the_end_overtakes_gives_way_to_the_last_one_and_leaves_nothing(tmp_path, monkeypatch):
    log = process.Log(settings(f"--out_dir={tmp_path}"), process.Ranks())
    log.run, log.reporter = dict(schema=1), subprocess.Popen(["sleep", "100"])
    half, others = (tmp_path / f"report.png.{pid}.tmp" for pid in (log.reporter.pid, log.reporter.pid + 1))
    half.touch(), others.touch()
    monkeypatch.setattr(process.Log, "start_report", lambda log: (tmp_path / f"ended{log.reporter.poll()}").touch())
    log.close("finished", 0)
    assert (tmp_path / "ended-9").exists() and others.exists() and not half.exists()


def test_neither_a_report_nor_a_sample_that_fails_ends_a_run(data_dir, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    monkeypatch.setattr(process.subprocess, "Popen", fail)
    monkeypatch.setattr("fluency.fixed_prompts", fail)
    monkeypatch.setattr(process, "git", lambda *_: None)
    assert train_here(data_dir, tmp_path, "--eval_interval=4", "--sample_interval=4", report=True) == 0
    assert "WARNING: no sample at step 4" in capsys.readouterr().out


@pytest.mark.parametrize("leak, guard, kind, code", [
    (1.0, "warn", "not_causal", 0), (1.0, "stop", "not_causal", 3), (math.nan, "stop", "non_finite", 3)])
def test_a_model_that_sees_its_targets_is_stopped_or_said(data_dir, tmp_path, monkeypatch, leak, guard, kind, code):
    monkeypatch.setattr(script, "causality_leak", lambda _: leak)
    assert train_here(data_dir, tmp_path, f"--guard={guard}", "--max_steps=2") == code
    assert column(tmp_path, "kind", "alarm") == [kind]


def test_too_few_lines_for_the_guard_are_said_at_the_start(data_dir, tmp_path, capsys):
    assert train_here(data_dir, tmp_path / "a", "--log_interval=100") == 0
    assert "the guard sees 3 lines" in capsys.readouterr().out
    assert train_here(data_dir, tmp_path / "b", "--log_interval=10") == 0
    assert "the guard sees" not in capsys.readouterr().out


def test_a_final_evaluation_cut_short_is_made_up_for(data_dir, straight, tmp_path, monkeypatch, capsys):
    real = script.evaluate
    monkeypatch.setattr(script, "evaluate", lambda *a: (os.kill(os.getpid(), signal.SIGTERM), real(*a))[1])
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 143 and not rows(tmp_path, "eval")
    monkeypatch.setattr(script, "evaluate", real)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
    assert column(tmp_path, "val_loss", "eval") == column(straight, "val_loss", "eval")
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0 and "finished" in capsys.readouterr().out
    assert len(rows(tmp_path, "eval")) == 1


@pytest.mark.parametrize("forget", ["rng", "optimizer", "windows"])
def test_a_resume_that_forgets_something_would_be_noticed(data_dir, straight, tmp_path, monkeypatch, forget):
    stop_after(monkeypatch, 4)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 143
    real = torch.load
    empty = dict(rng=[], optimizer={}, windows=0)
    monkeypatch.setattr(torch, "load", lambda *a, **k: real(*a, **k) | {forget: empty[forget]})
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
    assert column(tmp_path, "loss")[:4] == column(straight, "loss")[:4]
    assert column(tmp_path, "loss")[5] != column(straight, "loss")[5]


def test_a_rank_that_the_checkpoint_does_not_know_draws_from_seed_step_and_rank(data_dir, straight):
    saved, drawn = checkpoint(straight, 4), {}
    corpus, c = prepare.Corpus(data_dir), settings()
    for rank, step in ((1, 4), (1, 4), (2, 4), (1, 5)):
        model = Transformer(Shape.of(c, corpus.vocab_size, corpus.eot_id))
        ranks = process.Ranks()
        ranks.rank = rank
        torch.manual_seed(len(drawn))  # whatever was there before does not matter
        script.restore(saved | dict(step=step), model, script.make_optimizers(model, c),
                       torch.amp.GradScaler("cpu", enabled=False), ranks, torch.device("cpu"), c.seed)
        drawn.setdefault((rank, step), []).append(torch.rand(3).tolist())
    assert drawn[1, 4][0] == drawn[1, 4][1] and len({tuple(found[0]) for found in drawn.values()}) == 3


def test_a_killed_process_loses_only_the_steps_since_its_last_save(data_dir, straight, tmp_path, monkeypatch):
    process = start("train.py", *TINY, "--dropout=0.1", f"--data_dir={data_dir}", f"--out_dir={tmp_path}",
                    "--max_steps=8", env=dict(PYTHONUNBUFFERED="1"))
    for line in process.stdout:
        if line.startswith("step 6/"):
            process.kill()
            break
    finish(process)
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"event": "step", "st')
    assert newest_verified(tmp_path)[0] == 4
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # and again before its first line
        patch.setattr(script, "first_pass", lambda *_: 1 / 0)
        train_here(data_dir, tmp_path, "--dropout=0.1")
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
    heard = [json.loads(line)["gpu_hours"] for line in open(tmp_path / "log.discarded.jsonl")]
    assert rows(tmp_path, "run_start")[-1]["gpu_hours"] > max(heard)
    for key in ("step", "loss", "batch_crc"):
        assert column(tmp_path, key) == column(straight, key)
    assert same_tensors(checkpoint(tmp_path, 8), checkpoint(straight, 8))
    lost = [json.loads(line)["step"] for line in open(tmp_path / "log.discarded.jsonl")]
    assert lost and set(lost) <= {5, 6, 7}
    elapsed = column(tmp_path, "elapsed_s")
    assert elapsed == sorted(elapsed)


def test_a_damaged_checkpoint_is_passed_over_loudly(data_dir, straight, tmp_path, capsys):
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
    path = tmp_path / "ckpt" / "step_00000008.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
    out = capsys.readouterr().out
    assert "step_00000008.pt is not used: sha256 differs" in out and "resuming" in out
    assert same_tensors(checkpoint(tmp_path, 8), checkpoint(straight, 8)) and os.path.exists(str(path) + ".corrupt")


def test_a_finished_run_says_so_and_a_scratch_start_over_it_is_refused(data_dir, straight, capsys):
    before = open(f"{straight}/run.json").read()
    assert train_here(data_dir, straight, "--dropout=0.1") == 0
    assert "finished" in capsys.readouterr().out
    with pytest.raises(Refused, match="scratch"):
        train_here(data_dir, straight, "--init_from=scratch")
    assert open(f"{straight}/run.json").read() == before


def test_a_resume_lists_what_changed_and_refuses_what_must_not(data_dir, straight, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 4)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 143
    with pytest.raises(Refused) as refused:
        train_here(data_dir, tmp_path, *"--n_layer=3 --seed=5 --dropout=0.2 --block_size=64 --dtype=bfloat16".split())
    for part in ("n_layer: 2 -> 3", "seed: 1337 -> 5", "block_size: 32 -> 64", "dtype: float32 -> bfloat16"):
        assert part in str(refused.value)
    assert "dropout" not in str(refused.value)
    other = write_data(str(tmp_path / "other"), sentences(100, seed=1))
    with pytest.raises(Refused, match="data:"):
        train_here(other, tmp_path)
    words = ["--dropout=0.1", "--learning_rate=5e-3", "--beta2=0.9", "--max_steps=6", "--warmup_steps=0"]
    assert train_here(data_dir, tmp_path, *words) == 0
    assert "learning_rate: 0.01 -> 0.005" in capsys.readouterr().out
    assert set(rows(tmp_path, "resume")[0]["changed"]) == {"learning_rate", "beta2", "max_steps", "warmup_steps"}
    assert column(tmp_path, "lr")[4:] == [script.learning_rate(s, settings(*words)) for s in (5, 6)]
    assert column(tmp_path, "loss")[5] != column(straight, "loss")[5]


def test_a_second_start_into_a_running_folder_is_refused_naming_the_process(data_dir, tmp_path):
    os.makedirs(tmp_path / "out")
    holder = prepare.lock(str(tmp_path / "out"))
    open(tmp_path / "out" / "hang.rank0.txt", "w").close()
    with pytest.raises(Refused, match=str(os.getpid())):
        train_here(data_dir, tmp_path / "out")
    assert os.path.exists(tmp_path / "out" / "hang.rank0.txt")  # the running process still needs it
    holder.close()


def test_old_checkpoints_go_and_multiples_of_keep_every_stay(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path, "--save_interval=1", "--keep_last=2", "--keep_every=3") == 0
    steps = sorted(int(name[5:13]) for name in os.listdir(tmp_path / "ckpt") if name.endswith(".pt"))
    assert steps == [3, 6, 7, 8]


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_training(data_dir, tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: usage(0, 0, 26816 * 12 * 3 - 1))
    with pytest.raises(Refused, match="room for"):
        train_here(data_dir, tmp_path)
    assert train_here(data_dir, tmp_path, "--keep_last=1") == 0


def test_room_is_asked_for_the_checkpoints_that_will_stand_side_by_side(tmp_path):
    def need(*words):
        said = script.check_room(replace(settings(*words), out_dir=str(tmp_path)), 10**6)
        return said.split(" GB each, ")[1].split()[0]
    reference = "--max_steps=9536", "--save_interval=250"
    assert need(*reference) == "0.036" and need(*reference, "--weights_interval=100") == "0.048"
    assert need(*reference, "--keep_every=10") == "0.492"  # all 38 multiples of 250, and three more
    assert need(*reference, "--keep_every=1000", "--weights_interval=100") == "0.192"  # nine and three of each kind
    assert need("--save_interval=0") == "0"


def test_read_only_data_can_be_trained_on_again_and_a_folder_that_takes_no_file_is_refused(tmp_path):
    data = write_data(str(tmp_path / "data"), sentences(60))
    for name in os.listdir(data):
        os.chmod(f"{data}/{name}", 0o444)
    assert train_here(data, tmp_path / "out", "--max_steps=1") == 0
    for name in ("meta.json", "tokenizer.tiktoken"):
        assert os.stat(tmp_path / "out" / name).st_mode & 0o200
    os.makedirs(tmp_path / "b" / "hang.rank0.txt")
    with pytest.raises(Refused, match="can't be written on"):
        train_here(data, tmp_path / "b", "--max_steps=1")


def test_samples_are_refused_at_the_start_where_tiktoken_is_missing(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ModuleNotFoundError):
        train_here(data_dir, tmp_path, "--sample_interval=4")
    assert not os.path.exists(tmp_path / "log.jsonl") and train_here(data_dir, tmp_path) == 0


def test_without_git_a_run_has_no_commit_and_goes_on(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert train_here(data_dir, tmp_path, "--max_steps=1") == 0
    record = json.load(open(tmp_path / "run.json"))
    assert record["commit"] is None and record["dirty"] is False


def test_a_damaged_newer_checkpoint_neither_counts_nor_goes_when_old_ones_are_deleted(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path) == 0
    with open(tmp_path / "ckpt" / "step_00000008.pt", "ab") as f:
        f.write(b"x")
    assert train_here(data_dir, tmp_path, "--save_interval=1", "--keep_last=1", "--max_steps=7") == 0
    assert newest_verified(tmp_path)[0] == 7


def test_a_file_without_its_json_never_was_a_checkpoint_it_goes_and_a_renamed_one_is_one(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path, "--max_steps=4", "--save_interval=2") == 0
    os.unlink(tmp_path / "ckpt" / "step_00000004.json")
    assert train_here(data_dir, tmp_path, "--max_steps=6", "--save_interval=6") == 0
    steps = sorted(name for name in os.listdir(tmp_path / "ckpt") if name.endswith(".pt"))
    assert steps == ["step_00000002.pt", "step_00000006.pt"]
    for end in (".pt", ".json"):
        shutil.copy(tmp_path / "ckpt" / f"step_00000006{end}", tmp_path / f"best{end}")
    assert load_weights(str(tmp_path / "best.pt"))[2]["step"] == 6


def test_weights_are_saved_beside_a_full_checkpoint_and_never_taken_from_an_older_run(data_dir, tmp_path):
    saved = []
    for seed in (1, 2):
        assert train_here(data_dir, tmp_path / str(seed // 9), f"--seed={seed}", "--save_interval=0",
                          "--weights_interval=4") == 0
        saved.append(load_weights(str(tmp_path / "0" / "ckpt" / "weights_00000008.pt"))[0]["norm.weight"].clone())
    assert not torch.equal(*saved)
    assert train_here(data_dir, tmp_path / "b", "--save_interval=2", "--weights_interval=4") == 0
    assert [s for s, _ in script.saved_steps(tmp_path / "b", ("weights",))] == [8, 4]


def test_a_start_from_weights_begins_at_step_0_and_refuses_another_shape(data_dir, straight, tmp_path, capsys):
    assert train_here(data_dir, tmp_path / "a", f"--init_from={straight}") == 0
    out = capsys.readouterr().out
    assert f"{straight}, step 8; optimizer and schedule begin anew" in out
    assert f"next: python report.py {tmp_path}/a, python sample.py --out_dir={tmp_path}/a" in out
    assert column(tmp_path / "a", "loss")[0] < column(straight, "loss")[0] - 1
    assert column(tmp_path / "a", "step") == list(range(1, 9))
    shutil.copytree(straight, tmp_path / "damaged")
    with open(tmp_path / "damaged" / "ckpt" / "step_00000008.pt", "ab") as f:
        f.write(b"x")
    assert train_here(data_dir, tmp_path / "c", f"--init_from={tmp_path}/damaged", "--max_steps=1") == 0
    assert "step_00000008.pt is not used" in (out := capsys.readouterr().out) and "step 4; optimizer and" in out
    for words in (["--n_layer=3"], ["--n_head=2", "--n_kv_head=1"]):  # the second has tensors of the same sizes
        with pytest.raises(Refused, match="another shape"):
            train_here(data_dir, tmp_path / "b", f"--init_from={straight}", *words)
    with pytest.raises(Refused, match="another shape: rope_theta 10000.0"):
        train_here(data_dir, tmp_path / "b", f"--init_from={straight}", "--rope_theta=5e5")
    allowed = "--rope_theta=5e5", "--allow_change=rope_theta", "--max_steps=1"
    assert train_here(data_dir, tmp_path / "d", f"--init_from={straight}", *allowed) == 0
    other = write_data(str(tmp_path / "other"), sentences(40))
    meta = json.load(open(f"{other}/meta.json"))
    ranks = open(f"{other}/tokenizer.tiktoken").read().replace("YQ== 97", "-").replace("Yg== 98", "YQ== 98").replace(
        "-", "Yg== 97")
    open(f"{other}/tokenizer.tiktoken", "w").write(ranks)
    meta["tokenizer"]["sha256"] = hashlib.sha256(ranks.encode()).hexdigest()
    prepare.seal(other, meta)
    with pytest.raises(Refused, match="another tokenizer"):
        train_here(other, tmp_path / "b", f"--init_from={straight}")


def test_a_periodic_evaluation_cut_short_is_made_up_for(data_dir, tmp_path, monkeypatch):
    real = script.evaluate
    monkeypatch.setattr(script, "evaluate", lambda *a: (os.kill(os.getpid(), signal.SIGTERM), real(*a))[1])
    assert train_here(data_dir, tmp_path, "--eval_interval=3") == 143 and newest_verified(tmp_path)[0] == 3
    monkeypatch.setattr(script, "evaluate", real)
    assert train_here(data_dir, tmp_path, "--eval_interval=3") == 0
    assert column(tmp_path, "step", "eval") == [3, 6, 8]


def test_a_failed_save_is_said_and_the_run_goes_on_with_the_older_one(data_dir, tmp_path, monkeypatch, capsys):
    real = torch.save

    def full(content, file):
        real(content, file)
        if content["step"] in failing:
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    failing = {4}
    assert train_here(data_dir, tmp_path / "a", "--save_interval=2") == 0
    assert "the save of step 4 failed" in capsys.readouterr().out and newest_verified(tmp_path / "a")[0] == 8
    failing = {8}
    assert train_here(data_dir, tmp_path / "b", "--save_interval=2") == 1
    assert newest_verified(tmp_path / "b")[0] == 6
    assert not [name for name in os.listdir(tmp_path / "b" / "ckpt") if name.endswith(".tmp")]


class Killed(BaseException):
    """Stands for SIGKILL: no handler for errors may run on it."""


def test_a_save_cut_off_at_any_operation_leaves_the_older_or_the_newer_checkpoint_loadable(tmp_path, monkeypatch):
    c, real_save = settings("--keep_last=1"), torch.save
    before, cut = [0], [0]

    def count(real):
        def operation(*args, **options):
            before[0] += 1
            if before[0] == cut[0]:
                raise Killed
            return real(*args, **options)
        return operation

    def half(content, file):
        real_save(content, file)
        if before[0] + 1 == cut[0]:
            file.truncate(file.tell() // 2)
        count(lambda: None)()
    for name in ("fsync", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, count(getattr(os, name)))
    monkeypatch.setattr(torch, "save", half)
    seen, at = [], 0
    while not seen or seen[-1] != "whole":
        at += 1
        out, before[0], cut[0] = str(tmp_path / str(at)), 0, 0
        for step in (1, 2):
            before[0], cut[0] = 0, at if step == 2 else 0
            content = dict(model={"w": torch.full((1000,), float(step))}, step=step)
            try:
                script.write_checkpoint(f"{out}/ckpt/step_{step:08d}.pt", content, step)
                script.delete_old(out, c, step, print)
                seen += ["whole"] if step == 2 else []
            except Killed:
                seen.append("cut")
        step, path = newest_verified(out)
        assert torch.equal(torch.load(path)["model"]["w"], torch.full((1000,), float(step)))
    assert len(seen) >= 10 and step == 2 and script.saved_steps(out) == [(2, path)]


# ---- what a resume may change

def test_a_resume_with_another_batch_goes_on_with_the_window_after_the_last_one_seen(data_dir, tmp_path, monkeypatch):
    stop_after(monkeypatch, 4)
    assert train_here(data_dir, tmp_path) == 143
    with pytest.raises(Refused, match="global_batch_tokens: 384 -> 768"):
        train_here(data_dir, tmp_path, "--global_batch_tokens=768")
    assert train_here(data_dir, tmp_path, "--global_batch_tokens=768", "--allow_change=global_batch_tokens") == 0
    ids = np.fromfile(f"{data_dir}/train.bin", dtype="<u2")
    offsets = script.window_offsets(0, 4 * 12 + 4 * 24, (len(ids) - 32) // 32, 32, seed=1337)
    crc = [zlib.crc32(ids[o:o + 33].astype("<u4").tobytes()) for o in offsets]
    ends = [*range(0, 49, 12), *range(72, 145, 24)]
    assert column(tmp_path, "batch_crc") == [sum(crc[a:b]) % 2**32 for a, b in zip(ends, ends[1:], strict=False)]
    assert column(tmp_path, "tokens")[-1] == 144 * 32 and rows(tmp_path, "resume")[0]["changed"]["global_batch_tokens"]


def test_dropout_and_micro_batch_may_change_on_a_resume_and_are_said(data_dir, straight, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 4)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 143
    assert train_here(data_dir, tmp_path, "--dropout=0", "--micro_batch_size=4") == 0
    assert set(rows(tmp_path, "resume")[0]["changed"]) == {"dropout", "micro_batch_size"}
    out = capsys.readouterr().out
    assert "dropout: 0.1 -> 0.0" in out and "micro_batch_size: 2 -> 4" in out
    assert column(tmp_path, "batch_crc") == column(straight, "batch_crc")
    assert column(tmp_path, "loss")[4:] != column(straight, "loss")[4:]
    assert np.allclose(column(tmp_path, "loss")[4:], column(straight, "loss")[4:], rtol=0.05)


FAULTS = """
import resource, torch, process
if {keep}:
    process.keep_freed_memory()
for turn in range(12):  # 64 MB each time; malloc may place the first few in turn, the last six are counted
    if turn == 6:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again():
    gone, kept = (int(subprocess.check_output([sys.executable, "-c", FAULTS.format(keep=keep)], text=True, cwd=ROOT))
                  for keep in (False, True))
    assert kept < 100 < gone


def test_two_gigabytes_of_windows_are_read_in_flat_memory(tmp_path):
    tokens = 10**9
    for split in prepare.SPLITS:
        with open(tmp_path / f"{split}.bin", "wb") as f:
            f.truncate(2 * tokens)
    source = dict(offset=0, tokens=tokens, documents=1, bytes=1)
    files = {f"{split}.bin": dict(bytes=2 * tokens, sha256="", blocks=[]) for split in prepare.SPLITS}
    (tmp_path / "meta.json").write_text(json.dumps(dict(
        vocab_size=257, eot_id=256, dtype="uint16", tokenizer={}, files=files,
        splits={split: dict(all=source) for split in prepare.SPLITS})))
    c = settings("--block_size=2048", "--global_batch_tokens=204800", "--micro_batch_size=10", "--max_steps=100")
    batches = script.Batches(prepare.Corpus(str(tmp_path), check=False), c, process.Ranks(), torch.device("cpu"), 0)
    resident = []
    for _ in range(100):  # 10,000 windows, 41 MB of the file
        x, y, valid = batches.take()
        assert x.shape == y.shape == (10, 10, 2048) and valid == 204800
        resident.append(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE"))
    assert np.median(resident[60:]) - np.median(resident[10:50]) < 4e6  # mapped pages would be 18 MB more


# ---- Muon and fp16

@pytest.mark.parametrize("size", [(24, 24), (16, 48), (48, 16)])
def test_muon_in_fp32_is_its_polynomial_of_the_singular_values(size):
    rng, rate, decay = np.random.RandomState(0), 1e-2, 0.1
    w, momentum = rng.randn(*size), np.zeros(size)
    p = torch.nn.Parameter(torch.from_numpy(w).float())
    muon = script.MuonFP32([p], lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        g = rng.randn(*size)
        p.grad = torch.from_numpy(g).float()
        muon.step()
        momentum = 0.95 * momentum + 0.05 * g
        u, s, v = np.linalg.svd(0.05 * g + 0.95 * momentum, full_matrices=False)
        s /= np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5  # Jordan et al. 2024
        w = w * (1 - rate * decay) - 0.2 * rate * max(size)**0.5 * (u * s) @ v
        assert np.abs(p.detach().numpy() - w).max() < 1e-6
    assert set(muon.state[p]) == {"momentum_buffer"}


@pytest.mark.parametrize("computes", ["bfloat16", "float32"])
def test_muon_updates_the_matrices_and_adamw_the_rest(data_dir, tmp_path, monkeypatch, computes):
    monkeypatch.setattr(script, "pick_dtype", lambda c, device: computes if c.dtype == "auto" else c.dtype)
    words = ["--optimizer=muon", "--max_steps=1", "--warmup_steps=0", "--grad_clip=0"]
    assert train_here(data_dir, tmp_path, *words) == 0
    c, corpus = settings(*words), prepare.Corpus(data_dir)
    torch.manual_seed(c.seed)
    model = Transformer(Shape.of(c, corpus.vocab_size, corpus.eot_id))
    n = (corpus.tokens("train") - 32) // 32
    ids = torch.from_numpy(np.stack([corpus.read("train", o, 33) for o in script.window_offsets(0, 12, n, 32, c.seed)]))
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("layers.") and p.dim() == 2]
    assert len(matrices) == 2 * 7  # q, k, v, o and three of the feed-forward
    others = [dict(params=[named["tok_emb.weight"]], weight_decay=0.1),
              dict(params=[p for p in named.values() if p.dim() == 1], weight_decay=0.0)]
    muon = torch.optim.Muon if computes == "bfloat16" else script.MuonFP32
    muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), eps=1e-8).step()
    saved = checkpoint(tmp_path, 1)
    for name, p in named.items():
        far = (saved["model"][name] - p).abs()
        assert far.mean() < 1e-5 and far.max() < 2e-3, (name, far.mean(), far.max())
        assert set(saved["optimizer"][name]) == (
            {"momentum_buffer"} if name.startswith("layers.") and p.dim() == 2 else {"step", "exp_avg", "exp_avg_sq"})
    assert (saved["model"]["layers.0.wq.weight"] - Transformer(model.shape).layers[0].wq.weight).abs().mean() > 1e-3


def test_a_muon_run_that_was_stopped_goes_on_bit_for_bit(data_dir, tmp_path, monkeypatch):
    words = ("--optimizer=muon", "--dropout=0.1")
    assert train_here(data_dir, tmp_path / "a", *words) == 0
    stop_after(monkeypatch, 3)
    assert train_here(data_dir, tmp_path / "b", *words) == 143
    with pytest.raises(Refused, match="optimizer: muon -> adamw"):
        train_here(data_dir, tmp_path / "b", "--dropout=0.1")
    assert train_here(data_dir, tmp_path / "b", *words) == 0
    for key in ("step", "loss", "lr", "grad_norm", "batch_crc"):
        assert column(tmp_path / "b", key) == column(tmp_path / "a", key), key
    assert same_tensors(checkpoint(tmp_path / "b", 8), checkpoint(tmp_path / "a", 8))


def test_an_fp16_step_the_scaler_skips_counts_as_a_step_but_not_as_an_update(data_dir, tmp_path, monkeypatch):
    words, real = ("--dtype=float16", "--save_interval=1", "--keep_last=9"), torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, **k, init_scale=2.0**22))
    assert train_here(data_dir, tmp_path, *words) == 0
    skipped, record = column(tmp_path, "skipped"), json.load(open(tmp_path / "run.json"))
    assert skipped[0] and not skipped[-1] and "non_finite" not in column(tmp_path, "kind", "alarm")
    assert (record["steps"], record["updates"]) == (8, 8 - sum(skipped)) and column(tmp_path, "step") == [*range(1, 9)]
    scale = column(tmp_path, "loss_scale")
    assert all(b == (a / 2 if skip else a) for a, b, skip in zip([2.0**22, *scale], scale, skipped, strict=False))
    for step in range(2, 9):
        same = torch.equal(*(checkpoint(tmp_path, s)["model"]["tok_emb.weight"] for s in (step - 1, step)))
        assert same == skipped[step - 1]
    assert all(t.isfinite().all() for t in checkpoint(tmp_path, 8)["optimizer"]["tok_emb.weight"].values())
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, **k, init_scale=2.0**120))
    assert train_here(data_dir, tmp_path / "b", *words, "--max_steps=40") == 3
    assert len(rows(tmp_path / "b")) == script.MAX_FP16_SKIPS - 1
    (alarm,) = [row for row in rows(tmp_path / "b", "alarm") if row["kind"] == "non_finite"]
    assert "20 skipped in a row" in alarm["message"]


# ---- the record

@pytest.mark.parametrize("compiled", ["--compile=False", "--compile=True"])
def test_prompts_are_continued_while_training_goes_on_unchanged(data_dir, tmp_path, compiled):
    words = (compiled, "--max_steps=4")
    for name, interval in (("never", 0), ("often", 2)):
        assert train_here(data_dir, tmp_path / name, *words, f"--sample_interval={interval}") == 0
    assert column(tmp_path / "often", "loss") == column(tmp_path / "never", "loss")
    assert same_tensors(checkpoint(tmp_path / "often", 4)["model"], checkpoint(tmp_path / "never", 4)["model"])
    assert column(tmp_path / "often", "step", "sample") == [2, 4] and not rows(tmp_path / "never", "sample")
    lines = [json.loads(line) for line in open(tmp_path / "often" / "samples.jsonl")]
    assert [line["step"] for line in lines] == [step for step in (2, 4) for _ in lines[::2]]
    assert len(lines) == sum(column(tmp_path / "often", "prompts", "sample"))
    for line in lines:
        assert {"prompt", "completion", "tokens", "seed", "max_new_tokens", "temperature", "top_k"} <= line.keys()
        assert line["prompt"] and 0 < len(line["tokens"]) <= line["max_new_tokens"]
        assert line["completion"] == prepare.Tokenizer(data_dir).decode(line["tokens"])


def test_training_reads_no_token_of_the_test_split(data_dir, tmp_path, monkeypatch):
    seen, real = set(), prepare.Corpus.read
    monkeypatch.setattr(prepare.Corpus, "read", lambda self, split, *a: (seen.add(split), real(self, split, *a))[1])
    assert train_here(data_dir, tmp_path, "--eval_interval=2", "--sample_interval=4") == 0
    assert seen == {"train", "val"} and json.load(open(tmp_path / "run.json"))["test_scorings"] == 0


def test_the_record_of_a_run_is_complete_and_keeps_its_origin_over_a_resume(data_dir, tmp_path, monkeypatch):
    stop_after(monkeypatch, 4)
    words = ("--question=does it?", "--gpu_hour_price=2", "--note=a note")
    assert train_here(data_dir, tmp_path, *words) == 143
    first = json.load(open(tmp_path / "run.json"))
    assert train_here(data_dir, tmp_path, *words, "--max_steps=6") == 0
    last = json.load(open(tmp_path / "run.json"))
    for record, *end in ((first, "stopped", 143, 4, 4), (last, "finished", 0, 6, 6)):
        assert [record[key] for key in ("status", "exit_code", "steps", "updates")] == end
        assert record["pid"] == os.getpid() and record["settings"]["question"] == "does it?"
        assert (record["device_count"], record["link"], record["n_params"]) == (1, None, 26816)
        assert record["data_fingerprint"] == prepare.Corpus(data_dir).fingerprint and record["test_scorings"] == 0
        assert record["versions"]["torch"] == torch.__version__ and record["schema"] == 1 and record["dirty"] in (0, 1)
    for key in ("run_id", "started", "initial_loss"):
        assert first[key] == last[key] and first[key]
    assert last["settings"]["max_steps"] == 6 and {"command", "commit", "host", "device"} <= last.keys()


def test_a_run_over_its_budget_of_device_hours_says_so_and_goes_on(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path / "a", "--budget_gpu_hours=1e-7") == 0
    (alarm,) = [row for row in rows(tmp_path / "a", "alarm") if row["kind"] == "budget"]
    assert "budget_gpu_hours is 1e-07" in alarm["message"] and column(tmp_path / "a", "step")[-1] == 8
    assert train_here(data_dir, tmp_path / "b", "--budget_gpu_hours=100") == 0
    assert "budget" not in column(tmp_path / "b", "kind", "alarm")


def test_log_lines_a_full_disk_refuses_or_cuts_come_later_whole_and_in_order(data_dir, straight, tmp_path, monkeypatch):
    real, full = os.write, []

    def write(file, data):
        if os.readlink(f"/proc/self/fd/{file}").endswith((".jsonl", ".log")):
            full.append(1)
            if 10 < len(full) <= 25:
                if len(full) % 3:
                    raise OSError(28, "No space left on device")
                return real(file, data[:5])
        return real(file, data)
    monkeypatch.setattr(process.os, "write", write)
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0 and len(full) > 25
    assert column(tmp_path, "loss") == column(straight, "loss")
    shown = [line for line in open(tmp_path / "train.log").read().splitlines() if line.startswith("step ")]
    assert [line.split(" |")[0] for line in shown if "|" in line] == [f"step {s}/8" for s in range(1, 9)]


# ---- processes

def test_a_refusal_on_two_ranks_is_one_line_from_rank_0(data_dir, tmp_path):
    code, out, err = train(data_dir, tmp_path, "--expect_params=5", nproc=2)
    assert code != 0 and err.count("train.py: expect_params=5") == 1 and not os.path.exists(tmp_path / "run.json")


def test_sigterm_under_torchrun_saves_the_step_on_all_ranks(data_dir, tmp_path):
    process = start("train.py", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}", "--max_steps=100000",
                    "--log_interval=1", "--save_interval=100000", nproc=2)
    for line in process.stdout:
        if line.startswith("step 20/"):
            process.send_signal(signal.SIGTERM)
            break
    began = time.time()
    finish(process)
    assert time.time() - began < 25
    record = json.load(open(tmp_path / "run.json"))
    assert record["status"] == "stopped" and record["exit_code"] == 143
    step, _ = newest_verified(tmp_path)
    assert rows(tmp_path, "stop")[0]["step"] == step == record["steps"] and len(checkpoint(tmp_path, step)["rng"]) == 2


def test_whatever_a_run_compiles_it_has_compiled_before_its_first_update(data_dir, tmp_path, monkeypatch):
    torch._dynamo.reset()
    graphs, seen, real = torch._dynamo.utils.counters["stats"], [], script.batch_crc
    graphs.clear()
    monkeypatch.setattr(script, "batch_crc", lambda *a: (seen.append(graphs["unique_graphs"]), real(*a))[1])
    assert train_here(data_dir, tmp_path, "--compile=True", "--max_steps=4", "--eval_interval=2",
                      "--sample_interval=2") == 0
    assert [graphs["unique_graphs"]] * 4 == seen and seen[0] > 0


def test_a_run_compiled_and_one_eager_read_each_others_checkpoints(data_dir, straight, tmp_path, monkeypatch):
    stop_after(monkeypatch, 4)
    assert train_here(data_dir, tmp_path, "--compile=True") == 143
    assert not [name for name in checkpoint(tmp_path, 4)["model"] if "_orig_mod" in name or "module" in name]
    assert train_here(data_dir, tmp_path, "--compile=False") == 0
    assert rows(tmp_path, "resume")[0]["changed"] == dict(compile=[True, False])
    assert train_here(data_dir, tmp_path / "eager") == 0
    assert np.allclose(column(tmp_path, "loss"), column(tmp_path / "eager", "loss"), rtol=1e-4)


@pytest.mark.parametrize("damage, part", [
    (lambda d: os.truncate(f"{d}/train.bin", os.path.getsize(f"{d}/train.bin") - 1), "train.bin has"),
    (lambda d: np.array([300], "<u2").tofile(f"{d}/val.bin"), "val.bin has"),
    (lambda d: open(f"{d}/tokenizer.tiktoken", "a").write("QUJD 256\n"), "tokenizer.tiktoken"),
    (lambda d: os.unlink(f"{d}/meta.json"), "prepare.py"),
])
def test_damaged_data_is_refused_naming_the_file(tmp_path, damage, part):
    data = write_data(str(tmp_path / "data"), sentences(20))
    damage(data)
    with pytest.raises(Refused, match=part):
        train_here(data, tmp_path / "out")
    assert not os.path.exists(tmp_path / "out")
