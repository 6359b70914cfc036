"""bench.py: what it reports from a log, and that it runs train.py itself and leaves nothing behind."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from conftest import finish, start

import bench
import prepare
import train
from config import Refused

TINY = ["--n_layer=1", "--n_embd=32", "--n_head=2", "--n_kv_head=1", "--ffn_hidden=64", "--block_size=32",
        "--global_batch_tokens=256", "--micro_batch_size=2", "--vocab_size=300", "--compile=False", "--device=cpu"]
REFERENCE = train.Config(n_layer=18, n_head=12, n_kv_head=4, n_embd=1536, ffn_hidden=4096, block_size=2048,
                         global_batch_tokens=2**20, dtype="bfloat16")


def log_of(rates, warm_up=(1.0, 2.0, 3.0)):
    rows = [dict(event="run_start", step=0, time=0.0, first_pass_s=12.3, compiled="compiled")]
    for step, rate in enumerate([*warm_up, *rates], start=1):
        rows.append(dict(event="step", step=step, time=10.0 * step, tokens_per_s=rate, step_ms=2**20 / rate * 1000,
                         data_ms=2.0))
    return rows


def bench_settings():
    return replace(REFERENCE, max_steps=9536)


def figures(rates, device="NVIDIA A100-SXM4-80GB", more=(), **settings):
    """{first word or two of a line: the rest} of the report."""
    run = dict(settings=asdict(REFERENCE) | settings, device=device, device_count=4, n_params=502_193_664)
    c = replace(bench_settings(), device="cuda", gpu_hour_price=2.0)
    found = bench.figures([*log_of(rates), *more], run, 32_000)
    found |= bench.estimate(c, found) | dict(matrix_tflops=250.0)
    for key in ("", "_with_attention"):
        found[f"matrix_share{key}"] = found[f"tflops{key}"] / (4 * 250)
    lines = bench.lines_of(c, found)
    return dict(re.split(r"  +", line, maxsplit=1) for line in lines)


def test_mfu_of_the_reference_record_comes_out_both_ways():
    said = figures([163_399.0] * 7)
    assert said["MFU"].startswith("39.5% (6N), 48.3% (with attention)") and "4 x 312" in said["MFU"]
    assert said["tokens/s"].startswith("163,399") and said["step"].startswith("6,417")
    share = 6 * 502_193_664 * 163_399 / (4 * 250e12)
    assert f"reaches {share:.1%} of it (6N)" in said["matrix product"]
    assert said["first pass"].startswith("12.3 s")
    assert said["data wait"].startswith("2.00 ms, 0.03%")
    assert said["the whole run"].startswith("9,999,220,736 tokens: 17 h, 68 device-hours, 135.99 USD")
    assert "20%: 33.5 h, 30%: 22.4 h, 40%: 16.8 h, 50%: 13.4 h" in said["at other MFUs"]


def test_slow_steps_and_the_warm_up_do_not_move_the_figures():
    steady = [1000.0, 1010.0, 990.0, 1005.0, 995.0, 1000.0, 1002.0, 998.0, 1000.0]
    slow = steady[:4] + [3.0] + steady[5:]
    for name in ("tokens/s", "step", "MFU"):
        assert figures(steady)[name].split("  ")[0] == figures(slow)[name].split("  ")[0]
    assert figures(steady)["tokens/s"] == "1,000  (998 to 1,002)"


@pytest.mark.parametrize("device", ["NVIDIA A10G", "NVIDIA A100", "A10", "NVIDIA H200 NVL", "Some CPU, 2 threads"])
def test_a_device_of_another_name_has_no_mfu_unless_its_peak_is_given(device):
    said = figures([1000.0] * 5, device)
    assert "%" not in said["MFU"] and device in said["MFU"]
    assert figures([1000.0] * 5, device, peak_tflops=100.0)["MFU"].startswith("0.8% (6N)")
    assert "125 TFLOP/s" in figures([1000.0] * 5, "NVIDIA A10")["MFU"]


def test_peak_memory_is_the_logs_last_word_and_never_a_guess():
    stops = [dict(event="stop", peak_memory_bytes=gib * 2**30, peak_memory_source="here") for gib in (1, 3)]
    assert figures([1.0] * 5, more=stops)["peak memory"] == "3.00 GiB (here)"
    assert figures([1.0] * 5)["peak memory"].startswith("not measured")


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_random_data_is_a_finished_folder(tmp_path, vocab_size):
    bench.write_random_data(str(tmp_path), vocab_size, 5500)
    corpus = prepare.Corpus(str(tmp_path), check="all")
    ids = corpus.read("train", 0, 5500)
    ends = np.flatnonzero(ids == corpus.eot_id)
    assert corpus.tokens("train") == 5500 and corpus.vocab_size == vocab_size and corpus.eot_id == vocab_size - 1
    assert ends.tolist() == [999, 1999, 2999, 3999, 4999, 5499] and ids.max() == corpus.eot_id
    assert corpus.sources("train")["random"]["documents"] == len(ends)
    assert prepare.Tokenizer(str(tmp_path)).encode("A") == [65]


FAKE = """
import json, signal, sys, time
def stop(*_):
    log.write(json.dumps(dict(event="stop", step=step, peak_memory_bytes=9, peak_memory_source="fake")) + "\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
log = open(sys.argv[1] + "/log.jsonl", "w", buffering=1)
open(sys.argv[1] + "/run.json", "w").write("{}")
for step in range(1, 10**9):
    time.sleep(0.5 if step == 5 else 0.02)
    log.write(json.dumps(dict(event="step", step=step, time=time.time(), tokens_per_s=1)) + "\\n")
"""


def test_a_run_is_stopped_once_enough_is_measured(tmp_path):
    began = time.time()
    rows, run = bench.run_train([sys.executable, "-c", FAKE, str(tmp_path)], str(tmp_path), 1.0)
    steps = bench.measured(rows)
    assert steps[0]["step"] == 4 and 1.0 <= steps[-1]["time"] - steps[0]["time"] < 3.0 and time.time() - began < 6.0
    assert rows[-1]["event"] == "stop" and run == {}


def test_a_refusal_and_a_crash_of_train_keep_their_meaning(tmp_path):
    refusing = "import sys; print('W: noise'); print('train.py: no such shape', file=sys.stderr); sys.exit({})"
    for code in (2, 1):  # 1 as from torchrun
        with pytest.raises(Refused, match="no such shape"):
            bench.run_train([sys.executable, "-c", refusing.format(code)], str(tmp_path), 1.0)
    with pytest.raises(bench.Failed, match="ValueError: boom"):
        bench.run_train([sys.executable, "-c", "raise ValueError('boom')"], str(tmp_path), 1.0)


def test_the_real_loop_out_of_memory_ends_a_row_of_the_sweep_and_not_the_sweep(data_dir, tmp_path):
    limited = (f"import resource, sys; sys.path.insert(0, {bench.HERE!r}); import train; "
               "room = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (3 << 29); "
               "resource.setrlimit(resource.RLIMIT_AS, (room, room)); train.main()")  # 1.5 GiB beside torch
    words = [word for word in TINY if "vocab" not in word] + [f"--data_dir={data_dir}", f"--out_dir={tmp_path}"]
    words += ["--micro_batch_size=16384", "--global_batch_tokens=524288"]
    with pytest.raises(bench.Failed, match="rank 0 is out of memory"):
        bench.run_train([sys.executable, "-c", limited, *words], str(tmp_path), 1.0)


def test_a_sweep_survives_out_of_memory_and_takes_the_fastest_micro_batch():
    asked = []

    def measure(c, n):
        asked.append((c.micro_batch_size, c.compile, c.activation_checkpointing, n))
        if c.micro_batch_size > 2:
            raise bench.Failed("Traceback\ntorch.OutOfMemoryError: CUDA out of memory.")
        return dict(tokens_per_s=100.0 * c.micro_batch_size * n, peak_memory_bytes=2**30)
    c, lines, speedup = bench.sweep(train.Config(global_batch_tokens=16 * 256), 2, measure)
    assert c.micro_batch_size == 2 and asked == [
        (1, True, False, 2), (2, True, False, 2), (4, True, False, 2), (2, False, False, 2), (2, True, True, 2),
        (2, True, False, 1), (2, True, False, 2)]
    assert lines[3].endswith("out of memory") and lines[-1].endswith("2.00x     100.0%") and speedup == 2.0


def test_a_row_that_is_refused_ends_no_sweep_and_more_devices_than_windows_are_one_row():
    def measure(c, n):
        if c.compile:
            raise Refused("torch.compile can't work here")
        return dict(tokens_per_s=100.0, peak_memory_bytes=None)
    c, lines, speedup = bench.sweep(train.Config(compile=False, global_batch_tokens=1024), 8, measure)
    assert c.micro_batch_size == 1 and len([line for line in lines if "can't work here" in line]) == 1
    assert speedup == 1.0
    with pytest.raises(Refused):
        bench.sweep(train.Config(), 1, measure)


def start_bench(folder, *argv):
    return start("bench.py", *TINY, f"--data_dir={folder}/none", f"--out_dir={folder}/out", *argv,
                 env=dict(TMPDIR=str(folder)))


def test_two_ranks_of_the_real_loop_are_measured_and_nothing_stays_behind(tmp_path):
    code, out, err = finish(start_bench(tmp_path, "--devices=2", "--seconds=0.5", "--peak_tflops=1"))
    assert code == 0, err
    said = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    rate, step_ms = (float(said[name].split()[0].replace(",", "")) for name in ("tokens/s", "step"))
    assert rate == pytest.approx(256 / step_ms * 1000, rel=0.05)
    n_params = int(said["model"].split()[0].replace(",", ""))
    assert n_params == 300 * 32 + 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 3 * 32
    assert float(said["MFU"].split("%")[0]) == pytest.approx(100 * 6 * n_params * rate / 2e12, abs=0.051)
    assert said["device"].startswith("2 x") and "eager" in said["device"] and "GiB" in said["peak memory"]
    assert float(said["matrix product"].split()[0]) > 0 and "random ids, vocabulary 300" in said["data"]
    assert not any(name.startswith(("bench", "none")) for name in os.listdir(tmp_path))
    found = json.load(open(tmp_path / "out" / "bench.json"))
    assert os.listdir(tmp_path / "out") == ["bench.json"] and found["devices"] == 2 and found["n_params"] == n_params
    assert found["est_hours"] == pytest.approx(640 * 256 / found["tokens_per_s"] / 3600)


def test_a_trace_of_three_steps_is_written_on_request(tmp_path):
    trace = tmp_path / "trace.json"
    code, out, err = finish(start_bench(tmp_path, "--seconds=0", f"--profile={trace}"))
    assert code == 0, err
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert "aten::mm" in names and len({name for name in names if name.startswith("ProfilerStep#")}) == 3


def test_an_interrupted_bench_takes_its_run_along(tmp_path):
    bench_run = start_bench(tmp_path)
    deadline, record = time.time() + 60, None
    while record is None and time.time() < deadline:
        time.sleep(0.1)
        record = next(iter(tmp_path.glob("bench.*/out.*/run.json")), None)
    pid = json.loads(record.read_text())["pid"]
    bench_run.send_signal(signal.SIGTERM)
    assert finish(bench_run)[0] == 143
    assert not os.path.exists(f"/proc/{pid}") and not list(tmp_path.glob("bench.*"))


@pytest.mark.parametrize("argv,says", [
    (["--n_embd=33"], "n_embd=33"), (["--learing_rate=1"], "learning_rate"), (["--devices=-1"], "devices"),
    (["--dtype=int8"], "dtype"), (["--vocab_size=256"], "at least 257"), (["--block_size=0"], "block_size"),
     (["nowhere.py"], "nowhere.py")])
def test_wrong_settings_are_refused_before_anything_is_started(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench.py", *TINY, "--data_dir=none", *argv])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(Refused, match=says) as refused:
        bench.main()
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_what_cannot_be_written_or_is_under_torchrun_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", None)
    (tmp_path / "file").write_text("")
    for word, says in (f"--out_dir={tmp_path}/file/out", "out"), ("--profile=no/such/folder/x", "folder/x"):
        monkeypatch.setattr(sys, "argv", ["bench.py", *TINY, f"--out_dir={tmp_path}/out", "--data_dir=none", word])
        with pytest.raises(Refused, match=f"{says} can't be written"):
            bench.main()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="without torchrun"):
        bench.main()


def test_a_bare_bench_on_a_small_card_halves_the_micro_batch_until_it_fits(tmp_path, monkeypatch, capsys):
    def measure(c, world, folder, seconds, vocab_size, profile=""):
        asked.append((c.micro_batch_size, c.global_batch_tokens // c.block_size))
        if c.micro_batch_size > 2:
            raise bench.Failed("train.py: rank 0 is out of memory")
        run = dict(settings=asdict(REFERENCE), device="a card", device_count=1, n_params=502_193_664)
        return bench.figures(log_of([1000.0] * 6), run, vocab_size)
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "matrix_product_tflops", lambda *_: 100.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    bench.main()
    assert asked == [(8, 32), (4, 32), (2, 32)] and "half of it is taken" in capsys.readouterr().out
