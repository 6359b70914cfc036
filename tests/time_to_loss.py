"""Time to a loss: how long train.py takes to the loss that nanoGPT's own train.py reaches in four minutes, on the same
ids and cores.

    python tests/time_to_loss.py --nanogpt=DIR          a checkout of nanoGPT; about 20 minutes on a quiet machine
    python tests/time_to_loss.py --nanogpt=DIR --optimizer=adamw --learning_rate=2e-3      any key of train.py, for ours

The text is the code of this machine's Python library. nanoGPT runs as its README has it run on a CPU (the settings of
shakespeare_char, fp32, not compiled), its decay planned for the time; ours is planned for `ours_s`. Both then score
every token of the same held-out documents. Updates are counted from the first one; start and compile make the second
figure.
"""
import importlib.util
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)

import bench  # noqa: E402
import prepare  # noqa: E402
import sample  # noqa: E402
import train  # noqa: E402
from config import Refused, load, to_argv  # noqa: E402
from model import IGNORE  # noqa: E402
from process import pick_device, pick_dtype  # noqa: E402
from report import read_log  # noqa: E402

OURS = ("--device=cpu", "--n_layer=6", "--n_embd=384", "--n_head=6", "--n_kv_head=2", "--ffn_hidden=1024",
        "--block_size=256", "--micro_batch_size=8", "--global_batch_tokens=4096", "--optimizer=muon",
        "--learning_rate=8e-3", "--warmup_steps=6")
THEIRS = ("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--dropout=0.0", "--dataset=ours",
          "--block_size=256", "--batch_size=12", "--eval_iters=1", "--log_interval=1", "--always_save_checkpoint=True")


@dataclass(frozen=True)
class Config:
    nanogpt: str = ""  # folder of nanoGPT's checkout
    seconds: float = 240.0  # of its updates
    ours_s: float = 78.0  # of ours
    seeds: str = "1 2 3"  # a pair of runs for each


@dataclass(frozen=True)
class Settings(Config, train.Config):
    """Every key of train.py behind this script's own."""


def nanogpt_run(checkout, seed, steps):
    """(milliseconds of every update, seconds of the whole process) of its train.py; out-shakespeare-char/ckpt.pt is
    what it saved behind the last."""
    with open(f"{checkout}/train.py") as f:
        text = re.sub(r"torch\.manual_seed\(\d+", f"torch.manual_seed({seed}", f.read())
    with open(f"{checkout}/seeded.py", "w") as f:
        f.write(text)
    began, plan = time.time(), [f"--{key}={steps}" for key in ("max_iters", "lr_decay_iters", "eval_interval")]
    said = subprocess.check_output([sys.executable, "seeded.py", *THEIRS, *plan], cwd=checkout, text=True)
    return [float(ms) for ms in re.findall(r"^iter \d+:.* time ([\d.]+)ms", said, re.M)][:steps], time.time() - began


def nanogpt_loss(checkout, corpus, block_size):
    """Nats a token of every held-out token under its checkpoint, by sample.score."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", f"{checkout}/model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    saved = torch.load(f"{checkout}/out-shakespeare-char/ckpt.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])

    class Summed(torch.nn.Module):
        shape, head_weight = SimpleNamespace(block_size=block_size), model.lm_head.weight

        def forward(self, x, y):
            logits, _ = model(x, y.masked_fill(y == IGNORE, -1))
            return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
    token_bytes = np.ones(corpus.vocab_size)  # bits per byte are not asked for
    return sample.score(SimpleNamespace(dtype="float32"), Summed().eval(), corpus, "val", token_bytes)[""]["loss"]


def ours_run(c, out_dir):
    """(held-out loss, seconds of the updates, seconds from the process's start to its last update)."""
    c, began = replace(c, out_dir=out_dir), time.time()
    subprocess.run([sys.executable, f"{HERE}/train.py", *to_argv(c, train.Config)],
                   stdout=subprocess.DEVNULL, check=True)
    rows = read_log(out_dir)
    steps = [row for row in rows if row["event"] == "step"]
    loss = [row["val_loss"] for row in rows if row["event"] == "eval"][-1]
    return loss, sum(row["step_ms"] for row in steps) / 1000, steps[-1]["time"] - began


def main():
    c = load(Settings, [*OURS, *sys.argv[1:]], __doc__)
    if not os.path.exists(f"{c.nanogpt}/config/train_shakespeare_char.py"):
        raise Refused(f"--nanogpt={c.nanogpt} must name a checkout of nanoGPT")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the run that is being measured
    device = pick_device(c, 0)
    c = replace(c, dtype=pick_dtype(c, device), eval_interval=0, save_interval=0, log_interval=1, guard="off")
    with tempfile.TemporaryDirectory(prefix="time_to_loss.") as folder:
        checkout, data_dir = f"{folder}/nanogpt", f"{folder}/data"
        with open(f"{folder}/code.py", "w") as f:
            f.write("sources = [dict(name='code', path='python:library')]\nvocab_size = 4096\n")
        subprocess.run([sys.executable, f"{HERE}/prepare.py", f"{folder}/code.py", f"--data_dir={data_dir}"],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        corpus = prepare.Corpus(data_dir)
        shutil.copytree(c.nanogpt, checkout, ignore=shutil.ignore_patterns(".git", "data", "assets"))
        os.makedirs(f"{checkout}/data/ours")
        for split in ("train", "val"):
            shutil.copy(f"{data_dir}/{split}.bin", f"{checkout}/data/ours/")
        with open(f"{checkout}/data/ours/meta.pkl", "wb") as f:
            pickle.dump(dict(vocab_size=corpus.vocab_size), f)

        theirs_ms = np.median(nanogpt_run(checkout, 1, 8)[0][3:])
        rate = bench.measure(replace(c, data_dir=data_dir), 1, data_dir, 10.0, corpus.vocab_size)["tokens_per_s"]
        theirs_steps, ours_steps = int(1000 * c.seconds / theirs_ms), int(c.ours_s * rate / c.global_batch_tokens)
        print(f"{corpus.tokens('train'):,} train tokens; {theirs_steps} steps of 3,072 tokens for nanoGPT, "
              f"{ours_steps} of {c.global_batch_tokens:,} for ours, in {c.dtype}", flush=True)
        for seed in map(int, c.seeds.split()):
            ms, whole = nanogpt_run(checkout, seed, theirs_steps)
            theirs = nanogpt_loss(checkout, corpus, 256), sum(ms) / 1000, whole
            ours = ours_run(replace(c, seed=seed, max_steps=ours_steps, data_dir=data_dir), f"{folder}/out{seed}")
            for name, (loss, updates_s, whole_s) in (("nanoGPT", theirs), ("ours", ours)):
                print(f"seed {seed}  {name:<8} loss {loss:.3f} in {updates_s:.1f} s of updates, {whole_s:.1f} s in all")
            if ours[0] <= theirs[0]:
                print(f"seed {seed}  ours took 1/{theirs[1] / ours[1]:.1f} of the time, 1/{theirs[2] / ours[2]:.1f} "
                      "with start and compile", flush=True)
            else:
                print(f"seed {seed}  ours is not there yet: a larger --ours_s", flush=True)


if __name__ == "__main__":
    main()
