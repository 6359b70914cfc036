"""Faults for train.py, in real processes: killed at any operation of a save, at a step, at a random moment.

    python tests/crash.py [KILLS]     `make faults`: 200 SIGKILLs, one rank and two, and what was lost by them
    python tests/crash.py ends        SIGTERM in each phase, dead and hanging ranks: seconds to the end, exit codes

A fault is dict(at=, nth=, do=, rank=0): when `at` happens for the nth time in the process of that rank, `do` is done.
`at` is an operation of a save (PHASES, or "operation" for any of them, counted from the first temporary file on) or
"start", "first_pass", "step", "evaluate", "save". `do` is kill, kill job, term, term agent, term swallowed, raise,
refuse, sleep, EIO, or a shell command.
"""
import builtins
import collections
import contextlib
import errno
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ["PYTHONPATH"] = os.pathsep.join((ROOT, os.path.join(ROOT, "tests")))  # where a fork server looks
sys.path[:0] = ROOT, os.path.join(ROOT, "tests")

import torch  # noqa: E402
from conftest import TINY, checkpoint, column, rows, same_tensors, sentences, train_here, write_data  # noqa: E402

import prepare  # noqa: E402
import process  # noqa: E402
import train  # noqa: E402
from config import Refused  # noqa: E402
from model import newest_verified  # noqa: E402

PHASES = ("tmp opened", "tmp written", "fsync", "rename", "folder fsync", "json", "delete")
WORDS = (*TINY, "--dropout=0.1", "--save_interval=2", "--keep_last=1", "--weights_interval=3", "--max_steps=40",
         "--micro_batch_size=6", "--guard=off")


# ---- operations on files, as they happen

class Written(io.BufferedWriter):
    """A file that announces each write when half of it has reached the kernel."""
    announce = None

    def write(self, data):
        half = len(data) // 2
        super().write(data[:half])
        self.flush()
        self.announce("write", self.name)
        super().write(data[half:])
        self.flush()
        return len(data)


@contextlib.contextmanager
def watched(folder, before, after=lambda operation, *paths: None):
    """before(operation, *paths) and after(...) around each open for writing, write, fsync, rename, unlink and mkdir
    at or below `folder` in this process."""
    folder, real_open = os.path.abspath(folder), builtins.open

    def around(real, name, *paths):
        paths = [os.path.abspath(path) for path in paths]
        inside = [path for path in paths if path == folder or path.startswith(folder + os.sep)]
        if inside:
            before(name, *paths)
        result = real()
        if inside:
            after(name, *paths)
        return result

    def opened(path, mode="r", *args, **options):
        if mode != "wb" or not isinstance(path, str):
            return real_open(path, mode, *args, **options)
        file = around(lambda: Written(io.FileIO(path, "w")), "open", path)
        file.announce = lambda *event: around(lambda: None, *event)
        return file

    def announced(name, paths_of):
        real = getattr(os, name)
        return mock.patch.object(os, name, lambda *args, **options: around(
            lambda: real(*args, **options), name, *paths_of(args)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        for name in ("rename", "replace", "unlink", "mkdir"):
            stack.enter_context(announced(name, lambda args: [a for a in args if isinstance(a, str)]))
        stack.enter_context(announced("fsync", lambda args: [os.readlink(f"/proc/self/fd/{args[0]}")]))
        yield


def phase(operation, path):
    """Which step of a save an operation is."""
    if path.endswith((".json", ".json.tmp")) and operation != "unlink":
        return "json"
    return {"open": "tmp opened", "write": "tmp written", "rename": "rename", "replace": "rename", "unlink": "delete",
            "fsync": "folder fsync" if os.path.isdir(path) else "fsync"}[operation]


# ---- one process with faults in it

def children(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(word) for word in f.read().split()]
    return []


def kill_job(agent):
    """SIGKILL to torchrun and to its ranks, each of which leads a session of its own."""
    for pid in (agent, *children(agent)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def act(what):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill job":
        kill_job(os.getppid())
    elif what in ("term", "term agent"):
        os.kill(os.getpid() if what == "term" else os.getppid(), signal.SIGTERM)
    elif what == "term swallowed":  # as torch.compile does now and then
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10**6)
    elif what == "raise":
        raise RuntimeError("a fault was injected")
    elif what == "refuse":
        raise Refused("a fault was injected")
    elif what == "sleep":
        time.sleep(10**6)
    elif what == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    elif os.system(what):
        raise AssertionError(f"failed: {what}")


def work(words, faults=(), output=None, env=None):
    """train.main() with these settings and faults. What it does to checkpoints is noted in OUT_DIR.marks."""
    if output:  # forked: a session and a screen of its own
        os.setsid()
        screen = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
    os.environ.update(env or {})
    rank = int(os.environ.get("RANK", 0))
    out = [word for word in words if word.startswith("--out_dir=")][-1].partition("=")[2]
    marks = os.open(f"{out}.marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen, written = collections.Counter(), set()

    def mark(**values):
        os.write(marks, json.dumps(dict(rank=rank, time=time.time(), **values)).encode() + b"\n")

    def happens(name, where=None):
        seen[name] += 1
        for fault in faults:
            if (fault["at"], fault["nth"], fault.get("rank", 0)) == (name, seen[name], rank):
                mark(did=fault["do"], at=f"rank {rank} in {name}" if rank else where or name)
                act(fault["do"])

    def before(operation, *paths):
        if operation == "mkdir":
            return
        now = phase(operation, paths[-1])
        happens(now)
        if seen["tmp opened"] and (operation != "write" or paths not in written):  # of many writes to a file the first
            happens("operation", now)
        (written.add if operation == "write" else written.discard)(paths)

    def after(operation, *paths):
        if m := re.search(r"step_(\d+)\.json$", paths[-1]):
            if operation in ("rename", "replace"):
                mark(vouched=int(m[1]))

    def announced(module, name, event):
        real = getattr(module, name)
        return mock.patch.object(module, name, lambda *args, **options: (happens(event), real(*args, **options))[1])

    with contextlib.ExitStack() as stack:
        for module, name, event in ((prepare, "Corpus", "start"), (train, "first_pass", "first_pass"),
                                    (torch.nn.utils, "clip_grad_norm_", "step"), (train, "evaluate", "evaluate"),
                                    (train, "save", "save")):
            stack.enter_context(announced(module, name, event))
        stack.enter_context(watched(f"{out}/ckpt", before, after))
        if output:
            stack.enter_context(mock.patch.object(process.Log, "start_report", lambda self: None))  # seconds each
        sys.argv = ["train.py", *words]
        try:
            train.main()
        except Exception:
            sys.excepthook(*sys.exc_info())  # exits with 2 on a refusal
            sys.exit(1)


def marks(out, key):
    """What processes noted: the marks that have `key`."""
    if not os.path.exists(f"{out}.marks"):
        return []
    with open(f"{out}.marks") as f:
        return [row for row in map(json.loads, f) if key in row]


context = multiprocessing.get_context("forkserver")  # its server imports torch once; each run is a fork, ready at once
context.set_forkserver_preload(["torch._dynamo", "crash"])


class Forked:
    """train.py in a process forked from one that has imported it. Its screen goes to OUT_DIR.screen."""

    def __init__(self, words, faults=(), **env):
        self.out = words[-1].partition("=")[2]
        os.makedirs(os.path.dirname(os.path.abspath(self.out)), exist_ok=True)
        self.process = context.Process(target=work, args=(words, faults, f"{self.out}.screen", env))
        self.process.start()
        self.pid = self.process.pid

    def wait(self, timeout=180):
        """The exit code; minus the signal's number where one ended it. None when it still runs."""
        self.process.join(timeout)
        return self.process.exitcode

    def kill(self):
        self.process.kill()

    def terminate(self):
        self.process.terminate()


class Torchrun:
    """The same, two ranks under torchrun."""

    def __init__(self, words, faults=(), **env):
        self.out = words[-1].partition("=")[2]
        with open(f"{self.out}.screen", "a") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__,
                 json.dumps(faults), *words], stdout=screen, stderr=screen, cwd=ROOT, env=os.environ | env)
        self.pid = self.process.pid

    def wait(self, timeout=180):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)

    def kill(self):
        kill_job(self.pid)

    def terminate(self):
        self.process.terminate()


def ended(job, timeout=180):
    """The exit code of a job that must end by itself."""
    code = job.wait(timeout)
    if code is None:
        job.kill()
        raise AssertionError(f"still running after {timeout} s:\n{screen(job.out)}")
    return code


def screen(out):
    with open(f"{out}.screen", errors="replace") as f:
        return f.read()


# ---- kills in a row

@dataclass
class Tally:
    """What many kills did."""
    kills: collections.Counter = field(default_factory=collections.Counter)  # by phase
    unloadable: int = 0  # times that no checkpoint verified, or the start after it did not run, though one was saved
    lost_steps: int = 0  # steps between what was saved and what verified or was resumed
    unequal: int = 0  # finished runs that differ from the one that was not interrupted


def killed_again_and_again(begin, words, plans, tally):
    """One run, started again and again, each time with the next of `plans` in it: a fault, seconds until a SIGKILL at
    no particular moment, or None. Returns when the run is finished or the plans are."""
    out, newest = words[-1].partition("=")[2], 0
    for plan in plans:
        before, resumed = len(marks(out, "did")), len(log(out, "resume"))
        job = begin(words, [plan] if isinstance(plan, dict) else [])
        code = job.wait(plan) if isinstance(plan, float) else None
        if isinstance(plan, float) and code is None:
            job.kill()
            tally.kills["at random"] += 1
        code = ended(job)
        fired = marks(out, "did")[before:]
        tally.kills.update(mark["at"] for mark in fired)
        for row in log(out, "resume")[resumed:]:
            tally.lost_steps += newest - row["step"]
        vouched = max((mark["vouched"] for mark in marks(out, "vouched")), default=0)
        found = newest_verified(out, ("step",))
        newest = found[0] if found else 0
        tally.lost_steps += max(0, vouched - newest)
        tally.unloadable += bool(vouched and not found)
        if code == 0:
            return
        if not fired and not isinstance(plan, float):
            tally.unloadable += 1
            print(f"ended by itself with {code}:\n{screen(out)}")
            return


def log(out, event):
    return rows(out, event) if os.path.exists(f"{out}/log.jsonl") else []


def same_run(out, straight, step):
    """Whether two runs came to the same parameters, moments, losses and batches, bit for bit."""
    return (same_tensors(checkpoint(out, step), checkpoint(straight, step)) and
            all(column(out, key) == column(straight, key) for key in ("step", "loss", "batch_crc")))


# ---- power cuts

class PowerCuts:
    """Follows the operations in `out` and its parent, and around each rebuilds every state a power cut could leave.

    A name that was made, moved or removed may or may not be on disk until its folder is fsynced, one by one and in any
    combination; bytes written since a file's last fsync may be lost, half there, all there or zeros. In each of these
    states the newest checkpoint that verifies must be at least as new as the last one whose save had returned.
    """

    def __init__(self, out, scratch):
        self.out, self.scratch, self.returned, self.states, self.bad = os.path.abspath(out), scratch, 0, set(), []
        self.folders = {os.path.dirname(self.out)}  # that are on disk
        self.names, self.durable, self.pending = {}, {}, []  # path -> inode, now and on disk; what lies between
        self.files, self.synced, self.good = {}, {}, set()  # inode -> open file, so that no number is used twice; bytes

    def before(self, operation, *paths):
        if operation != "write" and not paths[-1].startswith(self.scratch):
            self.cut()

    def after(self, operation, *paths):
        path = paths[-1]
        if path.startswith(self.scratch):
            return
        if operation == "open" and path not in self.names:
            file = open(path, "rb")
            inode = os.fstat(file.fileno()).st_ino
            self.files[inode], self.synced[inode], self.names[path] = file, b"", inode
            self.pending.append(("open", path, inode, None))
        elif operation in ("rename", "replace"):
            self.names[path] = self.names.pop(paths[0])
            self.pending.append((operation, path, self.names[path], paths[0]))
        elif operation == "mkdir" or (operation == "unlink" and self.names.pop(path, None)):
            self.pending.append((operation, path, None, None))
        elif operation == "fsync" and os.path.isdir(path):
            for change in [change for change in self.pending if os.path.dirname(change[1]) == path]:
                self.pending.remove(change)
                self.apply(change, self.durable, self.folders)
        elif operation == "fsync":
            self.synced[self.names[path]] = self.content(self.names[path])
        if operation != "write":
            self.cut()

    def content(self, inode):
        self.files[inode].seek(0)
        return self.files[inode].read()

    @staticmethod
    def apply(change, names, folders):
        operation, path, inode, source = change
        if operation == "mkdir":
            folders.add(path)
        elif operation == "unlink":
            names.pop(path, None)
        else:
            names.pop(source, None)
            names[path] = inode

    def cut(self):
        """Checks every state that a power cut at this moment could leave."""
        ckpt = f"{self.out}/ckpt"
        content = {inode: self.content(inode) for path, inode in [*self.names.items(), *self.durable.items()]
                   if path.startswith(ckpt)}
        if len(self.pending) > 9:
            self.bad.append(f"no folder was fsynced since {self.pending[0][:2]}")
            return
        for happened in itertools.product((False, True), repeat=len(self.pending)):
            names, folders = dict(self.durable), set(self.folders)
            for change in itertools.compress(self.pending, happened):
                self.apply(change, names, folders)
            there = [(path, i) for path, i in names.items() if i in content and {ckpt, self.out} <= folders]
            for lose in (lambda old, new: old, lambda old, new: new[:len(new) // 2], lambda old, new: new,
                         lambda old, new: bytes(len(new))):
                self.check({os.path.basename(path): content[i] if content[i] == self.synced[i] else
                            lose(self.synced[i], content[i]) for path, i in there})

    def check(self, state):
        key = (frozenset(state.items()), self.returned)
        if key in self.states:
            return
        self.states.add(key)
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.makedirs(f"{self.scratch}/ckpt")
        for name, data in state.items():
            with open(f"{self.scratch}/ckpt/{name}", "xb") as f:
                f.write(data)
        step, path = newest_verified(self.scratch, ("step",)) or (0, None)
        if path and (digest := hash(state[os.path.basename(path)])) not in self.good:
            assert torch.load(path, weights_only=True)["step"] == step
            self.good.add(digest)
        if step < self.returned:
            sizes = {name: len(data) for name, data in state.items()}
            self.bad.append(f"step {self.returned} was saved, {step} is the newest that verifies in {sizes}")

    def saved(self, path, content, step):
        """Stands in for train.write_checkpoint: what it returned from must survive."""
        result = self.write(path, content, step)
        if "/step_" in path:
            self.returned = step
        return result

    def follow(self, run, *args):
        """run(*args) under watch."""
        self.write = train.write_checkpoint
        with mock.patch.object(train, "write_checkpoint", self.saved), \
                watched(os.path.dirname(self.out), self.before, self.after):
            return run(*args)


# ---- `make faults`

def faults(total):
    rng, began, tallies, rounds = random.Random(1), time.time(), {1: Tally(), 2: Tally()}, 0
    most = {"tmp written": 150, "json": 12, "folder fsync": 6, "delete": 6}  # a process gets through two or three saves

    def plans(ranks, count, took):
        kills, phases = tallies[ranks].kills, [*PHASES, "at random"]
        if ranks == 2:
            phases += ["rank 1 in save", "rank 1 in step"]
        while kills.total() < count:
            at = min(phases, key=lambda phase: kills[phase])
            if at == "at random":
                yield rng.uniform(0, took)
            elif at.startswith("rank 1"):
                yield dict(at=at.split()[-1], nth=rng.randint(1, 3), do="kill", rank=1)
            else:
                yield dict(at=at, nth=rng.randint(1, most.get(at, 3)), do=rng.choice(
                    ("kill", "kill job") if ranks == 2 else ("kill",)))
        yield from itertools.repeat(None)

    with tempfile.TemporaryDirectory() as folder:
        data = write_data(f"{folder}/data", sentences(200))
        for ranks, begin, count in (1, Forked, total - total // 5), (2, Torchrun, total // 5):
            words, straight, tally = (*WORDS, f"--data_dir={data}"), f"{folder}/straight{ranks}", tallies[ranks]
            started = time.time()
            assert ended(begin((*words, f"--out_dir={straight}"))) == 0
            todo = plans(ranks, count, time.time() - started)
            while tally.kills.total() < count:
                rounds += 1
                out = f"{folder}/{rounds}"
                killed_again_and_again(begin, (*words, f"--out_dir={out}"), todo, tally)
                tally.unequal += not same_run(out, straight, 40)
        cuts = PowerCuts(f"{folder}/cuts", f"{folder}/scratch")
        with contextlib.redirect_stdout(None):
            cuts.follow(train_here, data, cuts.out, *WORDS, "--max_steps=12")
    one, two = tallies.values()
    print(f"{'SIGKILL in':14} one rank  two ranks")
    for at in sorted({*one.kills, *two.kills}):
        print(f"{at:14} {one.kills[at]:8} {two.kills[at]:10}")
    print(f"{'all':14} {one.kills.total():8} {two.kills.total():10}   in {rounds} runs of 40 steps, "
          f"{time.time() - began:.0f} s")
    print(f"unloadable states {one.unloadable + two.unloadable}, steps lost beyond the last save "
          f"{one.lost_steps + two.lost_steps}, runs whose parameters, moments, losses or batches differ from the "
          f"uninterrupted one's: {one.unequal} on one rank, {two.unequal} on two")
    print(f"power cuts: {len(cuts.states)} states, {len(cuts.bad)} without the last checkpoint whose save had returned")
    return int(any((t.unloadable, t.lost_steps, t.unequal) != (0, 0, 0) for t in tallies.values()) or bool(cuts.bad))


# ---- how runs end

def left_behind(out):
    """Processes that still run with this out_dir, seen from their command lines."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as f:
            if f"--out_dir={out}\0" in f.read():
                found.append(int(pid))
    return found


def ends():
    """A row a way to end: who was asked, seconds until the job was gone, its exit code, run.json, the last line."""
    rank1 = dict(at="step", nth=5, rank=1)
    cases = [(f"SIGTERM in {at}", at, nth, "term") for at, nth in (
        ("start", 1), ("first_pass", 1), ("step", 5), ("evaluate", 1), ("save", 2))]
    cases = [(name, begin, dict(at=at, nth=nth, do=do + " agent" * (begin is Torchrun)))
             for name, at, nth, do in cases for begin in (Forked, Torchrun)]
    cases += [("SIGTERM twice, save hangs", begin, dict(at="fsync", nth=2, do="sleep")) for begin in (Forked, Torchrun)]
    cases += [("rank 1 refuses at start", Torchrun, dict(at="start", nth=1, do="refuse", rank=1)),
              ("rank 1 killed at step 5", Torchrun, rank1 | dict(do="kill")),
              ("rank 1 raises at step 5", Torchrun, rank1 | dict(do="raise")),
              ("rank 1 sleeps at step 5", Torchrun, rank1 | dict(do="sleep")),
              ("sleeps at step 5", Forked, dict(at="step", nth=5, do="sleep"))]
    print("| what | started by | seconds | exit code | run.json | newest checkpoint | last lines said | left behind |\n"
          "|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(f"{folder}/data", sentences(200))
        for i, (name, begin, fault) in enumerate(cases):
            out = f"{folder}/{i}"
            job = begin((*WORDS, f"--data_dir={data}", "--eval_interval=3", "--max_steps=2000", "--dist_timeout_s=10",
                         f"--out_dir={out}"), [fault])
            while not marks(out, "did"):
                time.sleep(0.05)
            if "twice" in name:
                job.terminate()
                time.sleep(6)
                job.terminate()
            code = ended(job, 120)
            seconds, left = time.time() - marks(out, "did")[0]["time"], left_behind(out)
            record = prepare.read_json(f"{out}/run.json")
            lines = [line for line in screen(out).splitlines() if line.startswith(("stopped", "train.py:", "Runtime"))]
            hangs = [file for file in os.listdir(out) if file.startswith("hang.")] if os.path.isdir(out) else []
            newest = newest_verified(out, ("step",))
            print(f"| {name} | {'torchrun' if begin is Torchrun else 'python'} | {seconds:.1f} | {code} | "
                  f"{record.get('status')}, {record.get('exit_code')} | {newest[0] if newest else 'none'} | "
                  f"{' / '.join([*dict.fromkeys(lines), *hangs])[:160]} | {len(left)} |", flush=True)
            for pid in left:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):
        work(sys.argv[2:], json.loads(sys.argv[1]))
    elif sys.argv[1:] == ["ends"]:
        ends()
    else:
        sys.exit(faults(int((sys.argv[1:] or [200])[0])))
