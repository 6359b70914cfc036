"""What happened in a run, from its folder alone: tables, curves, diagnosis, cost.

    python report.py out                 writes out/report.md and out/report.png
    python report.py out/a out/b         several runs side by side, written into the first

Works at any time, also on a run that is still going, was killed, or never got far. train.py starts it at every
evaluation and at the end.
"""
import contextlib
import fcntl
import io
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

from config import Refused, load

import numpy as np

from diagnosis import SYMPTOMS, history, mishaps, most, of


@dataclass(frozen=True)
class Config:  # words without -- are run folders; none: out
    gpu_hour_price: float = 0.0  # of one device; 0: what the run's settings say
    budget_gpu_hours: float = 0.0  # of all these runs; 0: what the run's settings say


def hours(n_params, tokens, devices, peak_tflops, mfu):
    """Hours of training: 6 FLOPs a parameter and token (Kaplan et al. 2020) over `mfu`, a fraction, of all peaks."""
    return 6 * n_params * tokens / (devices * peak_tflops * 1e12 * mfu) / 3600


# ---- reading one run

def read_log(out_dir, name="log.jsonl"):
    """The lines of a log, in order; a half-written last one, or a broken one, is left out."""
    rows = []
    with contextlib.suppress(OSError), open(os.path.join(out_dir, name), encoding="utf-8", errors="replace") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "event" in row and "step" in row]


def is_running(folder):
    """Whether a train.py holds the folder's lock."""
    try:
        with open(os.path.join(folder, ".lock")) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def middle(rows, key):
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(np.median(values)) if values else None


def read_run(folder, several=False):
    """A run folder as a namespace: its files, and figures that are None where nothing was recorded.

    Raises Refused where there is no run at all.
    """
    if not any(os.path.exists(os.path.join(folder, name)) for name in ("log.jsonl", "run.json")):
        raise Refused(f"{folder} holds no run (neither log.jsonl nor run.json): name the out_dir of a train.py run")
    r = SimpleNamespace(name="/".join(os.path.abspath(folder).split("/")[-2:]), rows=read_log(folder),
                        discarded=read_log(folder, "log.discarded.jsonl"))
    r.who = f"{r.name}: " if several else ""  # begins a sentence about it
    for name in ("run", "meta", "bench", "preflight", "prepare"):
        setattr(r, name, {})
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, f"{name}.json"), "rb") as f:
            setattr(r, name, dict(json.load(f)))
    r.steps, r.evals, r.starts = (of(r.rows, event) for event in ("step", "eval", "run_start"))
    r.settings, r.eval = r.run.get("settings") or {}, (r.evals or [{}])[-1]
    killed = r.run.get("status") == "running" and not is_running(folder)
    r.status = "killed" if killed else r.run.get("status") or "not recorded"
    r.world, r.n_params = r.run.get("device_count") or 1, r.run.get("n_params")
    r.step, r.max_steps = r.rows[-1]["step"] if r.rows else 0, r.settings.get("max_steps") or 0
    r.vocab_size = r.meta.get("vocab_size") or next((row.get("vocab_size") for row in r.starts), None)
    r.elapsed_s, r.hours = (most(r.rows + r.discarded, key) for key in ("elapsed_s", "gpu_hours"))
    r.memory, r.tokens_per_s = most(r.rows, "peak_memory_bytes", None), middle(r.steps, "tokens_per_s")
    r.mfu, r.step_ms = middle(r.steps, "mfu"), middle(r.steps, "step_ms")
    r.mishaps = mishaps(r.rows, r.discarded, r.status)
    r.findings = history(r.rows, r.settings, r.vocab_size, r.world) if r.settings and r.vocab_size else []
    r.lost_hours = sum(lost or 0.0 for *_, lost in r.mishaps)
    r.verdict = (", ".join(dict.fromkeys(f.kind for f in r.findings)) or "healthy curve") if r.steps else "no curve yet"
    return r


def where_time_went(r):
    """{what: seconds}, together the time that passed. Waiting for data is inside the steps."""
    parts = ("steps", "evaluation", "saving", "start and first pass", "work done again")
    spent, at, heard, begun = dict.fromkeys(parts, 0.0), 0, 0.0, 0.0
    for row in r.rows:
        if row["event"] == "step":
            spent["steps"] += (row["step"] - at) * row["step_ms"] / 1000
        elif row["event"] == "run_start":
            if gone := [x for x in r.discarded if begun <= x["time"] < row["time"]]:
                kept = [x for x in r.rows if x["time"] < gone[0]["time"]]
                spent["work done again"] += most(gone, "elapsed_s") - most(kept, "elapsed_s")
            begun, heard = row["time"], max(heard, most(gone, "elapsed_s"))
            spent["start and first pass"] += row["elapsed_s"] - heard
        spent["evaluation"] += row.get("seconds") or 0.0
        spent["saving"] += (row.get("stall_ms") or 0.0) / 1000
        at, heard = row["step"] if row["event"] in ("step", "run_start") else at, max(heard, row["elapsed_s"])
    return spent | {"the rest": max(0.0, r.elapsed_s - sum(spent.values()))}


# ---- words and tables

def duration(seconds):
    m, s = divmod(round(seconds), 60)
    return f"{m // 60}h{m % 60:02}m" if m >= 60 else f"{m}m{s:02}s" if m else f"{s}s"  # 1h02m, 3m20s or 12s


def cell(value, form="{}"):
    return "not measured" if value is None or value == "" else form.format(value)


def table(title, head, rows):
    """Lines of a markdown table."""
    rows = [[str(x).replace("|", "/").replace("\n", " ") for x in row] for row in [head, ["---"] * len(head), *rows]]
    return [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]


def basics(r):
    """{what: text or nothing}"""
    s, run, sources = r.settings, r.run, r.meta.get("splits", {}).get("train", {})
    micro = s and s["global_batch_tokens"] // (r.world * s["micro_batch_size"] * s["block_size"])
    return {
        "state": r.status + (f", exit code {run['exit_code']}" if run.get("exit_code") is not None else ""),
        "start": run.get("started") and time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["started"])),
        "duration": r.elapsed_s and duration(r.elapsed_s),
        "hardware": run.get("device") and f"{r.world} x {run['device']}",
        "link": run.get("link") or (run and "none: one process"),
        "parallelism": s and f"data parallel over {r.world}, {micro} x {s['micro_batch_size']} windows of "
                             f"{s['block_size']} tokens each a step",
        "precision": s.get("dtype"),
        "model": r.n_params and f"{r.n_params:,} parameters, {s['n_layer']} layers of width {s['n_embd']}",
        "data": sources and ", ".join(f"{name} {source['tokens']:,}" for name, source in sources.items()) + " tokens",
        "steps": r.max_steps and f"{r.step:,} of {r.max_steps:,}",
        "tokens read": r.steps and f"{r.steps[-1]['tokens']:,}, {r.steps[-1]['epoch']:.2f} epochs",
        "code": run.get("commit") and f"{run['commit'][:12]}{', with local changes' if run.get('dirty') else ''}, "
                                      f"torch {run['versions']['torch']}"}


def speed(r):
    """{what: (estimate of bench.json, measured, their format)}, None where there is none."""
    b, alone = r.bench, 1.0 if r.world == 1 else None
    if (b.get("n_params", r.n_params), b.get("devices", r.world)) != (r.n_params, r.world):
        b = {}  # of another model, or on other devices
    if b.get("global_batch_tokens") not in (None, r.settings.get("global_batch_tokens")):
        b = b | dict(step_ms=None)  # of another step
    tokens = r.max_steps * r.settings.get("global_batch_tokens", 0)
    for key in ("est_hours", "est_gpu_hours") if tokens and b.get("est_tokens") else ():  # for this run's length
        b = b | {key: b.get(key) and b[key] * tokens / b["est_tokens"]}
    if b.get("tokens_per_s") and b.get("speedup") and r.tokens_per_s:
        alone = r.tokens_per_s / b["tokens_per_s"] * b["speedup"]
    return {"tokens/s": (b.get("tokens_per_s"), r.tokens_per_s, "{:,.0f}".format),
            "MFU (6N)": (b.get("mfu"), r.mfu, "{:.1%}".format),
            "step": (b.get("step_ms"), r.step_ms, "{:,.1f} ms".format),
            "peak memory": (b.get("peak_memory_bytes"), r.memory, lambda n: f"{n / 2**30:.2f} GiB"),
            "speed-up over one device": (b.get("speedup"), alone, "{:.2f}".format),
            "device-hours": (b.get("est_gpu_hours"), r.hours or None, "{:.3g}".format),
            "duration": (b["est_hours"] * 3600 if b.get("est_hours") else None, r.elapsed_s or None, duration)}


def quality(r):
    """{what: number or None}"""
    found = {"loss before the first update": r.run.get("initial_loss"),
             "train loss, median of the last 10 lines": middle(r.steps[-10:], "loss")}
    sources = {f"source {name}" if name == "val" else name: s for name, s in (r.eval.get("sources") or {}).items()}
    for name, source in {"val": r.eval, **sources}.items():
        found |= {f"{name} {what}": source.get(f"val_{key}") for key, what in (
            ("loss", "loss"), ("ppl", "perplexity"), ("bpb", "bits per byte"))}
    return found


def gap(r):
    """The difference between estimate and measurement, in words."""
    said = [f"{what} {form(now)}, {now / estimate - 1:+.1%} against the estimate." for what, (estimate, now, form)
            in speed(r).items() if estimate and now and (what in ("tokens/s", "peak memory") or
                                                         what == "duration" and r.step == r.max_steps)]
    if not said:
        said.append("No estimate to compare with: `python bench.py` with this run's settings makes one.")
    if r.mfu and r.n_params and r.max_steps:
        peak = 6 * r.n_params * r.tokens_per_s / r.mfu / r.world / 1e12
        tokens = r.max_steps * r.settings["global_batch_tokens"]
        said.append(f"All {r.max_steps:,} steps are {hours(r.n_params, tokens, r.world, peak, r.mfu):.3g} h of pure "
                    f"training at the MFU measured, {hours(r.n_params, tokens, r.world, peak, 0.4):.3g} h at 40%.")
    parts = [f"{what} {s / r.elapsed_s:.1%}" for what, s in where_time_went(r).items() if r.elapsed_s and s]
    waits = sum(row["data_ms"] for row in r.steps) / max(1e-9, sum(row["step_ms"] for row in r.steps))
    said.append(f"Where the time went: {', '.join(parts) or 'not measured'}; {waits:.1%} of the steps was data wait.")
    return " ".join(said)


def costs(runs, c):
    """Lines of the cost table: device-hours and money an item, over all runs."""
    settings = next((r.settings for r in runs if r.settings.get("gpu_hour_price")), runs[0].settings)
    price = c.gpu_hour_price or settings.get("gpu_hour_price") or 0
    budget = c.budget_gpu_hours or sum(r.settings.get("budget_gpu_hours") or 0 for r in runs)
    once = {r.run.get("data_fingerprint"): r.prepare["device_hours"] for r in runs if r.prepare.get("device_hours")}
    items = [("data", [*once.values()] or [r.prepare.get("device_hours") for r in runs])]  # several runs on one folder
    items += [(name, [getattr(r, key).get("device_hours") for r in runs]) for name, key in (
        ("smoke test (preflight)", "preflight"), ("bench", "bench"))]
    items += [("run", [r.hours - r.lost_hours if r.rows else None for r in runs]),
              ("reruns: lost work, restarts", [r.lost_hours if r.rows else None for r in runs])]
    rows = [(name, sum(filter(None, parts)) if set(parts) != {None} else None) for name, parts in items]
    rows.append(("**total**", sum(x or 0.0 for _, x in rows)))
    lines = [(name, cell(x, "{:.4g}"), "not measured" if x is None else f"{x * price:,.2f}" if price else "")
             for name, x in rows]
    if budget:
        lines.append(("budget", f"{budget:g}", f"{rows[-1][1] / budget:.1%} used"))
    money = settings.get("currency") or "USD" if price else "money: no --gpu_hour_price was given"
    return table("Cost", ("", "device-hours", money), lines)


def five_questions(runs):
    """What changed, what was fixed, what ran, what came out, what is still open: a list in markdown."""
    settings, first = [r.settings for r in runs], runs[0].settings
    differ = [key for key in first if key not in ("out_dir", "question", "note")
              and any(s.get(key) != first[key] for s in settings)]
    changed = [f"`{key}` {' / '.join(str(s.get(key)) for s in settings)}" for key in differ]
    if len(runs) == 1 and runs[0].run.get("command"):
        changed = [f"against the defaults: `train.py{runs[0].run['command'].partition('train.py')[2]}`"]
    changed += [f"on resume at step {row['step']}: " + ", ".join(f"`{key}` {a} → {b}" for key, (a, b) in
                row["changed"].items()) for r in runs for row in of(r.rows, "resume") if row.get("changed")]
    fixed = [f"data {'/'.join(sorted({str(r.run.get('data_fingerprint'))[:12] for r in runs}))}"]
    fixed += [f"{key} {first[key]}" for key in ("seed", "n_layer", "n_embd", "block_size", "global_batch_tokens",
              "optimizer", "learning_rate", "lr_schedule", "warmup_steps") if key in first and key not in differ]
    ran = [f"{r.who}{r.status}, {r.step:,} of {r.max_steps:,} steps in {len(r.starts)} start(s), {r.hours:.3g} "
           f"device-hours" for r in runs]
    out = [f"{r.who}val loss {cell(r.eval.get('val_loss'), '{:.4f}')}, {cell(r.eval.get('val_bpb'), '{:.4f}')} bits "
           f"per byte; {r.verdict}" for r in runs]
    opened = [f"{what} not measured" for what, key in (("speed before the run", "bench"), ("preflight", "preflight"))
              if not any(getattr(r, key) for r in runs)]
    for r in runs:
        to_go = r.max_steps - r.step
        opened += [f"{r.who}{to_go:,} steps, {duration(to_go * (r.step_ms or 0) / 1000)}"] if to_go > 0 else []
        opened += [f"{r.who}why {f.kind} at step {f.step}" for f in r.findings]
        opened += [f"{r.who}its code is in no commit"] if r.run.get("dirty") else []
    if len({s.get("seed") for s in settings}) == 1:
        opened.append("one seed: how much of this is chance is not known")
    if not any(r.run.get("test_scorings") for r in runs):
        opened.append("the test split is unread")
    asked = [s[key] for s in settings for key in ("question", "note") if s.get(key)]
    answers = {"Asked": asked, "What changed": changed, "What was fixed": fixed, "What ran": ran, "What came out": out,
               "What is still open": opened}
    said = {title: "; ".join(dict.fromkeys(parts)) or "nothing recorded" for title, parts in answers.items()}
    return [f"- **{title}:** {text}{'' if text.endswith(('.', '?', '!')) else '.'}"
            for title, text in said.items() if answers[title] or title != "Asked"]


# ---- the picture

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#999933")  # Okabe and Ito: told apart by all eyes
RED, GREY = "#D55E00", "#777777"


def smooth(values):
    """Running median over a twentieth of the curve, at most 51 lines. values (n,)."""
    k = min(51, max(3, len(values) // 20)) // 2
    return np.array([np.median(values[max(0, i - k):i + k + 1]) for i in range(len(values))])


def draw_loss(axes, r, color, several):
    """One run's train and val loss. Returns the lowest and the highest value worth showing, or nothing."""
    lines = [row for row in r.steps if row["loss"] is not None]
    at, loss = [row["step"] for row in lines], np.array([row["loss"] for row in lines])
    shown = [*np.quantile(loss, (0, 0.98)), *loss[:1]] if lines else []
    axes.plot(at, loss, color=color, alpha=0.3, linewidth=0.8)
    axes.plot(at, smooth(loss), color=color, linewidth=2, label=None if several else "train")
    names = [""] if several else ["", *(r.eval.get("sources") or ())]
    for name, tint in zip(names, [color] if several else [RED, *COLORS[1:] * 9], strict=False):
        values = [(row.get("sources", {}).get(name, {}) if name else row).get("val_loss") for row in r.evals]
        points = [(row["step"], x) for row, x in zip(r.evals, values, strict=True) if x is not None]
        whole = r.status == "finished" and len(points) > 1  # the last evaluation alone reads all of val
        label = f"{r.name}: val" if several else f"val {name}" if name else "val"
        if points:
            axes.plot(*zip(*points[:-1] if whole else points, strict=True), color=tint, marker="o", markersize=4,
                      linewidth=1.3)
            axes.plot(*points[-1], color=tint, marker="D", markersize=8, linestyle="",
                      label=f"{label} {points[-1][1]:.3f}")
            shown += [value for _, value in points]
    saves = [row["step"] for row in of(r.rows, "save")]
    axes.plot(saves, [0.012] * len(saves), "^", color=color if several else GREY, markersize=7,
              transform=axes.get_xaxis_transform(), label="save" if saves and not several else None)
    return shown


def plot(runs, path):
    """report.png, 1600 x 1000: the loss, large; beside and below it rate, gradient norm, speed, data wait, memory."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
                         "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False,
                         "axes.spines.right": False})
    figure, r, several, shown = plt.figure(figsize=(16, 10), dpi=100), runs[0], len(runs) > 1, []
    grid = figure.add_gridspec(3, 3, left=0.05, right=0.955, top=0.885, bottom=0.06, wspace=0.22, hspace=0.42)
    large = figure.add_subplot(grid[:2, :2], title="loss, nats a token")
    clip, small = r.settings.get("grad_clip"), {}
    for name, place, title in (
            ("lr", grid[0, 2], "learning rate"), ("memory", grid[2, 2], "peak memory, GiB"),
            ("grad_norm", grid[1, 2], f"gradient norm, clipped to {clip:g}" if clip else "gradient norm"),
            ("tokens_per_s", grid[2, 0], "tokens/s" if r.mfu else "tokens/s (no MFU: peak unknown)"),
            ("wait", grid[2, 1], "waiting for data, % of a step")):
        small[name] = figure.add_subplot(place, title=title)
    for number, (run, color) in enumerate(zip(runs, COLORS * len(runs), strict=False)):
        shown += draw_loss(large, run, color, several)
        memory = [(row["step"], row["peak_memory_bytes"] / 2**30) for row in run.rows if row.get("peak_memory_bytes")]
        waits = [(row["step"], 100 * row["data_ms"] / row["step_ms"]) for row in run.steps]
        curves = {key: [(row["step"], row[key]) for row in run.steps if row[key] is not None]
                  for key in ("lr", "grad_norm", "tokens_per_s")} | dict(wait=waits, memory=memory)
        for name, points in curves.items():
            small[name].plot(*zip(*points or [(0, math.nan)], strict=True), color=color, linewidth=1.5,
                             marker="o" if name == "memory" else None)
        marks = [(row["step"], row.get("kind") or " ".join(filter(None, (row["event"], row.get("reason")))))
                 for row in of(run.rows, "alarm", "resume", "stop")]
        for i, (step, what) in enumerate(sorted(marks)):
            tint = color if several else GREY if what == "resume" else RED
            for axes in (large, *small.values()):
                axes.axvline(step, color=tint, linewidth=1, linestyle="--", alpha=0.8)
            large.text(step, 0.16 - 0.035 * ((i + number) % 4), f" {what} ", color=tint,
                       ha="left" if step < 0.8 * run.step else "right", transform=large.get_xaxis_transform())
    if r.vocab_size:
        shown.append(math.log(r.vocab_size))
        large.axhline(shown[-1], color=GREY, linewidth=1, linestyle=":")
        large.text(1, shown[-1], "ln V: nothing learned", ha="right", va="bottom", color=GREY,
                   transform=large.get_yaxis_transform())
    low, high = (min(shown), min(max(shown), 2 * sorted(shown)[len(shown) // 2] + 2)) if len(shown) > 1 else (0, 10)
    low = min(low, high - 1)  # the noise of a flat curve must not look like a slope
    large.set_ylim(low - 0.12 * (high - low), high + 0.06 * (high - low))
    if large.get_legend_handles_labels()[0]:  # a run that was stopped at once has nothing to name
        large.legend(loc="upper right", bbox_to_anchor=(1, 0.92), edgecolor="none")
    norms = [row["grad_norm"] for run in runs for row in run.steps if row["grad_norm"] is not None]
    small["grad_norm"].set_ylim(0, 1.5 * float(np.quantile(norms, 0.98)) if norms else 1)
    small["grad_norm"].axhline(clip or math.nan, color=GREY, linewidth=1, linestyle=":")
    if r.mfu and r.tokens_per_s:
        share = 100 * r.mfu / r.tokens_per_s
        right = small["tokens_per_s"].secondary_yaxis("right", functions=(lambda y: y * share, lambda y: y / share))
        right.set_ylabel("MFU, %")
    for axes in (large, *small.values()):
        axes.set(xlabel="step", xlim=(0, 1.02 * max(1, *(run.step for run in runs))))
        if axes not in (large, small["grad_norm"]) and 0 < axes.dataLim.ymax < math.inf:
            axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    title = f"{len(runs)} runs" if several else f"{r.name} · {r.status}, step {r.step:,} · {r.verdict}"
    figure.text(0.05, 0.965, title, fontsize=16, fontweight="bold")
    figure.text(0.05, 0.94, f"{r.n_params or 0:,} parameters · {r.world} x {r.run.get('device')} · thick line: running "
                "median, dots: val on eval_tokens, diamond: the last val" +
                ", on all" * all(run.status == "finished" for run in runs),
                fontsize=11, color=GREY)
    figure.savefig(picture := io.BytesIO(), format="png")
    plt.close(figure)
    write(path, picture.getvalue())


def write(path, data):
    """Renamed into place: no reader meets half a file, and two reports at once don't meet either. Raises Refused."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise Refused(f"{path} can't be written: {error.strerror}") from None


def write_report(out_dirs, c=None):
    """Writes report.md and report.png into the first of the run folders. Returns their paths. Raises Refused."""
    c, runs = c or Config(), [read_run(folder, len(out_dirs) > 1) for folder in out_dirs]
    several, names = len(runs) > 1, [r.name for r in runs] if len(runs) > 1 else ["this run"]
    facts, speeds, results = ([figures(r) for r in runs] for figures in (basics, speed, quality))
    lines = [f"# {', '.join(r.name for r in runs)}", "", *five_questions(runs), "", "![curves](report.png)", "",
             "## Diagnosis", ""]
    for r in runs:
        lines += [f"- {r.who}{r.verdict}", *(f"  - step {f.step}, **{f.kind}**: {f.message}. Likely: {f.causes}. "
                                                f"First check: {f.check}." for f in r.findings)]
    lines += ["", *table("Basics", ["", *names], [[key, *(cell(f[key] or None) for f in facts)] for key in facts[0]])]
    lines += table("Speed", ["", *(f"{name} {what}".removeprefix("this run ") for name in names
                                   for what in ("estimate", "measured"))],
                   [[key, *("not measured" if x is None else f[key][2](x) for f in speeds for x in f[key][:2])]
                    for key in speeds[0]])
    lines += [f"{r.who}{gap(r)}\n" for r in runs]
    rows = []
    for key in dict.fromkeys(key for result in results for key in result):
        values = [result.get(key) for result in results]
        known = [x for x in values if x is not None]
        chance = [f"{np.mean(known):.4f} ± {np.std(known, ddof=1):.4f}" if len(known) > 1 else ""] if several else []
        rows.append([key, *(cell(x, "{:.4f}") for x in values), *chance])
    lines += table("Quality", ["", *names, *(["mean ± standard deviation"] if several else [])], rows)
    lines += [f"{r.who}val as of step {r.eval['step']}, " + ("all its tokens" if r.status == "finished" else
              f"its first {r.settings.get('eval_tokens', 0):,} tokens at most") + ".\n" for r in runs if r.eval]
    lines += costs(runs, c)
    lines += table("Mishaps", ("step", "what was seen", "likely cause", "device-hours lost"), [
        (step, r.who + what, cause, "" if lost is None else f"{lost:.4f}")
        for r in runs for step, what, cause, lost in r.mishaps] or [("", "none", "", "")])
    seen = {f.kind for r in runs for f in r.findings} | {row["kind"] for r in runs for row in of(r.rows, "alarm")}
    lines += table("What you see, why, what to do", ("", "what you see", "likely cause", "what to do first"), [
        ("**seen**" if kind in seen else "", f"{what} ({kind})", cause, check)
        for kind, (what, cause, check) in SYMPTOMS.items()])
    paths = [os.path.join(out_dirs[0], name) for name in ("report.md", "report.png")]
    write(paths[0], "\n".join(lines).encode(errors="backslashreplace"))
    plot(runs, paths[1])
    return paths


def main():
    folders = []
    c = load(Config, sys.argv[1:], __doc__, positional=folders)
    print("\n".join(write_report(folders or ["out"], c)))


if __name__ == "__main__":
    main()
