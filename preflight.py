"""The checks that are cheap now and expensive later: one table, before the rented hours begin.

    python preflight.py config/train_demo.py                 the settings of the run itself, on the machine of the run
    python preflight.py config/train_demo.py --only=data     a part of the table; this one needs no GPU

Exit code 0 when nothing failed, 1 when something did, 2 when the settings are refused. Writes out_dir/preflight.json;
the run itself is not begun. Every key of train.py is taken; the last ones of --help are this script's own.
"""
import contextlib
import gc
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

from config import Refused, load  # before torch: a missing package then ends in one line

import numpy as np
import torch

import bench
import prepare
import train
from model import SHORT, Shape, causality_leak, describe, newest_verified
from process import Ranks, device_name, git, pick_device, pick_dtype, without_nan
from report import duration, read_log

LARGE = 50_000_000  # parameters that a CPU is not asked to train
PIECE = 1 << 20  # ids read at once
ROW = "{:<12} {:<7} {:<36} "  # of the table; what was measured follows


@dataclass(frozen=True)
class Config(train.Config):
    """Every key of train.py, then this script's own."""
    only: str = ""  # comma-separated: place data model batch overfit resume ranks time; place goes with all but data
    seconds: float = 20.0  # how long steps are timed, once the first three are done
    allow_tmpfs: bool = False  # an out_dir that lives in memory is no failure


# Each part yields (True: pass, None: warn, False: fail; what was measured) of its checks, in the order of the table at
# the end. What is raised is a failure as well, and ends the part.

def estimated_memory(c, s, n_params):
    """Bytes of one process: weights, gradients, moments (under autocast also in 16 bit), what backward keeps, logits.
    What is kept was counted by saved_tensors_hooks on a CPU; compiled layers make anew what is cheap to make."""
    size, kv_dim = 4 if c.dtype == "float32" else 2, s.n_embd // s.n_head * s.n_kv_head
    layer = 32 * s.n_embd + size * (2 * kv_dim + 4 * s.ffn_hidden)
    logit = 10
    if c.compile:
        layer, logit = (4 + 5 * size) * s.n_embd + size * (2 * kv_dim + 3 * s.ffn_hidden), 2 * size
    if c.device == "cpu" and s.block_size <= SHORT:  # attend_in_blocks keeps five eighths of T x T weights a head
        layer += size * s.n_embd + (4 if size == 4 else 6) * s.n_head * s.block_size * 5 // 8
    kept = 4 * s.n_embd * s.n_layer + layer if c.activation_checkpointing else layer * s.n_layer
    return ((16 if size == 4 else 18) * n_params +
            c.micro_batch_size * s.block_size * (kept + 12 * s.n_embd + logit * s.vocab_size / c.loss_chunks))


def free_memory(device):
    """Bytes free on the GPU that has least, or in this machine."""
    if device.type == "cuda":
        ask = "import torch; print(min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"
        return int(subprocess.check_output([sys.executable, "-c", ask]))  # here it would keep memory on every card
    with open("/proc/meminfo", encoding="utf-8") as f:
        return 1024 * int(f.read().split("MemAvailable:")[1].split()[0])


def place(p):
    p.ending.callback(train.open_out_dir(p.c, "preflight").close)
    p.folder = p.ending.enter_context(
        tempfile.TemporaryDirectory(prefix="preflight.", dir=p.c.out_dir, ignore_cleanup_errors=True))
    said = subprocess.check_output(["df", "--output=source,fstype,target", p.folder], text=True)
    device, kind, point = said.splitlines()[1].split(maxsplit=2)
    in_memory, rooted = kind in ("tmpfs", "ramfs"), kind == "overlay" or point == "/"
    yield p.c.allow_tmpfs if in_memory else None if rooted else True, (
        f"{kind} on {device} at {point}" + "; gone with the machine: take another --out_dir" * in_memory +
        "; does it outlive the machine?" * rooted)

    # a checkpoint as train.py writes it, hash and fsync included; above 1 GiB that much of it stands for the whole
    size, said = 12 * p.n_params, train.check_room(p.c, p.n_params)
    content, began = dict(content=torch.empty(min(size, 1 << 30) // 8, dtype=torch.int64).random_()), time.time()
    written = train.write_checkpoint(f"{p.folder}/write/weights_00000000.pt", content, 0)
    p.save_s = (time.time() - began) * size / written
    shutil.rmtree(f"{p.folder}/write")
    yield True, f"{said.split(maxsplit=1)[1]}; {size / p.save_s / 1e6:,.0f} MB/s"

    buckets = 4 * p.n_params * (p.world > 1)  # DDP's, beside the gradients
    need = buckets + estimated_memory(p.small, p.shape, p.n_params)  # the checks do not compile
    compiled = buckets + estimated_memory(replace(p.small, compile=p.c.compile), p.shape, p.n_params)
    fits = False if p.too_large else need < 0.95 * p.free or None
    advice = "" if fits else ": a smaller model" if p.too_large else (
        ": the run fits, these checks may not" if compiled < 0.95 * p.free else
        ": lower --micro_batch_size, then --loss_chunks=8, then --activation_checkpointing=True")
    yield fits, (f"{p.world} x {device_name(p.device)}; each needs about {compiled / 2**30:.2f} GiB" +
                 f", these checks, not compiled, {need / 2**30:.2f}" * p.c.compile +
                 f"; {p.free / 2**30:.1f} are free{advice}")


def scan(corpus, split, weight):
    """Of a split's documents: the sum of weight[id] modulo 2**64, uint64 (documents,); the tokens at which they begin
    and the last one ends, int64 (documents + 1,). Raises Refused where ids or end-of-texts are not meta.json's."""
    sums, edges, total = [np.zeros(1, np.uint64)], [np.zeros(1, np.int64)], np.zeros(1, np.uint64)
    for name, source in corpus.sources(split).items():
        end, documents, ids = source["offset"] + source["tokens"], source["documents"], [corpus.eot_id]
        for at in range(source["offset"], end, PIECE):
            ids = corpus.read(split, at, min(PIECE, end - at))
            so_far, last = total + np.cumsum(weight[ids]), np.flatnonzero(ids == corpus.eot_id)
            sums.append(so_far[last])
            edges.append(at + last + 1)
            total, documents = so_far[-1:], documents - len(last)
        if documents or ids[-1] != corpus.eot_id:
            raise Refused(f"{split}.bin: the end-of-texts of source {name} are not its {source['documents']:,} "
                          "documents' of meta.json: prepare the data again")
    return np.diff(np.concatenate(sums)), np.concatenate(edges)


def data(p):
    corpus, tokenizer = prepare.Corpus(p.c.data_dir, check="all"), prepare.Tokenizer(p.c.data_dir)
    tokens, known = corpus.tokens("train"), len(tokenizer.ranks) + len(corpus.meta["tokenizer"]["special_tokens"])
    if known != corpus.vocab_size:
        raise Refused(f"meta.json speaks of {corpus.vocab_size:,} ids, its tokenizer and special tokens are {known:,}: "
                      "copy the folder again, or prepare it again")
    yield True, f"{tokens:,} train tokens; all as their sha256 say" + "".join(
        f"\ntoken {at:,}: {tokenizer.decode(corpus.read('train', at, min(32, tokens)))[:70]!r}"
        for at in np.random.RandomState(0).randint(0, max(1, tokens - 32), 3))

    # A document weighs a random number for each byte, white space left out: copies weigh the same whatever their white
    # space and their tokens, and the few that weigh the same are then compared in full.
    of_byte, weight = np.random.RandomState(0).randint(1, 2**63, 256, np.uint64), np.zeros(corpus.vocab_size, np.uint64)
    of_byte[list(b" \t\n")] = 0
    weight[:len(tokenizer.ranks)] = [of_byte[list(piece)].sum() for piece in tokenizer.ranks]
    found, copies = {split: scan(corpus, split, weight) for split in prepare.SPLITS}, []

    def texts(split, other):
        """(text, first token) of the documents that weigh what one of the other split weighs."""
        sums, edges = found[split]
        for i in np.flatnonzero(np.isin(sums, found[other][0])):
            ids = corpus.read(split, edges[i], edges[i + 1] - edges[i])
            yield tokenizer.decode_bytes(ids).translate(None, b" \t\n"), edges[i]
    for a, b in itertools.combinations(prepare.SPLITS, 2):
        known = dict(texts(a, b))
        copies += [f"the document at token {at} of {b}.bin stands at token {known[words]} of {a}.bin as well: prepare "
                   "the data again" for words, at in texts(b, a) if words in known]
    counts = ", ".join(f"{split} {len(sums):,}" for split, (sums, _) in found.items())
    yield not copies, copies[0] if copies else f"{counts}: ids in range, one end-of-text each, none in two splits"

    train.check_batch(p.c, p.world)
    epochs = train.Batches(corpus, p.c, SimpleNamespace(rank=0, world=p.world), torch.device("cpu"), 0).epochs
    budget = p.c.max_steps * p.c.global_batch_tokens
    no_peak = p.c.warmup_steps >= p.c.max_steps
    yield epochs <= 4 and not no_peak or None, (
        f"{budget:,} of {tokens:,} tokens, {epochs:.2f} epochs, {budget / p.n_params:.1f} a parameter" +
        "; over 4 epochs overfit" * (epochs > 4) + "; warmup_steps is the whole run: lower it" * no_peak)


# ---- in this process, by the functions that train.py calls

def run_of(p):
    """(Run of train.py at step 0, not compiled and without dropout; x, y (B, T) of its first micro-batch)."""
    quiet = SimpleNamespace(on=True, say=lambda text: None, run=dict(commit=None), event=lambda *_, **__: None,
                            alarm=lambda *_, **__: None)
    c = replace(p.small, dropout=0.0, out_dir=p.folder)
    run = train.build(c, Ranks(), SimpleNamespace(signum=0), quiet, p.device, p.corpus, None)
    x, y, _ = train.Batches(p.corpus, c, run.ranks, p.device, 0).take()
    return run, x[0], y[0]


def learn(run, x, y, rate):
    """One update, its gradients left in place. Returns the mean loss before it. What is differentiated is the sum:
    AdamW and Muon do not mind, and fp16 then needs no scaling."""
    run.model.zero_grad(set_to_none=True)
    with run.autocast():
        total = run.model(x, y)
    total.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return total.item() / y.numel()


def model(p):
    yield p.c.expect_params in (0, p.n_params), f"{p.n_params:,}; expect_params={p.c.expect_params or 'not given'}"

    run, V, T = run_of(p)[0], p.corpus.vocab_size, p.small.block_size
    x, y = torch.randint(V, (2, -(-8192 // T), T), generator=torch.Generator().manual_seed(0)).to(p.device)
    with torch.no_grad(), run.autocast():
        found, leak = run.model(x, y).item() / y.numel(), causality_leak(run.model)
    expected = math.log(V) + 1 / 8  # model.py draws its weights for this
    yield abs(found - expected) < 0.05, f"{found:.4f} on random targets; ln {V:,} + 1/8 is {expected:.4f}"
    yield leak == 0, f"other later tokens move the logits of earlier ones by {leak:.3g}"


def batch(p):
    """One batch through the whole chain, from the file to a new process that goes on from what is saved here."""
    run, x, y = run_of(p)
    T, tokenizer, dtype = run.c.block_size, prepare.Tokenizer(p.c.data_dir), p.corpus.dtype
    at = int(train.window_offsets(0, 1, (p.corpus.tokens("train") - T) // T, T, run.c.seed)[0])
    raw = np.fromfile(f"{p.c.data_dir}/train.bin", dtype, T + 1, offset=at * dtype.itemsize).tolist()
    pieces = [f"{repr(tokenizer.decode([i]))[1:-1].replace(' ', '·')[:9]:<9}" for i in raw[:10]]
    same = x[0].tolist() == raw[:-1] and y[0].tolist() == raw[1:]
    yield same, (f"the first is{'' if same else ' NOT'} train.bin from token {at:,}, targets one on"
                 f"\ninput    {' '.join(pieces[:-1])}\ntarget   {' '.join(pieces[1:])}")

    with torch.no_grad(), run.autocast():
        ours, logits = run.model(x[:1], y[:1]).item() / T, run.model(x[:1])[0].double().cpu().numpy()  # (T, vocab)
    own = (np.logaddexp.reduce(logits, axis=1) - logits[range(T), y[0].tolist()]).mean()  # the definition, in float64
    yield abs(ours - own) < 1e-4 * own, f"{ours:.6f} a token; from the logits, in float64, {own:.6f}"

    before = {name: w.detach().clone() for name, w in run.model.named_parameters()}
    learn(run, x, y, run.c.learning_rate)
    bad = [name for name, w in run.model.named_parameters() if w.grad is None or not w.grad.isfinite().all()
           or not w.grad.any() or torch.equal(w, before[name])]
    yield not bad, (f"{len(before) - len(bad)} of {len(before)} tensors get a gradient and change"
                    f"{', not ' + bad[0] if bad else ''}")

    run.c = c = replace(run.c, out_dir=f"{p.folder}/reload")
    saved, here = train.save(run, "step"), train.first_pass(run, x, y)
    del run, x, y, before
    gc.collect()
    torch.cuda.empty_cache()  # the memory is for the other process
    child(c, 1)
    there = prepare.read_json(f"{c.out_dir}/run.json")["initial_loss"]  # before it makes a step
    shutil.rmtree(c.out_dir, ignore_errors=True)  # the disk has room for the run's checkpoints, not for many more
    yield saved and abs(here - there) <= (1e-4 if p.device.type == "cuda" else 0), (
        f"loss {here:.7f}; saved and loaded by a new process {there:.7f}")


def overfit(p):
    run, x, y = run_of(p)
    x, y, targets, steps, found = x[:2, :128], y[:2, :128], y[:2, :128].clone(), 0, math.inf
    while found >= 0.1 and (steps := steps + 1) <= 400:
        found = learn(run, x, y, 1e-3 * min(1, steps / 10))
    same = torch.equal(targets, y)
    yield found < 0.1 and same, (f"loss {found:.3f} after {steps} steps on {y.numel()} tokens, targets "
                                 f"{'untouched' if same else 'CHANGED'}")


# ---- train.py in processes of its own: killed, resumed, side by side, timed

def shortened(c, narrow, **changes):
    """The settings `c` in steps of four micro-batches, with nothing that is not a step; narrow: 2 layers x 128."""
    if narrow:
        c = replace(c, n_layer=2, n_embd=128, n_head=2, n_kv_head=1, ffn_hidden=352, block_size=min(c.block_size, 256))
    return replace(bench.fit(c, 1), global_batch_tokens=4 * c.micro_batch_size * c.block_size, init_from="auto",
                   warmup_steps=c.warmup_steps, keep_last=1, keep_every=0, budget_gpu_hours=0.0, compile=False,
                   **changes)


CHILD = """
import os, signal, train
right = train.Log.event
def event(log, name, step, **values):
    right(log, name, step, **values)
    if name == "step" and step == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
train.Log.event = event
train.main()
"""


def child(c, last, world=1):
    """The step lines of train.py with settings `c`, killed behind that of step `last`. Raises Refused if it fails."""
    done = subprocess.run(bench.command(c, world, CHILD.replace("LAST", str(last))), capture_output=True, text=True,
                          errors="replace", check=False)
    rows = [row for row in read_log(c.out_dir) if row["event"] == "step"]
    if not rows or rows[-1]["step"] != last:
        lines = (done.stdout + done.stderr).splitlines()
        raise Refused(" ".join([line for line in lines if line.startswith("train.py: ")] or lines[-3:])[-300:])
    return rows


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
    """Five steps in one process; or three, the third lost, and the last three in a new process."""
    runs = []
    for name, save_interval, *kills in ("straight", 4, 5), ("cut", 2, 3, 5):
        c = replace(p.small, save_interval=save_interval, out_dir=f"{p.folder}/{name}")
        rows = [child(c, last) for last in kills][-1]
        path = newest_verified(c.out_dir, ("step",))[1]
        runs.append((rows, torch.load(path, map_location="cpu", weights_only=True, mmap=True)))
    exact = p.device.type == "cpu"  # the backward of attention on a GPU adds up in any order
    found = first_difference(*runs, 0 if exact else 0.01)
    yield not found, ("killed behind step 3, gone on with behind step 2; the first difference in batches, rates, "
                      f"losses, RNG, parameters, moments: {found or 'none' + ', bit for bit' * exact}")


def ranks(p):
    """batch_crc is a sum over all ranks' windows: where it is that of one rank, none was read twice."""
    alone = p.device.type == "cuda" and p.world < 2
    c = shortened(p.small, True, device="cpu", dtype="float32") if alone else p.small
    one, two = ((child(replace(c, dropout=0.0, out_dir=f"{p.folder}/ranks{n}"), 4, n), {}) for n in (1, 2))
    found = first_difference(one, two, 1e-4 if c.dtype == "float32" else 0.01)
    yield not found, (f"2 ranks against 1{', 2 layers x 128 on the CPU' * alone}; the first difference in batches, "
                      f"rates, losses: {found or 'none'}")


def stop(save_s, step_s=0.0):
    """torchrun gives its workers 30 s between SIGTERM and SIGKILL, from torch 2.12 on what this variable says."""
    settable = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) if settable else 30.0
    seconds = save_s + step_s
    advice = f": TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(3 * seconds)} gives more, from torch 2.12 on"
    said = f"{seconds:.1f} s for {'a step and ' if step_s else ''}a save; torchrun waits {limit:g} s"
    return (True, said) if seconds <= limit / 1.5 else (None, said + advice)


def timing(p):
    if p.narrow and p.device.type == "cpu":
        yield None, "a CPU is not timed at this size: run `python bench.py` with these settings on the GPU machine"
        yield stop(p.save_s)
        return
    c, few = p.c, 4 * p.world * p.c.micro_batch_size * p.c.block_size  # four micro-batches stand for a long step
    timed = replace(c, global_batch_tokens=min(few, c.global_batch_tokens))
    p.estimate = found = bench.measure(timed, p.world, p.folder, c.seconds, p.corpus.vocab_size)
    found |= bench.estimate(c, found)
    hours, step_s = found["est_gpu_hours"], c.global_batch_tokens / found["tokens_per_s"]
    money = f", {found['est_cost']:,.2f} {c.currency}" if found["est_cost"] else ""
    limit = f"; budget_gpu_hours={c.budget_gpu_hours:g}" if c.budget_gpu_hours else ""
    yield not 0 < c.budget_gpu_hours < hours, (
        f"{found['tokens_per_s']:,.0f} tokens/s, {step_s:.3g} s a step, {(found['peak_memory_bytes'] or 0) / 2**30:.2f}"
        f" GiB; the run, without evaluation and saving: {duration(3600 * found['est_hours'])}, {hours:.3g} "
        f"device-hours{money}{limit}")
    yield stop(p.save_s, step_s)


# ---- the table

CHECKS = dict(  # part: (function, {check: what skipping it costs})
    place=(place, dict(out_dir="checkpoints gone with the machine", disk="a full disk in the night",
                       memory="out of memory, the hours paid for")),
    data=(data, dict(files="training on damaged bytes, gibberish", documents="a val loss too good to be true",
                     budget="the same pages over and over")),
    model=(model, dict(parameters="another model than the one planned", initial_loss="a start nothing makes up for",
                       causality="a fine loss, and it can't write")),
    batch=(batch, dict(inputs="learning to copy, not to predict", loss="training towards something else",
                       update="layers that never learn", reload="weights no other process can use")),
    overfit=(overfit, dict(overfit="a loop that can't learn even this")),
    resume=(resume, dict(resume="another run after a restart")),
    ranks=(ranks, dict(ranks="paying for GPUs that see the same")),
    time=(timing, dict(timing="another bill than expected", stop="the last hour lost at a shutdown")))
PROVES = """
What passing proves: the data are whole and apart from what is held out; this code on this machine computes the loss it
should, learns, saves, and goes on after a kill as if there had been none; disk, memory and hours suffice. What it does
not: that data, size and rate make a good model, that a machine keeps well for days, anything about other nodes, nor
about the real shape where a line says [2 layers x 128], nor about steps of more than 4 micro-batches."""


def ask(p, part, rows):
    """Adds the rows of a part to `rows` and shows them."""
    gc.collect()  # what the part before it held
    torch.cuda.empty_cache()
    function, costs = CHECKS[part]
    answers, needed = function(p), () if part in ("place", "data") else ("out_dir", "disk", "files")
    missing = [row["check"] for row in rows if row["check"] in needed and row["result"] in ("FAIL", "not run")]
    for name, cost in costs.items():
        result, said = "not run", f"{missing[0]} did not pass" if missing else ""
        if not missing:
            try:
                passed, said = next(answers)
                result = "warn" if passed is None else "pass" if passed else "FAIL"
            except Exception as error:
                kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
                result, said, missing = "FAIL", kind + " ".join(str(error).split())[-500:], [name]
            if p.narrow and part not in ("place", "data", "time") and name != "parameters":
                said = f"[2 layers x 128] {said}"
        rows.append(dict(part=part, check=name, result=result, measured=said, cost=cost))
        first, *shown = said.split("\n")
        print(textwrap.fill(first, 120, initial_indent=ROW.format(name, result, cost), subsequent_indent=" " * 58))
        print("".join(f"{'':<21}{line[:98]}\n" for line in shown), end="", flush=True)


def main():
    c, began, rows = load(Config, sys.argv[1:], __doc__), time.time(), []
    train.check(c)
    parts = c.only.split(",") if c.only else list(CHECKS)
    if not set(parts) <= set(CHECKS):
        raise Refused(f"only={c.only!r} takes {', '.join(CHECKS)}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise Refused("this starts its own processes: without torchrun, and where WORLD_SIZE is set anyway, unset it")
    corpus = prepare.Corpus(c.data_dir, check=False)
    shape = Shape.of(c, corpus.vocab_size, corpus.eot_id)
    device = torch.device("cpu") if parts == ["data"] else pick_device(c, 0)
    n_params, dtype = describe(shape, 1)[0], pick_dtype(c, device)
    free = math.inf if parts == ["data"] else free_memory(device)
    too_large = 20 * n_params > free  # bytes: weights, gradients and moments take 16, and the checks keep a copy
    narrow = too_large or device.type == "cpu" and n_params > LARGE
    p = SimpleNamespace(
        c=c, corpus=corpus, shape=shape, n_params=n_params, free=free, too_large=too_large, narrow=narrow,
        small=shortened(c, narrow, dtype=dtype, device=device.type), estimate=None, device=device,
        world=torch.cuda.device_count() if device.type == "cuda" else 1)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))  # through what p.ending holds
    print(ROW.format("check", "result", "what skipping it costs") + "measured")
    with contextlib.ExitStack() as p.ending:
        for part in CHECKS:
            if part in parts or part == "place" and parts != ["data"]:
                ask(p, part, rows)
    seconds, found = time.time() - began, [row["result"] for row in rows]
    print(", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found)), "in", duration(seconds))
    print("" if c.only else PROVES)
    record = dict(schema=1, time=began, seconds=seconds, device_hours=seconds * p.world / 3600, checks=rows,
                  estimate=p.estimate, settings=asdict(c), commit=git("rev-parse", "HEAD"))
    with contextlib.suppress(Refused):  # damaged
        record["device_hours"] += prepare.read_json(f"{c.out_dir}/preflight.json").get("device_hours") or 0.0
    with contextlib.suppress(OSError):  # out_dir has said why
        os.makedirs(c.out_dir, exist_ok=True)
        prepare.write_atomically(f"{c.out_dir}/preflight.json", json.dumps(without_nan(record), indent=1).encode())
    sys.exit(1 if "FAIL" in found else 0)


if __name__ == "__main__":
    main()
