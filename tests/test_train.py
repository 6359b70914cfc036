"""The loop: which tokens, which rate, what is logged; stopping, saving and going on as if nothing had happened."""
import collections
import json
import math
import os
import signal
import time
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
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


def test_a_signal_before_the_first_update_ends_at_once_and_saves_nothing(data_dir, tmp_path, monkeypatch):
    stop_after(monkeypatch, 1)
    assert train_here(data_dir, tmp_path) == 143
    assert newest_verified(tmp_path) is None and json.load(open(tmp_path / "run.json"))["status"] == "stopped"
    assert train_here(data_dir, tmp_path, "--max_steps=2") == 0


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


def test_a_killed_process_loses_only_the_steps_since_its_last_save(data_dir, straight, tmp_path):
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
    assert train_here(data_dir, tmp_path, "--dropout=0.1") == 0
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
        train_here(data_dir, tmp_path, "--n_layer=3", "--seed=5", "--dropout=0.2")
    assert "n_layer: 2 -> 3" in str(refused.value) and "seed: 1337 -> 5" in str(refused.value)
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
    with pytest.raises(Refused, match=str(os.getpid())):
        train_here(data_dir, tmp_path / "out")
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


def test_a_damaged_newer_checkpoint_neither_counts_nor_goes_when_old_ones_are_deleted(data_dir, tmp_path):
    assert train_here(data_dir, tmp_path) == 0
    with open(tmp_path / "ckpt" / "step_00000008.pt", "ab") as f:
        f.write(b"x")
    assert train_here(data_dir, tmp_path, "--save_interval=1", "--keep_last=1", "--max_steps=7") == 0
    assert newest_verified(tmp_path)[0] == 7


def test_weights_are_saved_beside_a_full_checkpoint_and_never_taken_from_an_older_run(data_dir, tmp_path):
    saved = []
    for seed in (1, 2):
        assert train_here(data_dir, tmp_path / str(seed // 9), f"--seed={seed}", "--save_interval=0",
                          "--weights_interval=4") == 0
        saved.append(load_weights(str(tmp_path / "0" / "ckpt" / "weights_00000008.pt"))[0]["norm.weight"].clone())
    assert not torch.equal(*saved)
    assert train_here(data_dir, tmp_path / "b", "--save_interval=2", "--weights_interval=4") == 0
    assert [s for s, _ in script.saved_steps(tmp_path / "b", ("weights",))] == [8, 4]


def test_a_start_from_weights_begins_at_step_0_and_refuses_another_shape(data_dir, straight, tmp_path):
    assert train_here(data_dir, tmp_path / "a", f"--init_from={straight}") == 0
    assert column(tmp_path / "a", "loss")[0] < column(straight, "loss")[0] - 1
    assert column(tmp_path / "a", "step") == list(range(1, 9))
    with pytest.raises(Refused, match="another shape"):
        train_here(data_dir, tmp_path / "b", f"--init_from={straight}", "--n_layer=3")


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


def test_a_run_compiled_and_one_eager_read_each_others_checkpoints(data_dir, straight, tmp_path, monkeypatch):
    stop_after(monkeypatch, 4)
    assert train_here(data_dir, tmp_path, "--compile=True") == 143
    assert not [name for name in checkpoint(tmp_path, 4)["model"] if "_orig_mod" in name or "module" in name]
    assert train_here(data_dir, tmp_path, "--compile=False") == 0
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
