"""report.py and diagnosis.py: what the guard says of broken and of healthy runs, and the report of whole and of broken
folders."""
import fcntl
import json
import math
import os
import struct
import time
from dataclasses import asdict

import numpy as np
import pytest
from conftest import TINY, finish, rows, start, train_here
from faults import FAULTS

import report
import train as train_script
from config import Refused, load
from diagnosis import SYMPTOMS, diagnose, history

SETTINGS = asdict(load(train_script.Config, [*TINY, "--max_steps=1000", "--warmup_steps=20", "--log_interval=10"]))
LN_V = math.log(4096)


def learning(step):
    """The curve of a small model on real text."""
    return 4 + (LN_V - 4) * math.exp(-step / 60)


def lines(curve=learning, steps=300, every=10, noise=0.1, start="scratch", seed=0, **more):
    """Rows of log.jsonl as train.py writes them; `more` are values of step lines, or functions of the step."""
    rng = np.random.RandomState(seed)
    log = [dict(event="run_start", time=0.0, step=0, elapsed_s=2.0, gpu_hours=2 / 3600, start=start, world=1,
                vocab_size=4096, bytes_per_token=3.4, first_pass_s=1.0)]
    for step in (1, *range(every, steps + 1, every)):
        row = dict(event="step", time=float(step), step=step, elapsed_s=2.0 + step, gpu_hours=(2 + step) / 3600,
                   epoch=step / 10_000, loss=curve(step) + noise * rng.randn() * (step > 1), lr=1e-3, grad_norm=1.2,
                   tokens_per_s=384.0, mfu=None, step_ms=1000.0, data_ms=1.0, tokens=384 * step, targets=384 * step)
        log.append(row | {key: value(step) if callable(value) else value for key, value in more.items()})
    return log


def evaluation(step, loss, **sources):
    def scores(x):
        return dict(val_loss=x, val_ppl=math.exp(x), val_bpb=x / math.log(2) / 3.4)
    return dict(event="eval", time=float(step), step=step, elapsed_s=2.0 + step, gpu_hours=(2 + step) / 3600,
                seconds=1.0, sources={name: scores(x) for name, x in sources.items()}, **scores(loss))


def said(log, **settings):
    """{kind: (first step, stop)} of what `diagnose` says on the way through a log."""
    found = {}
    for i, row in enumerate(log):
        if row["event"] == "step":
            for finding in diagnose(log[:i + 1], SETTINGS | settings, 4096, 1):
                found.setdefault(finding.kind, (finding.step, finding.stop))
    return found


# ---- the guard on real runs with a fault in them

@pytest.mark.parametrize("fault, kind, by, words", [
    ("rate_zero", "flat", 160, ()),
    ("no_step", "flat", 160, ()),
    ("loss_times_accumulation", "diverging", 2, ("--micro_batch_size=2",)),
    ("targets_shifted_by_zero", "too_fast", 2, ()),
    ("huge_rate", "diverging", 60, ("--grad_clip=0", "--log_interval=2")),
    ("mask_off", "not_causal", 1, ()),
])
def test_a_faulty_run_is_stopped_with_exit_3(data_dir, tmp_path, monkeypatch, fault, kind, by, words):
    monkeypatch.setattr(*FAULTS[fault]())
    assert train_here(data_dir, tmp_path, "--max_steps=300", "--save_interval=10", "--block_size=16", "--n_layer=1",
                      "--global_batch_tokens=128", "--micro_batch_size=8", "--log_interval=10", *words) == 3
    [stop] = rows(tmp_path, "stop")
    said = [row["step"] for row in rows(tmp_path, "alarm") if row["kind"] == kind][0]
    assert all(row["step"] < said for row in rows(tmp_path, "save"))
    assert stop["reason"] == "guard" and stop["step"] <= by
    assert kind in [row["kind"] for row in rows(tmp_path, "alarm")]


def test_a_mask_that_goes_missing_after_the_start_is_seen_in_the_curve(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(*FAULTS["mask_off"]())
    monkeypatch.setattr(train_script, "causality_leak", lambda model: 0.0)
    assert train_here(data_dir, tmp_path, "--max_steps=200", "--micro_batch_size=12", "--log_interval=10",
                      "--save_interval=0") == 3
    assert rows(tmp_path, "alarm")[-1]["kind"] == "too_fast" and rows(tmp_path, "stop")[0]["step"] < 150


@pytest.mark.parametrize("guard, code", [("warn", 0), ("off", 0)])
def test_the_guard_warns_or_is_silent_when_told(data_dir, tmp_path, monkeypatch, guard, code):
    monkeypatch.setattr(*FAULTS["targets_shifted_by_zero"]())
    assert train_here(data_dir, tmp_path, f"--guard={guard}", "--save_interval=0") == code
    assert ("too_fast" in [row["kind"] for row in rows(tmp_path, "alarm")]) == (guard == "warn")


# ---- the curve

@pytest.mark.parametrize("every", [1, 5, 10, 20, 50])
@pytest.mark.parametrize("curve, noise", [
    (learning, 0.02), (learning, 0.3), (lambda s: 2.5 + (LN_V - 2.5) / (1 + s / 100), 0.3),
    (lambda s: LN_V - 7e-6 * s * s, 0.02),  # 2,000 steps of warm-up
])
def test_healthy_curves_raise_no_alarm(every, curve, noise):
    assert said(lines(curve, 500, every, noise), log_interval=every) == {}


def test_a_warm_started_run_may_be_flat_and_start_low():
    assert said(lines(lambda s: 3.0, start="weights")) == {}


def test_a_start_is_judged_by_its_distance_from_ln_v():
    for start_loss, kind in ((LN_V - 0.6, None), (LN_V + 0.2, None), (LN_V - 1.5, "too_fast"), (LN_V * 2, "diverging")):
        found = said(lines(lambda s, first=start_loss: first, steps=0))
        assert found == ({kind: (1, True)} if kind else {})


def test_a_curve_without_any_noise_can_be_flat():
    assert said(lines(lambda s: LN_V, noise=0.0))["flat"] == (150, True)


def test_later_flatness_warns_and_does_not_stop():
    found = said(lines(lambda s: LN_V, 300, start="scratch"))
    assert found["flat"] == (150, True)
    assert not any(f.stop for f in diagnose(lines(lambda s: LN_V, 300), SETTINGS, 4096, 1))


def test_divergence_that_lasts_stops_a_run_at_any_step():
    log = lines(lambda s: learning(s) + (2.5 if s > 500 else 0), 800)
    assert said(log)["diverging"] == (530, False)
    assert [f.kind for f in diagnose(log, SETTINGS, 4096, 1) if f.stop] == ["diverging"]


def test_overfitting_needs_val_to_rise_while_train_falls():
    def run(vals, **more):
        return lines(steps=450, **more) + [evaluation(100 * (i + 1), v) for i, v in enumerate(vals)] + lines(
            steps=460)[-1:]
    assert "overfitting" in said(run([5.0, 4.8, 5.0, 5.2]))
    assert "overfitting" not in said(run([5.0, 4.8, 4.85, 4.7]))
    last = run([5.0, 4.8, 4.7, 6.5])
    assert "overfitting" not in {f.kind for f in diagnose(last, SETTINGS | dict(max_steps=400), 4096, 1)}, (
        "the final evaluation reads other tokens")


@pytest.mark.parametrize("kind, log, settings", [
    ("oscillating", lines(lambda s: learning(s) + 2 * math.sin(s / 25) ** 2, 600, every=2), dict(log_interval=2)),
    ("grad_pinned", lines(grad_norm=9.0), {}),
    ("grad_norm", lines(grad_norm=lambda s: 500.0 if s > 200 else 1.0), {}),
    ("spike", lines(lambda s: learning(s) + 3 * (s == 250)), {}),
    ("spike", lines(grad_norm=lambda s: 60.0 if s == 250 else 1.0), {}),
    ("low_mfu", lines(mfu=0.2), {}),
    ("data_wait", lines(data_ms=100.0), {}),
])
def test_signs_of_trouble_are_named_and_do_not_stop_the_run(kind, log, settings):
    found = said(log, **settings)
    assert kind in found and not found[kind][1], found


def test_a_jump_behind_a_resume_is_seen_and_a_clean_resume_is_not():
    for jump in (0.0, 2.0):
        log = lines(lambda s, jump=jump: learning(s) + jump * (s > 300), 340)  # noqa: B023
        at = next(i for i, row in enumerate(log) if row["step"] > 300)
        again = [log[0] | dict(step=300, start="resume"), dict(event="resume", time=300.0, step=300, changed={})]
        assert ("resume_jump" in said(log[:at] + again + log[at:])) == (jump > 0)


def test_lines_without_a_loss_are_passed_over():
    log = lines(loss=lambda s: None if s % 30 == 0 else learning(s), grad_norm=lambda s: None if s % 50 == 0 else 1.0)
    assert said(log) == {}
    assert diagnose(lines(loss=None), SETTINGS, 4096, 1) == []


def test_a_line_of_a_long_run_is_judged_in_milliseconds():
    log = lines(steps=10_000, every=1)
    began = time.process_time()
    for _ in range(20):
        diagnose(log, SETTINGS | dict(log_interval=1, max_steps=20_000), 4096, 1)
    assert (time.process_time() - began) / 20 < 0.005  # 0.6 ms on an idle core


# ---- the report

def folder(path, log=(), run=None, **files):
    os.makedirs(path, exist_ok=True)
    for name, value in dict(run=run, **files).items():
        if value is not None:
            with open(f"{path}/{name}.json", "w") as f:
                json.dump(value, f)
    with open(f"{path}/log.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in log)
    return str(path)


def a_run(status="finished", **settings):
    return dict(status=status, settings=SETTINGS | settings, started=0.0, n_params=1000, device="cpu", device_count=1,
                initial_loss=8.4, command="python train.py --x=1", data_fingerprint="abc", test_scorings=0)


def report_of(*folders, **settings):
    """(text of report.md, size of report.png in pixels)"""
    text, picture = report.write_report([str(f) for f in folders], report.Config(**settings))
    with open(picture, "rb") as f:
        assert f.read(8) == b"\x89PNG\r\n\x1a\n"
        size = struct.unpack(">II", f.read(16)[8:])
    with open(text, encoding="utf-8") as f:
        return f.read(), size


def row_of(text, first):
    [line] = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [part.strip() for part in line.split("|")[2:-1]]


def test_the_report_of_a_real_run_from_its_folder_alone(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path / "out", "--eval_interval=4", "--question=does it run?") == 0
    code, out, err = finish(start("report.py", tmp_path / "out", env={"DISPLAY": ""}))
    assert code == 0, err
    assert out.splitlines() == [f"{tmp_path}/out/report.md", f"{tmp_path}/out/report.png"]
    text, size = report_of(tmp_path / "out")
    assert size == (1600, 1000)
    final = rows(tmp_path / "out", "eval")[-1]
    assert row_of(text, "val loss") == [f"{final['val_loss']:.4f}"]
    assert row_of(text, "code bits per byte") == [f"{final['sources']['code']['val_bpb']:.4f}"]
    assert row_of(text, "steps") == ["8 of 8"] and row_of(text, "state") == ["finished, exit code 0"]
    assert "does it run?\n" in text  # no full stop behind it
    assert all(f"({kind})" in text for kind in SYMPTOMS)


@pytest.mark.parametrize("log", ["", "{", '{"event": "step", "step": 1', "null\n3\n[]\n",
                                 json.dumps(lines()[0]) + "\n" + json.dumps(lines()[1])[:-9]])
@pytest.mark.parametrize("run", [None, a_run("running")])
def test_a_broken_or_empty_log_still_gives_a_report(tmp_path, log, run):
    folder(tmp_path, (), run)
    (tmp_path / "log.jsonl").write_text(log)
    text, size = report_of(tmp_path)
    assert size == (1600, 1000) and "not measured" in text


def test_losses_that_are_not_numbers_and_a_run_that_never_evaluated(tmp_path):
    log = lines(loss=lambda s: None if s > 100 else 5.0, grad_norm=None, mfu=0.4)
    text, _ = report_of(folder(tmp_path / "a", log, a_run("killed")))
    assert row_of(text, "val loss") == ["not measured"] and row_of(text, "MFU (6N)") == ["not measured", "40.0%"]
    text, _ = report_of(folder(tmp_path / "b", lines(loss=None)))  # and no run.json
    assert row_of(text, "state") == ["not recorded"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(Refused, match="holds no run"):
        report.write_report([str(tmp_path)])
    code, _, err = finish(start("report.py", tmp_path))
    assert code == 2 and err.count("\n") == 1


def test_running_without_the_lock_held_reads_as_killed(tmp_path):
    path = folder(tmp_path, lines(), a_run("running"))
    assert report.read_run(path).status == "killed"
    with open(f"{path}/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert report.read_run(path).status == "running"
    assert report.read_run(path).status == "killed"


def test_lost_work_is_counted_in_device_hours(tmp_path):
    log = lines(steps=300)
    save = dict(event="save", time=200.5, step=200, elapsed_s=202.5, gpu_hours=202.5 / 3600, path="x", stall_ms=500.0)
    lost = [row for row in log if row["step"] > 200]
    begun = dict(log[0], time=1000.0, step=200, start="resume", elapsed_s=302 + 9.0, gpu_hours=(302 + 9) / 3600)
    resume = dict(event="resume", time=1000.1, step=200, path="x", world_size=1, changed={"learning_rate": [1, 2]},
                  elapsed_s=311.1, gpu_hours=311.1 / 3600)
    again = [dict(row, time=800.0 + row["step"], elapsed_s=row["elapsed_s"] + 110,
                  gpu_hours=(row["elapsed_s"] + 110) / 3600) for row in lost]
    path = folder(tmp_path, [row for row in log if row["step"] <= 200] + [save, begun, resume, *again], a_run(
        gpu_hour_price=36.0, budget_gpu_hours=1.0), bench=dict(device_hours=0.01, tokens_per_s=400.0, est_hours=0.1,
                                                               est_gpu_hours=0.1, peak_memory_bytes=2**30, mfu=None))
    with open(f"{path}/log.discarded.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in lost)
    text, _ = report_of(path)
    assert "ended without a word; went on from step 200, 10 logged lines done again" in text
    assert f"| {(302 - 202.5) / 3600:.4f} |" in text and f"| {9 / 3600:.4f} |" in text
    assert "`learning_rate` 1 → 2" in text
    total = 412 / 3600 + 0.01
    assert row_of(text, "**total**") == [f"{total:.4g}", f"{36 * total:,.2f}"]
    assert row_of(text, "reruns: lost work, restarts")[0] == f"{(302 - 202.5 + 9) / 3600:.4g}"
    assert row_of(text, "budget") == ["1", f"{total:.1%} used"]
    assert row_of(text, "tokens/s") == ["400", "384"] and "tokens/s 384, -4.0% against the estimate" in text
    assert "duration 6m52s, " not in text  # 300 of 1,000 steps: nothing to compare yet
    spent = report.where_time_went(report.read_run(path))
    assert spent["work done again"] == pytest.approx(99.5) and spent["saving"] == 0.5
    assert sum(spent.values()) == pytest.approx(412)
    with open(f"{path}/run.json", "w") as f:
        json.dump(a_run(max_steps=300), f)
    assert "duration 6m52s, +14.4% against the estimate" in report_of(path)[0]


def test_hours_lost_twice_are_counted_once_and_a_failed_save_in_a_folder_called_again_loses_none(tmp_path):
    save = dict(event="save", time=99.5, step=100, elapsed_s=102, gpu_hours=102 / 3600, path="x", stall_ms=0.0)
    failed = dict(event="alarm", time=150, step=150, elapsed_s=152, gpu_hours=152 / 3600, kind="save_failed",
                  message="out/again/ckpt: no space", action="going on")
    log = lines(steps=300)
    lost = [row for row in log if 100 < row["step"] <= 200]  # heard of until 202 s, killed; and killed again at 312 s
    begun = dict(log[0], time=1000.0, step=100, start="resume", elapsed_s=202 + 10, gpu_hours=212 / 3600)
    again = [dict(row, time=1000.0 + row["step"], elapsed_s=row["elapsed_s"] + 110,
                  gpu_hours=(row["elapsed_s"] + 110) / 3600) for row in lost]
    path = folder(tmp_path, [row for row in log if row["step"] <= 100] + [save, failed, begun, *again], a_run("killed"))
    with open(f"{path}/log.discarded.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in lost)
    r = report.read_run(path)
    assert [round(hours * 3600) for *_, hours in r.mishaps if hours] == [100, 10, 100]
    assert report.where_time_went(r)["work done again"] == pytest.approx(100) and report_of(path)


def test_figures_are_of_this_run_whatever_its_folder_and_its_sources_are_called(tmp_path):
    log = [*lines(steps=200), dict(event="alarm", time=390, step=390, elapsed_s=392, gpu_hours=392 / 3600, kind="spike",
                                   message="x", action="x"), evaluation(200, 4.0, val=9.0)]
    weights = dict(event="save", time=195, step=195, elapsed_s=197, gpu_hours=197 / 3600, stall_ms=0.0,
                   path="out/ckpt/weights_00000195.pt")
    path = folder(tmp_path / "a", [*log, weights], a_run("killed", note="caf\udce9"), bench=dict(
        tokens_per_s=400.0, n_params=999))
    text, _ = report_of(path)
    assert row_of(text, "val loss") == ["4.0000"] and row_of(text, "source val loss") == ["9.0000"]
    assert row_of(text, "tokens/s") == ["not measured", "384"]  # an estimate of another model
    assert row_of(text, "steps") == ["195 of 1,000"]
    assert report.read_run(path).mishaps[-1][3] == pytest.approx(390 / 3600)  # weights alone resume nothing
    path = folder(tmp_path / "b", lines(), a_run(), bench=dict(
        tokens_per_s=400.0, est_hours=1.0, est_tokens=500 * a_run()["settings"]["global_batch_tokens"]))
    assert "| duration | 2h00m | 5m02s |" in report_of(path)[0]  # estimated for half the steps


def test_what_several_runs_share_is_paid_once_and_a_report_that_cannot_be_written_is_one_line(tmp_path):
    paths = [folder(tmp_path / name, lines(), a_run(budget_gpu_hours=1.0), prepare=dict(device_hours=3.0))
             for name in "ab"]
    text, _ = report_of(*paths)
    assert "| data | 3 |" in text and row_of(text, "budget")[0] == "2"
    os.remove(f"{paths[0]}/report.md")
    os.mkdir(f"{paths[0]}/report.md")
    code, _, err = finish(start("report.py", paths[0]))
    assert code == 2 and err.count("\n") == 1 and not [name for name in os.listdir(paths[0]) if name.endswith("tmp")]


def test_the_last_line_of_a_long_run_is_judged_too(monkeypatch):
    seen, log = [], lines(steps=2001, every=1)
    monkeypatch.setattr("diagnosis.diagnose", lambda rows, *_: seen.append(len(rows)) or [])
    history(log, SETTINGS, 4096, 1)
    assert seen[-1] == len(log) and seen == sorted(set(seen)) and 1000 <= len(seen) <= 2000


def test_several_runs_side_by_side_with_their_spread(tmp_path):
    paths = [folder(tmp_path / str(seed), [*lines(seed=seed), evaluation(300, 4.0 + seed, en=1.0)], a_run(seed=seed))
             for seed in (0, 1, 2)]
    text, _ = report_of(*paths)
    assert row_of(text, "val loss") == ["4.0000", "5.0000", "6.0000", "5.0000 ± 1.0000"]
    assert "`seed` 0 / 1 / 2" in text and "one seed" not in text
    assert os.path.exists(f"{paths[0]}/report.png") and not os.path.exists(f"{paths[1]}/report.png")


def test_what_the_guard_said_stands_in_the_report(tmp_path):
    log = lines(lambda s: LN_V, 160)
    end = dict(time=160.0, step=160, elapsed_s=162.0, gpu_hours=0.045)
    log += [dict(end, event="alarm", kind="flat", message="m", action="a"), dict(end, event="stop", reason="guard")]
    text, _ = report_of(folder(tmp_path, log, a_run("guard")))
    assert "**flat**" in text and "| **seen** | the loss stays where it started (flat) |" in text
    assert f"ended here, guard: what follows the last save is lost |  | {0.045 - 2 / 3600:.4f} |" in text


def test_the_formula_gives_the_table_of_mfu_against_hours():
    for mfu, expected in ((0.1, 67.1), (0.2, 33.5), (0.3, 22.4), (0.35, 19.2), (0.4, 16.8), (0.45, 14.9), (0.5, 13.4)):
        assert round(report.hours(502_193_664, 10e9, 4, 312, mfu), 1) == expected
