"""Tokens a second beside others, one after another on the same machine: ours, `transformers`' Llama of exactly the same
shape, and nanoGPT's GPT of the same depth and width where its checkout is at hand.

    python tests/versus.py                                                 100,092,672 parameters, for two cores
    python tests/versus.py config/train_0p5b.py --global_batch_tokens=65536 --rounds=2   one GPU, under ten minutes
    python tests/versus.py --nanogpt=DIR                                   a checkout of nanoGPT

Ours is train.py itself through bench.py. The others get what their own loops do and no more: forward, backward, clip,
fused AdamW, in the autocast that ours has here (bf16, fp32 on a CPU without it) under torch.compile. `llama` is
compiled whole; before torch 2.14 transformers then hands attention a dense mask, so `llama_layers` has its layers and
its loss compiled instead, which keeps the causal kernel and grouped heads. `nanogpt_shipped` is what nanoGPT's README
asks for on this device (on a CPU: fp32, eager). Every key of train.py is taken. Needs transformers.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import bench  # noqa: E402
import train  # noqa: E402
from config import Refused, load  # noqa: E402
from model import Shape, describe, flops_per_token  # noqa: E402
from process import pick_device, pick_dtype  # noqa: E402

VOCAB = 32_000
ON_TWO_CORES = ("--n_layer=12", "--n_embd=768", "--n_head=12", "--n_kv_head=4", "--ffn_hidden=2048", "--block_size=512",
                "--micro_batch_size=4", "--global_batch_tokens=2048")


@dataclass(frozen=True)
class Config:
    rounds: int = 5  # every side runs this often, in turn
    seconds: float = 20.0  # of steps that are measured in each run
    sides: str = "ours llama llama_layers nanogpt nanogpt_shipped"  # the last two need --nanogpt
    nanogpt: str = ""  # folder of nanoGPT's checkout
    side: str = ""  # be that side, in this process: the script starts itself


@dataclass(frozen=True)
class Settings(Config, train.Config):
    """Every key of train.py behind this script's own."""


def llama(c):
    """(model, its loss on (x, y)) of exactly the shape of `c`."""
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=c.n_embd, intermediate_size=c.ffn_hidden, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, max_position_embeddings=c.block_size,
        tie_word_embeddings=c.tie_embeddings, attn_implementation="sdpa", use_cache=False))
    assert sum(p.numel() for p in model.parameters()) == describe(Shape.of(c, VOCAB), 1)[0]
    run = model if c.side == "llama_layers" else torch.compile(model)
    if run is model:
        model.loss_function = torch.compile(model.loss_function)
        for layer in model.model.layers:
            layer.compile()
    return model, lambda x, y: run(input_ids=x, labels=x, use_cache=False).loss


def nanogpt(c, plain):
    sys.path.insert(0, c.nanogpt)
    sys.modules.pop("model")  # ours
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(block_size=c.block_size, vocab_size=VOCAB, n_layer=c.n_layer, n_head=c.n_head,
                          n_embd=c.n_embd, dropout=0.0, bias=False))
    run = model if plain else torch.compile(model)
    return model, lambda x, y: run(x, y)[1]


def other(c):
    """One side's run, in this process: prints tokens a second, the median over its steps, as JSON."""
    torch.manual_seed(c.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() and c.device != "cpu" else "cpu"
    plain = c.side == "nanogpt_shipped" and device == "cpu"
    model, loss_of = nanogpt(c, plain) if c.side.startswith("nanogpt") else llama(c)
    model.to(device).train()
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW([dict(params=groups[0], weight_decay=0.1), dict(params=groups[1], weight_decay=0.0)],
                                  lr=3e-4, betas=(0.9, 0.95), fused=not plain)
    times, tokens = [], torch.randint(VOCAB, (64, c.micro_batch_size, c.block_size + 1)).to(device)
    accumulation = c.global_batch_tokens // c.micro_batch_size // c.block_size
    while len(times) < bench.DROPPED + bench.FEWEST or sum(times[bench.DROPPED:]) < c.seconds:
        began = time.perf_counter()
        for micro in range(accumulation):
            batch = tokens[(len(times) * accumulation + micro) % 64]
            with torch.autocast(device, getattr(torch, c.dtype), enabled=c.dtype != "float32" and not plain):
                loss = loss_of(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        times.append(time.perf_counter() - began)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    print(json.dumps(dict(tokens_per_s=c.global_batch_tokens / float(np.median(times[bench.DROPPED:])),
                          n_params=sum(p.numel() for p in model.parameters()), peak_memory_bytes=memory)))


def main():
    argv = sys.argv[1:]
    if not any(word.endswith(".py") for word in argv):
        argv = [*ON_TWO_CORES, *argv]
    c = load(Settings, argv, __doc__)
    c = replace(c, dtype=pick_dtype(c, pick_device(c, 0)))
    if c.nanogpt and not os.path.exists(f"{c.nanogpt}/model.py"):
        raise Refused(f"--nanogpt={c.nanogpt} must name a checkout of nanoGPT")
    if c.side:
        return other(c)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the run that is being measured
    device = "cuda" if torch.cuda.is_available() and c.device != "cpu" else "cpu"
    found = {side: [] for side in c.sides.split() if c.nanogpt or not side.startswith("nanogpt")}
    shape, rates = Shape.of(c, VOCAB), []
    with tempfile.TemporaryDirectory(prefix="versus.") as data_dir:
        bench.write_random_data(data_dir, VOCAB, 4 * c.global_batch_tokens + 2 * c.block_size)
        for number in range(c.rounds):
            print(f"round {number + 1} of {c.rounds}, in {c.dtype}", flush=True)
            rates.append(bench.matrix_product_tflops(device, c.dtype, 3.0))
            for side, measured in found.items():
                if side == "ours":
                    one = bench.measure(replace(c, data_dir=data_dir), 1, data_dir, c.seconds, VOCAB)
                else:
                    command = [sys.executable, os.path.abspath(__file__), *argv, f"--side={side}"]
                    one = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
                measured.append(one["tokens_per_s"])
                memory = f"{one['peak_memory_bytes'] / 2**30:.1f} GiB" if one["peak_memory_bytes"] else ""
                print(f"  {side:<16} {measured[-1]:>9,.0f} tokens/s  "
                      f"{one['n_params']:,} parameters  {memory}", flush=True)
    print(f"\n{'':<16} {'median':>9} {'least':>9} {'most':>9}  ours is")
    for side, measured in found.items():
        times = np.median(found["ours"]) / np.median(measured) if "ours" in found else np.nan
        print(f"{side:<16} {np.median(measured):>9,.0f} {min(measured):>9,.0f} {max(measured):>9,.0f}  {times:.2f} x")
    if "ours" in found:
        reached = flops_per_token(describe(shape, 1)[0], shape)[0] * np.median(found["ours"]) / np.median(rates) / 1e12
        print(f"ours reaches {reached:.1%} of a large {c.dtype} matrix product's {np.median(rates):.3g} TFLOP/s "
              "here (6N)")


if __name__ == "__main__":
    main()
