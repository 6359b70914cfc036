"""Several ranks: the batches, updates and evaluations of one; cut and gone on with; on two nodes.

Most ranks here are forked and joined as torchrun joins them (branches.py), which saves its seconds.
"""
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from unittest import mock

import branches
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from branches import Forked, Torchrun
from conftest import ROOT, TINY, column, rows, sentences, train_here, write_data

import prepare
import process
import train as script
from config import load
from model import IGNORE, Shape, Transformer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return branches.make_data(str(tmp_path_factory.mktemp("data") / "data"))


def forked(ranks, data_dir, out_dir, *words, function=branches.work, code=0):
    """The tiny run in so many ranks, to its end. Returns its screen."""
    job = Forked(ranks, [*TINY, f"--data_dir={data_dir}", *words, f"--out_dir={out_dir}"], function=function)
    began = time.time()
    while job.code() is None and time.time() - began < 600:
        time.sleep(0.01)
    with open(f"{out_dir}.screen", errors="replace") as f:
        text = f.read()
    if (ended := job.code()) != code and code is not None:
        job.kill()
        raise AssertionError(f"ended with {ended}:\n{text[-3000:]}")
    return text


# ---- resume

@pytest.mark.parametrize("ranks, cuts", [(2, [5, 13]), (3, [15])])
def test_a_run_of_several_ranks_cut_by_sigkill_goes_on_bit_for_bit(data, tmp_path, ranks, cuts):
    words, straight, out = [*branches.WORDS, f"--data_dir={data}"], str(tmp_path / "a"), str(tmp_path / "b")
    branches.run(ranks, [*words, f"--out_dir={straight}"], launch=Forked)
    assert column(straight, "epoch")[14] == 2  # the cut after step 15 is the end of an epoch
    assert branches.branch(straight, out, ranks, words, cuts, launch=Forked) == []
    assert {row["step"] for row in map(json.loads, open(f"{out}/log.discarded.jsonl"))} == {cut + 1 for cut in cuts}
    found = branches.control(straight, out, ranks, words, "rng", launch=Forked)
    assert "step loss" in found and "step batch_crc" not in found


def test_two_ranks_under_torchrun_see_the_batches_of_one_and_one_or_three_go_on_from_their_checkpoint(data, tmp_path):
    words = [*branches.WORDS, f"--data_dir={data}", "--dropout=0"]
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    branches.run(1, [*words, f"--out_dir={one}"], launch=Forked)
    branches.run(2, [*words, f"--out_dir={two}"], cut=8, launch=Torchrun)
    assert open(f"{two}.screen").read().count("step 1/20") == 1 and len(branches.checkpoint(two, 8)["rng"]) == 2
    shutil.copytree(two, three)
    for out, ranks in ((two, 1), (three, 3)):
        branches.run(ranks, [*words, f"--out_dir={out}"], launch=Forked)
        assert rows(out, "resume")[0]["world_size"] == ranks and column(out, "step") == list(range(1, 21))
        assert column(out, "batch_crc") == column(one, "batch_crc")
        for key, event in (("loss", "step"), ("grad_norm", "step"), ("val_loss", "eval")):
            assert np.allclose(column(out, key, event), column(one, key, event), rtol=1e-4), key


def test_a_resume_needs_no_more_memory_than_a_fresh_start(data, tmp_path):
    words = ("--n_layer=6", "--n_embd=512", "--ffn_hidden=2048", "--global_batch_tokens=32", "--micro_batch_size=1")
    peaks = []
    for steps in (2, 4):  # a checkpoint of 12 bytes a parameter, 300 MB, beside 400 MB of torch
        forked(1, data, tmp_path / "out", *words, f"--max_steps={steps}", "--save_interval=100", "--keep_last=1")
        peaks.append(rows(tmp_path / "out", "save")[-1]["peak_memory_bytes"])
    assert rows(tmp_path / "out", "resume") and peaks[1] < 1.05 * peaks[0]


# ---- the step

def recorded(words):
    """Notes the crc of each window this rank trains on, and a hash of its parameters before each update and at the
    end, in OUT_DIR.rankN. Evaluates nothing, which would take its own compiling."""
    models, real_crc, nothing = [], script.batch_crc, dict(val_loss=0.0, val_ppl=1.0, val_bpb=0.0)

    def note(*batch):
        ids = torch.cat((batch[0][..., :1], batch[1]), dim=-1).flatten(0, 1).numpy() if batch else ()
        parameters = b"".join(p.detach().numpy().tobytes() for p in models[0].parameters())
        with open(f"{words[-1].partition('=')[2]}.rank{os.environ['RANK']}", "a") as f:
            f.write(json.dumps([[zlib.crc32(row.astype("<u4").tobytes()) for row in ids],
                                hashlib.sha256(parameters).hexdigest()]) + "\n")

    def groups(model, decay, real=script.parameter_groups):
        models.append(model)
        return real(model, decay)
    with (mock.patch.object(script, "parameter_groups", groups),
          mock.patch.object(script, "batch_crc", lambda x, y: (note(x, y), real_crc(x, y))[1]),
          mock.patch.object(script, "evaluate", lambda run, *a: (note(), {
              name: dict(nothing) for name in ("", *run.corpus.sources("val"))})[1])):
        branches.work(words)


def on_rank_1(words):
    """branches.work, on rank 1 with what stands behind --note= as one more word."""
    [extra] = [word.removeprefix("--note=") for word in words if word.startswith("--note=")]
    branches.work([*words[:-1], *[extra] * (os.environ["RANK"] == "1"), words[-1]])


def test_a_rank_with_other_settings_is_refused_naming_them(data, tmp_path):
    said = forked(2, data, tmp_path / "out", "--note=--learning_rate=5e-3", function=on_rank_1, code=2)
    assert "ranks 0 and 1 have other settings: learning_rate 0.01 and 0.005" in said
    assert not os.path.exists(tmp_path / "out" / "log.jsonl")


def broken_on_rank_1(words):
    """From the first step on the weights of rank 1 hold a NaN; rank 0 looks for it long."""
    rank, real = os.environ["RANK"], script.first_pass

    def spoil(run, x, y):
        loss = real(run, x, y)
        run.model.norm.weight.data[0] = math.nan if rank == "1" else 1.0
        return loss

    def look(*args, real=script.first_nonfinite):
        time.sleep(2 * (rank == "0"))
        return real(*args)
    with (mock.patch.object(script, "first_pass", spoil), mock.patch.object(script, "causality_leak", lambda _: 0.0),
          mock.patch.object(script, "first_nonfinite", look)):
        branches.work(words)


def test_the_ranks_leave_together_when_one_of_them_has_a_nan_and_it_is_named(data, tmp_path):
    said = forked(2, data, tmp_path, function=broken_on_rank_1, code=3)
    record = prepare.read_json(f"{tmp_path}/run.json")
    assert (record["status"], record["exit_code"]) == ("guard", 3) and "first non-finite: norm on rank 1" in said


def cut_off_on_rank_1(words):
    """Rank 1 can't read the windows of the third step."""
    def read(corpus, split, offset, count, real=prepare.Corpus.read, seen=[]):  # noqa: B006
        if os.environ["RANK"] == "1" and split == "train" and (seen.append(1) or len(seen) > 12):
            raise corpus._bad("train", "ends too early")
        return real(corpus, split, offset, count)
    with mock.patch.object(prepare.Corpus, "read", read):
        branches.work(words)


def slow_save(words):
    """Saving takes longer than a step may."""
    def write(*args, real=script.write_checkpoint):
        time.sleep(10)
        return real(*args)
    with mock.patch.object(script, "write_checkpoint", write):
        branches.work(words)


def blind_on_rank_1(words):
    """The log is not seen by rank 1, as on a network file system that shows it late."""
    def read(*args, real=script.read_log):
        return [] if os.environ["RANK"] == "1" else real(*args)
    with mock.patch.object(script, "read_log", read):
        branches.work(words)


def test_a_save_may_take_longer_than_a_step_and_rank_0_alone_says_what_the_log_holds(data, tmp_path):
    words = "--dist_timeout_s=8", "--max_steps=2", "--save_interval=2"
    forked(2, data, tmp_path / "out", *words, function=slow_save)
    assert "finished: " in forked(2, data, tmp_path / "out", *words, function=blind_on_rank_1)


def test_what_one_rank_alone_refuses_in_the_middle_of_a_run_is_said(data, tmp_path):
    said = forked(2, data, tmp_path, "--dist_timeout_s=20", function=cut_off_on_rank_1, code=None)
    assert "train.py: rank 1: " in said and "ends too early" in said


def test_ranks_train_on_different_windows_and_hold_the_same_parameters_after_every_step(data, tmp_path):
    one, out, words = tmp_path / "one", tmp_path / "out", ("--compile=True", "--max_steps=4", "--n_layer=1")
    forked(1, data, one, *words, function=recorded)  # alone first: what it compiles the two find in the cache
    text = forked(2, data, out, *words, function=recorded)
    assert f"{'eager' if process.why_no_compile(torch.device('cpu')) else 'compiled'}, accumulation 3" in text
    assert np.allclose(column(one, "loss"), column(out, "loss"), rtol=1e-4)
    ranks = [[json.loads(line) for line in open(f"{out}.rank{rank}")] for rank in (0, 1)]
    ids, (n, block) = np.fromfile(f"{data}/train.bin", "<u2"), (branches.WINDOWS, branches.BLOCK)
    for step in range(4):
        (first, a), (second, b) = (rank[step] for rank in ranks)
        offsets = script.window_offsets(step * 12, 12, n, block, seed=1337)
        assert a == b and len(first) == len(second) == 6 and not set(first) & set(second)
        assert first + second == [zlib.crc32(ids[o:o + block + 1].astype("<u4").tobytes()) for o in offsets]
    assert ranks[0][4][1] == ranks[1][4][1] and len({params for _, params in ranks[0]}) == 5


def some_valid(x, y):
    """Of windows that begin with an even id only the first four targets count; x, y (..., T)."""
    return torch.where((x[..., :1] % 2 == 0) & (torch.arange(x.shape[-1]) >= 4), IGNORE, y)


def masked(words):
    """Windows, micro-batches and ranks with different numbers of valid targets."""
    real = script.Batches.read

    def read(batches, first):
        x, y = real(batches, first)
        return x, some_valid(x, y)
    with mock.patch.object(script.Batches, "read", read):
        branches.work(words)


def test_loss_and_gradient_are_means_over_the_valid_targets_of_all_micro_batches_and_ranks(data, tmp_path):
    words = ("--max_steps=2", "--grad_clip=0", "--warmup_steps=0")
    cases = {"1x12": (1, 12), "1x2": (1, 2), "2x3": (2, 3), "3x2": (3, 2)}
    for name, (ranks, micro) in cases.items():
        forked(ranks, data, tmp_path / name, *words, f"--micro_batch_size={micro}", function=masked)
    c, corpus = load(script.Config, [*TINY]), prepare.Corpus(data)
    torch.manual_seed(c.seed)
    model = Transformer(Shape.of(c, corpus.vocab_size, corpus.eot_id)).double()
    offsets = script.window_offsets(0, 12, branches.WINDOWS, branches.BLOCK, c.seed)
    ids = torch.from_numpy(np.stack([corpus.read("train", o, branches.BLOCK + 1) for o in offsets]))
    x, y = ids[:, :-1], some_valid(ids[:, :-1], ids[:, 1:])
    F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE).backward()
    norm = math.sqrt(sum((p.grad**2).sum().item() for p in model.parameters()))
    with torch.no_grad():
        each = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORE, reduction="none").sum(dim=1)
    loss, valid = (each.sum() / (y != IGNORE).sum()).item(), (y != IGNORE).sum(dim=1)
    unweighted = (each / valid).mean().item()
    assert abs(unweighted / loss - 1) > 1e-3  # what a mean of means would give is told apart
    for name in cases:
        row = rows(tmp_path / name)[0]
        assert abs(row["loss"] / loss - 1) < 1e-6 and abs(row["grad_norm"] / norm - 1) < 1e-5, name
        assert row["targets"] == valid.sum() and row["tokens"] == 384, name
        assert np.allclose(column(tmp_path / name, "loss"), column(tmp_path / "1x12", "loss"), rtol=1e-5), name


# ---- evaluation

def test_two_ranks_evaluate_as_one_does_also_where_there_are_fewer_windows_than_ranks(data, tmp_path):
    short = write_data(str(tmp_path / "short"), ["x" * 40] + sentences(20), val_share=0.05)
    assert prepare.Corpus(short).tokens("val") == 41  # two rows in one source
    assert train_here(data, tmp_path / "weights") == 0
    words = (f"--init_from={tmp_path / 'weights'}", "--max_steps=1", "--learning_rate=0", "--min_lr=0", "--guard=off")
    for folder, ranks in ((data, 2), (short, 3)):
        for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-4)):
            seen = {}
            for world, micro in ((1, 2), (1, 12), (ranks, 2)):
                out = tmp_path / f"{os.path.basename(folder)}{dtype}{world}x{micro}"
                forked(world, folder, out, *words, f"--dtype={dtype}", f"--micro_batch_size={micro}")
                (row,) = rows(out, "eval")
                seen[world, micro] = [value for part in (row, *row["sources"].values())
                                      for value in (part["val_loss"], part["val_ppl"], part["val_bpb"])]
            for values in seen.values():
                assert np.allclose(values, seen[1, 2], rtol=tolerance, atol=0), (folder, dtype)


# ---- nodes

def node(number, port, words, screen):
    """One torchrun of two nodes of one rank each, as README.md has it."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={number}", "--nproc_per_node=1",
         "--master_addr=127.0.0.1", f"--master_port={port}", "train.py", *words],
        cwd=ROOT, stdout=screen, stderr=screen)


def test_two_torchruns_are_one_run_over_a_copied_data_dir_and_a_shared_out_dir(data, tmp_path):
    shutil.copytree(data, tmp_path / "copy")
    port, jobs, out = branches.free_port(), [], tmp_path / "out"
    screens = [open(tmp_path / f"screen{number}", "w+") for number in (0, 1)]
    for number, folder in enumerate((data, tmp_path / "copy")):
        words = [*TINY, f"--data_dir={folder}", f"--out_dir={out}"]
        jobs.append(node(number, port, words, screens[number]))
    assert [job.wait(120) for job in jobs] == [0, 0], open(tmp_path / "screen0").read()
    assert train_here(data, tmp_path / "one") == 0
    assert column(out, "step") == list(range(1, 9))
    assert column(out, "batch_crc") == column(tmp_path / "one", "batch_crc")
    assert np.allclose(column(out, "loss"), column(tmp_path / "one", "loss"), rtol=1e-4)
    assert len(branches.checkpoint(out, 8)["rng"]) == 2 and json.load(open(out / "run.json"))["device_count"] == 2
    assert "step 1/8" in open(tmp_path / "screen0").read() and "step 1/8" not in open(tmp_path / "screen1").read()


def other_node(words):
    """Rank 1 takes the settings behind --note=: it is the first of another node."""
    (at,) = [i for i, word in enumerate(words) if word.startswith("--note=")]
    if os.environ["RANK"] == "1":
        os.environ["LOCAL_RANK"] = "0"
        words = [*words[:at], *words[-1:], words[at][7:]]
    with mock.patch.object(script.time, "sleep", lambda seconds: None):  # it would look for ten seconds
        branches.work([word for word in words if not word.startswith("--note=")])


def other_mount(words):
    """Rank 1 has the shared out_dir in another place, and each rank loads from its own."""
    real, (out_dir,) = torch.load, [word[10:] for word in words if word.startswith("--out_dir=")]
    if os.environ["RANK"] == "1":
        words = [*words, f"--out_dir={out_dir}.elsewhere"]

    def load(path, **options):
        assert not isinstance(path, str) or path.startswith(words[-1][10:] + "/")
        return real(path, **options)
    with mock.patch.object(torch, "load", load):
        branches.work(words)


def test_nodes_may_have_the_shared_out_dir_in_different_places(data, tmp_path):
    os.symlink(tmp_path / "out", tmp_path / "out.elsewhere")
    for steps in 2, 3:
        forked(2, data, tmp_path / "out", f"--max_steps={steps}", "--save_interval=2", function=other_mount)
    assert column(tmp_path / "out", "step") == [1, 2, 3] and len(rows(tmp_path / "out", "resume")) == 1


def test_a_node_with_another_out_dir_or_with_other_data_is_refused_and_nothing_is_written(data, tmp_path):
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    text = forked(2, data, out, f"--note=--out_dir={elsewhere}", function=other_node, code=2)
    assert re.search(rf"train.py: rank 1: out_dir {elsewhere} on \S+ is not the folder that rank 0 writes to", text)
    other = write_data(str(tmp_path / "other"), sentences(100, seed=1))
    text = forked(2, data, tmp_path / "b", f"--note=--data_dir={other}", function=other_node, code=2)
    assert text.count("holds different data on different nodes") == 1
    for path in (elsewhere, tmp_path / "b", out / "run.json", out / "log.jsonl", out / "ckpt"):
        assert not os.path.exists(path)
