"""The entire training loop: data/ -> out/.

    python train.py config/train_demo.py
    torchrun --standalone --nproc_per_node=4 train.py config/train_0p5b.py

The same command again resumes the newest verified checkpoint: same batches, same rates, same numbers.
"""
import contextlib
import functools
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from config import Refused, load  # before torch: a missing package then ends in one line

import numpy as np
import torch
import torch.distributed as dist

import prepare
from diagnosis import diagnose
from model import (IGNORE, PEAK_TFLOPS, Shape, Transformer, causality_leak, count_parameters, describe, first_nonfinite,
                   flops_per_token, head_loss, load_weights, newest_verified, parameter_groups, saved_steps, sha256_of,
                   why_bad)
from process import (Log, Ranks, StopSignal, device_name, keep_freed_memory, peak_memory, pick_device, pick_dtype,
                     rng_state, seed_everything, set_rng_state, why_no_compile, without_nan)
from report import duration, read_log


@dataclass(frozen=True)
class Config:
    # where things are
    data_dir: str = "data"  # the folder prepare.py wrote
    out_dir: str = "out"  # checkpoints, log and record of this run
    init_from: str = "auto"  # auto: resume, else start; scratch; or a path: its weights at step 0
    # model
    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads
    n_kv_head: int = 2  # key and value heads, each shared by n_head / n_kv_head query heads
    n_embd: int = 192  # width
    ffn_hidden: int = 512  # hidden units of the feed-forward
    block_size: int = 256  # context, in tokens
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    dropout: float = 0.0  # on the embedding and on each block's output
    tie_embeddings: bool = True  # the head uses the embedding's matrix
    doc_mask: bool = False  # attention stays inside a document
    # a step
    global_batch_tokens: int = 1024  # tokens of one update over all ranks; accumulation is derived
    micro_batch_size: int = 4  # windows in one forward and backward of one rank
    max_steps: int = 640  # updates
    max_epochs: int = 0  # refuse a run that reads the data more often than this; 0: no limit
    # optimizer
    optimizer: str = "adamw"  # adamw; or muon: torch's Muon on the layers' matrices, AdamW on the rest
    learning_rate: float = 2e-3  # peak
    min_lr: float = 1e-4  # at the last step
    warmup_steps: int = 20  # linear from 0 to the peak
    lr_schedule: str = "cosine"  # cosine; or wsd: stable, then linear to min_lr over the last fifth of the run
    weight_decay: float = 0.1  # on matrices, embeddings included
    beta1: float = 0.9  # AdamW's first moment
    beta2: float = 0.95  # AdamW's second moment
    adam_eps: float = 1e-8  # AdamW's epsilon
    grad_clip: float = 1.0  # largest norm of the gradient; 0: off, the norm is still logged
    label_smoothing: float = 0.0  # of the training loss only
    # rhythm, in steps
    log_interval: int = 10  # a line on screen and in log.jsonl
    eval_interval: int = 200  # validation loss on the first eval_tokens; 0: only at the end
    eval_tokens: int = 1_000_000  # tokens of a periodic evaluation, split evenly over the sources; the last takes all
    save_interval: int = 320  # full checkpoint; 0: none at all, the end included
    weights_interval: int = 0  # weights-only file; 0: never
    keep_last: int = 2  # newest full checkpoints that stay on disk
    keep_every: int = 0  # checkpoints at multiples of this many steps are never deleted; 0: none
    sample_interval: int = 0  # continue fixed prompts into samples.jsonl; 0: never
    # machine
    seed: int = 1337  # of weights, order of the data, dropout
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, bfloat16, float16, float32: of the autocast; weights and moments are always fp32
    compile: bool = True  # torch.compile on the layers and the loss
    activation_checkpointing: bool = False  # recompute each layer in backward: less memory, a third more work
    loss_chunks: int = 1  # pieces of the batch whose logits stand in memory one after another
    dist_timeout_s: int = 600  # a step that takes longer is a hang: the job ends and says where
    peak_tflops: float = 0.0  # dense peak of one device, for MFU; 0: from the table of known devices
    # safety
    guard: str = "stop"  # a curve that can't be right: stop, warn, off; non-finite values always stop
    expect_params: int = 0  # refuse a model of another parameter count; 0: any
    allow_change: str = ""  # comma-separated keys that may differ from the checkpoint's on resume
    # for the report
    gpu_hour_price: float = 0.0  # of one device; 0: no money in the report
    currency: str = "USD"  # of the price
    budget_gpu_hours: float = 0.0  # a run that is going to take more says so; 0: no budget
    question: str = ""  # what this run is to answer
    note: str = ""  # anything to remember


SHAPE_KEYS = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "tie_embeddings")
CHANGEABLE = ("block_size", "rope_theta", "norm_eps", "doc_mask", "dtype", "seed", "global_batch_tokens", "data")
FIXED_KEYS = (*SHAPE_KEYS, "optimizer", *CHANGEABLE)  # refused on resume when changed, the last unless allow_change
WSD_DECAY = 0.2  # share of the run over which wsd decays (MiniCPM found 10% or more enough)
MAX_FP16_SKIPS = 20  # updates in a row that the fp16 scaler may skip before it is an alarm


CHOICES = dict(optimizer="adamw muon", lr_schedule="cosine wsd", guard="stop warn off", device="auto cpu cuda",
               dtype="auto bfloat16 float16 float32")
BOUNDS = [  # (least, under, keys)
    (1, math.inf, "micro_batch_size max_steps log_interval eval_tokens loss_chunks keep_last dist_timeout_s"),
    (0, math.inf, "learning_rate min_lr warmup_steps weight_decay grad_clip eval_interval max_epochs save_interval "
                  "weights_interval keep_every sample_interval expect_params peak_tflops gpu_hour_price "
                  "budget_gpu_hours"),
    (0, 1, "beta1 beta2 label_smoothing"), (0, 2**32, "seed"), (1, 2**40, "global_batch_tokens"),
    (1e-30, math.inf, "rope_theta norm_eps adam_eps")]


def check(c):
    """Everything about the settings that can be known before a file is touched. Raises Refused."""
    for key, choices in CHOICES.items():
        if getattr(c, key) not in choices.split():
            raise Refused(f"{key}={getattr(c, key)!r} must be one of {', '.join(choices.split())}")
    for least, under, keys in BOUNDS:
        for key in keys.split():
            if not least <= getattr(c, key) < under:
                below = f" and under {under}" if under < math.inf else ""
                raise Refused(f"{key}={getattr(c, key)} must be at least {least}{below}")
    if not c.out_dir or os.path.realpath(c.out_dir) == os.path.realpath(c.data_dir):
        raise Refused(f"out_dir={c.out_dir!r} must name a folder of its own")
    if c.min_lr > c.learning_rate:
        raise Refused(f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}")
    if unknown := set(filter(None, c.allow_change.split(","))) - set(CHANGEABLE):
        raise Refused(f"allow_change names {', '.join(unknown)}; it takes: {', '.join(CHANGEABLE)}")
    Shape.of(c, vocab_size=1)  # refuses one that can't be


def learning_rate(step, c):
    """The rate of the update that makes `step`, 1 <= step <= max_steps."""
    if step <= c.warmup_steps:
        return c.learning_rate * step / c.warmup_steps
    if c.lr_schedule == "cosine":
        done = (step - c.warmup_steps - 1) / max(1, c.max_steps - c.warmup_steps - 1)  # 0 ... 1 at the last step
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = min(1.0, (c.max_steps - step) / max(1, int(WSD_DECAY * c.max_steps)))
    return share * c.learning_rate + (1 - share) * c.min_lr


# ---- which tokens a step sees

@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, n_windows, block_size):
    """(offset, order) of one epoch. RandomState's stream is frozen, so both are the same on any numpy."""
    rng = np.random.RandomState([seed, epoch])
    return int(rng.randint(block_size)), rng.permutation(n_windows)


def order_crc(c, corpus, windows):
    """crc32 of the order of the epoch that window lies in: whether another numpy would still deal the same windows."""
    n_windows = (corpus.tokens("train") - c.block_size) // c.block_size
    return zlib.crc32(epoch_order(c.seed, windows // n_windows, n_windows, c.block_size)[1].astype("<i8").tobytes())


def window_offsets(first, count, n_windows, block_size, seed):
    """Token offsets (count,) of the windows [first, first + count) of the endless sequence of epochs."""
    offsets = np.empty(count, dtype=np.int64)
    for i, window in enumerate(range(first, first + count)):
        start, order = epoch_order(seed, window // n_windows, n_windows, block_size)
        offsets[i] = start + order[window % n_windows] * block_size
    return offsets


class Batches:
    """The windows of each step for this rank, the next step's read in a thread while this one trains."""

    def __init__(self, corpus, c, ranks, device, first_window):
        self.corpus, self.c, self.ranks, self.device, self.window = corpus, c, ranks, device, first_window
        self.per_step = c.global_batch_tokens // c.block_size
        self.accumulation = self.per_step // ranks.world // c.micro_batch_size
        self.n_windows = (corpus.tokens("train") - c.block_size) // c.block_size
        if self.n_windows < 1:
            raise Refused(f"{c.data_dir}: {corpus.tokens('train')} train tokens are less than one window and its "
                          f"offset, {2 * c.block_size}: take a smaller --block_size or more documents")
        if not corpus.tokens("val"):
            raise Refused(f"{c.data_dir}: val.bin is empty, no loss could be trusted: prepare more documents")
        self.epochs = c.max_steps * self.per_step / self.n_windows  # of the whole run
        if c.max_epochs and self.epochs > c.max_epochs:
            raise Refused(f"{c.max_steps} steps read the data {self.epochs:.2f} times, more than "
                          f"max_epochs={c.max_epochs}")
        self.pool = ThreadPoolExecutor(1)
        self.next = self.pool.submit(self.read, self.window)

    def read(self, first):
        """(x, y): inputs and targets, both (accumulation, B, T) int64 on the CPU, of the step at window `first`."""
        c, mine = self.c, self.per_step // self.ranks.world
        first += self.ranks.rank * mine
        offsets = window_offsets(first, mine, self.n_windows, c.block_size, c.seed)
        ids = np.stack([self.corpus.read("train", offset, c.block_size + 1) for offset in offsets])
        ids = torch.from_numpy(ids).view(-1, c.micro_batch_size, c.block_size + 1)
        x, y = ids[..., :-1].contiguous(), ids[..., 1:].contiguous()
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)

    def take(self):
        """(x, y, valid): the next step's batch on the device and this rank's count of valid targets in it."""
        x, y = self.next.result()
        self.window += self.per_step
        self.next = self.pool.submit(self.read, self.window)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True), int((y != IGNORE).sum())


def batch_crc(x, y):
    """Sum of crc32 over the windows' T + 1 ids as little-endian uint32. x, y as in Batches.read, on any device."""
    ids = torch.cat((x[..., :1], y), dim=-1).flatten(0, 1).cpu().numpy().astype("<u4")
    return sum(zlib.crc32(row.tobytes()) for row in ids)


def check_batch(c, world):
    """Refuses a global batch that this many ranks and this micro-batch can't divide, naming values that work."""
    windows, rest = divmod(c.global_batch_tokens, c.block_size)
    unit = world * c.micro_batch_size
    if rest or windows % unit:
        some = () if rest else range(1, min(windows, 4096) + 1)
        near = sorted({max(1, windows // unit) * unit, (windows // unit + 1) * unit})
        sizes = [str(n) for n in some if windows % (world * n) == 0]
        ranks = [str(n) for n in some if windows % (n * c.micro_batch_size) == 0]
        raise Refused(
            f"global_batch_tokens={c.global_batch_tokens} can't be cut into {world} rank(s) x micro_batch_size "
            f"{c.micro_batch_size} x block_size {c.block_size}; valid: global_batch_tokens="
            f"{' or '.join(str(n * c.block_size) for n in near)}; or, for these tokens, micro_batch_size "
            f"{' '.join(sizes[-8:]) or '(none)'}; ranks {' '.join(ranks[-12:]) or '(none)'}")


# ---- evaluation

@torch.no_grad()
def evaluate(run, split, limit):
    """Token-weighted loss of a split: {name: dict(val_loss, val_ppl, val_bpb)} a source, and "" for all of them.

    Every source is one stream behind an end-of-text, cut into rows of T: each of its first `limit` / sources tokens is
    a target exactly once. Rows are dealt over the ranks. None when a stop signal came meanwhile.
    """
    corpus, sources = run.corpus, {name: s for name, s in run.corpus.sources(split).items() if s["tokens"]}
    B, T = run.c.micro_batch_size, run.c.block_size
    sums = np.zeros((len(sources), 3))  # nats, targets, bytes
    run.model.eval()
    for row_sums, source in zip(sums, sources.values(), strict=True):
        tokens = int(min(source["tokens"], max(1, limit / len(sources))))
        starts = range(0, tokens, T)[run.ranks.rank::run.ranks.world]
        for i in range(0, len(starts), B):
            run.log.alive()
            x, y = np.full((B, T), corpus.eot_id), np.full((B, T), IGNORE)
            for row, start in enumerate(starts[i:i + B]):
                y_row = corpus.read(split, source["offset"] + start, min(T, tokens - start))
                y[row, :len(y_row)], x[row, 1:len(y_row)] = y_row, y_row[:-1]
                if start:
                    x[row, 0] = corpus.read(split, source["offset"] + start - 1, 1)[0]
            with run.autocast():
                loss = run.model(torch.from_numpy(x).to(run.device), torch.from_numpy(y).to(run.device))
            valid = y[y != IGNORE]
            row_sums += loss.item(), len(valid), run.token_bytes[valid].sum()
            if run.stop.signum:
                break
    run.model.train()
    stopping, *total = run.ranks.sum(run.stop.signum, *sums.flatten())
    total = np.array(total).reshape(sums.shape)
    return None if stopping else {
        name: dict(val_loss=nats / targets, val_ppl=math.exp(min(nats / targets, 700)),
                   val_bpb=nats / math.log(2) / max(n_bytes, 1))
        for name, (nats, targets, n_bytes) in [*zip(sources, total, strict=True), ("", total.sum(axis=0))]}


# ---- checkpoints

def make_folder(path):
    """os.makedirs whose names survive a power cut."""
    if not os.path.isdir(path):
        above = os.path.dirname(os.path.abspath(path))
        make_folder(above)
        os.mkdir(path)
        prepare.fsync_folder(above)


def write_checkpoint(path, content, step):
    """Temporary name, fsync, rename, directory fsync; then the json that vouches for it. Returns bytes written.

    A crash between any two of these leaves the older checkpoints whole and this one either absent or without its json,
    which no reader trusts. Raises OSError; then nothing of it stays behind.
    """
    said_path, folder, made = path[:-len(".pt")] + ".json", os.path.dirname(path), [path + ".tmp"]
    make_folder(folder)
    torch.serialization.set_crc32_options(False)  # sha256 guards the file: 0.57 s instead of 1.40 for 1.3 GB
    try:
        with open(path + ".tmp", "wb") as f, ThreadPoolExecutor(1) as pool:
            torch.save(content, f)
            f.flush()
            sha256 = pool.submit(sha256_of, path + ".tmp")  # beside the fsync: 2.1 s instead of 2.9 for 1.2 GB
            os.fsync(f.fileno())
        said = dict(bytes=os.path.getsize(path + ".tmp"), sha256=sha256.result(), step=step)
        with contextlib.suppress(FileNotFoundError):  # of a bad file of the same name
            os.unlink(said_path)
        os.rename(path + ".tmp", path)
        made = [said_path, path, said_path + ".tmp"]
        prepare.fsync_folder(folder)
        prepare.write_atomically(said_path, json.dumps(said).encode())
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into RuntimeError
        for name in made:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise OSError(f"{path}: {error}") from error
    return said["bytes"]


def delete_old(out_dir, c, newest, warn):
    """Of each kind keeps the last keep_last up to step `newest`, the one just verified, and every keep_every-th.

    Files of later steps were passed over as bad at the start: they neither count nor go. One without its json never was
    whole: it does not count, and goes.
    """
    for kind in ("step", "weights"):
        found = [(step, path, path[:-len(".pt")] + ".json") for step, path in saved_steps(out_dir, (kind,))
                 if step <= newest]
        whole = [step for step, _, said in found if os.path.exists(said)]
        keep = {*whole[:c.keep_last], *(step for step in whole if c.keep_every and step % c.keep_every == 0)}
        for step, *names in found:
            if step not in keep:
                try:
                    for name in reversed(names):
                        if os.path.exists(name):
                            os.unlink(name)
                except OSError as error:
                    warn(f"WARNING: an old checkpoint stays: {error}")


def moments_by_name(model, optimizers):
    state = {p: moments for optimizer in optimizers for p, moments in optimizer.state.items()}
    return {name: dict(state[p]) for name, p in model.named_parameters() if p in state}


def restore(saved, model, optimizers, scaler, ranks, device, seed):
    """Weights, moments, scaler and this rank's RNG out of a checkpoint; rates and decay stay as the settings say."""
    model.load_state_dict(saved["model"])
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if name in saved["optimizer"]:
            owner[p].state[p] = {key: value.to(p.device) for key, value in saved["optimizer"][name].items()}
    if saved["scaler"]:  # empty unless it was an fp16 run
        scaler.load_state_dict(saved["scaler"])
    if ranks.rank < len(saved["rng"]):
        set_rng_state(saved["rng"][ranks.rank], device)
    else:
        seed_everything(seed, saved["step"], ranks.rank)


def changes_since(saved, c, fingerprint):
    """{key: [then, now]} of the settings that differ from the checkpoint's. Raises Refused for one that must not."""
    now = asdict(c) | dict(data=fingerprint)
    then = saved["settings"] | dict(data=saved["data_fingerprint"])
    changed = {key: [then.get(key), value] for key, value in now.items() if then.get(key) != value}
    allowed = c.allow_change.split(",")
    refused = [f"{key}: {changed[key][0]} -> {changed[key][1]}" for key in FIXED_KEYS
               if key in changed and key not in allowed]
    if refused:
        raise Refused(f"{c.out_dir} was begun with other settings: {'; '.join(refused)}. Use another --out_dir, or "
                      f"name what may change ({', '.join(CHANGEABLE)}) in --allow_change=")
    return {key: value for key, value in changed.items() if key not in ("out_dir", "data_dir", "allow_change")}


# ---- the run

@dataclass
class Run:
    """What one process holds while it trains."""
    c: Config
    ranks: Ranks
    stop: StopSignal
    log: Log
    device: torch.device
    corpus: prepare.Corpus
    token_bytes: np.ndarray  # (vocab_size,), UTF-8 bytes of each id
    shape: Shape
    model: Transformer  # its layers and its loss may be compiled; never wrapped, so names in checkpoints stay plain
    ddp: torch.nn.Module  # the same model behind DistributedDataParallel where there are several ranks
    optimizers: list  # AdamW, or Muon and AdamW
    scaler: torch.amp.GradScaler
    state: dict  # step and windows, tokens, targets consumed, updates made, skipped_in_a_row

    def autocast(self):
        return torch.autocast(self.device.type, getattr(torch, self.c.dtype), enabled=self.c.dtype != "float32")

    def eager(self):
        """The raw module, whatever the shapes: the compiled one only ever sees (micro_batch_size, block_size)."""
        compiled = self.model.head_loss is not head_loss
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def open_out_dir(c, start_id):
    """Locks out_dir, clears what an interrupted save left, writes `start_id`. Returns the lock. Raises Refused."""
    ckpt = os.path.join(c.out_dir, "ckpt")
    try:
        make_folder(c.out_dir)
        lock = prepare.lock(c.out_dir)
        for name in os.listdir(ckpt) if os.path.isdir(ckpt) else ():
            if re.fullmatch(r"(step|weights)_\d+\.(pt|json)\.tmp", name):
                os.unlink(os.path.join(ckpt, name))
        prepare.write_atomically(os.path.join(c.out_dir, ".start_id"), start_id.encode())
    except OSError as error:
        raise Refused(f"out_dir {c.out_dir} can't be written: {error.strerror}") from None
    if c.init_from == "scratch" and saved_steps(c.out_dir):
        raise Refused(f"init_from=scratch, but {c.out_dir}/ckpt holds checkpoints: take another --out_dir, or "
                      f"init_from=auto to go on")
    return lock


def see_out_dir(c, start_id):
    """Raises Refused where this rank's out_dir is not the folder that rank 0 locked: nodes must share it."""
    for _ in range(100):  # a network file system may show it late
        with contextlib.suppress(FileNotFoundError), open(os.path.join(c.out_dir, ".start_id"), encoding="utf-8") as f:
            if f.read() == start_id:
                return
        time.sleep(0.1)
    raise Refused(f"out_dir {os.path.realpath(c.out_dir)} on {socket.gethostname()} is not the folder that rank 0 "
                  f"writes to: all nodes need one shared file system for it")


def check_same(c, ranks):
    """Raises Refused where a rank has other settings: its weights would drift from the others' without a word."""
    of_rank = ranks.gather({key: value for key, value in asdict(c).items() if key not in ("data_dir", "out_dir")})
    for rank, other in enumerate(of_rank):
        if differ := [f"{key} {of_rank[0][key]!r} and {value!r}" for key, value in other.items()
                      if value != of_rank[0][key]]:
            raise Refused(f"ranks 0 and {rank} have other settings: {'; '.join(differ)}")


def first_files(c, ranks):
    """Copies into out_dir what sampling and exporting need of data_dir. Returns the file for this rank's stack should
    it hang. Raises Refused."""
    try:
        for name in ("tokenizer.tiktoken", "meta.json", "prepare.json") if ranks.rank == 0 else ():
            source = os.path.join(c.data_dir, name)
            if name != "prepare.json" or os.path.exists(source):  # what preparing cost: may be missing
                with open(source, "rb") as f:
                    prepare.write_atomically(os.path.join(c.out_dir, name), f.read())
        return open(os.path.join(c.out_dir, f"hang.rank{ranks.rank}.txt"), "a")
    except OSError as error:
        raise Refused(f"out_dir {c.out_dir} can't be written on {socket.gethostname()}: {error}") from None


def check_room(c, n_params):
    """A line about the disk. Raises Refused where the checkpoints that will stand side by side have no room."""
    def kept(interval):  # a new one stands beside the old
        for_good = c.max_steps // math.lcm(c.keep_every, interval) if c.keep_every and interval else 0
        return c.keep_last + 1 + for_good if interval else 0
    need = n_params * (12 * kept(c.save_interval) + 4 * kept(c.weights_interval))  # fp32 weight and two moments
    free = shutil.disk_usage(c.out_dir).free + sum(os.path.getsize(path) for _, path in saved_steps(c.out_dir))
    if free < need:
        raise Refused(f"{c.out_dir} has room for {free / 1e9:.3g} GB of checkpoints, {need / 1e9:.3g} GB are needed: "
                      f"make room, or lower --keep_last or raise --keep_every")
    return f"checkpoints    {12 * n_params / 1e9:.3g} GB each, {need / 1e9:.3g} GB in all; {free / 1e9:,.0f} GB free"


class MuonFP32(torch.optim.Muon):
    """torch's Muon with its Newton-Schulz iteration in fp32. torch's takes bfloat16, and where a device only emulates
    that, a step of the demo took 3.3 s instead of 0.4."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (a, b, c), rate = group["ns_coefficients"], group["lr"]
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(momentum, group["momentum"])  # Nesterov's look ahead
                x = x.T if p.shape[0] > p.shape[1] else x  # wide: the smaller Gram matrix
                x = x / x.norm().clamp(min=group["eps"])
                for _ in range(group["ns_steps"]):  # the singular values go towards 1
                    gram = x @ x.T
                    x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
                x = x.T if p.shape[0] > p.shape[1] else x
                p.mul_(1 - rate * group["weight_decay"]).add_(x, alpha=-0.2 * rate * math.sqrt(max(p.shape)))


def make_optimizers(model, c):
    """[AdamW], or [Muon, AdamW]: Muon on the layers' matrices, q, k and v apart, scaled to AdamW's update size so that
    one rate serves both (Jordan et al. 2024; Liu et al. 2025)."""
    matrices, *others = parameter_groups(model, c.weight_decay)
    adamw = functools.partial(torch.optim.AdamW, lr=0.0, betas=(c.beta1, c.beta2), eps=c.adam_eps, fused=True)
    if c.optimizer == "adamw":
        return [adamw([matrices, *others])]
    computes = pick_dtype(replace(c, dtype="auto"), model.head_weight.device)
    muon = torch.optim.Muon if computes == "bfloat16" else MuonFP32
    return [muon([matrices], lr=0.0, adjust_lr_fn="match_rms_adamw"), adamw(others)]


def build(c, ranks, stop, log, device, corpus, saved):
    """A Run at step 0, or where the checkpoint `saved` left off. Raises Refused."""
    shape = Shape.of(c, corpus.vocab_size, corpus.eot_id)
    n_params, lines = describe(shape, c.micro_batch_size)
    if c.expect_params and c.expect_params != n_params:
        raise Refused(f"expect_params={c.expect_params:,}, but the model has {n_params:,} parameters with the "
                      f"{shape.vocab_size:,} ids of {c.data_dir}: --expect_params=0 takes any")
    log.say("\n".join([*lines, check_room(c, n_params)]))
    torch.manual_seed(c.seed)
    torch.set_float32_matmul_precision("high")
    if c.doc_mask:  # the backward of cuDNN's attention under a mask gives NaN in some shapes (torch 2.11 to 2.13)
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = Transformer(shape, c.activation_checkpointing, c.loss_chunks).to(device)
    if not saved and c.init_from not in ("auto", "scratch"):
        weights, other, source = load_weights(c.init_from, log.say)
        tokenizer = corpus.meta["tokenizer"]["sha256"]
        if source.get("tokenizer_sha256", tokenizer) != tokenizer:
            raise Refused(f"init_from={c.init_from} was trained with another tokenizer than that of {c.data_dir}: its "
                          f"ids stand for other text")
        same = {"vocab_size", "eot_id", *SHAPE_KEYS, "rope_theta", "norm_eps"} - set(c.allow_change.split(","))
        if differing := [f"{key} {getattr(other, key)}" for key in sorted(same)
                         if getattr(other, key) != getattr(shape, key)]:
            raise Refused(f"init_from={c.init_from} holds weights of another shape: {', '.join(differing)}")
        model.load_state_dict(weights)
        log.say(f"weights        {c.init_from}, step {source['step']}; optimizer and schedule begin anew")
    if c.compile and (lacking := why_no_compile(device)):
        log.say(f"not compiled: {lacking}")
    elif c.compile:
        torch._dynamo.config.optimize_ddp = False  # it cuts each layer in three; DDP overlaps layer by layer anyway
        for layer in model.layers:
            layer.compile()
        model.head_loss = torch.compile(head_loss)
    optimizers = make_optimizers(model, c)
    scaler = torch.amp.GradScaler(device.type, enabled=c.dtype == "float16")
    seed_everything(c.seed, 0, ranks.rank)
    state = dict(step=0, windows=0, tokens=0, targets=0, updates=0, skipped_in_a_row=0)
    if saved:
        state = {key: saved[key] for key in state}
        if not c.allow_change and saved["order_crc"] != order_crc(c, corpus, state["windows"]):
            raise Refused("this numpy deals the windows in another order than the run began with: use its version")
        restore(saved, model, optimizers, scaler, ranks, device, c.seed)
    ddp = model if ranks.world == 1 else torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    if c.sample_interval:
        import tiktoken  # noqa: F401 - it may be missing: better known now than at the first sample
    token_bytes = prepare.Tokenizer(c.data_dir).token_bytes
    return Run(c, ranks, stop, log, device, corpus, token_bytes, shape, model, ddp, optimizers, scaler, state)


def first_pass(run, x, y):
    """One forward and backward that is thrown away, before the first update of every process: then compile time and
    memory are known, and DDP's buckets final (else a resume on three ranks is not bit-exact). And one of evaluation:
    torchrun's SIGTERM reaches the compilers too, and a compilation that fails ends the run. Returns the mean loss."""
    before = rng_state(run.device)
    with run.autocast():
        loss = run.ddp(x, y, run.c.label_smoothing)
    loss.backward()
    run.model.zero_grad(set_to_none=True)
    run.model.eval()
    with torch.no_grad(), run.autocast():
        run.model(x, y)
    run.model.train()
    set_rng_state(before, run.device)
    return loss.item() / y.numel()


def run_evaluation(run, limit):
    """Evaluates on val and says so. Returns the seconds it took, None when a signal cut it short."""
    began, step = time.time(), run.state["step"]
    result = evaluate(run, "val", limit)
    if result is None:
        return None
    seconds, total = time.time() - began, result.pop("")
    each = limit / len(result)
    part = any(run.corpus.sources("val")[name]["tokens"] > each for name in result)
    run.log.event("eval", step, **total, sources=result, seconds=seconds)
    run.log.say(f"step {step}: val loss {total['val_loss']:.4f}, perplexity {total['val_ppl']:.2f}, bits per byte "
                f"{total['val_bpb']:.4f} (" + "; ".join(
                    f"{name} {r['val_loss']:.4f}, {r['val_ppl']:.2f}, {r['val_bpb']:.4f}"
                    for name, r in result.items()) + ")" + (
                    f", on the first {each:,.0f} tokens of each source" if part else ""))
    run.log.start_report()
    return seconds


def run_sampling(run):
    """Continues the fixed prompts into samples.jsonl, on rank 0 alone, by the raw module and generators of its own."""
    if not run.log.on:
        return
    import fluency
    import sample

    c, step, how = run.c, run.state["step"], dict(max_new_tokens=64, temperature=0.8, top_k=50, top_p=1.0)
    try:
        tokenizer, prompts = prepare.Tokenizer(c.out_dir), fluency.fixed_prompts(c.out_dir)
        rngs = [np.random.RandomState([c.seed, number, 0]) for number in range(len(prompts))]
        with run.eager(), run.autocast():
            new = sample.generate(run.model, [tokenizer.encode(text) for text in prompts], *how.values(), rngs,
                                  torch.from_numpy(tokenizer.writable).to(run.device))
    except (Refused, OSError) as error:  # a volume that went away for a moment
        return run.log.say(f"WARNING: no sample at step {step}: {error}")
    with contextlib.suppress(OSError), open(os.path.join(c.out_dir, "samples.jsonl"), "a", encoding="utf-8") as f:
        for prompt, ids in zip(prompts, new, strict=True):
            line = dict(step=step, prompt=prompt, completion=tokenizer.decode(ids), tokens=ids, seed=c.seed, **how)
            f.write(json.dumps(line, ensure_ascii=False) + "\n")
    run.log.event("sample", step, prompts=len(prompts))
    run.log.say(f"step {step}: {prompts[0]!r} -> {tokenizer.decode(new[0])!r}")


def end_by_signal(run, saved_ok):
    """Says that the run was stopped, on every rank the same. Returns the exit code."""
    signum, step = max(run.ranks.gather(run.stop.signum)), run.state["step"]
    code = 128 + signum if saved_ok else 1
    run.log.event("stop", step, reason=signal.Signals(signum).name, exit_code=code, **peak_memory(run.device))
    after = "the same command continues" if run.c.save_interval else "save_interval=0: nothing was saved"
    run.log.say(f"stopped by {signal.Signals(signum).name} after step {step}; {after}")
    return code


def end_by_guard(run, step, kind, message, x=None, y=None):
    """Nothing is updated or saved any more. For a non-finite value: which module made it, in alarm_step_N.json."""
    run.stop.ready = True  # a signal raises its flag only: all ranks leave together
    run.log.alive()
    if x is not None:
        with run.eager(), run.autocast():
            found = first_nonfinite(run.model, *(t.flatten(0, 1)[:, None] for t in (x, y)))  # a window at a time
        name = f"alarm_step_{step}" + (f".rank{run.ranks.rank}" if run.ranks.rank else "") + ".json"
        text = json.dumps(without_nan(dict(step=step, message=message, rank=run.ranks.rank, **found)), indent=1)
        with contextlib.suppress(OSError):
            prepare.write_atomically(os.path.join(run.c.out_dir, name), text.encode())
        where = [f"{name} on rank {rank}, largest logit {logit:.3g}" for rank, (name, logit) in enumerate(
            run.ranks.gather((found["module"] or found["gradient"], found["logit"]))) if name]
        message += f"; first non-finite: {(where or ['not found again'])[0]}"
    if kind not in run.log.alarmed:
        run.log.event("alarm", step, kind=kind, message=message, action="stop: no update, no save")
    run.log.event("stop", step, reason="guard", exit_code=3, **peak_memory(run.device))
    run.log.say(f"STOPPED by the guard at step {step}: {message}; no further update or save")
    return 3


def judge(run):
    """The guard, on rank 0: says what the logged curve looks like. Returns the finding that should stop the run."""
    if not run.log.on or run.c.guard == "off":
        return None
    found = diagnose(run.log.rows, asdict(run.c), run.shape.vocab_size, run.ranks.world)
    for f in found:
        run.log.alarm(f.kind, run.state["step"], f.message, f"likely {f.causes}; first check {f.check}")
    return next((f for f in found if f.stop and run.c.guard == "stop"), None)


def save(run, kind):
    """Writes a checkpoint (kind "step") or weights only ("weights"). Whether it is on disk; all ranks hear the same."""
    c, step, began = run.c, run.state["step"], time.time()
    path, written, error = os.path.join(c.out_dir, "ckpt", f"{kind}_{step:08d}.pt"), 0, None
    rng = run.ranks.gather(rng_state(run.device)) if kind == "step" else None
    if run.ranks.rank == 0 and (reason := why_bad(path) or ("always written anew" if kind == "weights" else None)):
        content = dict(model=run.model.state_dict(), settings=asdict(c), vocab_size=run.shape.vocab_size, step=step,
                       eot_id=run.shape.eot_id, data_fingerprint=run.corpus.fingerprint, commit=run.log.run["commit"],
                       tokenizer_sha256=run.corpus.meta["tokenizer"]["sha256"])
        if kind == "step":
            content |= run.state | dict(
                order_crc=order_crc(c, run.corpus, run.state["windows"]), scaler=run.scaler.state_dict(),
                optimizer=moments_by_name(run.model, run.optimizers), rng=rng)
        try:
            if os.path.exists(path) and kind == "step":
                run.log.say(f"{path} is replaced, {reason}; the old one is kept as .corrupt")
                os.rename(path, path + ".corrupt")
            written = write_checkpoint(path, content, step)
        except OSError as failed:
            error = str(failed)
        else:
            delete_old(c.out_dir, c, step, run.log.say)
    error = run.ranks.gather(error)[0]
    if error:
        run.log.alarm("save_failed", step, f"the save of step {step} failed: {error}", "older checkpoints are kept",
                      every=0)
        return False
    stall_ms = (time.time() - began) * 1000
    size = run.log.on and os.path.getsize(path)  # a network file system may show it to the others late
    run.log.event("save", step, path=path, bytes=size, stall_ms=stall_ms, **peak_memory(run.device))
    run.log.say(f"step {step}: saved {path} ({written / 1e6:.1f} MB, {stall_ms:.0f} ms)" if written else
                f"step {step}: {path} is there already and verified")
    return True


def begin(c, ranks, stop, log):
    """All that can refuse, then the record, then the first pass. Returns (run, batches, first batch), None for a
    finished run."""
    log.alive()
    ranks.join(10 * c.dist_timeout_s)  # the others wait while rank 0 saves; a step has its own, shorter limit
    device = ranks.together(pick_device, c, ranks.local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    ranks.together(check_batch, c, ranks.world)
    corpus = ranks.together(prepare.Corpus, c.data_dir, ranks.local_rank == 0)
    if len(set(ranks.gather(corpus.fingerprint))) > 1:
        raise Refused(f"data_dir {c.data_dir} holds different data on different nodes: copy one folder to all")
    start_id = ranks.gather(uuid.uuid4().hex)[0]
    log.lock = ranks.together(*(open_out_dir, c, start_id) if ranks.rank == 0 else (lambda: None,))
    ranks.together(see_out_dir, c, start_id)
    newest = newest_verified(c.out_dir, ("step",), log.say) if ranks.rank == 0 else None
    name = ranks.gather(newest and os.path.basename(newest[1]))[0]  # rank 0 verifies once and tells the others
    path = name and os.path.join(c.out_dir, "ckpt", name)
    # read whole on a CPU, where the moments then serve as they are; mapped on a GPU, where all are copied over
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=device.type == "cuda") if path else None
    c = replace(c, dtype=saved["settings"]["dtype"] if saved and c.dtype == "auto" else pick_dtype(c, device))
    check_same(c, ranks)
    changed = ranks.together(changes_since, saved, c, corpus.fingerprint) if saved else {}
    rows, discarded = ranks.gather([read_log(c.out_dir, name) for name in ("log.jsonl", "log.discarded.jsonl")]
                                   if ranks.rank == 0 else None)[0]  # what all decide by must be the same
    ends = [(row["event"], row["step"]) for row in rows if row["event"] in ("run_start", "run_end")]
    if saved and saved["step"] >= c.max_steps and ends[-1:] == [("run_end", saved["step"])]:
        log.say(f"finished: {path} is of step {saved['step']}, max_steps is {c.max_steps}")
        return None
    run = ranks.together(build, c, ranks, stop, log, device, corpus, saved)
    del saved  # a mapped file keeps its space on disk when it is deleted
    batches = ranks.together(Batches, corpus, c, ranks, device, run.state["windows"])
    x, y, valid = ranks.together(batches.take)
    log.hang_file = ranks.together(first_files, c, ranks)

    log.open(rows, discarded, run.state["step"])  # whatever could refuse has been asked: the record begins
    if ranks.rank == 0:
        log.start_record(run, fresh=not path)
    if path:
        log.say(f"resuming {path}: step {run.state['step'] + 1} is next" + "".join(
            f"\n  {key}: {then} -> {now}" for key, (then, now) in changed.items()))
    log.say(f"data           {corpus.tokens('train'):,} train tokens, read {batches.epochs:.2f} times in {c.max_steps} "
            f"steps of {c.global_batch_tokens:,} tokens")
    compiled = "compiled" if run.model.head_loss is not head_loss else "eager"
    log.say(f"device         {ranks.world} x {device_name(device)}, {c.dtype}, {compiled}, accumulation "
            f"{batches.accumulation}")
    for holds, warning in (
            (c.save_interval == 0, "save_interval=0: no checkpoint will be written, not at the end either"),
            (batches.epochs > 4, "the data is read more than 4 times: expect overfitting"),
            (c.guard != "off" and c.log_interval > 20, f"log_interval={c.log_interval}: of the first 200 steps the "
             f"guard sees {200 // c.log_interval + 1} lines, too few to end a run by; 10 is better"),
            (c.warmup_steps >= c.max_steps, f"warmup_steps={c.warmup_steps}, the whole run: the rate never falls")):
        if holds:
            log.say(f"warning: {warning}")
    log.alive()
    if compiled == "compiled":
        log.say("compiling      a minute or two where this shape is new, seconds later on")
    began = time.time()
    initial_loss, first_pass_s = first_pass(run, x[0], y[0]), time.time() - began
    kind = "resume" if path else "scratch" if c.init_from in ("auto", "scratch") else "weights"
    expected = "" if kind != "scratch" else f", expected near {math.log(run.shape.vocab_size) + 1 / 8:.4f}"
    included = ", compile included" if compiled == "compiled" else ""
    log.say(f"first pass     {first_pass_s:.1f} s{included}; loss {initial_loss:.4f}{expected}")
    log.record(initial_loss=log.run.get("initial_loss") or initial_loss)
    train_bytes = sum(source["bytes"] for source in corpus.sources("train").values())
    log.event("run_start", run.state["step"], start=kind, world=ranks.world, vocab_size=run.shape.vocab_size,
              n_params=count_parameters(run.model), first_pass_s=first_pass_s, compiled=compiled,
              bytes_per_token=train_bytes / corpus.tokens("train"))
    logged_steps = sorted({1, c.max_steps, *range(c.log_interval, c.max_steps, c.log_interval)})
    log.event("plan", run.state["step"], plan=[[s, learning_rate(s, c)] for s in logged_steps])
    log.say("planned rate   " + ", ".join(f"step {s}: {learning_rate(s, c):.3g}" for s in sorted(
        {1, min(c.max_steps, max(1, c.warmup_steps)), *(max(1, c.max_steps * i // 4) for i in (1, 2, 3, 4))})))
    if path:
        log.event("resume", run.state["step"], path=path, world_size=ranks.world, changed=changed)
    return run, batches, (x, y, valid)


def train(c, ranks, stop, log):
    """One run from its start, or from its checkpoint, to its end. Returns the exit code."""
    if (begun := begin(c, ranks, stop, log)) is None:
        return 0
    run, batches, (x, y, valid) = begun
    c, state, model, scaler = run.c, run.state, run.model, run.scaler
    n_params, peak = count_parameters(model), c.peak_tflops or PEAK_TFLOPS.get(device_name(run.device), 0)
    interval = []  # (seconds, of them waiting for data) of the steps since the last line, without evaluation and saving
    eval_s, saved_ok = 0.0, True
    [step_targets] = ranks.sum(valid)

    with run.eager(), run.autocast():
        leak = causality_leak(model)
    log.say(f"causality      {'holds' if leak == 0 else f'BROKEN: later tokens move earlier logits by {leak:.3g}'}")
    if not math.isfinite(leak):
        return end_by_guard(run, state["step"], "non_finite", "the logits are not finite before the first update")
    if leak and c.guard == "stop":
        return end_by_guard(run, state["step"], "not_causal", f"later tokens move earlier logits by {leak:.3g}")
    if leak and c.guard == "warn":
        log.alarm("not_causal", state["step"], f"later tokens move earlier logits by {leak:.3g}", "going on")
    evaluated = [row["step"] for row in log.rows if row["event"] == "eval"]
    if c.eval_interval and 0 < state["step"] < c.max_steps and not state["step"] % c.eval_interval and (
            state["step"] not in evaluated):
        run_evaluation(run, c.eval_tokens)  # which a stop had cut short

    for step in range(state["step"] + 1, c.max_steps + 1):
        log.alive(1)
        began, rate = time.perf_counter(), learning_rate(step, c)
        logged = step in (1, c.max_steps) or step % c.log_interval == 0
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

        loss_sum = 0.0
        for micro in range(batches.accumulation):
            is_last = micro == batches.accumulation - 1
            with contextlib.nullcontext() if is_last or ranks.world == 1 else run.ddp.no_sync():
                with run.autocast():
                    loss = run.ddp(x[micro], y[micro], c.label_smoothing)
                # a sum becomes its share of the mean over the whole step; DDP averages over ranks, hence their number
                scaler.scale(loss * (ranks.world / step_targets)).backward()
            loss_sum = loss_sum + loss.detach()
        for optimizer in run.optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip or math.inf)
        loss_sum, grad_norm = torch.stack((loss_sum, grad_norm)).tolist()  # the one wait for the device in an update

        this_x, this_y, crc, waited = x, y, batch_crc(x, y) if logged else 0, time.perf_counter()
        x, y, valid = batches.take()
        data_s = time.perf_counter() - waited
        stopping, loss_sum, crc, next_targets = ranks.sum(stop.signum, loss_sum, crc, valid)
        loss = loss_sum / step_targets
        skipped = c.dtype == "float16" and not math.isfinite(grad_norm)  # the scaler will leave this update out
        state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if skipped else 0
        if not math.isfinite(loss + (0 if skipped else grad_norm)) or state["skipped_in_a_row"] >= MAX_FP16_SKIPS:
            message = (f"loss {loss}, gradient norm {grad_norm}, windows {state['windows']} to "
                       f"{state['windows'] + batches.per_step - 1}, scale {scaler.get_scale():g}, "
                       f"{state['skipped_in_a_row']} skipped in a row")
            return end_by_guard(run, step, "non_finite", message, this_x, this_y)

        for optimizer in run.optimizers:
            if not skipped:
                scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)  # else DDP rounds a process's first update otherwise on 3 ranks
        scaler.update()
        stop.ready = True
        state.update(step=step, windows=state["windows"] + batches.per_step, updates=state["updates"] + (not skipped),
                     tokens=state["tokens"] + c.global_batch_tokens, targets=state["targets"] + int(step_targets))
        step_targets = next_targets
        log.run.update(steps=step, updates=state["updates"])

        interval.append((time.perf_counter() - began, data_s))
        if logged:
            step_s, waited_s = np.mean(interval, axis=0).tolist()
            tokens_per_s = c.global_batch_tokens / step_s
            mfu = flops_per_token(n_params, run.shape)[0] * tokens_per_s / (ranks.world * peak * 1e12) if peak else None
            evals_left = (c.max_steps - 1) // c.eval_interval - step // c.eval_interval + 1 if c.eval_interval else 1
            eta_s = (c.max_steps - step) * step_s + evals_left * eval_s
            log.event("step", step, epoch=state["windows"] / batches.n_windows, loss=loss,
                      lr=rate, grad_norm=grad_norm, tokens_per_s=tokens_per_s, mfu=mfu, step_ms=step_s * 1000,
                      data_ms=waited_s * 1000, tokens=state["tokens"],
                      targets=state["targets"], batch_crc=int(crc) % 2**32, eta_s=eta_s,
                      **(dict(loss_scale=scaler.get_scale(), skipped=skipped) if c.dtype == "float16" else {}))
            log.say(f"step {step}/{c.max_steps} | loss {loss:.4f} | lr {rate:.2e} | norm {grad_norm:.2f} | "
                    f"{tokens_per_s:,.0f} tok/s | mfu {f'{mfu:.1%}' if mfu else 'n/a'} | eta {duration(eta_s)} | "
                    f"{log.device_hours():.3f} device-h")
            interval.clear()
            hours = log.device_hours() + eta_s * ranks.world / 3600
            if c.budget_gpu_hours and step > 1 and hours > c.budget_gpu_hours:
                log.alarm("budget", step, f"the run is going to take {hours:.3g} device-hours, budget_gpu_hours is "
                                          f"{c.budget_gpu_hours:g}", "going on")
            verdict = judge(run)
            if c.guard == "stop" and (verdict := ranks.gather(verdict)[0]):  # all leave before anything is saved
                return end_by_guard(run, step, verdict.kind, verdict.message)

        log.alive()
        final = step == c.max_steps
        if c.save_interval and (stopping or final or step % c.save_interval == 0):
            saved_ok = save(run, "step")
        if c.weights_interval and step % c.weights_interval == 0:
            save(run, "weights")
        if stopping:
            return end_by_signal(run, saved_ok)
        if c.sample_interval and (final or step % c.sample_interval == 0):
            run_sampling(run)
        if c.eval_interval and step % c.eval_interval == 0 and not final:
            eval_s = run_evaluation(run, c.eval_tokens)
            if eval_s is None:
                return end_by_signal(run, c.save_interval == 0 or save(run, "step"))

    if run_evaluation(run, math.inf) is None:
        return end_by_signal(run, saved_ok)
    log.event("run_end", state["step"], **peak_memory(run.device))
    if saved_ok:
        log.say(f"finished; next: python report.py {c.out_dir}" + (
            f", python sample.py --out_dir={c.out_dir}" if c.save_interval else ""))
    return 0 if saved_ok else 1


def main():
    c = load(Config, sys.argv[1:], __doc__)
    check(c)
    ranks, stop = Ranks(), StopSignal()
    log = Log(c, ranks)
    code, status = 1, "crashed"
    try:
        code = train(c, ranks, stop, log)
        status = {0: "finished", 1: "crashed", 3: "guard"}.get(code, "stopped")
    except Refused as refused:
        code = 2
        if log.rows and ranks.rank:  # met in the middle of a run, by this rank alone
            print(f"train.py: rank {ranks.rank}: {refused}", file=sys.stderr)
        raise
    except SystemExit as ended:
        code, status = ended.code, "stopped"
        if log.rows:
            log.event("stop", log.rows[-1]["step"], reason=signal.Signals(code - 128).name, exit_code=code)
        log.say("stopped by a signal before the first update of this start: there was nothing to save")
    except RuntimeError as error:
        if not re.search("out of memory|can't allocate memory", str(error)):
            raise
        message = (f"rank {ranks.rank} is out of memory: lower --micro_batch_size, then --loss_chunks=8, then "
                   f"--activation_checkpointing=True ({str(error).splitlines()[0]})")
        log.alarm("out_of_memory", log.run.get("steps", 0), message, "the run ends; its last checkpoint is whole")
        print(f"train.py: {message}", file=sys.stderr)
    finally:
        signal.alarm(0)
        log.close(status, code)
    if dist.is_initialized() and code != 1:  # other ranks may be in the middle of an exchange
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
