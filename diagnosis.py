"""What a training curve shows: a pure function over the lines of log.jsonl.

train.py asks at every logged line, report.py asks again of the whole log: both get the same answer.
"""
import math
from typing import NamedTuple

import numpy as np

# What a curve can show: kind -> (what you see, likely causes, the first thing to check).
SYMPTOMS = dict(
    flat=("the loss stays where it started",
          "the rate is zero; the optimizer does not step; the weights are frozen",
          "`lr` and `grad_norm` in log.jsonl; `python preflight.py` compares weights before and after an update"),
    diverging=("the loss rises, or starts far over ln V",
               "the rate is too high; no clipping; the loss is not divided by the accumulation",
               "loss at step 1 against ln V; then a third of --learning_rate, with --grad_clip=1"),
    too_fast=("the loss starts far under ln V, or falls faster than language allows",
              "the causal mask is off; targets leak into the inputs; the same few documents over and over",
              "`python preflight.py` (causality, inputs and targets side by side); duplicates in the corpus"),
    overfitting=("val loss rises while train loss falls",
                 "too little data for the size and the number of epochs",
                 "`epoch` in log.jsonl; more documents, fewer steps, a smaller model; the checkpoint of the best val"),
    oscillating=("the loss swings up and down by more than its batches differ",
                 "the rate is too high (in the warm-up: its peak); numbers overflow in low precision",
                 "half the rate or twice the warm-up; one short run with --dtype=float32"),
    grad_pinned=("the gradient norm stays far over the clip",
                 "the rate is too high; the clip is too low; the loss is not divided by the accumulation",
                 "grad_norm at step 1; a lower rate, or a clip near the usual norm"),
    grad_norm=("the gradient norm is over 100",
               "the rate is too high; no clipping; bad initial weights",
               "--grad_clip=1 and half the rate; the norm at step 1"),
    spike=("one line of loss or gradient norm stands far over its neighbours",
           "a bad batch; the rate is near its limit",
           "the windows of that step in data/; if it comes back, a lower rate or beta2=0.95"),
    low_mfu=("MFU is under 30%",
             "waiting for data; a small micro-batch; compile off; a model too small for the device",
             "data_ms against step_ms; `python bench.py --sweep=True`"),
    data_wait=("over 5% of the time goes into waiting for data",
               "a slow or shared disk; too few CPU cores",
               "copy data/ to a local disk; cores per GPU"),
    resume_jump=("the loss jumps behind a resume",
                 "optimizer moments or step missing from the checkpoint; other data or rates",
                 "what the `resume` line lists as changed; preflight's resume check"),
    not_causal=("later tokens move earlier logits, or loss far under ln V from the start",
                "the causal mask is off",
                "the attention in model.py; preflight's causality check"),
    non_finite=("loss or gradient norm is not a number",
                "overflow in low precision; the rate is too high; a damaged weight",
                "alarm_step_N.json names the first module; a few steps with --dtype=float32; a lower rate"),
    save_failed=("a save failed",
                 "the disk is full, or a network volume went away",
                 "make room: the run goes on, keeps the older checkpoints and tries again"),
    hang=("the job stands still, then ends by itself",
          "a rank died or waits for another; a disk does not answer",
          "hang.rankN.txt shows where each rank stood; the same command continues"),
    same_data=("every rank reports the same loss, or more ranks don't help",
               "every rank reads the same windows",
               "preflight's check of ranks; batch_crc of one rank against several"),
    out_of_memory=("out of memory in the first steps",
                   "micro-batch, context or logits too large for the device",
                   "half --micro_batch_size; --loss_chunks=4; --activation_checkpointing=True"),
)


class Finding(NamedTuple):
    kind: str  # a key of SYMPTOMS
    step: int
    message: str  # what was seen, with its numbers
    causes: str
    check: str
    stop: bool  # guard=stop ends the run here


# Thresholds, with the runs that set them. A: 0.6M parameters, 8 windows of 128 tokens a step of the demo's data
# (ln V = 8.32, 3.4 bytes a token), AdamW at 2e-3, 300 steps. B: the same on bytes, on made-up sentences, on made-up
# server logs. Most are a share of ln V or a multiple of the curve's own noise.
EARLY = 200  # steps in which a scratch start is still cheap to end
FLAT_AT, FLAT_NATS, FLAT_NOISE = 150, 0.1, 4.0  # A with rate 0: 0.02; with 2000 steps of warm-up to 3e-4: falls by 0.15
START_LOW_NATS, START_HIGH = 1.0, 1.25  # under ln V: B on bytes 0.55, A with targets shifted by zero 2.3; of ln V
RISE_START = 0.05  # of ln V, over step 1. A at rate 0.2: 0.45 at step 9; at 0.02: never over it
RISE_STEPS, RISE_NATS, RISE_NOISE = 50, 0.5, 10.0  # over the best median of so many steps
SUSTAINED_NATS, SUSTAINED_NOISE = 0.3, 4.0  # over the level of step 200, for 200 steps
FAST_BPB, FAST_TOKENS, FAST_BPB_LATER, FAST_BPB_EVER = 0.7, 2e7, 0.5, 0.35  # B, logs: 0.86; language far over it
FAST_BELOW, FAST_RATIO, FAST_NOISE = 2.5, 0.65, 5.0  # bits per byte; of 50 steps before. A 0.9, B 0.69, no mask 0.6
SWING, SWING_NOISE = 0.08, 4.0  # of ln V, between medians of 4 lines. A at rate 0.06: 0.12 within its warm-up
OVERFIT_NATS = 0.1  # over the best val loss, in two evaluations, or three times that in one. A on 5 documents: 0.5, 1.3
PINNED, NORM = 4.0, 100.0  # times the clip for 100 steps; absolute. A: 1.2 to 1.6 times
SPIKE_NOISE, SPIKE_NATS, SPIKE_NORM = 8.0, 0.3, 10.0  # over the last 8 lines; times the median norm of 32
JUMP_NOISE, JUMP_NATS = 5.0, 0.3
LOW_MFU, DATA_WAIT, DATA_WAIT_MS = 0.30, 0.05, 10.0  # A: 0.5 ms; up to 8 ms with six other jobs on both cores


def noise_of(loss):
    """Standard deviation of a curve around its trend, from the differences of neighbours; of few, a high guess."""
    if len(loss) < 4:
        return 0.0
    steps = np.diff(loss)
    return (1 + 4 / len(loss)) * 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)


def swings(levels, least):
    """How often a curve rose by `least` from its lowest and then fell by as much again. levels (n,)."""
    count, rising, low, high = 0, False, math.inf, -math.inf
    for level in levels:
        low, high = min(low, level), max(high, level)
        if not rising and level > low + least:
            rising, high = True, level
        elif rising and level < high - least:
            count, rising, low = count + 1, False, level
    return count


def diagnose(rows, settings, vocab_size, world):
    """What the curve up to its last row shows, as a list of Findings; a healthy one has none.

    rows: log.jsonl from the run's first start on; settings: train.Config as a dict; world: ranks. Reads the first 600
    and the last 2,000 rows, so a line of a long run costs no more than one of a short run.
    """
    begin, recent = rows[:600], rows[-600:]
    lines = [row for row in recent if row["event"] == "step" and row["loss"] is not None]
    if not lines:
        return []
    first = next(row for row in begin + lines if row["event"] == "step" and row["loss"] is not None)
    start = next((row for row in begin if row["event"] == "run_start"), {})
    scratch = start.get("start", "scratch") == "scratch" and first["step"] == 1
    step, every, ln_v = lines[-1]["step"], settings["log_interval"], math.log(vocab_size)
    at, loss = (np.array([row[key] for row in lines]) for key in ("step", "loss"))
    norm = np.array([row["grad_norm"] for row in lines if row["grad_norm"] is not None])  # an fp16 line may lack it
    noise, early, found = noise_of(loss[-64:]), scratch and step <= EARLY, {}

    def count(steps, least=3):
        """Lines that cover so many steps."""
        return max(least, -(-steps // every))

    def say(kind, message, stop=False, causes=None):
        found.setdefault(kind, Finding(kind, step, message, causes or SYMPTOMS[kind][1], SYMPTOMS[kind][2], stop))

    # the start, before anything was learned
    if early and first["loss"] > START_HIGH * ln_v:
        micro = settings["global_batch_tokens"] / (world * settings["micro_batch_size"] * settings["block_size"])
        divided = abs(first["loss"] / ln_v / micro - 1) > 0.1
        say("diverging", f"loss {first['loss']:.3f} at step 1 is {first['loss'] / ln_v:.2f} times ln V = {ln_v:.3f}, "
            f"and a step has {micro:g} micro-batches", True,
            None if divided else "the loss is not divided by the accumulation")
    if early and first["loss"] < ln_v - START_LOW_NATS:
        say("too_fast", f"loss {first['loss']:.3f} at step 1, before anything was learned; ln V is {ln_v:.3f}", True,
            "targets leak into the inputs (shifted by zero?); the causal mask is off")

    # flat
    opening = [row for row in begin if row["event"] == "step" and row["step"] <= EARLY and row["loss"] is not None]
    if scratch and step >= FLAT_AT and len(loss) >= 5:
        then = [row["loss"] for row in opening if row["step"] <= EARLY // 3]
        fall = float(np.mean(then) - np.mean(loss[-len(then):]))
        if fall <= min(FLAT_NATS, FLAT_NOISE * noise * math.sqrt(2 / len(then))):
            say("flat", f"loss {np.mean(then):.3f} in the first {EARLY // 3} steps and {np.mean(then) - fall:.3f} now",
                early, "the learning rate is zero" if not any(row["lr"] for row in lines)
                else "the optimizer does not step; the weights are frozen; the rate is far too low")

    # rising: over its start, over its level at step 200, over its best
    k = count(10)
    if early and len(loss) >= k and (level := float(np.median(loss[-k:]))) > first["loss"] + RISE_START * ln_v:
        say("diverging", f"loss {level:.3f} over the last {k} lines, {first['loss']:.3f} at step 1", True)
    last = loss[at > step - EARLY]
    if step >= 2 * EARLY and len(last) >= 3 and opening:
        then = [row["loss"] for row in opening][-max(3, 50 // every):]
        level = float(np.median(then))
        over = level + max(SUSTAINED_NATS, SUSTAINED_NOISE * noise * math.sqrt(1 / len(last) + 1 / len(then)))
        if last.min() > level and np.median(last) > over:
            say("diverging", f"loss {np.median(last):.3f} over the last {EARLY} steps, {level:.3f} at step {EARLY}",
                True)
    k = count(RISE_STEPS)
    if len(loss) >= 2 * k:
        levels = np.median(loss[len(loss) % k:].reshape(-1, k), axis=1)
        best, level = float(levels[:-1].min()), float(levels[-1])
        if level - best > max(RISE_NATS, RISE_NOISE * noise / math.sqrt(k)):
            say("diverging", f"loss {level:.3f} over the last {k} lines, {best:.3f} before", early)

    # falling faster than language allows; a second epoch can be learned by heart
    k, bits = count(20), 1 / math.log(2) / start.get("bytes_per_token", 1.0)
    level, before = float(np.median(loss[-k:])) * bits, loss[(at >= 50) & (at <= step - 50)][-k:]
    lowest = FAST_BPB_EVER if step > EARLY else FAST_BPB if lines[-1]["tokens"] < FAST_TOKENS else FAST_BPB_LATER
    before = float(np.median(before)) * bits if len(before) else math.inf
    if scratch and lines[-1]["epoch"] <= 1 and len(loss) >= k:
        if level < lowest:
            say("too_fast", f"{level:.2f} bits per byte at step {step}", early)
        elif before < FAST_BELOW and level < min(FAST_RATIO * before,
                                                 before - FAST_NOISE * noise * bits * math.sqrt(2 / k)):
            say("too_fast", f"{level:.2f} bits per byte at step {step}, {before:.2f} fifty steps before", early)

    # val against train; the last evaluation of a run reads other tokens than those before it
    part = rows[-2000:]
    ends = {row["step"] for row in part if row["event"] == "run_end"} | {settings["max_steps"]}
    evals = [row for row in part if row["event"] == "eval" and row["step"] not in ends and row["val_loss"] is not None]
    if len(evals) >= 2:
        best = min(evals[:-1], key=lambda row: row["val_loss"])
        *_, previous, now = (row["val_loss"] - best["val_loss"] for row in evals)
        then = [row["loss"] for row in part if row["event"] == "step" and row["step"] <= best["step"] and row["loss"]]
        if now > OVERFIT_NATS and (previous > OVERFIT_NATS or now > 3 * OVERFIT_NATS) and (
                not then or np.median(loss[-8:]) < np.median(then[-8:])):
            say("overfitting", f"val loss {evals[-1]['val_loss']:.3f} at step {evals[-1]['step']}, "
                f"{best['val_loss']:.3f} at step {best['step']}; train loss {np.median(loss[-8:]):.3f}, epoch "
                f"{lines[-1]['epoch']:.2f}")

    # up and down
    if len(loss) >= 16:
        levels = np.median(loss[-64:][len(loss[-64:]) % 4:].reshape(-1, 4), axis=1)
        times = swings(levels, max(SWING * ln_v, SWING_NOISE * noise))
        if times >= (1 if step <= EARLY else 2):
            say("oscillating", f"loss {times} time(s) up and down between {levels.min():.3f} and {levels.max():.3f} "
                f"within {4 * len(levels)} lines")

    # the gradient
    k, clip = count(100, 10), settings["grad_clip"]
    if clip and step > settings["warmup_steps"] and len(norm) >= k and np.median(norm[-k:]) > PINNED * clip:
        say("grad_pinned", f"gradient norm {np.median(norm[-k:]):.2f} over the last {k} lines, clipped to {clip:g}")
    if len(norm) >= 3 and np.median(norm[-3:]) > NORM:
        say("grad_norm", f"gradient norm {np.median(norm[-3:]):.1f}")
    if len(loss) >= 13:
        over, usual = loss[-1] - np.median(loss[-9:-1]), max(noise_of(loss[-65:-1]), 1e-9)
        usually, now = (float(np.median(norm[-33:-1])), norm[-1]) if len(norm) >= 13 else (math.inf, 0.0)
        if over > max(SPIKE_NATS, SPIKE_NOISE * usual) or now > SPIKE_NORM * usually:
            say("spike", f"loss {loss[-1]:.3f} (z {over / usual:.1f}), gradient norm {now:.2f} (median {usually:.2f})")

    # this process: speed, and how it took over
    begun = max((i for i, row in enumerate(recent) if row["event"] == "run_start"), default=-1)
    mine = [row for row in recent[begun + 1:] if row["event"] == "step"]
    if len(mine) > (k := count(20, 5)):
        ms, wait = (float(np.median([row[key] for row in mine[1:][-k:]])) for key in ("step_ms", "data_ms"))
        if waits := wait > max(DATA_WAIT * ms, DATA_WAIT_MS):
            say("data_wait", f"{wait:.1f} ms of a step's {ms:.1f} ms")
        mfu = [row["mfu"] for row in mine[1:][-k:] if row.get("mfu")]
        if mfu and np.median(mfu) < LOW_MFU:
            say("low_mfu", f"MFU {np.median(mfu):.1%}", causes="waiting for data" if waits else
                "compile is off; a small micro-batch" if not settings["compile"] else None)
    resume = next((row for row in recent[max(begun, 0):] if row["event"] == "resume"), None)
    if resume and 2 <= len(mine) <= 10:
        then, now = loss[at <= resume["step"]][-8:], loss[at > resume["step"]][:5]
        if len(then) and len(now) > 1 and np.median(now) - np.median(then) > max(
                JUMP_NATS, JUMP_NOISE * noise_of(then) * math.sqrt(1 / len(then) + 1 / len(now))):
            say("resume_jump", f"loss {np.median(then):.3f} before step {resume['step']}, {np.median(now):.3f} after")
    return list(found.values())


def history(rows, settings, vocab_size, world):
    """What `diagnose` had to say while a run went on; a kind again only after 200 steps without it."""
    said, last = [], {}
    at = [i + 1 for i, row in enumerate(rows) if row["event"] in ("step", "eval")]
    for i in at[::-max(1, -(-len(at) // 2000))][::-1]:  # the last one always among them
        for finding in diagnose(rows[:i], settings, vocab_size, world):
            if finding.step - last.get(finding.kind, -math.inf) > EARLY:
                said.append(finding)
            last[finding.kind] = finding.step
    return said


def of(rows, *events):
    return [row for row in rows if row["event"] in events]


def most(rows, key, default=0.0):
    return max((row[key] for row in rows if row.get(key) is not None), default=default)


def mishaps(rows, discarded, status):
    """[(step, what was seen, likely cause, device-hours lost or None)] in the order they came."""
    seen, begun = [], None
    for i, row in enumerate(rows):
        if row["event"] == "alarm":
            cause = SYMPTOMS[row["kind"]][1] if row["kind"] in SYMPTOMS else row.get("action")
            seen.append((row["step"], f"{row['kind']}: {row['message']}", cause, None))
        elif row["event"] == "run_start" and begun:
            gone = [x for x in discarded if begun["time"] <= x["time"] < row["time"]]
            kept = [x for x in rows[:i] if not gone or x["time"] < gone[0]["time"]]
            end = next(x for x in reversed(rows[:i]) if x["event"] in ("run_start", "stop", "run_end"))
            how, cause = dict(stop=(f"stopped by {end.get('reason')}", "asked for, or the guard"),
                              run_end=("finished", "more steps were asked for")).get(
                end["event"], ("ended without a word", "killed, crashed, or the machine went away"))
            again = f", {len(gone)} logged line{'s' * (len(gone) > 1)} done again" if gone else ""
            seen.append((row["step"], f"{how}; went on from step {row['step']}{again}", cause,
                         most(gone, "gpu_hours") - most(kept, "gpu_hours") if gone else 0.0))
            seen.append((row["step"], "loading and first pass of that restart", "",
                         row["gpu_hours"] - most(rows[:i] + gone, "gpu_hours")))
        begun = row if row["event"] == "run_start" else begun
    if status in ("killed", "crashed", "guard") and rows:
        safe = most([row for row in of(rows, "save", "run_start")  # what an earlier process lost is counted above
                     if not (row.get("path") or "").rpartition("/")[2].startswith("weights_")], "gpu_hours")
        seen.append((rows[-1]["step"], f"ended here, {status}: what follows the last save is lost", "",
                     max(0.0, most(rows, "gpu_hours") - safe)))
    return seen
