"""Two branches: a run that was cut by SIGKILL and gone on with against one that never was, bit for bit.

    python tests/branches.py [FOLDER]     the whole table; exit code 1 if anything differs

Every process is a real one, under torchrun where there are several ranks. A cut: the save of step N is over, the step
after it is made, then SIGKILL to torchrun and every rank. Compared are the log (batches, rates, losses, gradient norms,
evaluations), and everything in the last checkpoint: parameters, optimizer tensors, RNG states, counters. Controls
resume without the RNG, the moments or the count of windows, and must differ.
"""
import contextlib
import glob
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ["PYTHONPATH"] = os.pathsep.join((ROOT, os.path.join(ROOT, "tests")))  # where a fork server looks
sys.path[:0] = ROOT, os.path.join(ROOT, "tests")

import torch  # noqa: E402
from conftest import TINY, checkpoint, column, sentences, write_data  # noqa: E402

import process  # noqa: E402
import train  # noqa: E402

STEPS, BLOCK, WINDOWS = 20, 32, 90  # 12 windows a step: step 8 straddles two epochs, step 15 ends the second
WORDS = (*TINY, "--dropout=0.1", f"--max_steps={STEPS}", "--save_interval=1", "--keep_last=99", "--eval_interval=6",
         "--eval_tokens=100")
CUTS = (1, 7, 8, 12, 15, 19, 20)
FORGET = dict(rng=[], optimizer={}, windows=0)


def make_data(folder):
    """WINDOWS windows an epoch, exactly: documents of BLOCK ids, end-of-text included."""
    text, held_out = "".join(sentences(200)).encode().decode("ascii", "ignore"), 6
    size = BLOCK - 1
    documents = [text[i * size:(i + 1) * size] for i in range(WINDOWS + 1 + 2 * held_out)]
    return write_data(folder, documents, val_share=(held_out + 0.5) / len(documents))


# ---- one process

def work(words, cut=0, forget=None):
    """train.main(), held at the first save or evaluation after `cut`'s save, or resuming without `forget`."""
    out = [word for word in words if word.startswith("--out_dir=")][-1].partition("=")[2]
    real_save, real_load, saved = train.save, torch.load, []

    def hold():
        if saved:
            open(f"{out}.held.{os.environ.get('RANK', 0)}", "w").close()
            time.sleep(10**6)

    def save(run, kind):
        hold()
        done = real_save(run, kind)
        if run.state["step"] == cut:
            saved.append(cut)
        return done

    def evaluate(*args, real=train.evaluate):
        if saved and saved[0] == STEPS:  # nothing is saved after the last step
            hold()
        return real(*args)
    def load(*args, **options):
        loaded = real_load(*args, **options)
        return loaded | {forget: FORGET[forget]} if isinstance(loaded, dict) and "rng" in loaded else loaded

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(process.Log, "start_report", lambda log: None))
        if cut:
            stack.enter_context(mock.patch.object(train, "save", save))
            stack.enter_context(mock.patch.object(train, "evaluate", evaluate))
        if forget:
            stack.enter_context(mock.patch.object(torch, "load", load))
        sys.argv = ["train.py", *words]
        train.main()


def children(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(word) for word in f.read().split()]
    return []


class Torchrun:
    """That process, or torchrun with so many of them. Its screen goes to OUT_DIR.screen."""

    def __init__(self, ranks, words, cut=0, forget=None):
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        with open(f"{words[-1].partition('=')[2]}.screen", "a") as screen:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, os.path.abspath(__file__), "run", str(cut), forget or "-", *words],
                stdout=screen, stderr=screen, cwd=ROOT)

    def code(self):
        """None while it runs, then its exit code."""
        return self.process.poll()

    def kill(self):
        """SIGKILL to torchrun and to its ranks, each of which leads a session of its own."""
        pids = [self.process.pid, *children(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):  # init has to collect them
            time.sleep(0.01)


context = multiprocessing.get_context("forkserver")  # its server imports torch once; each rank is a fork, ready at once
context.set_forkserver_preload(["torch._dynamo", "branches"])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def as_rank(function, rank, ranks, port, output, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    screen = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    try:
        function(*args)
    except Exception:
        sys.excepthook(*sys.exc_info())  # exits with 2 on a refusal
        sys.exit(1)


class Forked:
    """The same ranks without torchrun and its seconds, for the test suite: `function` in each."""

    def __init__(self, ranks, words, *args, function=work):
        port, output = free_port(), f"{words[-1].partition('=')[2]}.screen"
        self.processes = [context.Process(target=as_rank, args=(function, rank, ranks, port, output, (words, *args)))
                          for rank in range(ranks)]
        for rank in self.processes:
            rank.start()

    def code(self):
        """None while one runs, then the exit code farthest from 0."""
        codes = [rank.exitcode for rank in self.processes]
        return None if None in codes else max(codes, key=abs)

    def kill(self):
        for rank in self.processes:
            rank.kill()
            rank.join()


def run(ranks, words, cut=0, forget=None, launch=Torchrun, timeout=600):
    """A run from its start to its end or cut. Raises AssertionError for any other end."""
    out = words[-1].partition("=")[2]
    job, began = launch(ranks, words, cut, forget), time.time()
    while job.code() is None and time.time() - began < timeout:
        if cut and len(glob.glob(f"{out}.held.*")) == ranks:
            job.kill()
            for path in glob.glob(f"{out}.held.*"):
                os.unlink(path)
            return
        time.sleep(0.02)
    code = job.code()
    if code is None:
        job.kill()
    with open(f"{out}.screen", errors="replace") as f:
        assert code == 0 and not cut, f"ended with {code}:\n{f.read()[-3000:]}"


# ---- what must be equal

def differences(a, b, path=""):
    """Paths at which two checkpoints differ: tensors bit for bit, everything else by value."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


def compare(straight, out):
    """What differs between an uninterrupted run and another one: columns of the log, entries of the last checkpoint."""
    found = [f"{event} {key}" for event, keys in (
        ("step", "step epoch loss lr grad_norm batch_crc tokens targets"), ("eval", "step val_loss val_bpb sources"))
        for key in keys.split() if column(out, key, event) != column(straight, key, event)]
    a, b = (checkpoint(folder, STEPS) for folder in (straight, out))
    for saved in (a, b):
        saved["settings"].pop("out_dir")
    return found + differences(a, b)


def resumed_as_cut(out, cuts):
    """Whether each resumed process began with the step behind its cut and made exactly the steps up to its own end."""
    with open(f"{out}/log.jsonl", encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    starts = [i for i, line in enumerate(lines) if line["event"] == "resume"]
    made = [[line["step"] for line in lines[i:j] if line["event"] == "step"]
            for i, j in zip(starts, [*starts[1:], len(lines)], strict=True)]
    ends = [*cuts[1:], STEPS]
    return (made == [list(range(cut + 1, end + 1)) for cut, end in zip(cuts, ends, strict=True)] and
            [lines[i]["step"] for i in starts] == list(cuts))


def branch(straight, out, ranks, words, cuts, launch=Torchrun):
    """Cuts a run after the saves of `cuts`, goes on, and returns what differs from `straight`. As the last process
    found it, the folder is kept in OUT.cut."""
    for cut in cuts:
        run(ranks, [*words, f"--out_dir={out}"], cut, launch=launch)
    shutil.copytree(out, f"{out}.cut")
    run(ranks, [*words, f"--out_dir={out}"], launch=launch)
    return compare(straight, out) + ([] if resumed_as_cut(out, cuts) else ["steps made after the resume"])


def control(straight, out, ranks, words, forget, launch=Torchrun):
    """What differs when the run that was cut in `out` is gone on with by a process that forgets something."""
    shutil.copytree(f"{out}.cut", f"{out}.{forget}")
    run(ranks, [*words, f"--out_dir={out}.{forget}"], forget=forget, launch=launch)
    return compare(straight, f"{out}.{forget}")


# ---- the table

def main(folder):
    data, failed, count = make_data(f"{folder}/data"), 0, 0
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"

    def line(name, ranks, cuts, found, must_differ=False):
        nonlocal failed, count
        wrong = bool(found) != must_differ
        failed, count = failed + wrong, count + 1
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "") or "nothing"
        print(f"{'WRONG' if wrong else 'ok':<6}{name:<22}{ranks:>6}  {cuts:<12}{shown}", flush=True)

    print(f"{'':<6}{'run':<22}{'ranks':>6}  {'cut after':<12}differs")
    plans = [("eager", r, [], [*[[cut] for cut in CUTS], [5, 13]]) for r in (1, 2, 3)]
    plans += [("compiled", r, ["--compile=True"], [[8], [15], [20]] if r < 3 else [[15]]) for r in (1, 2, 3)]
    plans += [("muon", r, ["--optimizer=muon"], [[8]]) for r in (1, 2)]
    plans += [(d, r, [f"--dtype={d}"], [[8]]) for d in ("bfloat16", "float16") for r in (1, 2)]
    plans += [("checkpointing, chunks", 2, ["--activation_checkpointing=True", "--loss_chunks=3"], [[8]])]
    for name, ranks, extra, all_cuts in plans:
        base, words = f"{folder}/{name.split(',')[0]}{ranks}", [*WORDS, f"--data_dir={data}", *extra]
        run(ranks, [*words, f"--out_dir={base}.straight"])
        for cuts in all_cuts:
            out = f"{base}.{'_'.join(map(str, cuts))}"
            line(name, ranks, " and ".join(map(str, cuts)), branch(f"{base}.straight", out, ranks, words, cuts))
        for forget in FORGET if name == "eager" else ():  # in the first epoch: at another, no windows is refused
            found = control(f"{base}.straight", f"{base}.7", ranks, words, forget)
            line(f"control: no {forget}", ranks, "7", found, must_differ=True)
    print(f"{count} branches, {failed} wrong")
    return failed > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        work(sys.argv[4:], int(sys.argv[2]), None if sys.argv[3] == "-" else sys.argv[3])
    else:
        with contextlib.ExitStack() as stack:
            sys.exit(main(sys.argv[1] if sys.argv[1:] else stack.enter_context(tempfile.TemporaryDirectory())))
