"""Tokens a second and MFU of the real loop on this machine, in about two minutes.

    python bench.py                                      every CUDA device with the 0.5B shape; without CUDA the demo's
    python bench.py config/train_120m.py --compile=False     any settings of train.py
    python bench.py config/train_0p5b.py --sweep=True        which micro-batch, compile, checkpointing, devices

Starts train.py itself, reads its log and stops it again before it would evaluate or save anything. Without data it
trains on random ids. Every key of train.py is taken and passed on; the last ones of --help are this script's own.
What it finds goes to out_dir/bench.json, where report.py looks for it.
"""
import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

from config import Refused, load, to_argv  # before torch: a missing package then ends in one line

import numpy as np
import torch

from model import PEAK_TFLOPS, Shape, flops_per_token
from prepare import PATTERN, SPLITS, Corpus, read_json, seal, write_atomically
from report import hours, read_log

HERE = os.path.dirname(os.path.abspath(__file__))
DROPPED = 3  # first steps: optimizer state is allocated, clocks and caches settle
FEWEST, MOST = 5, 500  # measured steps
SWEEP_S = 15  # of a sweep's single run
MATRIX = dict(cuda=8192, cpu=4096)  # side of the product whose rate the step is compared with


@dataclass(frozen=True)
class Config:  # main() puts these behind the keys of train.Config
    seconds: float = 60.0  # how long steps are measured, once the first three are done
    devices: int = 0  # processes, one a device; 0: all CUDA devices, else one
    vocab_size: int = 0  # of the random ids; 0: 32,000, and the demo's 4,096 for a bare run without CUDA
    sweep: bool = False  # measure micro-batches, compile, checkpointing and numbers of devices beside each other
    profile: str = ""  # write a trace of three steps of rank 0 to this file (for chrome://tracing or Perfetto)


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


class Failed(Exception):
    """train.py ended without enough measured steps; the message is what it said last."""


def run_train(command, out_dir, seconds):
    """(lines of log.jsonl, run.json) of train.py, stopped by SIGTERM after `seconds` of measured steps.

    Raises Refused with what train.py said when it refused, Failed with its last lines when it failed.
    """
    os.makedirs(out_dir, exist_ok=True)
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
        lost = [line for line in said if "out of memory" in line][:1]  # torchrun's own words may follow
        refused = [line for line in said if line.startswith("train.py: ") and not lost]  # it hides the exit code 2
        if child.returncode == 2 or refused:
            raise Refused("; ".join(refused) or "; ".join(said[-3:]))
        raise Failed("\n".join(lost + said[-20:]))
    return rows, read_json(os.path.join(out_dir, "run.json"))


def spread(steps, key):
    """(median, lower quartile, upper quartile): one slow step moves none of them."""
    return tuple(float(q) for q in np.quantile([row[key] for row in steps], (0.5, 0.25, 0.75)))


def matrix_product_tflops(device, dtype, seconds):
    """Median rate in TFLOP/s of a square product in `dtype` on `device` ("cuda" or "cpu"); the first doesn't count."""
    torch.set_float32_matmul_precision("high")  # as train.py
    n, repeats = MATRIX[device], 10 if device == "cuda" else 1  # to launch one takes long beside it there
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(repeats):
            product = a @ b
        product[0, 0].item()  # waits for the device
        times.append((time.perf_counter() - began) / repeats)
    return 2 * n**3 / float(np.median(times[1:])) / 1e12


def figures(rows, run, vocab_size):
    """What a run measured, as bench.json has it: medians over its steps, a key that was not measured is None."""
    settings, world, steps = run["settings"], run["device_count"], measured(rows)
    flops = flops_per_token(run["n_params"], Shape.of(settings, vocab_size))  # 6N, attention included
    peak = settings["peak_tflops"] or PEAK_TFLOPS.get(run["device"])
    found = dict(device=run["device"], devices=world, n_params=run["n_params"], vocab_size=vocab_size,
                 micro_batch_size=settings["micro_batch_size"], global_batch_tokens=settings["global_batch_tokens"],
                 dtype=settings["dtype"], measured_steps=len(steps), peak_tflops=peak,
                 measured_s=steps[-1]["time"] - steps[0]["time"], peak_memory_bytes=None, peak_memory_source=None)
    for row in rows:
        found |= {key: row[key] for key in ("first_pass_s", "compiled", "peak_memory_bytes", "peak_memory_source")
                  if row.get(key)}
    for key in ("tokens_per_s", "step_ms", "data_ms"):
        found[key], *found[f"{key}_quartiles"] = spread(steps, key)
    for key, f in zip(("", "_with_attention"), flops, strict=True):
        found[f"tflops{key}"] = f * found["tokens_per_s"] / 1e12  # of all devices together
        found[f"mfu{key}"] = found[f"tflops{key}"] / (world * peak) if peak else None
    return found


def estimate(c, found):
    """What the run that the settings ask for takes at the measured speed; evaluation, saving, start are not in it."""
    tokens = c.max_steps * c.global_batch_tokens
    took = tokens / found["tokens_per_s"] / 3600
    cost = took * found["devices"] * c.gpu_hour_price if c.gpu_hour_price else None
    return dict(est_tokens=tokens, est_hours=took, est_gpu_hours=took * found["devices"], est_cost=cost)


def lines_of(c, found):
    """The lines a person reads."""
    (r_low, r_high), (s_low, s_high) = found["tokens_per_s_quartiles"], found["step_ms_quartiles"]
    side, memory, world, peak = MATRIX["cuda" if c.device == "cuda" else "cpu"], found["peak_memory_bytes"], \
        found["devices"], found["peak_tflops"]
    lines = [
        f"device          {world} x {found['device']}, {found['dtype']}, {found['compiled']}",
        f"model           {found['n_params']:,} parameters, context {c.block_size}, vocabulary {found['vocab_size']:,}",
        f"a step          {found['global_batch_tokens']:,} tokens, micro-batch {found['micro_batch_size']}",
        f"measured        {found['measured_steps']} steps in {found['measured_s']:.0f} s, {DROPPED} before them "
        f"dropped; medians, and in brackets the middle half",
        f"tokens/s        {found['tokens_per_s']:,.0f}  ({r_low:,.0f} to {r_high:,.0f})",
        f"step            {found['step_ms']:,.1f} ms  ({s_low:,.1f} to {s_high:,.1f})",
        f"data wait       {found['data_ms']:.2f} ms, {found['data_ms'] / found['step_ms']:.2%} of a step",
        f"first pass      {found['first_pass_s']:.1f} s, not in the figures above",
        f"peak memory     {memory / 2**30:.2f} GiB ({found['peak_memory_source']})" if memory else
        "peak memory     not measured: train.py was ended before it could say",
        f"matrix product  {found['matrix_tflops']:.4g} TFLOP/s (side {side}, {found['dtype']}, one device); the run "
        f"reaches {found['matrix_share']:.1%} of it (6N), {found['matrix_share_with_attention']:.1%} (with attention)",
        f"MFU             {found['mfu']:.1%} (6N), {found['mfu_with_attention']:.1%} (with attention) of "
        f"{world} x {peak:g} TFLOP/s" if peak else
        f"MFU             no peak is known for {found['device']}: no MFU (--peak_tflops=... gives one)",
        f"the whole run   {found['est_tokens']:,} tokens: {found['est_hours']:.3g} h, {found['est_gpu_hours']:.3g} "
        f"device-hours" + (f", {found['est_cost']:,.2f} {c.currency}" if found["est_cost"] else "") +
        ", without evaluation and saving"]
    if peak:
        at = [(mfu, hours(found["n_params"], found["est_tokens"], world, peak, mfu)) for mfu in (0.2, 0.3, 0.4, 0.5)]
        lines.append("at other MFUs   " + ", ".join(f"{mfu:.0%}: {h:.1f} h" for mfu, h in at))
    return lines


# ---- one measurement, and many

PROFILED = """
import torch, train
path, real = PATH, train.batch_crc
prof = torch.profiler.profile(schedule=torch.profiler.schedule(wait=5, warmup=1, active=3, repeat=1),
                              on_trace_ready=lambda p: p.export_chrome_trace(path))
def step(x, y):
    prof.step()
    return real(x, y)
if train.Ranks().rank == 0:
    train.batch_crc = step
    prof.start()
train.main()
"""


def fit(c, world):
    """The settings of a benched run: log every step, never evaluate or save, a global batch that the ranks divide."""
    unit = world * c.micro_batch_size * c.block_size
    max_steps = DROPPED + MOST + 1000  # stopped long before its end
    return replace(c, global_batch_tokens=max(1, c.global_batch_tokens // unit) * unit, max_steps=max_steps,
                   warmup_steps=max_steps, log_interval=1, max_epochs=0, eval_interval=0, sample_interval=0,
                   save_interval=0, weights_interval=0, expect_params=0, init_from="scratch", guard="off")


def command(c, world, code=""):
    """The words that start train.py, or Python `code` in its place, with the settings `c` in so many processes."""
    import train
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={world}", "--no_python", sys.executable]
    start = ["-c", f"import sys; sys.path.insert(0, {HERE!r}); sys.argv[0] = 'train.py'\n{code}"]
    script = start if code else [os.path.join(HERE, "train.py")]
    return [sys.executable, *(["-m", *torchrun] if world > 1 else []), *script, *to_argv(c, train.Config)]


def measure(c, world, folder, seconds, vocab_size, profile=""):
    """`figures` of train.py on `world` devices with these settings. Raises Refused and Failed as run_train does."""
    c = replace(fit(c, world), out_dir=tempfile.mkdtemp(dir=folder, prefix="out."))
    code = PROFILED.replace("PATH", repr(profile)) if profile else ""
    return figures(*run_train(command(c, world, code), c.out_dir, seconds), vocab_size)


def sweep(c, world, measure):
    """Lines of a table: micro-batches until one is too large, the best with compile and checkpointing the other way,
    then 1, 2, 4, ... devices. `measure(c, world)` gives figures. Returns (settings of the fastest, lines, how many
    times as fast as one device they are on `world`, or None)."""
    lines, best = ["micro  compile  checkpointing  devices       tokens/s       peak memory speed-up efficiency"], None

    def row(c, n, alone=None):
        few = n * max(32, 2 * c.micro_batch_size) * c.block_size  # stand for a step that may take 20 s
        c = replace(c, global_batch_tokens=min(few, c.global_batch_tokens))
        head = f"{c.micro_batch_size:<6} {c.compile!s:<8} {c.activation_checkpointing!s:<14} {n:<7}"
        try:
            found = measure(c, n)
        except (Failed, Refused) as failed:
            if isinstance(failed, Refused) and best is None:  # the settings themselves; else one change of them
                raise
            memory = "out of memory" in str(failed).lower()
            lines.append(f"{head} {'out of memory' if memory else 'failed: ' + str(failed).splitlines()[-1][:60]}")
            print(lines[-1], flush=True)
            return None
        rate, memory = found["tokens_per_s"], found["peak_memory_bytes"]
        line = f"{head} {rate:>14,.0f} {f'{memory / 2**30:.2f} GiB' if memory else 'not measured':>17}"
        lines.append(line + (f" {rate / alone:>8.2f}x {rate / alone / n:>10.1%}" if alone else ""))
        print(lines[-1], flush=True)
        return rate

    print(lines[0])
    micro = 1
    while micro == 1 or micro * c.block_size * world <= c.global_batch_tokens:
        tried = replace(c, micro_batch_size=micro)
        if (rate := row(tried, world)) is None:
            break
        best = max(best or (rate, tried), (rate, tried), key=lambda pair: pair[0])
        micro *= 2
    if best is None:
        raise Failed("\n".join(lines))
    for change in (dict(compile=not c.compile), dict(activation_checkpointing=not c.activation_checkpointing)):
        row(replace(best[1], **change), world)
    alone, n = row(best[1], 1) if world > 1 else None, 2
    while alone and n <= world:
        row(best[1], n, alone)
        n *= 2
    return best[1], lines, alone and best[0] / alone


def main():
    import train

    @dataclass(frozen=True)
    class Settings(Config, train.Config):
        """Every key of train.py, then this script's own."""

    argv, began = sys.argv[1:], time.time()
    cuda = torch.cuda.is_available() and "--device=cpu" not in argv
    named = any(not word.startswith("--") for word in argv)
    c = load(Settings, argv if named or not cuda else [os.path.join(HERE, "config", "train_0p5b.py"), *argv], __doc__)
    cuda = cuda and c.device != "cpu"  # no context is made here: train.py has the memory to itself
    c = replace(c, device="cuda" if cuda else c.device)
    world = c.devices or (torch.cuda.device_count() if cuda else 1)
    if world < 1 or cuda and world > torch.cuda.device_count() or 0 != c.vocab_size < 257 or c.seconds < 0:
        raise Refused(f"devices={c.devices} and seconds={c.seconds} must be 0 or more, and no more devices than there "
                      f"are; vocab_size={c.vocab_size} must be 0 or at least 257")
    train.check(c)
    if (batch := fit(c, world).global_batch_tokens) != c.global_batch_tokens:
        print(f"notice: {world} device(s) x {c.micro_batch_size} windows do not divide {c.global_batch_tokens:,} "
              f"tokens; a step takes {batch:,}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise Refused("this starts its own processes: without torchrun, and where WORLD_SIZE is set anyway, unset it")
    path, before = os.path.join(c.out_dir, "bench.json"), 0.0
    try:
        os.makedirs(c.out_dir, exist_ok=True)
        for name in filter(None, (path + ".tmp", c.profile)):
            open(name, "w").close()
        os.unlink(path + ".tmp")
    except OSError as error:
        raise Refused(f"{error.filename} can't be written: {error.strerror}") from None
    with contextlib.suppress(Refused):  # damaged
        before = read_json(path).get("device_hours") or 0.0  # of earlier benches of this run
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))  # through run_train's finally

    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        asked = c
        if cuda and not named and not c.sweep:  # any card, about two minutes
            few = 4 * world * c.micro_batch_size * c.block_size
            c = replace(c, global_batch_tokens=min(few, c.global_batch_tokens))
        if os.path.exists(os.path.join(c.data_dir, "meta.json")):
            vocab_size = Corpus(c.data_dir, check=False).vocab_size
            print(f"data            {c.data_dir}")
        else:
            vocab_size = c.vocab_size or (32_000 if cuda or named else 4096)
            print(f"data            random ids, vocabulary {vocab_size:,}: {c.data_dir} holds no finished data")
            c = replace(c, data_dir=folder)
            write_random_data(folder, vocab_size, 4 * c.global_batch_tokens + 2 * c.block_size)
        table, speedup = [], None
        try:
            if c.sweep:
                print(f"sweep           runs of train.py, {min(SWEEP_S, c.seconds):g} s of steps each")
                c, table, speedup = sweep(
                    c, world, lambda c, n: measure(c, n, folder, min(SWEEP_S, c.seconds), vocab_size))
            found = None
            while found is None:
                print(f"running         train.py on {world} device(s) for {c.seconds:g} s of steps", flush=True)
                try:
                    found = measure(c, world, folder, c.seconds, vocab_size, c.profile)
                except Failed as failed:
                    if named or c.micro_batch_size == 1 or "out of memory" not in str(failed):
                        raise
                    print(f"notice: micro-batch {c.micro_batch_size} is out of memory, half of it is taken")
                    c = replace(c, micro_batch_size=c.micro_batch_size // 2)
        except Failed as failed:
            sys.exit(f"bench.py: train.py failed; its last lines:\n{failed}")
    rate = matrix_product_tflops("cuda" if cuda else "cpu", found["dtype"], min(3.0, c.seconds))
    at_once = world if cuda else 1  # processes on one CPU share what the product had alone
    found |= estimate(asked, found) | dict(matrix_tflops=rate, sweep=table, speedup=speedup)
    for key in ("", "_with_attention"):
        found[f"matrix_share{key}"] = found[f"tflops{key}"] / (at_once * rate)
    print("\n".join(lines_of(c, found)) + f"\ntrace           {c.profile}" * bool(c.profile))
    found["device_hours"] = before + world * (time.time() - began) / 3600
    try:
        write_atomically(path, json.dumps(found, indent=1).encode())
    except OSError as error:
        sys.exit(f"bench.py: {path} can't be written: {error.strerror}")


if __name__ == "__main__":
    main()
