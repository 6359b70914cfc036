"""What several test files share: a tiny data folder, small models, runs of train.py as a user starts them."""
import base64
import hashlib
import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
torch.set_num_threads(1)  # the shapes are tiny, and some tests run several processes

import prepare  # noqa: E402
import process as process_script  # noqa: E402
import train as train_script  # noqa: E402

TINY = ("--n_layer=2 --n_embd=32 --n_head=4 --n_kv_head=2 --ffn_hidden=64 --block_size=32 --micro_batch_size=2 "
        "--global_batch_tokens=384 --max_steps=8 --warmup_steps=2 --log_interval=1 --eval_interval=0 --save_interval=4 "
        "--learning_rate=1e-2 --min_lr=1e-3 --compile=False --dtype=float32").split()


def write_data(folder, documents, vocab_size=257, dtype="uint16", val_share=0.1):
    """A finished data folder with a byte tokenizer (ids 0-255 are bytes, the last id ends a text) and two sources."""
    os.makedirs(folder, exist_ok=True)
    ranks = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    with open(f"{folder}/tokenizer.tiktoken", "wb") as f:
        f.write(ranks)
    eot, splits = vocab_size - 1, {}
    held_out = max(1, int(len(documents) * val_share))
    parts = dict(val=documents[:held_out], test=documents[held_out:2 * held_out], train=documents[2 * held_out:])
    for split, texts in parts.items():
        ids, splits[split] = [], {}
        for name, mine in (("code", texts[::2]), ("prose", texts[1::2])):
            offset = len(ids)
            for text in mine:
                ids += [*text.encode(), eot]
            splits[split][name] = dict(offset=offset, tokens=len(ids) - offset, documents=len(mine),
                                       bytes=sum(len(text.encode()) for text in mine))
        np.array(ids, dtype=dtype).tofile(f"{folder}/{split}.bin")
    tokenizer = dict(pattern=prepare.PATTERN, special_tokens={prepare.EOT: eot},
                     sha256=hashlib.sha256(ranks).hexdigest())
    prepare.seal(folder, dict(schema=1, vocab_size=vocab_size, dtype=dtype, eot_id=eot, tokenizer=tokenizer,
                              splits=splits, recipe={}, dropped={}))
    return folder


def sentences(count, seed=0):
    """`count` documents of made-up prose that a small model can learn."""
    rng = random.Random(seed)
    words = "the run stops here when a rank waits for data and no step was lost before its checkpoint 模型 数据".split()
    return [" ".join(rng.choice(words) for _ in range(rng.randint(20, 60))) + ".\n" for _ in range(count)]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return write_data(str(tmp_path_factory.mktemp("data")), sentences(200))


def start(*words, nproc=0, **options):
    """A script of the project as a process, under torchrun with `nproc` ranks where that is not 0."""
    command = [sys.executable]
    if nproc:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=ROOT) | options.pop("env", {})
    return subprocess.Popen([*command, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=environment, **options)


def finish(process, timeout=120):
    """(exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def train(data_dir, out_dir, *words, nproc=0, **options):
    """A whole run of train.py on the tiny shape as a process; later words win."""
    return finish(start("train.py", *TINY, f"--data_dir={data_dir}", f"--out_dir={out_dir}", *words, nproc=nproc,
                        **options))


def train_here(data_dir, out_dir, *words, report=False):
    """The same inside this process: seconds faster, and tests can reach in. Returns the exit code."""
    argv, handlers = sys.argv, [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    start_report = process_script.Log.start_report
    process_script.Log.start_report = start_report if report else lambda log: None
    sys.argv = ["train.py", *TINY, f"--data_dir={data_dir}", f"--out_dir={out_dir}", *map(str, words)]
    try:
        train_script.main()
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv, process_script.Log.start_report = argv, start_report
        for signum, handler in handlers:
            signal.signal(signum, handler)


def rows(out_dir, event="step"):
    with open(os.path.join(out_dir, "log.jsonl"), encoding="utf-8") as f:
        return [row for row in map(json.loads, f) if row["event"] == event]


def column(out_dir, key, event="step"):
    return [row[key] for row in rows(out_dir, event)]


def checkpoint(out_dir, step):
    return torch.load(f"{out_dir}/ckpt/step_{step:08d}.pt", weights_only=True)


def tensors(value, path=""):
    """{path: tensor} of everything in a checkpoint that must come out equal."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {k: v for key, inner in pairs for k, v in tensors(inner, f"{path}/{key}").items()}


def same_tensors(a, b):
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
