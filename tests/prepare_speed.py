"""What prepare.py reaches of bare encoding: the whole pipeline behind its tokenizer, and `encode_ordinary` alone in as
many processes on the same text.

    python tests/prepare_speed.py --docs=FOLDER --rounds=5      documents as prepare.py takes them; 250 MB or more

"bare" is the tokenizer as meta.json describes it, "fast" the same under prepare.py's faster pattern of equal splits.
They work in turn, two seconds each while the others are stopped, so that a machine that slows down slows all of them.
Prints for each round the seconds of each, the shares that are reached, and the peak memory of the main process.
"""
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import tiktoken

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)

import documents  # noqa: E402
import prepare  # noqa: E402
from config import Refused, load  # noqa: E402

TURN_S = 2.0


@dataclass(frozen=True)
class Config:
    docs: str = ""  # a folder of documents
    vocab_size: int = 32_000  # ids
    rounds: int = 3  # the whole of it so often


def bare(number, parts, pattern, barrier):
    """Encodes every process_count()-th document, all of them in memory before the clock starts."""
    ranks, texts = {piece: rank for rank, piece in enumerate(prepare.read_ranks(parts))}, []
    encoding = tiktoken.Encoding("bare", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for source in prepare.read_json(f"{parts}/recipe.json")["sources"]:
        for batch, *_ in documents.batches(source, documents.files_of(source)):
            for at, (_, text, *_) in enumerate(documents.usable(batch, source, True, Counter())):
                if at % prepare.process_count() == number:
                    texts.append(text)
    barrier.wait()
    for text in texts:
        for start in range(0, len(text), prepare.PIECE_CHARS):
            encoding.encode_ordinary(text[start:start + prepare.PIECE_CHARS])


def tell(pids, signum):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def one_round(c, data_dir):
    """({tokenizer, ours, bare, fast: seconds}, peak bytes of prepare.py's main process); ours: behind the tokenizer."""
    words = [f"--docs={os.path.abspath(c.docs)}", f"--data_dir={data_dir}", f"--vocab_size={c.vocab_size}"]
    parts, spawn, count = f"{data_dir}/parts", multiprocessing.get_context("spawn"), prepare.process_count()
    seconds, peak = Counter(), 0
    ours = subprocess.Popen([sys.executable, f"{HERE}/prepare.py", *words], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, start_new_session=True)
    sides, barrier = dict(ours=([-ours.pid], lambda: ours.poll() is None)), spawn.Barrier(2 * count + 1)

    def turn(side, over, name):
        """Continues a side and counts the time until over() or its end; then it is stopped, with its workers."""
        nonlocal peak
        pids, running = sides[side]
        if running():
            tell(pids, signal.SIGCONT)
        began = time.time()
        while running() and not over(time.time() - began):
            if side == "ours":
                with open(f"/proc/{ours.pid}/statm") as f:
                    peak = max(peak, int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE"))
            time.sleep(0.01)
        seconds[name] += time.time() - began
        if running():
            tell(pids, signal.SIGSTOP)

    try:
        turn("ours", lambda _: os.path.exists(f"{parts}/tokenizer.tiktoken"), "tokenizer")
        if ours.poll() is None:
            for name, pattern in (("bare", prepare.PATTERN), ("fast", prepare.FAST)):
                some = [spawn.Process(target=bare, args=(i, parts, pattern, barrier)) for i in range(count)]
                for process in some:
                    process.start()
                sides[name] = [process.pid for process in some], lambda some=some: any(p.is_alive() for p in some)
            barrier.wait(timeout=600)
            tell([*sides["bare"][0], *sides["fast"][0]], signal.SIGSTOP)
        while any(running() for _, running in sides.values()):
            for side in sides:
                turn(side, lambda s: s > TURN_S, side)
    finally:
        if ours.poll() is None:
            tell([-ours.pid], signal.SIGKILL)
        for process in multiprocessing.active_children():
            process.kill()
    if ours.returncode:
        raise Refused(f"prepare.py ended with {ours.returncode}: try it by hand with {' '.join(words)}")
    return seconds, peak


def main():
    c, shares = load(Config, sys.argv[1:], __doc__), dict(bare=[], fast=[])
    if not os.path.isdir(c.docs):
        raise Refused(f"--docs={c.docs} must name a folder of documents")
    for signum in (signal.SIGTERM, signal.SIGHUP):  # nothing stays behind, above all nothing that is stopped
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    for number in range(c.rounds):
        with tempfile.TemporaryDirectory(prefix="prepare_speed.") as data_dir:
            seconds, peak = one_round(c, data_dir)
            meta = prepare.read_json(f"{data_dir}/meta.json")
        size = sum(source["bytes"] for split in meta["splits"].values() for source in split.values())
        took = "".join(f"{name} {s:.1f} s  " for name, s in seconds.items())
        print(f"round {number + 1}  {size / 1e6:,.1f} MB  {took}memory {peak / 1e6:,.0f} MB")
        for name, found in shares.items():
            found.append(seconds[name] / seconds["ours"])
            print(f"  {found[-1]:.0%} of {name} encoding in {prepare.process_count()} processes, median so far "
                  f"{np.median(found):.0%}", flush=True)


if __name__ == "__main__":
    main()
