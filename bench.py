"""Tokens a second and MFU of the real loop on this machine, in about two minutes.

    python bench.py                                      every CUDA device with the 0.5B shape; without CUDA the demo's
    python bench.py config/train_120m.py --compile=False     any settings of train.py

Starts train.py itself, reads its log and stops it again before it would evaluate or save anything. Without data it
trains on random ids. Every key of train.py is taken and passed on; the last ones of --help are this script's own.
"""
import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields, replace

from config import Refused, load, to_argv  # before torch: a missing package then ends in one line

import numpy as np
import torch

from model import PEAK_TFLOPS, Shape, flops_per_token
from prepare import PATTERN, SPLITS, Corpus, seal

HERE = os.path.dirname(os.path.abspath(__file__))
DROPPED = 3  # first steps: optimizer state is allocated, clocks and caches settle
FEWEST, MOST = 5, 500  # measured steps
MATRIX = dict(cuda=8192, cpu=4096)  # side of the product whose rate the step is compared with


@dataclass(frozen=True)
class Config:  # main() puts these behind the keys of train.Config
    seconds: float = 60.0  # how long steps are measured, once the first three are done
    devices: int = 0  # processes, one a device; 0: all CUDA devices, else one
    vocab_size: int = 0  # of the random ids; 0: 32,000, and the demo's 4,096 for a bare run without CUDA


def write_random_data(folder, vocab_size, train_tokens):
    """A finished data folder of random ids in documents of 1,000 tokens, under a tokenizer of single bytes."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    with open(f"{folder}/tokenizer.tiktoken", "wb") as f:
        f.write(ranks)
    splits, rng = {}, np.random.RandomState(0)
    for split, tokens in zip(SPLITS, (train_tokens, 1000, 1000), strict=True):
        ids = rng.randint(0, vocab_size - 1, tokens).astype(dtype)
        ids[999::1000] = ids[-1] = vocab_size - 1
        ids.tofile(f"{folder}/{split}.bin")
        splits[split] = dict(random=dict(offset=0, tokens=tokens, documents=-(-tokens // 1000), bytes=tokens))
    seal(folder, dict(schema=1, vocab_size=vocab_size, dtype=np.dtype(dtype).name, eot_id=vocab_size - 1, splits=splits,
                      tokenizer=dict(pattern=PATTERN, special_tokens={"<|endoftext|>": vocab_size - 1},
                                     sha256=hashlib.sha256(ranks).hexdigest()),
                      recipe=dict(sources=[]), dropped={}))


def measured(rows):
    """The step lines of a log that count."""
    return [row for row in rows if row["event"] == "step"][DROPPED:]


def run_train(command, out_dir, seconds):
    """(lines of log.jsonl, run.json) of train.py, stopped by SIGTERM after `seconds` of measured steps.

    Raises Refused with what train.py said when it refused; shows its last lines and exits 1 when it failed.
    """
    from report import read_log

    shown, output = time.time(), os.path.join(out_dir, "output.txt")
    with open(output, "w") as screen:
        child = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT)
    try:
        while child.poll() is None:
            time.sleep(0.2)
            steps = measured(read_log(out_dir))
            if steps and time.time() - shown > 10:
                shown = time.time()
                print(f"  step {steps[-1]['step']}: {steps[-1]['tokens_per_s']:,.0f} tokens/s", file=sys.stderr)
            if len(steps) >= MOST or len(steps) >= FEWEST and steps[-1]["time"] - steps[0]["time"] >= seconds:
                break
    finally:
        child.terminate()  # it ends behind the step it is in; torchrun passes the signal on
        try:
            child.wait(timeout=120)
        except subprocess.TimeoutExpired:
            child.kill()
    rows = read_log(out_dir)
    if len(measured(rows)) < FEWEST:
        with open(output, errors="replace") as f:
            said = f.read().splitlines()
        refused = [line for line in said if line.startswith("train.py: ")]  # torchrun hides the exit code 2
        if child.returncode == 2 or refused:
            raise Refused("; ".join(refused) or "; ".join(said[-3:]))
        print("\n".join(["bench.py: train.py failed; its last lines:", *said[-20:]]), file=sys.stderr)
        sys.exit(1)
    with open(os.path.join(out_dir, "run.json"), encoding="utf-8") as f:
        return rows, json.load(f)


def spread(steps, key):
    """(median, lower quartile, upper quartile): one slow step moves none of them."""
    return tuple(float(q) for q in np.quantile([row[key] for row in steps], (0.5, 0.25, 0.75)))


def matrix_product_tflops(device, dtype, seconds):
    """Median rate in TFLOP/s of a square product in `dtype` on `device` ("cuda" or "cpu"); the first doesn't count."""
    torch.set_float32_matmul_precision("high")  # as train.py
    n = MATRIX[device]
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return 2 * n**3 / float(np.median(times[1:])) / 1e12


def peak_memory(rows):
    """What train.py's log says last of its peak memory, in words."""
    for row in reversed(rows):
        if row.get("peak_memory_bytes"):
            return f"{row['peak_memory_bytes'] / 2**30:.2f} GiB ({row['peak_memory_source']})"
    return "not measured: train.py was ended before it could say"


def report(rows, run, vocab_size, cuda, matrix_tflops):
    """The lines a person reads, from train.py's own record and the rate of the matrix product."""
    settings, world, steps = run["settings"], run["device_count"], measured(rows)
    start = next(row for row in rows if row["event"] == "run_start")
    (rate, *rates), (step_ms, *steps_ms), (data_ms, *_) = (spread(steps, key) for key in
                                                           ("tokens_per_s", "step_ms", "data_ms"))
    flops = flops_per_token(run["n_params"], Shape.of(settings, vocab_size))  # 6N, attention included
    reached = [f * rate / 1e12 for f in flops]  # TFLOP/s of all devices together
    peak = settings["peak_tflops"] or PEAK_TFLOPS.get(run["device"])
    mfu = f"no peak is known for {run['device']}: no MFU (--peak_tflops=... gives one)"
    if peak:
        mfu = (f"{reached[0] / world / peak:.1%} (6N), {reached[1] / world / peak:.1%} (attention included) "
               f"of {world} x {peak:g} TFLOP/s")
    at_once = world if cuda else 1  # processes on one CPU share what the product had alone
    shares = [r / (at_once * matrix_tflops) for r in reached]
    return [
        f"device          {world} x {run['device']}, {settings['dtype']}, {start['compiled']}",
        f"model           {run['n_params']:,} parameters, context {settings['block_size']}, vocabulary {vocab_size:,}",
        f"a step          {settings['global_batch_tokens']:,} tokens, micro-batch {settings['micro_batch_size']}",
        f"measured        {len(steps)} steps in {steps[-1]['time'] - steps[0]['time']:.0f} s, {DROPPED} before them "
        f"dropped; medians, and in brackets the middle half",
        f"tokens/s        {rate:,.0f}  ({rates[0]:,.0f} to {rates[1]:,.0f})",
        f"step            {step_ms:,.1f} ms  ({steps_ms[0]:,.1f} to {steps_ms[1]:,.1f})",
        f"data wait       {data_ms:.2f} ms, {data_ms / step_ms:.2%} of a step",
        f"first pass      {start['first_pass_s']:.1f} s, compile included, not in the figures above",
        f"peak memory     {peak_memory(rows)}",
        f"matrix product  {matrix_tflops:.4g} TFLOP/s (side {MATRIX['cuda' if cuda else 'cpu']}, {settings['dtype']}, "
        f"one device); the run reaches {shares[0]:.1%} of it (6N), {shares[1]:.1%} (attention included)",
        f"MFU             {mfu}",
    ]


def main():
    import train

    @dataclass(frozen=True)
    class Settings(Config, train.Config):
        """Every key of train.py, then this script's own."""

    argv, cuda = sys.argv[1:], torch.cuda.is_available()
    named = any(not word.startswith("--") for word in argv)
    c = load(Settings, argv if named or not cuda else [os.path.join(HERE, "config", "train_0p5b.py"), *argv], __doc__)
    cuda = cuda and c.device != "cpu"  # no context is made here: train.py has the memory to itself
    world = c.devices or (torch.cuda.device_count() if cuda else 1)
    if world < 1 or cuda and world > torch.cuda.device_count() or c.vocab_size < 0 or c.seconds < 0:
        raise Refused(f"devices={c.devices}, vocab_size={c.vocab_size} and seconds={c.seconds} must be 0 or more, and "
                      f"no more devices than there are")
    unit = world * c.micro_batch_size * c.block_size
    batch = max(1, c.global_batch_tokens // unit) * unit
    if batch != c.global_batch_tokens:
        print(f"notice: {world} device(s) x {c.micro_batch_size} windows do not divide {c.global_batch_tokens:,} "
              f"tokens; a step takes {batch:,}")
    max_steps = DROPPED + MOST + 1000  # stopped long before its end, and so before the final evaluation
    c = replace(c, global_batch_tokens=batch, max_steps=max_steps, warmup_steps=max_steps, log_interval=1, max_epochs=0,
                eval_interval=0, save_interval=0, weights_interval=0, expect_params=0, init_from="scratch")
    train.check(c)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))  # through run_train's finally

    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        if os.path.exists(os.path.join(c.data_dir, "meta.json")):
            vocab_size = Corpus(c.data_dir, check=False).vocab_size
            print(f"data            {c.data_dir}")
        else:
            vocab_size = c.vocab_size or (32_000 if cuda or named else 4096)
            print(f"data            random ids, vocabulary {vocab_size:,}: {c.data_dir} holds no finished data")
            c = replace(c, data_dir=folder)
            write_random_data(folder, vocab_size, 4 * c.global_batch_tokens + 2 * c.block_size)
        Shape.of(c, vocab_size)  # refuses one that can't be
        c = replace(c, out_dir=os.path.join(folder, "out"))
        os.makedirs(c.out_dir)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"] if world > 1 else []
        command = [sys.executable, *torchrun, os.path.join(HERE, "train.py"),
                   *to_argv(c, *(field.name for field in fields(train.Config)))]
        print(f"running         train.py on {world} device(s) for {c.seconds:g} s of steps, after start and compile",
              flush=True)
        rows, run = run_train(command, c.out_dir, c.seconds)
    tflops = matrix_product_tflops("cuda" if cuda else "cpu", run["settings"]["dtype"], min(3.0, c.seconds))
    print("\n".join(report(rows, run, vocab_size, cuda, tflops)))


if __name__ == "__main__":
    main()
