"""What prepare.py reaches of bare encoding: the whole pipeline, then `encode_ordinary` alone in as many processes on
the same text, in turn.

    python tests/prepare_speed.py --docs=FOLDER --rounds=5      documents as prepare.py takes them; 250 MB or more

Prints for each round the seconds of the stages, the share that is reached once the tokenizer is trained, and the peak
memory of the main process.
"""
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)

import documents  # noqa: E402
import prepare  # noqa: E402
from config import Refused, load  # noqa: E402


@dataclass(frozen=True)
class Config:
    docs: str = ""  # a folder of documents
    vocab_size: int = 32_000  # ids
    rounds: int = 3  # both sides run this often, in turn


def pipeline(c, data_dir):
    """(seconds of sample and tokenizer, of reading to encoding, of the join; peak bytes of the main process)."""
    words = [f"--docs={os.path.abspath(c.docs)}", f"--data_dir={data_dir}", f"--vocab_size={c.vocab_size}"]
    process = subprocess.Popen([sys.executable, f"{HERE}/prepare.py", *words], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    marks, peak = [time.time()], 0
    while process.poll() is None:
        done = f"{data_dir}/parts/{('tokenizer.tiktoken', 'train.bin', 'meta.json')[min(len(marks) - 1, 2)]}"
        if len(marks) < 3 and os.path.exists(done):
            marks.append(time.time())
        with open(f"/proc/{process.pid}/statm") as f:
            peak = max(peak, int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE"))
        time.sleep(0.02)
    marks += [time.time()] * (4 - len(marks))
    if process.returncode:
        raise Refused(f"prepare.py ended with {process.returncode}: try it by hand with {' '.join(words)}")
    return *np.diff(marks), peak


def bare(number, data_dir, barrier, answer):
    """Encodes every process_count()-th document, all of them in memory before the clock starts."""
    encoding, texts = prepare.encoding_of(data_dir), []
    for source in prepare.Corpus(data_dir, check=False).meta["recipe"]["sources"]:
        for batch, *_ in documents.batches(source, documents.files_of(source)):
            for at, (_, text, *_) in enumerate(documents.usable(batch, source, True, Counter())):
                if at % prepare.process_count() == number:
                    texts.append(text)
    size = sum(len(text.encode()) for text in texts)
    barrier.wait()
    began = time.time()
    for text in texts:
        for start in range(0, len(text), prepare.PIECE_CHARS):
            encoding.encode_ordinary(text[start:start + prepare.PIECE_CHARS])
    answer.put((time.time() - began, size))


def main():
    c = load(Config, sys.argv[1:], __doc__)
    if not os.path.isdir(c.docs):
        raise Refused(f"--docs={c.docs} must name a folder of documents")
    spawn, shares, count = multiprocessing.get_context("spawn"), [], prepare.process_count()
    for number in range(c.rounds):
        with tempfile.TemporaryDirectory(prefix="prepare_speed.") as data_dir:
            tokenizer, encode, join, peak = pipeline(c, data_dir)
            barrier, answer = spawn.Barrier(count), spawn.SimpleQueue()
            processes = [spawn.Process(target=bare, args=(i, data_dir, barrier, answer)) for i in range(count)]
            for process in processes:
                process.start()
            seconds, sizes = zip(*(answer.get() for _ in processes), strict=True)
        shares.append(max(seconds) / (encode + join))
        print(f"round {number + 1}  {sum(sizes) / 1e6:,.1f} MB  tokenizer {tokenizer:.1f} s  encode {encode:.1f} s  "
              f"join {join:.1f} s  bare {max(seconds):.1f} s  reached {shares[-1]:.0%}  memory "
              f"{peak / 1e6:,.0f} MB", flush=True)
    print(f"median {np.median(shares):.0%} of bare encoding in {count} processes")


if __name__ == "__main__":
    main()
