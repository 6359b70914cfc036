"""One process of a run: its rank, its device, its randomness, its signals; and the record that rank 0 keeps.

train.py is the loop; what surrounds a loop on any machine stands here.
"""
import contextlib
import ctypes
import datetime
import faulthandler
import glob
import importlib.util
import json
import math
import os
import platform
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from dataclasses import asdict

from config import Refused  # before torch: a missing package then ends in one line

import numpy as np
import torch
import torch.distributed as dist

import prepare
from model import count_parameters

# ---- its rank and its device

class Ranks:
    """This process among those torchrun started. Alone, every exchange is the identity."""

    def __init__(self):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))

    def join(self, timeout_s):
        if self.world > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))

    def gather(self, value):
        """[value of every rank], on every rank. Small Python objects, over the CPU."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def sum(self, *numbers):
        """Sums over ranks, as floats exact to 2**53, in one small all-reduce on the CPU."""
        total = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def together(self, function, *args):
        """function(*args) on every rank; where one refuses, all refuse with its message. Returns this rank's result."""
        result, error = None, None
        try:
            result = function(*args)
        except Refused as refused:
            error = f"rank {self.rank}: {refused}" if self.rank else str(refused)
        if error := next(filter(None, self.gather(error)), None):
            raise Refused(error)
        return result


def pick_device(c, local_rank):
    """The torch device of this process. Raises Refused where an NVIDIA device is there but CUDA does not work."""
    works = torch.cuda.is_available()
    if not works and (c.device == "cuda" or (c.device == "auto" and glob.glob("/dev/nvidia[0-9]*"))):
        driver = "/proc/driver/nvidia/version"
        seen = open(driver).readline().strip() if os.path.exists(driver) else "no NVIDIA driver"
        raise Refused(f"CUDA does not work: {seen}; torch {torch.__version__} was built for CUDA "
                      f"{torch.version.cuda}. Install a matching torch, or say --device=cpu")
    if c.device == "cpu" or not works:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise Refused(f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def pick_dtype(c, device):
    """auto: bfloat16 where the device computes in it, else float32 (an emulated bfloat16 is slower than that)."""
    if c.dtype != "auto":
        return c.dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        if {"avx512_bf16", "amx_bf16"} & set(f.read().split()):
            return "bfloat16"
    return "float32"


def why_no_compile(device):
    """None, or what a CPU lacks for torch.compile. Raises Refused where a GPU lacks it: eager steps cost money."""
    gpu = device.type == "cuda"  # there triton builds its launchers in C
    usual = "g++" if not gpu else "gcc" if shutil.which("gcc") else "clang"
    compiler = os.environ.get("CC" if gpu else "CXX", "").strip() or usual
    lacking = ("no triton (pip install triton)" if gpu and not importlib.util.find_spec("triton") else
               "no C++ compiler (apt-get install g++)" if not shutil.which(compiler.split()[0]) else
               "no Python.h (apt-get install python3-dev)" if not os.path.exists(
                   os.path.join(sysconfig.get_paths()["include"], "Python.h")) else None)
    if gpu and lacking:
        raise Refused(f"torch.compile can't work here: {lacking}; or say --compile=False")
    return lacking


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as f:
        name = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    return f"{name}, {torch.get_num_threads()} thread(s)"


def keep_freed_memory():
    """Has malloc keep what is freed. By default glibc returns tensors over 32 MB to the kernel, and the page faults of
    getting them back took a sixth of the step of a 100M model on two cores. A no-op where the C library is another."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def peak_memory(device):
    """The high-water mark of this process, and what it is, as log.jsonl has it."""
    if device.type == "cuda":
        return dict(peak_memory_bytes=torch.cuda.max_memory_allocated(device),
                    peak_memory_source="cuda max_memory_allocated")
    return dict(peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                peak_memory_source="process ru_maxrss")


# ---- randomness

def seed_everything(seed, step, rank):
    words = [int(word) for word in np.random.SeedSequence([seed, step, rank]).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])


def rng_state(device):
    """The state of every global generator, in types that torch.load(weights_only=True) reads."""
    numpy_state = np.random.get_state()
    return dict(python=random.getstate(), numpy=torch.from_numpy(numpy_state[1].astype(np.int64)),
                numpy_rest=(int(numpy_state[2]), int(numpy_state[3]), float(numpy_state[4])),
                torch=torch.get_rng_state(), device=torch.cuda.get_rng_state() if device.type == "cuda" else None)


def set_rng_state(state, device):
    random.setstate(state["python"])
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["numpy_rest"]))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"])


# ---- the record

def without_nan(value):
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {key: without_nan(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """log.jsonl, train.log, run.json and the screen, all from rank 0 alone. None of them ends a run: the lines that a
    full disk refuses wait in memory and are written with a later one."""

    def __init__(self, c, ranks):
        self.out_dir, self.world, self.on, self.started = c.out_dir, ranks.world, ranks.rank == 0, time.time()
        self.began = time.monotonic()  # a clock that is set right meanwhile must not make hours
        self.elapsed_before = self.hours_before = 0.0
        self.rows, self.run, self.lock, self.alarmed = [], {}, None, {}
        self.reports, self.reporter, self.hang_file, self.limit_s = c.save_interval > 0, None, None, c.dist_timeout_s
        self.files, self.waiting = {}, {"train.log": b"", "log.jsonl": b""}

    def alive(self, times=10):
        """Unless this is called again within dist_timeout_s, 10 times that outside a step, the process ends as hung and
        its stack is in hang_file."""
        faulthandler.dump_traceback_later(times * self.limit_s, exit=True, file=self.hang_file or sys.__stderr__)

    def open(self, rows, discarded, step):
        """Goes on behind `rows`, the lines on disk: time and device-hours from where an earlier process was last heard
        of. Those of steps past `step` join the `discarded` in log.discarded.jsonl, so that no step stands twice."""
        self.elapsed_before, self.hours_before = (
            max((row.get(key) or 0.0 for row in rows + discarded), default=0.0) for key in ("elapsed_s", "gpu_hours"))
        lost, self.rows = [], []
        for row in rows:
            past = row["step"] > step and row["event"] in ("step", "eval", "sample")
            (lost if past else self.rows).append(row)
        if self.on:
            paths = {name: os.path.join(self.out_dir, name) for name in ("log.discarded.jsonl", *self.waiting)}
            lines, lost = ("".join(json.dumps(row) + "\n" for row in part) for part in (self.rows, lost))
            if lost:
                with open(paths["log.discarded.jsonl"], "a", encoding="utf-8") as f:
                    f.write(lost)
            prepare.write_atomically(paths["log.jsonl"], lines.encode())
            self.files = {name: os.open(paths[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                          for name in self.waiting}

    def append(self, name, line):
        self.waiting[name] += line.encode(errors="backslashreplace") + b"\n"
        with contextlib.suppress(OSError, KeyError):  # a full disk; out_dir is not ours yet
            while self.waiting[name]:
                self.waiting[name] = self.waiting[name][os.write(self.files[name], self.waiting[name]):]

    def device_hours(self):
        return self.hours_before + (time.monotonic() - self.began) * self.world / 3600

    def say(self, text):
        if self.on:
            with contextlib.suppress(OSError):  # a terminal that went away must not end the run
                print(text, flush=True)
            self.append("train.log", text)

    def event(self, name, step, **values):
        row = without_nan(dict(event=name, time=time.time(), step=step, gpu_hours=self.device_hours(),
                               elapsed_s=self.elapsed_before + time.monotonic() - self.began, **values))
        self.rows.append(row)
        if self.on and self.files:
            self.append("log.jsonl", json.dumps(row))

    def alarm(self, kind, step, message, action, every=200):
        """Said on screen and in the log, each kind at most once in `every` steps."""
        if step - self.alarmed.get(kind, -math.inf) >= every:
            self.alarmed[kind] = step
            self.event("alarm", step, kind=kind, message=message, action=action)
            self.say(f"WARNING at step {step}: {message}; {action}")

    def record(self, **values):
        """Updates run.json."""
        self.run.update(values)
        if self.on:
            path = os.path.join(self.out_dir, "run.json")
            try:
                prepare.write_atomically(path, json.dumps(without_nan(self.run), indent=1).encode())
            except OSError as error:
                self.say(f"WARNING: {path} is not up to date: {error}")

    def start_record(self, run, fresh):
        """The run's entry in run.json; a resumed run keeps its id, start and initial loss."""
        c, kept = run.c, {}
        with contextlib.suppress(Refused):
            kept = {} if fresh else prepare.read_json(os.path.join(self.out_dir, "run.json"))
        self.run = dict(run_id=uuid.uuid4().hex, started=self.started, initial_loss=None, test_scorings=0) | kept
        self.record(
            schema=1, pid=os.getpid(), host=socket.gethostname(), status="running", exit_code=None, settings=asdict(c),
            command=" ".join(sys.orig_argv), commit=git("rev-parse", "HEAD"),
            dirty=bool(git("status", "--porcelain", "--", "*.py", ":!config")),  # of config the settings say all
            data_fingerprint=run.corpus.fingerprint, device=device_name(run.device), device_count=self.world,
            link=None if self.world == 1 else "nccl" if run.device.type == "cuda" else "gloo",
            n_params=count_parameters(run.model), steps=run.state["step"], updates=run.state["updates"],
            versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                          cuda=torch.version.cuda))

    def start_report(self):
        """report.md and report.png of the run so far, by a process of its own: the loop does not wait for it."""
        if self.on and self.reports and (self.reporter is None or self.reporter.poll() is not None):
            script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report.py")
            with contextlib.suppress(OSError):  # no more processes allowed
                nice = ["nice"] if self.run.get("exit_code") is None else []  # the last one has the processors
                self.reporter = subprocess.Popen([*nice, sys.executable, script, self.out_dir],
                                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self, status, exit_code):
        """The end in run.json and a last report, if the run ever began; out_dir is free for another process."""
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if self.hang_file and os.path.getsize(self.hang_file.name) == 0:
                os.unlink(self.hang_file.name)
        if self.run:
            self.record(status=status, exit_code=exit_code)
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # a stop has 30 s under torchrun
                if self.reporter:
                    self.reporter.kill()  # it does not know the end yet
                    self.reporter.wait(10)
                    for half in glob.glob(f"{glob.escape(self.out_dir)}/report.*.{self.reporter.pid}.tmp"):
                        os.unlink(half)
                self.start_report()
                if self.reporter:
                    self.reporter.wait(10)
        for file in self.files.values():
            os.close(file)
        self.files = {}
        if self.lock:
            self.lock.close()


def git(*words):
    where = os.path.dirname(os.path.abspath(__file__))
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git here, or this is no checkout
        return subprocess.check_output(["git", "-C", where, *words], text=True, stderr=subprocess.DEVNULL).strip()


class StopSignal:
    """SIGTERM, SIGINT and SIGHUP raise a flag which the loop reads between steps; a second one after 5 s ends at once.

    A SIGHUP that nohup has ignored stays so, but not under torchrun: it takes the signal itself and passes it on.
    """

    def __init__(self):
        self.signum, self.came, self.ready = 0, 0.0, False
        signal.signal(signal.SIGTERM, self.take)
        signal.signal(signal.SIGINT, self.take)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGHUP, self.take)

    def take(self, signum, frame):
        if self.signum and time.monotonic() - self.came > 5:
            os._exit(128 + signum)
        self.signum, self.came = self.signum or signum, self.came or time.monotonic()
        if not self.ready:  # before the first update there is nothing to save
            signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + signum))
            signal.alarm(5)  # the exception can be lost: torch.compile swallowed it in a weakref callback
            raise SystemExit(128 + signum)
