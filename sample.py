"""Continue text with a trained base model. It completes documents; it was not taught to answer or to be right.

    python sample.py --out_dir=out --prompt="def read(path):"        several --prompt or --prompt_file may be given
    python sample.py --out_dir=out                                   continues a few fixed prompts for every source
"""
import codecs
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass

from config import Refused, load  # before torch: a missing package then ends in one line

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside a training on two cores: 126 tokens/s instead of 16

import numpy as np
import torch
import torch.nn.functional as F

from model import KVCache, Transformer, load_weights
from prepare import Tokenizer, read_json


@dataclass(frozen=True)
class Config:
    out_dir: str = "out"  # the folder train.py wrote; nothing else is read
    prompt: tuple = ()  # text to continue, again for each further one; empty text: a new document
    prompt_file: tuple = ()  # a file with one prompt (its last newline is dropped), or .jsonl with one a line
    num_samples: int = 1  # continuations of each prompt
    max_new_tokens: int = 200  # tokens at most; an end-of-text ends it earlier
    temperature: float = 0.8  # 0: always the likeliest token; 1: the model's own probabilities
    top_k: int = 50  # draw among the k likeliest tokens only; 0: among all
    top_p: float = 1.0  # draw among the likeliest tokens that together reach this probability
    seed: int = 1337  # same seed, prompts and settings: same text, alone or in a batch
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, bfloat16, float16, float32: of weights and cache
    json: bool = False  # JSON lines on stdout, nothing else


BATCH_ROWS = 8  # continuations computed together under --json; on the screen they come one by one
FIXED_PROMPTS = {  # none ends in a space: to these tokenizers a word's space is part of the word
    "code": ("import os\nimport sys\n\n\ndef",
             "class Stack:\n    \"\"\"A last-in, first-out list.\"\"\"\n\n    def __init__(self",
             "def count_words(path):\n    with open(path) as f:\n        for line in f:\n",
             "    try:\n        value = int(text)\n    except ValueError:\n"),
    "prose": ("The \"for\" statement is used to", "A function is called with", "The value of the expression",
              "If an exception is raised"),
    "zh": ("人类最早的文字出现在", "水在自然界中的循环是指", "学习一门新的语言，最重要的是", "春天来了，"),
    "stories": ("Once upon a time, there was a little", "Tom and his sister went to the park.",
                "One day, a small bird", "\"Can I help you?\" asked"),
    "": ("The history of the city begins", "Water boils when", "In order to learn a new language,",
         "Scientists have found that"),  # English, for a source of any other name
}
CONTROLS = {i: 0xFFFD for i in (*range(9), *range(11, 32), *range(127, 160))}  # they would steer the terminal


# ---- generation: a few pure functions; no global generator is touched

def pick(logits, temperature, top_k, top_p, uniform):
    """Next ids (B,) from logits (B, V): the likeliest at temperature 0, else drawn by `uniform` (B,), float64 < 1."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, ids = logits.topk(min(top_k or logits.shape[1], logits.shape[1]))  # (B, k), largest first
    logits = logits.double()
    p = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)
    p = p * (p.cumsum(dim=-1) - p < top_p)  # the smallest set that reaches top_p, the first always in it
    reached = p.cumsum(dim=-1)
    passed = reached <= uniform[:, None] * reached[:, -1:]  # the product stays below the sum, as uniform below 1
    return ids.gather(1, passed.sum(dim=-1, keepdim=True))[:, 0]


def prefill(model, contexts):
    """(cache, h): a KVCache that holds `contexts` (B lists of ids), and h (B, n_embd) behind the last id of each."""
    device, kind = model.head_weight.device, model.head_weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.head_weight.dtype
    idx = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in contexts], batch_first=True)  # (B, longest)
    cache, lengths = KVCache(model, len(contexts), dtype), torch.tensor([len(ids) for ids in contexts])
    h = model.hidden(idx.to(device), cache)
    cache.lengths += lengths
    return cache, h[torch.arange(len(contexts)), lengths - 1]


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, temperature, top_k, top_p, rngs, allowed=None, emit=None):
    """Continue B prompts (lists of at least one id): B lists of new ids, an end-of-text being the last of its list.

    `rngs`: a np.random.RandomState for each row; a row's text depends on its prompt and generator alone, not on the
    others. `allowed` (V,): boolean, ids that may come. `emit(row, id)` hears of every id at once. A row whose context
    is full goes on with the last half of it (at first: with the last block_size ids of the prompt). Raises Refused
    when the logits are not finite.
    """
    block_size, device = model.shape.block_size, model.head_weight.device
    forbidden = None if allowed is None or allowed.all() else ~allowed
    contexts = [list(ids[-block_size:]) for ids in prompts]
    new, going, cache = [[] for _ in prompts], list(range(len(prompts))), None  # going: rows without an end-of-text
    was_training = model.training
    model.eval()
    for _ in range(max_new_tokens):
        full = [row for row in going if len(contexts[row]) > block_size]
        for row in full:
            contexts[row] = contexts[row][-max(1, block_size // 2):]
        if cache is None or full:
            cache, h = prefill(model, [contexts[row] for row in going])  # h (B, n_embd)
        else:
            h = model.hidden(torch.tensor([contexts[row][-1:] for row in going], device=device), cache)[:, 0]
            cache.lengths += 1
        logits = F.linear(h, model.head_weight)  # (B, V)
        if forbidden is not None:
            logits = logits.masked_fill_(forbidden, -torch.inf)
        uniform = torch.tensor([rngs[row].random_sample() for row in going], dtype=torch.float64, device=device)
        if not math.isfinite(logits.max()):  # NaN is larger than all
            raise Refused("the model's logits are not finite: the weights are broken, or --dtype=float32 is needed")
        for row, token in zip(going, pick(logits, temperature, top_k, top_p, uniform).tolist(), strict=True):
            new[row].append(token)
            contexts[row].append(token)
            if emit:
                emit(row, token)
        stay = [i for i, row in enumerate(going) if new[row][-1] != model.shape.eot_id]
        if len(stay) < len(going):
            going = [going[i] for i in stay]
            cache.keep(stay)
        if not going:
            break
    model.train(was_training)
    return new


# ---- text in, text out

def read_prompts(c):
    """[text] of --prompt, then of every --prompt_file. Raises Refused naming file and line."""
    prompts = list(c.prompt)
    for path in c.prompt_file:
        try:
            with open(path, encoding="utf-8-sig") as f:
                text = f.read()
        except OSError as error:
            raise Refused(f"prompt_file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise Refused(f"prompt_file {path} is not UTF-8 (byte {error.start}): convert it with iconv") from None
        if not path.endswith(".jsonl"):
            prompts.append(text.removesuffix("\n"))
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                prompts.append("" + (value if isinstance(value, str) else value["prompt"]))  # TypeError unless text
            except (ValueError, KeyError, TypeError):
                raise Refused(f'prompt_file {path}, line {number}: no JSON string, no {{"prompt": "..."}}') from None
    try:  # under LC_ALL=C the command line's bytes arrive as surrogates
        return [text.encode("utf-8", "surrogateescape").decode() for text in prompts]
    except UnicodeError as error:
        raise Refused(f"a prompt is not valid UTF-8: {error}") from None


def fixed_prompts(out_dir):
    """The prompts of every source the run was trained on, as its meta.json names them."""
    meta = read_json(os.path.join(out_dir, "meta.json"))
    kinds = {source["name"]: source.get("kind") for source in meta.get("recipe", {}).get("sources", [])}
    names = ["code" if kinds.get(name) == "code" else name for name in meta["splits"]["train"]]
    return list(dict.fromkeys(text for name in names for text in FIXED_PROMPTS.get(name, FIXED_PROMPTS[""])))


def reader(tokenizer):
    """A function from the next id to the characters it completes: "" while one is open, U+FFFD for what is no UTF-8.

    A character that max_new_tokens cuts in two never comes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda token: decoder.decode(tokenizer.decode_bytes([token]), final=token == tokenizer.eot_id)


# ---- the model

def check(c):
    """Raises Refused for settings that can't work."""
    for key, choices in dict(device=("auto", "cpu", "cuda"), dtype=("auto", "bfloat16", "float16", "float32")).items():
        if getattr(c, key) not in choices:
            raise Refused(f"{key}={getattr(c, key)!r} must be one of {', '.join(choices)}")
    for key, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0).items():
        if getattr(c, key) < least:
            raise Refused(f"{key}={getattr(c, key)} must be at least {least}")
    if not 0 < c.top_p <= 1:
        raise Refused(f"top_p={c.top_p} must be above 0 and at most 1")


def load_model(out_dir, device, dtype):
    """(model in eval mode, tokenizer, step) of a run folder. Raises Refused, also for weights that are not finite."""
    weights, shape, saved = load_weights(out_dir, warn=lambda message: print(message, file=sys.stderr))
    tokenizer = Tokenizer(out_dir)
    if (tokenizer.vocab_size, tokenizer.eot_id) != (shape.vocab_size, shape.eot_id):
        raise Refused(f"{out_dir}: the tokenizer has {tokenizer.vocab_size} ids, the weights have {shape.vocab_size}: "
                      f"they are not of one run")
    with torch.device("meta"):
        model = Transformer(shape)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise Refused(f"{out_dir}: the checkpoint does not fit its own settings: "
                      f"{' '.join(str(error).split())[:200]}") from None
    model.to(device, getattr(torch, dtype)).eval()
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise Refused(f"{out_dir}: the weights of step {saved['step']} are broken: {name} holds NaN or infinity "
                          f"in {dtype}")
    return model, tokenizer, saved["step"]


def show(text):
    print(text.translate(CONTROLS), end="", flush=True)


def main():
    from process import pick_device, pick_dtype

    c = load(Config, sys.argv[1:], __doc__)
    check(c)
    prompts = read_prompts(c)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    device = pick_device(c, 0)
    dtype = pick_dtype(c, device)
    model, tokenizer, step = load_model(c.out_dir, device, dtype)
    prompts = prompts or fixed_prompts(c.out_dir)
    ids = [tokenizer.encode(text) or [tokenizer.eot_id] for text in prompts]
    for number, prompt in enumerate(ids, start=1):
        if len(prompt) > model.shape.block_size:
            print(f"notice: prompt {number} has {len(prompt)} tokens, the context is {model.shape.block_size}: "
                  f"only its end is used", file=sys.stderr)
    allowed = torch.zeros(model.shape.vocab_size, dtype=torch.bool, device=device)
    allowed[:len(tokenizer.ranks)] = allowed[tokenizer.eot_id] = True

    settings = {key: getattr(c, key) for key in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    if not c.json:
        print(f"{c.out_dir}, step {step}, on {device} in {dtype}: {', '.join(f'{k} {v}' for k, v in settings.items())}")
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    rows = [(number, sample) for number in range(len(prompts)) for sample in range(c.num_samples)]
    at_once = BATCH_ROWS if c.json else 1
    for start in range(0, len(rows), at_once):
        batch = rows[start:start + at_once]
        if not c.json:
            text = prompts[batch[0][0]]
            show(f"\n---- {start + 1} of {len(rows)}: {text[:60]!r}{'...' if len(text) > 60 else ''}\n")
            print(bold, end="")
            show(text)
            print(plain, end="")
        read, began = reader(tokenizer), time.perf_counter()
        new = generate(model, [ids[number] for number, _ in batch], c.max_new_tokens, c.temperature, c.top_k, c.top_p,
                       [np.random.RandomState([c.seed, number, sample]) for number, sample in batch], allowed,
                       None if c.json else lambda _, token, read=read: show(read(token)))
        for (number, sample), tokens in zip(batch, new, strict=True):
            stopped_by = "end_of_text" if tokens[-1] == tokenizer.eot_id else "max_new_tokens"
            if c.json:
                line = dict(prompt=prompts[number], completion="".join(map(reader(tokenizer), tokens)), tokens=tokens,
                            stopped_by=stopped_by, sample=sample, step=step, dtype=dtype, **settings)
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print(f"\n---- {len(tokens)} tokens, {len(tokens) / (time.perf_counter() - began):.0f} a second, "
                      f"stopped by {stopped_by}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` and ctrl-C end it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
