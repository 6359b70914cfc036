"""The checks that are cheap now and expensive later: one table, before the rented hours begin.

    python preflight.py config/train_demo.py                 the settings of the run itself, on the machine of the run
    python preflight.py config/train_demo.py --only=data     a part of the table; this one needs no GPU

Exit code 0 when nothing failed, 1 when something did, 2 when the settings are refused. Writes out_dir/preflight.json;
the run itself is not begun. Every key of train.py is taken; the last ones of --help are this script's own.
"""
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace

from config import Refused, load, to_argv  # before torch: a missing package then ends in one line

import numpy as np
import torch

import prepare
import train
from model import Shape, causality_leak, describe, newest_verified
from process import Ranks, device_name, git, pick_device, pick_dtype, without_nan
from report import read_log

HERE = os.path.dirname(os.path.abspath(__file__))
LARGE = 50_000_000  # parameters that a CPU is not asked to train
KEYS = [field.name for field in fields(train.Config)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no_python"]
PIECE = 1 << 20  # ids read at once
OOM_HELP = "lower --micro_batch_size, then --loss_chunks=8, then --activation_checkpointing=True"


@dataclass(frozen=True)
class Config:  # main() puts these behind the keys of train.Config
    only: str = ""  # comma-separated: place data model batch overfit resume ranks time; place goes with all but data
    devices: int = 0  # processes of the real run, one a device; 0: all CUDA devices, else one
    seconds: float = 20.0  # how long steps are timed, once the first three are done
    allow_tmpfs: bool = False  # an out_dir that lives in memory is no failure


# Each check returns (True: pass, None: warn, False: fail; what was measured). A Refused is a failure as well.
# ---- place

def out_dir(p):
    p.lock = train.open_out_dir(p.c, "preflight")
    p.folder, device, point, kind = tempfile.mkdtemp(prefix="preflight.", dir=p.c.out_dir), "", "", ""
    with open("/proc/mounts", encoding="utf-8") as f:
        for words in (line.replace("\\040", " ").split(" ") for line in f):
            inside = (os.path.realpath(p.folder) + "/").startswith(words[1].rstrip("/") + "/")
            if inside and len(words[1]) >= len(point):
                device, point, kind = words[:3]
    if kind in ("tmpfs", "ramfs"):
        return p.c.allow_tmpfs, f"{kind} at {point}: gone with the machine; another --out_dir, or --allow_tmpfs=True"
    rooted = kind == "overlay" or point == "/"
    return None if rooted else True, f"{kind} on {device} at {point}" + "; does it outlive the machine?" * rooted


def disk(p):
    """A checkpoint as train.py writes it, hash and fsync included; above 1 GiB that much of it stands for the whole."""
    size, said = 12 * p.n_params, train.check_room(p.c, p.n_params)
    content, began = dict(content=torch.empty(min(size, 1 << 30) // 8, dtype=torch.int64).random_()), time.time()
    written = train.write_checkpoint(f"{p.folder}/write/weights_00000000.pt", content, 0)
    p.save_s = (time.time() - began) * size / written
    shutil.rmtree(f"{p.folder}/write")
    return True, re.sub("^checkpoints +", "", said) + f"; {size / p.save_s / 1e6:,.0f} MB/s"


def estimated_memory(c, s, n_params, dtype):
    """Bytes of one process: weights, gradients, moments (under autocast a 16-bit copy as well), what backward keeps of
    the layers, the logits. What is kept was counted by saved_tensors_hooks, eagerly on a CPU; compiled layers and a
    GPU's RMSNorm (8 * n_embd a token less) keep less."""
    kv, half = s.n_embd // s.n_head * s.n_kv_head, dtype != "float32"
    layer = 30 * s.n_embd + 4 * kv + 8 * s.ffn_hidden if half else 32 * s.n_embd + 8 * kv + 16 * s.ffn_hidden
    kept = (4 * s.n_embd * s.n_layer + layer if c.activation_checkpointing else layer * s.n_layer) + 12 * s.n_embd
    logits = (10 if half else 8) * s.vocab_size / c.loss_chunks
    return ((18 if half and not c.activation_checkpointing else 16) * n_params +
            c.micro_batch_size * s.block_size * (kept + logits))


def memory(p):
    need, cuda = estimated_memory(p.c, p.shape, p.n_params, p.dtype), p.device.type == "cuda"
    with open("/proc/meminfo", encoding="utf-8") as f:
        free = 1024 * int(re.search(r"MemAvailable: *(\d+)", f.read())[1]) // p.world
    if cuda:
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(p.world))
    said = f"{p.world} x {device_name(p.device)}; about {need / 2**30:.2f} of {free / 2**30:.1f} GiB needed on each"
    if need > 0.95 * free if cuda else p.n_params > LARGE:
        p.small, p.note = narrowed(p.small), " [2 x 128]"
        said += f"; too large to try here: [2 x 128] is said of 2 layers x 128, context {p.small.block_size}"
    return (True, said) if need < 0.95 * free else (None if 16 * p.n_params < free else False, f"{said}: {OOM_HELP}")


# ---- data

def files(p):
    corpus = prepare.Corpus(p.c.data_dir, check="all")
    described, size = corpus.meta["tokenizer"], sum(map(corpus.tokens, prepare.SPLITS))
    ranks, special = len(prepare.read_ranks(p.c.data_dir, described["sha256"])), described["special_tokens"]
    if (corpus.vocab_size, corpus.eot_id) != (ranks + len(special), special.get(prepare.EOT)):
        return False, (f"meta.json speaks of {corpus.vocab_size:,} ids, end-of-text {corpus.eot_id:,}; the tokenizer "
                       f"has {ranks:,} and {special}: they do not belong together")
    return True, f"{size:,} tokens as their sha256 say, vocabulary {corpus.vocab_size:,}"


def scan(corpus, split, weight):
    """uint64 (3, documents) from one pass over a split: the sum of weight[id] modulo 2**64, first token, token behind
    the last. Raises Refused for an id outside the vocabulary, or where the end-of-texts are not those of meta.json."""
    def weigh(at):
        ids = corpus.read(split, at, min(PIECE, corpus.tokens(split) - at))
        so_far, last = np.cumsum(weight[ids]), np.flatnonzero(ids == corpus.eot_id)
        return so_far[last], so_far[-1], at + last + 1
    ends, sums, carry = [np.zeros(1, np.int64)], [np.zeros(1, np.uint64)], np.zeros(1, np.uint64)
    with ThreadPoolExecutor() as pool:  # numpy lets go of the interpreter
        for so_far, whole, last in pool.map(weigh, range(0, corpus.tokens(split), PIECE)):
            sums.append(carry + so_far)
            ends.append(last)
            carry = carry + whole
    ends, sums = np.concatenate(ends), np.concatenate(sums)
    for name, source in corpus.sources(split).items():
        edges = np.array([source["offset"], source["offset"] + source["tokens"]])
        found = np.searchsorted(ends, edges)
        if not np.isin(edges, ends).all() or found[1] - found[0] != source["documents"]:
            raise Refused(f"{split}.bin: {found[1] - found[0]:,} end-of-texts for {source['documents']:,} documents of "
                          f"source {name}, or none at its end: prepare the data again")
    return np.array([np.diff(sums), ends[:-1], ends[1:]], np.uint64)


def documents(p):
    """A document weighs a random number for each byte, white space left out: copies weigh the same whatever their
    white space and their tokens, and the few that weigh the same are then compared in full."""
    corpus, tokenizer = p.corpus, prepare.Tokenizer(p.c.data_dir)
    of_byte, weight = np.random.RandomState(0).randint(1, 2**63, 256, np.uint64), np.zeros(corpus.vocab_size, np.uint64)
    of_byte[list(b" \t\n")] = 0
    weight[:len(tokenizer.ranks)] = [of_byte[list(piece)].sum() for piece in tokenizer.ranks]
    p.found = {split: scan(corpus, split, weight) for split in prepare.SPLITS}

    def words(split, start, end):
        return tokenizer.decode_bytes(corpus.read(split, int(start), int(end - start))).translate(None, b" \t\n")
    for a, b in ("train", "val"), ("train", "test"), ("val", "test"):
        for total, *here in p.found[a].T[np.isin(p.found[a][0], p.found[b][0])]:
            for _, *there in p.found[b].T[p.found[b][0] == total]:
                if words(a, *here) == words(b, *there):
                    began = tokenizer.decode(corpus.read(b, int(there[0]), int(min(8, there[1] - there[0]))))
                    return False, (f"the document at token {there[0]} of {b}.bin, {began!r}, stands at token {here[0]} "
                                   f"of {a}.bin as well: prepare the data again")
    return True, (", ".join(f"{split} {part.shape[1]:,}" for split, part in p.found.items()) + ": ids in range, one "
                  "end-of-text each, none of val or test in another split")


def text(p):
    corpus, tokenizer, rng, bad = p.corpus, prepare.Tokenizer(p.c.data_dir), np.random.RandomState(0), []
    for _, start, end in p.found["train"].T[rng.randint(0, p.found["train"].shape[1], 20)].astype(np.int64):
        ids = corpus.read("train", start, end - start - 1)
        if len(ids) < 100_000 and tokenizer.encode(tokenizer.decode(ids)) != ids.tolist():
            bad.append(int(start))
    shown = "".join(f"\ntoken {at:,}: {tokenizer.decode(corpus.read('train', at, 32))[:70]!r}"
                    for at in rng.randint(0, max(1, corpus.tokens("train") - 32), 3).tolist())
    return not bad, (f"20 documents, decoded and encoded again, have the same ids{shown}" if not bad else
                     f"the documents at tokens {bad} of train.bin, decoded and encoded again, have other ids")


def budget(p):
    train.check_batch(p.c, p.world)
    batches = train.Batches(p.corpus, p.c, SimpleNamespace(rank=0, world=p.world), torch.device("cpu"), 0)
    tokens = p.c.max_steps * p.c.global_batch_tokens
    return batches.epochs <= 4 or None, (
        f"{tokens:,} of {p.corpus.tokens('train'):,} tokens, {batches.epochs:.2f} epochs, {tokens / p.n_params:.1f} a "
        "parameter" + "; over 4 epochs overfit" * (batches.epochs > 4))


# ---- model and batch: in this process, by the functions that train.py calls

def run_of(p):
    """(Run of train.py at step 0, not compiled and without dropout; x, y (B, T) of its first micro-batch)."""
    if p.run is None:
        quiet = SimpleNamespace(say=lambda text: None, event=lambda *a, **k: None, run=dict(commit=None))
        c = replace(shortened(p.small), dropout=0.0, dtype=p.dtype, out_dir=p.folder)
        p.run = train.build(c, Ranks(), SimpleNamespace(signum=0), quiet, p.device, p.corpus, None)
        p.x, p.y = (part[0] for part in train.Batches(p.corpus, c, p.run.ranks, p.device, 0).take()[:2])
    return p.run, p.x, p.y


@torch.no_grad()
def mean_loss(run, x, y):
    run.model.eval()
    with run.autocast():
        return sum(run.model(x[i:i + 1], y[i:i + 1]).item() for i in range(len(x))) / y.numel()


def learn(run, x, y, rate):
    """One update, its gradients left in place. Returns the mean loss before it. What is differentiated is the sum:
    AdamW and Muon do not mind, and fp16 then needs no scaling."""
    run.model.train().zero_grad(set_to_none=True)
    with run.autocast():
        total = run.model(x, y)
    total.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return total.item() / y.numel()


def parameters(p):
    expected = f"expect_params={p.c.expect_params:,}" if p.c.expect_params else "no --expect_params to compare with"
    return p.c.expect_params in (0, p.n_params), f"{p.n_params:,}; {expected}"


def initial_loss(p):
    run, V = run_of(p)[0], p.corpus.vocab_size
    size, generator = (2, -(-8192 // run.c.block_size), run.c.block_size), torch.Generator().manual_seed(0)
    found = mean_loss(run, *torch.randint(V, size, generator=generator).to(p.device))
    expected = math.log(V) + 1 / 8  # model.py draws its weights for this
    return abs(found - expected) < 0.05, f"{found:.4f} on random targets; ln {V:,} + 1/8 is {expected:.4f}"


def causality(p):
    with run_of(p)[0].autocast():
        leak = causality_leak(p.run.model)
    return leak == 0, f"other later tokens move the logits of earlier ones by {leak:.3g}"


def inputs(p):
    run, x, y = run_of(p)
    T, tokenizer, dtype = run.c.block_size, prepare.Tokenizer(p.c.data_dir), p.corpus.dtype
    at = int(train.window_offsets(0, 1, (p.corpus.tokens("train") - T) // T, T, run.c.seed)[0])
    raw = np.fromfile(f"{p.c.data_dir}/train.bin", dtype, T + 1, offset=at * dtype.itemsize).tolist()
    pieces = [f"{repr(tokenizer.decode([i]))[1:-1].replace(' ', '·')[:9]:<9}" for i in raw[:10]]
    same = x[0].tolist() == raw[:-1] and y[0].tolist() == raw[1:] and torch.equal(x[:, 1:], y[:, :-1])
    return same, (f"the first is{'' if same else ' NOT'} train.bin from token {at:,}, targets one on"
                  f"\ninput    {' '.join(pieces[:-1])}\ntarget   {' '.join(pieces[1:])}")


def loss(p):
    """Against its definition, in float64: logsumexp of a position's logits minus the logit of the target."""
    run, x, y = run_of(p)
    ours, targets = mean_loss(run, x[:1], y[:1]), y[0].cpu().numpy()
    with torch.no_grad(), run.autocast():
        logits = run.model(x[:1])[0].double().cpu().numpy()  # (T, vocab)
    own = (np.logaddexp.reduce(logits, axis=1) - logits[range(len(targets)), targets]).mean()
    return abs(ours - own) < 1e-4 * own, f"{ours:.6f} a token; from the logits, in float64, {own:.6f}"


def update(p):
    run, x, y = run_of(p)
    before = {name: w.detach().clone() for name, w in run.model.named_parameters()}
    first = learn(run, x, y, p.c.learning_rate)
    bad = [name for name, w in run.model.named_parameters() if w.grad is None or not w.grad.isfinite().all()
           or not w.grad.any() or torch.equal(w, before[name])]
    return not bad, (f"{len(before) - len(bad)} of {len(before)} tensors get a gradient and change"
                     f"{', not ' + bad[0] if bad else ''}; {first:.4f} -> {mean_loss(run, x, y):.4f}")


def reload(p):
    """A new process of train.py resumes from what is saved here, and says its first loss before it makes a step."""
    run, x, y = run_of(p)
    run.c = c = replace(run.c, out_dir=f"{p.folder}/reload")
    run.model.train()
    saved, here = train.save(run, "step"), train.first_pass(run, x, y)
    del run, x, y
    child(p, "reload", c, 1)
    there = prepare.read_json(f"{c.out_dir}/run.json")["initial_loss"]
    shutil.rmtree(c.out_dir)
    return saved and abs(here - there) <= (1e-4 if p.device.type == "cuda" else 0), (
        f"loss {here:.7f}; saved and loaded by a new process {there:.7f}")


def overfit(p):
    """Two short windows, at a rate of 1e-3."""
    run, x, y = run_of(p)
    x, y, targets, steps, found = x[:2, :128], y[:2, :128], y[:2, :128].cpu().clone(), 0, math.inf
    while found >= 0.1 and (steps := steps + 1) <= 400:
        found = learn(run, x, y, 1e-3 * min(1, steps / 10))
    same = torch.equal(targets, y.cpu())
    return found < 0.1 and same, (f"loss {found:.3f} after {steps} steps on {y.numel()} tokens, targets "
                                  f"{'untouched' if same else 'CHANGED'}")


# ---- train.py in processes of its own: killed, resumed, side by side, timed

def narrowed(c):
    return replace(c, n_layer=2, n_embd=128, n_head=2, n_kv_head=1, ffn_hidden=352, block_size=min(c.block_size, 256),
                   micro_batch_size=min(c.micro_batch_size, 2))


def shortened(c, world=1):
    """The same settings for a few steps: at most 4 micro-batches a rank in each, and nothing that is not a step."""
    unit = world * c.micro_batch_size * c.block_size
    return replace(c, global_batch_tokens=unit * max(1, min(4, c.global_batch_tokens // unit)), init_from="auto",
                   log_interval=1, eval_interval=0, save_interval=0, weights_interval=0, sample_interval=0, keep_last=1,
                   keep_every=0, max_epochs=0, expect_params=0, budget_gpu_hours=0.0, guard="off",
                   max_steps=max(c.max_steps, 2000))


CHILD = """
import os, sys, time
import train
steps, seconds, signum = int(sys.argv.pop(1)), float(sys.argv.pop(1)), int(sys.argv.pop(1))
right, times, sys.argv[0] = train.batch_crc, [], "train.py"
def batch_crc(x, y):  # called once in every logged step, behind its backward and before its update
    times.append(time.time())
    if len(times) > steps and times[-1] - times[min(3, steps)] >= seconds:
        os.kill(os.getpid(), signum)
    return right(x, y)
train.batch_crc = batch_crc
train.main()
"""


def child(p, name, c, steps, world=1, seconds=0.0, signum=signal.SIGKILL):
    """train.py with settings `c` in a folder `name`, ended by `signum` within the first step behind `steps` of them and
    `seconds`. Returns its start and its lines of log.jsonl: step lines, others. Raises Refused where it failed."""
    p.run = p.x = p.y = None  # their memory is for the other process
    torch.cuda.empty_cache()
    began, out = time.time(), f"{p.folder}/{name}"
    command = [sys.executable, "-c", CHILD, steps, seconds, int(signum), *to_argv(replace(c, out_dir=out), *KEYS)]
    if world > 1:
        command = [*TORCHRUN, f"--nproc_per_node={world}", *command]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, errors="replace", check=False,
                          env=os.environ | dict(PYTHONPATH=HERE))
    rows = [row for row in read_log(out) if row["time"] > began]
    steps_made = [row for row in rows if row["event"] == "step"]
    if len(steps_made) < steps:
        lines = (done.stdout + done.stderr).splitlines()
        said = " ".join([line for line in lines if line.startswith("train.py: ")] or lines[-3:])[-300:]
        raise Refused(said + f"; {OOM_HELP}" * ("out of memory" in done.stderr.lower()))
    return began, steps_made, [row for row in rows if row["event"] != "step"]


def leaves(value, path=""):
    """(path, number or tensor as float64) of everything in a nested value."""
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path} {key}")
    else:
        yield path, value.double() if isinstance(value, torch.Tensor) else torch.tensor(float(value or 0))


def first_difference(a, b, tolerance):
    """What differs first between two runs, in the order in which one thing follows from another; "" for nothing. A
    run is its step lines and its checkpoint. Loss, parameters and moments may be `tolerance` of their size apart."""
    a, b = ({key: {f"of step {row['step']}": row[key] for row in rows} for key in ("batch_crc", "lr", "loss")} | saved
            for rows, saved in (a, b))
    for what, key, near in (("batch", "batch_crc", 0), ("rate", "lr", 0), ("loss", "loss", tolerance),
                            ("RNG", "rng", 0), ("parameter", "model", tolerance),
                            ("optimizer state", "optimizer", tolerance)):
        pairs = itertools.zip_longest(leaves(a.get(key)), leaves(b.get(key)), fillvalue=(" is missing", torch.zeros(0)))
        for (path, x), (its_path, y) in pairs:
            if path != its_path or x.shape != y.shape or not (x - y).norm() <= near * x.norm():
                return what + path
    return ""


def resume(p):
    """Four steps in one process; two, a third lost to SIGKILL in the fourth, and the rest in a new process."""
    c, runs = shortened(p.small), []
    for name, save_interval, *parts in ("straight", 4, 4), ("cut", 2, 3, 2):
        rows = [child(p, name, replace(c, save_interval=save_interval), steps)[1] for steps in parts]
        path = newest_verified(f"{p.folder}/{name}", ("step",))[1]
        runs.append((rows[0][:2] + rows[-1][-2:], torch.load(path, map_location="cpu", weights_only=True, mmap=True)))
    exact = p.device.type == "cpu"  # the backward of attention on a GPU adds up in any order
    found = first_difference(*runs, 0 if exact else 0.01)
    return not found, "killed in step 4 and gone on with behind step 2: " + (
        f"the first to differ is {found}" if found else "same batches, rates, losses, RNG, parameters and moments" +
        ", bit for bit" * exact)


def ranks(p):
    alone = p.device.type == "cuda" and torch.cuda.device_count() < 2
    c = replace(narrowed(p.small) if alone else p.small, dropout=0.0)
    c = shortened(replace(c, device="cpu", dtype="float32") if alone else c)
    windows, T = c.global_batch_tokens // c.block_size, c.block_size
    if windows % 2:
        return None, f"not possible: {windows} windows a step can't be halved"
    halves = replace(c, micro_batch_size=max(n for n in range(1, c.micro_batch_size + 1) if windows // 2 % n == 0))
    one, two = (child(p, f"ranks{n}", settings, 4, n)[1] for n, settings in ((1, c), (2, halves)))
    dealt = [train.Batches(p.corpus, halves, SimpleNamespace(rank=rank, world=world), torch.device("cpu"), 0).read(0)[0]
             for rank, world in ((0, 2), (1, 2), (0, 1))]
    offsets = train.window_offsets(0, windows, (p.corpus.tokens("train") - T) // T, T, c.seed).tolist()
    apart = torch.equal(torch.cat(dealt[:2]), dealt[2]) and len(set(offsets)) == windows
    found = first_difference((one, {}), (two, {}), 1e-4 if "float32" in (c.dtype, p.dtype) else 0.01)
    return not found and apart, (f"2 ranks against 1{', on the CPU' * alone}: " + (
        f"the first to differ is {found}" if found else "same batches and rates, losses up to rounding") + (
        "; no window on both" if apart else "; the same window on both"))


def timing(p):
    """A token of evaluation is taken to cost a third of one of training: it has a forward and no backward."""
    c, quick, val = p.c, shortened(p.c, p.world), p.corpus.tokens("val")
    began, steps, others = child(p, "time", quick, 6, p.world, c.seconds, signal.SIGTERM)
    token_s = float(np.median([row["step_ms"] for row in steps[3:]])) / 1000 / quick.global_batch_tokens
    p.step_s, peak = token_s * c.global_batch_tokens, others[-1]["peak_memory_bytes"]
    evals = val + ((c.max_steps - 1) // c.eval_interval * min(val, c.eval_tokens) if c.eval_interval else 0)
    saves = math.ceil(c.max_steps / c.save_interval) if c.save_interval else 0
    total = steps[0]["time"] - began + c.max_steps * p.step_s + evals * token_s / 3 + saves * p.save_s
    hours = total / 3600 * p.world
    p.estimate = dict(tokens_per_s=1 / token_s, step_ms=p.step_s * 1000, seconds=total, device_hours=hours,
                      money=hours * c.gpu_hour_price, peak_memory_bytes=peak)
    money = f", {hours * c.gpu_hour_price:,.2f} {c.currency}" if c.gpu_hour_price else ""
    limit = f"; budget_gpu_hours={c.budget_gpu_hours:g}" if c.budget_gpu_hours else ""
    return not 0 < c.budget_gpu_hours < hours, (
        f"{1 / token_s:,.0f} tokens/s, {p.step_s:.3g} s a step, {peak / 2**30:.2f} GiB; the whole run: "
        f"{train.duration(total)}, {hours:.3g} device-hours{money}{limit}")


def stop(p):
    """Two thirds of the time that torchrun gives its workers between SIGTERM and SIGKILL are the limit."""
    seconds, new = p.step_s + p.save_s, tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) if new else 30
    advice = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(3 * seconds)} " + ("gives more" if new else "needs torch 2.12")
    said = f"{seconds:.1f} s for a step and a save; torchrun waits {limit:g} s"
    return (True, said) if seconds <= limit / 1.5 else (None, f"{said}: {advice}")


# ---- the table

CHECKS = [  # part, function, the checks without which it can't be asked, what skipping it costs
    ("place", out_dir, "", "checkpoints gone with the machine"),
    ("place", disk, "out_dir", "a full disk in the night"),
    ("place", memory, "", "out of memory, the hours paid for"),
    ("data", files, "", "training on damaged bytes"),
    ("data", documents, "files", "a val loss too good to be true"),
    ("data", text, "files documents", "days of training on gibberish"),
    ("data", budget, "files", "the same pages over and over"),
    ("model", parameters, "", "another model than the one planned"),
    ("model", initial_loss, "out_dir files", "a start nothing makes up for"),
    ("model", causality, "out_dir files", "a fine loss, and it can't write"),
    ("batch", inputs, "out_dir files", "learning to copy, not to predict"),
    ("batch", loss, "out_dir files", "training towards something else"),
    ("batch", update, "out_dir files", "layers that never learn"),
    ("batch", reload, "out_dir disk files", "weights no other process can use"),
    ("overfit", overfit, "out_dir files", "a loop that can't learn even this"),
    ("resume", resume, "out_dir disk files", "another run after a restart"),
    ("ranks", ranks, "out_dir files", "paying for GPUs that see the same"),
    ("time", timing, "out_dir disk files", "another bill than expected"),
    ("time", stop, "timing", "the last hour lost at a shutdown"),
]
PROVES = """
What passing proves: the data are whole and apart from what is held out; this code on this machine computes the loss it
should, learns, saves, and goes on after a kill as if there had been none; disk, memory and hours suffice. What it does
not: that data, size and rate make a good model, that a machine keeps well for days, anything about other nodes, nor
about the real shape where a line says [2 x 128], nor about steps of more than 4 micro-batches."""


def ask(p, function, needs, results):
    """(result, measured) of one check. What goes wrong inside it is its failure, and the next one is asked."""
    if missing := [need for need in needs.split() if results.get(need, "pass") not in ("pass", "warn")]:
        return "not run", f"{missing[0]} did not pass"
    try:
        passed, said = function(p)
        return "warn" if passed is None else "pass" if passed else "FAIL", said
    except Exception as error:
        said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        return "FAIL", said + f"; {OOM_HELP}" * isinstance(error, torch.OutOfMemoryError)


def show(name, result, said, cost):
    said, *shown = said.split("\n")
    columns = [name.replace("_", " ")], [result], textwrap.wrap(said, 61), textwrap.wrap(cost, 34)
    for cells in itertools.zip_longest(*columns, fillvalue=""):
        print(" ".join(f"{cell:<{width}}" for cell, width in zip(cells, (13, 8, 62, 34), strict=True)).rstrip())
    print("".join(f"{'':<23}{line[:96]}\n" for line in shown), end="", flush=True)


def main():
    @dataclass(frozen=True)
    class Settings(Config, train.Config):
        """Every key of train.py, then this script's own."""

    c, began, results, rows = load(Settings, sys.argv[1:], __doc__), time.time(), {}, []
    train.check(c)
    known = dict.fromkeys(part for part, *_ in CHECKS)
    parts = c.only.split(",") if c.only else list(known)
    if not set(parts) <= set(known) or os.environ.get("WORLD_SIZE", "1") != "1":
        raise Refused(f"only={c.only!r} takes {', '.join(known)}; and this starts its own processes, without torchrun")
    corpus = prepare.Corpus(c.data_dir, check=False)
    shape = Shape.of(c, corpus.vocab_size, corpus.eot_id)
    device = torch.device("cpu") if parts == ["data"] else pick_device(c, 0)
    p = SimpleNamespace(
        c=c, corpus=corpus, shape=shape, n_params=describe(shape, 1)[0], device=device, dtype=pick_dtype(c, device),
        world=c.devices or (torch.cuda.device_count() if device.type == "cuda" else 1),
        small=replace(c, compile=False), note="", lock=None, folder=None, run=None, estimate=None)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))  # through the finally below
    sys.stdout.reconfigure(errors="backslashreplace")  # pieces of text, in a locale without UTF-8
    show("check", "result", "measured", "what skipping it costs")
    try:
        for part, function, needs, cost in CHECKS:
            if part in parts or part == "place" and parts != ["data"]:
                name = function.__name__
                if sys.stdout.isatty():
                    print(f"{name} ...", end="\r", flush=True)
                results[name], said = ask(p, function, needs, results)
                if "files" in needs and part not in ("data", "time") and results[name] != "not run":
                    said = re.sub("$", p.note, said, count=1, flags=re.MULTILINE)
                rows.append(dict(part=part, check=name, result=results[name], measured=said, cost=cost))
                show(name, results[name], said, cost)
    finally:
        shutil.rmtree(p.folder or "", ignore_errors=True)
        if p.lock:
            p.lock.close()
    seconds, path, found = time.time() - began, os.path.join(c.out_dir, "preflight.json"), list(results.values())
    record = dict(schema=1, time=began, seconds=seconds, device_hours=seconds * p.world / 3600, checks=rows,
                  estimate=p.estimate, settings=asdict(c), commit=git("rev-parse", "HEAD"))
    print(", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found)), "in", train.duration(seconds))
    print("" if c.only else PROVES)
    try:
        os.makedirs(c.out_dir, exist_ok=True)
        prepare.write_atomically(path, json.dumps(without_nan(record), indent=1).encode())
    except OSError as error:
        print(f"{path} could not be written: {error}")
    sys.exit(1 if "FAIL" in found else 0)


if __name__ == "__main__":
    main()
