"""preflight.py: everything passes on a sound run, and each fault fails the check that is there for it."""
import glob
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import faults
import numpy as np
import pytest
import torch
from conftest import TINY, column, finish, sentences, start, train_here, write_data

import model
import preflight
import train
from config import Refused
from model import Shape, Transformer

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that preflight starts: one that resumes must count alike
SHAPE = ("--n_embd=64", "--ffn_hidden=128", "--seconds=0.5")


def look(data_dir, out_dir, *words):
    """(exit code, {check: result}, {check: measured}) of preflight.py in this process; later words win."""
    argv, handlers = sys.argv, [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    sys.argv = ["preflight.py", *TINY, *SHAPE, f"--data_dir={data_dir}", f"--out_dir={out_dir}", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as ended:
            preflight.main()
    finally:
        sys.argv = argv
        for signum, handler in handlers:
            signal.signal(signum, handler)
    with open(f"{out_dir}/preflight.json", encoding="utf-8") as f:
        rows = json.load(f)["checks"]
    return ended.value.code, *({row["check"]: row[key] for row in rows} for key in ("result", "measured"))


def failed(results):
    return [name for name, result in results.items() if result == "FAIL"]


def test_all_checks_pass_and_the_run_is_not_begun(data_dir, tmp_path, capsys):
    words = ("--gpu_hour_price=2", "--currency=EUR", "--expect_params=90496")
    code, results, measured = look(data_dir, tmp_path / "out", *words)
    said = capsys.readouterr().out
    assert code == 0 and list(results) == [name for _, costs in preflight.CHECKS.values() for name in costs], said
    assert set(results.values()) <= {"pass", "warn"}, said
    assert "bit for bit" in measured["resume"] and "EUR" in measured["timing"]
    assert max(map(len, said.splitlines())) <= 120 and "What it does not" in said.replace("\n", " ")
    with open(tmp_path / "out/preflight.json") as f:
        record = json.load(f)
    assert record["device_hours"] == pytest.approx(record["seconds"] / 3600) and record["estimate"]["tokens_per_s"] > 0
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", ".start_id", "preflight.json"]
    assert train_here(data_dir, tmp_path / "out", "--init_from=scratch", "--max_steps=2") == 0
    assert column(tmp_path / "out", "step") == [1, 2]


# ---- data

@pytest.fixture
def copy(data_dir, tmp_path):
    """A copy of the data folder that a test may spoil, and its meta.json."""
    folder = shutil.copytree(data_dir, tmp_path / "data")
    return folder, json.loads((folder / "meta.json").read_text())


def test_a_held_out_document_in_train_fails_whatever_its_white_space(tmp_path):
    documents = sentences(60)
    documents[40] = documents[3].replace(" ", "\n  ", 5)  # 3 is of val, 40 of train
    data = write_data(str(tmp_path / "data"), documents)
    code, results, measured = look(data, tmp_path / "out", "--only=data")
    assert code == 1 and failed(results) == ["documents"] and "stands at token" in measured["documents"]
    assert list(results) == ["files", "documents", "budget"] and "\ntoken" in measured["files"]


def test_documents_of_the_same_letters_in_another_order_are_no_copies(tmp_path):
    documents = sentences(60)
    documents[40] = " ".join(reversed(documents[3].split()))
    data = write_data(str(tmp_path / "data"), documents)
    assert look(data, tmp_path / "out", "--only=data")[0] == 0


@pytest.mark.parametrize("vocab_size, eot_id, row", [
    (200, 256, "files"), (256, 256, "files"), (258, 256, "files"), (257, 10, "documents")])
def test_a_wrong_vocabulary_fails(copy, tmp_path, vocab_size, eot_id, row):
    folder, meta = copy
    (folder / "meta.json").write_text(json.dumps(meta | dict(vocab_size=vocab_size, eot_id=eot_id)))
    assert failed(look(folder, tmp_path / "out", "--only=data")[1]) == [row]


def test_an_id_outside_the_vocabulary_and_a_lost_end_of_text_fail(copy):
    folder, meta = copy
    ids = np.fromfile(folder / "train.bin", np.uint16)
    for at, value, why in ((100, 300, "the vocabulary ends"), (len(ids) - 1, 65, "end-of-texts")):
        spoiled = ids.copy()
        spoiled[at] = value
        spoiled.tofile(folder / "train.bin")
        with pytest.raises(Refused, match=why):
            preflight.scan(preflight.prepare.Corpus(folder, check=False), "train", np.ones(257, np.uint64))


def test_a_document_that_reaches_over_pieces_is_weighed_whole(copy, monkeypatch):
    corpus, weight = preflight.prepare.Corpus(copy[0]), np.random.RandomState(0).randint(0, 2**63, 257, np.uint64)
    ids = corpus.read("train", 0, corpus.tokens("train"))
    for piece in (1 << 20, 100):
        monkeypatch.setattr(preflight, "PIECE", piece)
        sums, edges = preflight.scan(corpus, "train", weight)
        assert edges.tolist() == [0, *np.flatnonzero(ids == 256) + 1]
        assert sums.tolist() == [weight[ids[a:b]].sum() for a, b in zip(edges, edges[1:], strict=False)]


def test_a_cut_train_bin_fails_and_what_needs_data_is_not_run(copy, tmp_path):
    folder, _ = copy
    with open(folder / "train.bin", "r+b") as f:
        f.truncate(os.path.getsize(f.name) - 1)
    code, results, measured = look(folder, tmp_path / "out")
    assert code == 1 and failed(results) == ["files"] and "train.bin has" in measured["files"]
    ran = [name for name, result in results.items() if result in ("pass", "warn")]
    assert ran == ["out_dir", "disk", "memory"] and measured["resume"] == "files did not pass"


# ---- place

def test_no_space_fails_and_nothing_is_saved(data_dir, tmp_path):
    code, results, measured = look(data_dir, tmp_path / "out", "--only=batch", "--keep_last=10000000")
    assert code == 1 and failed(results) == ["disk"] and "make room" in measured["disk"]
    assert results["reload"] == "not run" and measured["reload"] == "disk did not pass"


def test_memory_is_no_place_for_checkpoints(data_dir):
    out = f"/dev/shm/preflight.{os.getpid()}"
    try:
        code, results, measured = look(data_dir, out, "--only=place")
        assert code == 1 and results["out_dir"] == "FAIL" and "tmpfs" in measured["out_dir"]
        assert look(data_dir, out, "--only=place", "--allow_tmpfs=True")[0] == 0
    finally:
        shutil.rmtree(out, ignore_errors=True)


def test_an_out_dir_in_use_or_below_a_file_fails(data_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    process = start("preflight.py", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}/file/out", "--only=place")
    lock = preflight.prepare.lock(tmp_path)
    code, results, measured = look(data_dir, tmp_path, "--only=place")
    assert code == 1 and str(os.getpid()) in measured["out_dir"] and results["disk"] == "not run"
    lock.close()
    code, said, _ = finish(process)
    assert code == 1 and "FAIL" in said and "can't be written" in " ".join(said.split())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_estimated_memory_is_what_backward_really_keeps(dtype, checkpointing, compiled):
    shape = Shape(1000, 5, 4, 2, 256, 700, 96)
    c = train.Config(micro_batch_size=2, activation_checkpointing=checkpointing, dtype=dtype, device="cpu",
                     compile=compiled)
    net, kept = Transformer(shape, checkpointing), {}
    if compiled:  # cut into forward and backward as Inductor does, run by torch
        torch._dynamo.reset()
        for layer in net.layers:
            layer.compile(backend="aot_eager_decomp_partition")
        net.head_loss = torch.compile(model.head_loss, backend="aot_eager_decomp_partition")
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t
        return t
    x, y = torch.randint(1000, (2, 2, 96))
    with (torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
          torch.autocast("cpu", torch.bfloat16, enabled=dtype != "float32")):
        net(x, y)
    later = 4 if dtype == "float32" else 2 if compiled else 6
    counted = sum(size for size, _ in kept.values()) + later * x.numel() * 1000
    if dtype != "float32":  # 16-bit weights, of which checkpointing keeps the head's alone
        counted -= 2 * (1000 * 256 if checkpointing else model.count_parameters(net))
    estimated = preflight.estimated_memory(c, shape, 0)
    if checkpointing:  # what one layer keeps comes later
        plain = replace(c, activation_checkpointing=False)
        one, none = (preflight.estimated_memory(plain, replace(shape, n_layer=n), 0) for n in (1, 0))
        estimated -= one - none
    assert 0.9 < counted / estimated < 1.03, counted / estimated  # with the logits' gradient, which is made later


# ---- model and batch

def test_a_wrong_parameter_count_fails(data_dir, tmp_path):
    code, results, measured = look(data_dir, tmp_path, "--only=model", "--expect_params=90497")
    assert code == 1 and failed(results) == ["parameters"] and "90,496" in measured["parameters"]


def test_attention_without_its_mask_fails(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(*faults.mask_off())
    assert failed(look(data_dir, tmp_path, "--only=model")[1]) == ["causality"]


def test_targets_that_are_the_inputs_fail(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(*faults.targets_shifted_by_zero())
    assert "inputs" in failed(look(data_dir, tmp_path, "--only=batch")[1])


def test_a_wrong_loss_fails(data_dir, tmp_path, monkeypatch):
    right = model.head_loss
    monkeypatch.setattr(model, "head_loss", lambda *args: right(*args) * 1.001)
    monkeypatch.setattr(preflight, "child", lambda *args: None)
    assert "loss" in failed(look(data_dir, tmp_path, "--only=batch")[1])


def test_an_optimizer_that_does_not_step_fails(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(*faults.no_step())
    assert failed(look(data_dir, tmp_path, "--only=batch,overfit")[1]) == ["update", "overfit"]


def test_a_shape_too_large_for_the_cpu_is_checked_narrowed_and_says_so(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "LARGE", 1000)
    code, results, measured = look(data_dir, tmp_path, "--only=model,overfit,time")
    assert code == 0 and all(measured[name].startswith("[2 layers x 128]") for name in ("overfit", "causality"))
    assert measured["parameters"].startswith("90,496")
    assert results["timing"] == "warn" and "python bench.py" in measured["timing"]
    assert "s for a save;" in measured["stop"]


def test_a_shape_that_memory_does_not_hold_is_checked_narrowed_and_fails_there_alone(data_dir, tmp_path, monkeypatch):
    for bytes_each, fails in ((19, ["memory"]), (1000, [])):
        monkeypatch.setattr(preflight, "free_memory", lambda device, free=90_496 * bytes_each: free)
        _, results, measured = look(data_dir, tmp_path, "--only=model")
        assert failed(results) == fails and measured["causality"].startswith("[2 layers x 128]") == bool(fails)


# ---- processes of their own

def faulty(monkeypatch, line):
    monkeypatch.setattr(preflight, "CHILD", preflight.CHILD.replace("train.main()", f"{line}\ntrain.main()"))


def test_a_resume_without_moments_fails_and_is_named(data_dir, tmp_path, monkeypatch):
    faulty(monkeypatch, "load = train.torch.load\n"
                        "train.torch.load = lambda *a, **k: load(*a, **k) | dict(optimizer={})")
    code, results, measured = look(data_dir, tmp_path, "--only=resume")
    assert code == 1 and "moments: loss of step 4" in measured["resume"]


def test_weights_that_a_new_process_does_not_get_fail(data_dir, tmp_path, monkeypatch):
    faulty(monkeypatch, "train.restore = lambda *args: None")
    assert failed(look(data_dir, tmp_path, "--only=batch")[1]) == ["reload"]


def test_ranks_that_read_the_same_windows_fail(data_dir, tmp_path, monkeypatch):
    faulty(monkeypatch, "read = train.Batches.read\n"
                        "train.Batches.read = lambda self, n: read(self, n - self.ranks.rank * self.per_step // 2)")
    code, results, measured = look(data_dir, tmp_path, "--only=ranks")
    assert code == 1 and "losses: batch of step 1" in measured["ranks"]


def test_a_run_over_its_budget_fails(data_dir, tmp_path):
    code, results, measured = look(data_dir, tmp_path, "--only=time", "--budget_gpu_hours=1e-6")
    assert failed(results) == ["timing"] and "budget_gpu_hours=1e-06" in measured["timing"]


def test_differences_are_named_in_the_order_of_their_causes():
    rows = [dict(step=s, batch_crc=s, lr=0.1, loss=2.0) for s in (1, 2)]
    saved, other = (dict(rng=[dict(torch=torch.arange(9) + n)], model=dict(w=torch.ones(3) + n),
                         optimizer=dict(w=dict(m=torch.ones(3) + n))) for n in (0, 1))
    mixed = dict(saved)
    assert preflight.first_difference((rows, saved), (rows, saved), 0) == ""
    for key, named in (("optimizer", "optimizer state w m"), ("model", "parameter w"), ("rng", "RNG 0 torch")):
        mixed[key] = other[key]
        assert preflight.first_difference((rows, saved), (rows, mixed), 0) == named
    for key, named in (("loss", "loss of step 2"), ("lr", "rate of step 2"), ("batch_crc", "batch of step 2")):
        rows_b = [rows[0], rows[1] | {key: 9}]
        assert preflight.first_difference((rows, saved), (rows_b, mixed), 0) == named
    renamed = saved | dict(optimizer=dict(v=dict(m=torch.ones(3))))
    assert preflight.first_difference((rows, saved), (rows, renamed), 0) == "optimizer state w m"
    assert preflight.first_difference((rows, saved), (rows[:1], saved), 0) == "batch of step 2"
    assert preflight.first_difference((rows, saved), ([rows[0], rows[1] | dict(loss=2.01)], saved), 0.01) == ""


def test_a_stop_that_torchrun_would_cut_short_is_named(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    passed, said = preflight.stop(5.0, 20.0)
    assert passed is None and "25.0 s for a step and a save" in said
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=75 gives more" in said
    assert preflight.stop(20.0) == (True, "20.0 s for a save; torchrun waits 30 s")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "75")
    assert preflight.stop(25.0)[0] is True


def test_ended_by_a_signal_it_leaves_nothing_behind(data_dir, tmp_path):
    process = start("preflight.py", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}", "--only=resume")
    while not (made := glob.glob(f"{tmp_path}/preflight.*/straight/log.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130 and made
    assert sorted(os.listdir(tmp_path)) == [".lock", ".start_id"]


def test_settings_that_can_not_be_are_refused(data_dir, tmp_path):
    words = ("preflight.py", *TINY, f"--data_dir={data_dir}", f"--out_dir={tmp_path}/out")
    refused = [start(*words, "--only=dat"), start(*words, "--n_head=3"), start(*words, env=dict(WORLD_SIZE="2"))]
    for process, why in zip(refused, ("only='dat' takes place, data", "n_head=3", "without torchrun"), strict=True):
        code, out, err = finish(process)
        assert code == 2 and why in err and len(err.splitlines()) == 1
    assert not os.path.exists(tmp_path / "out")
