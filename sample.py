"""Continue text with a trained base model. It completes documents; it was not taught to answer or to be right.

    python sample.py --out_dir=out --prompt="def read(path):"        several --prompt or --prompt_file may be given
    python sample.py --out_dir=out                                   the continuation check: does it write fluently?
    python sample.py --out_dir=out --score=FILE                      loss, perplexity, bits per byte of a text
    python sample.py --out_dir=out --split=test                      the same of the held-out test documents
"""
import codecs
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

from config import Refused, load  # before torch: a missing package then ends in one line

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # beside a training on two cores: 126 tokens/s instead of 16

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fluency
import prepare
from model import KVCache, Transformer, load_weights


@dataclass(frozen=True)
class Config:
    out_dir: str = "out"  # the folder train.py wrote, or one checkpoint file in its ckpt/
    data_dir: str = ""  # the folder prepare.py wrote, for check and split; empty: the one the run was trained on
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
    score: str = ""  # a file of UTF-8 text: how well the model predicts it
    split: str = ""  # val or test: the same for these documents; run.json counts how often test was scored


BATCH_ROWS = 8  # continuations computed together by the check and under --json; else they come one by one
SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "dtype")
SCORED_TOKENS = 4096  # positions whose logits stand in memory at once when text is scored
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
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])  # cuDNN plans each length
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

def read_text(key, path):
    """The text of a UTF-8 file. Raises Refused naming key and file."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            return f.read()
    except OSError as error:
        raise Refused(f"{key} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{key} {path} is not UTF-8 (byte {error.start}): convert it with iconv") from None


def read_prompts(c):
    """[text] of --prompt, then of every --prompt_file. Raises Refused naming file and line."""
    prompts = list(c.prompt)
    for path in c.prompt_file:
        text = read_text("prompt_file", path)
        if not path.endswith(".jsonl"):
            prompts.append(text.removesuffix("\n"))
            continue
        if not text.strip():
            raise Refused(f"prompt_file {path} holds no prompt")
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


def reader(tokenizer):
    """A function from the next id to the characters it completes: "" while one is open, U+FFFD for what is no UTF-8.

    A character that max_new_tokens cuts in two never comes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda token: decoder.decode(tokenizer.decode_bytes([token]), final=token == tokenizer.eot_id)


# ---- the model

def check(c):
    """Raises Refused for settings that can't work."""
    for key, choices in dict(device=("auto", "cpu", "cuda"), dtype=("auto", "bfloat16", "float16", "float32"),
                             split=("", "val", "test")).items():
        if getattr(c, key) not in choices:
            raise Refused(f"{key}={getattr(c, key)!r} must be one of {', '.join(filter(None, choices))}")
    for key, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0).items():
        if getattr(c, key) < least:
            raise Refused(f"{key}={getattr(c, key)} must be at least {least}")
    if c.seed >= 2**32:
        raise Refused(f"seed={c.seed} must be under {2**32}")
    if not 0 < c.top_p <= 1:
        raise Refused(f"top_p={c.top_p} must be above 0 and at most 1")
    if bool(c.prompt or c.prompt_file) + bool(c.score) + bool(c.split) > 1:
        raise Refused("prompts, --score and --split are three different jobs: give one of them")


def folder_of(out_dir):
    """The run folder that `out_dir`, a run folder or a checkpoint file in one, belongs to."""
    return os.path.dirname(os.path.dirname(os.path.abspath(out_dir))) if os.path.isfile(out_dir) else out_dir


def load_model(out_dir, device, dtype):
    """(model in eval mode, tokenizer, checkpoint) of a run. Raises Refused, also for weights that are not finite."""
    weights, shape, saved = load_weights(out_dir, warn=lambda message: print(message, file=sys.stderr))
    tokenizer = prepare.Tokenizer(folder_of(out_dir))
    if (tokenizer.vocab_size, tokenizer.eot_id) != (shape.vocab_size, shape.eot_id):
        raise Refused(f"{out_dir}: a tokenizer of {tokenizer.vocab_size} ids, weights of {shape.vocab_size}: two runs")
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
            raise Refused(f"{out_dir}, step {saved['step']}: {name} holds NaN or infinity in {dtype}: it is broken")
    return model, tokenizer, saved


def data_of(c, saved):
    """The Corpus of --data_dir, or of the run's own data_dir. Raises Refused when it is not there, or not the run's."""
    corpus = prepare.Corpus(c.data_dir or saved["settings"].get("data_dir", ""))
    if corpus.fingerprint != saved.get("data_fingerprint"):
        raise Refused(f"{corpus.folder} is not the data this run was trained on: name that with --data_dir")
    return corpus


# ---- scoring given text

def score(c, model, corpus, split, token_bytes):
    """{source: dict(loss, perplexity, bits_per_byte)}, "" for all of them, as train.py's last evaluation measures."""
    from train import evaluate
    T, device = model.shape.block_size, model.head_weight.device
    run = SimpleNamespace(  # what evaluate needs of a train.Run
        c=SimpleNamespace(micro_batch_size=max(1, SCORED_TOKENS // T), block_size=T), corpus=corpus, model=model,
        ranks=SimpleNamespace(rank=0, world=1, sum=lambda *numbers: numbers), stop=SimpleNamespace(signum=0),
        log=SimpleNamespace(alive=lambda: None), token_bytes=token_bytes, device=device,
        autocast=lambda: torch.autocast(device.type, getattr(torch, c.dtype), enabled=c.dtype != "float32"))
    return {name: dict(loss=r["val_loss"], perplexity=r["val_ppl"], bits_per_byte=r["val_bpb"])
            for name, r in evaluate(run, split, math.inf).items()}


def score_file(c, model, tokenizer):
    """[row] of --score=FILE: its text is one stream behind an end-of-text. Raises Refused."""
    text = read_text("score", c.score)
    ids = np.array(tokenizer.encode(text), dtype=np.int64)
    if not len(ids):
        raise Refused(f"score {c.score} is empty: there is nothing to predict")
    stream = SimpleNamespace(eot_id=tokenizer.eot_id, read=lambda _, offset, count: ids[offset:offset + count],
                             sources=lambda _: {"": dict(offset=0, tokens=len(ids))})
    figures = score(c, model, stream, "", tokenizer.token_bytes)[""]
    return [dict(score=c.score, tokens=len(ids), bytes=len(text.encode()), **figures)]


def score_split(c, model, tokenizer, saved):
    """[row] of every source of --split, and of all. Raises Refused where a scoring of test can't be counted."""
    corpus, folder, rows, counted = data_of(c, saved), folder_of(c.out_dir), [], {}
    if c.split == "test":
        try:
            with prepare.lock(folder):  # a live train.py would write its own count over this one
                if not (record := prepare.read_json(f"{folder}/run.json")):
                    raise Refused(f"{folder} has no run.json to count a scoring of the test documents in")
                record["test_scorings"] = counted["test_scorings"] = (record.get("test_scorings") or 0) + 1
                prepare.write_atomically(f"{folder}/run.json", json.dumps(record, indent=1).encode())
        except OSError as error:
            raise Refused(f"{folder}: a scoring of the test documents can't be counted: {error.strerror}") from None
    for name, figures in score(c, model, corpus, c.split, tokenizer.token_bytes).items():
        size = {key: sum(s[key] for n, s in corpus.sources(c.split).items() if name in ("", n))
                for key in ("tokens", "bytes")}
        rows.append(dict(split=c.split, source=name or "all", **size, **figures, **counted))
    return rows


def print_scores(c, rows, step):
    for row in rows:
        print(json.dumps(dict(row, step=step, dtype=c.dtype), ensure_ascii=False) if c.json else
              f"{c.score or c.split + ' ' + row['source']}: {row['tokens']:,} tokens, {row['bytes']:,} bytes: loss "
              f"{row['loss']:.4f}, perplexity {row['perplexity']:.5g}, bits per byte {row['bits_per_byte']:.4f}")
    if c.split == "test" and not c.json:
        print(f"test was scored {rows[0]['test_scorings']} time(s) so far; it is spent by every choice it decides")


# ---- the jobs

def show(text):
    print(text.translate(CONTROLS), end="", flush=True)


def show_prompt(title, text):
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n---- {title}\n{bold}", end="")
    show(text)
    print(plain, end="")


def ending(tokens, tokenizer):
    return dict(stopped_by="end_of_text" if tokens[-1] == tokenizer.eot_id else "max_new_tokens",
                repeated=fluency.repeated([tokenizer.decode(tokens)]))


def json_line(c, tokenizer, step, prompt, tokens, **more):
    return json.dumps(dict(prompt=prompt, completion="".join(map(reader(tokenizer), tokens)), tokens=tokens, step=step,
                           **ending(tokens, tokenizer), **more, **{key: getattr(c, key) for key in SETTINGS}),
                      ensure_ascii=False)


def continue_prompts(c, model, tokenizer, step, allowed, prompts):
    """The asked continuations: streamed one by one, or under --json computed together."""
    ids = [tokenizer.encode(text) or [tokenizer.eot_id] for text in prompts]
    for number, prompt in enumerate(ids, start=1):
        if len(prompt) > model.shape.block_size:
            print(f"notice: prompt {number} has {len(prompt)} tokens, the context is {model.shape.block_size}: "
                  f"only its end is used", file=sys.stderr)
    rows = [(number, sample) for number in range(len(prompts)) for sample in range(c.num_samples)]
    at_once = BATCH_ROWS if c.json else 1
    for start in range(0, len(rows), at_once):
        batch = rows[start:start + at_once]
        if not c.json:
            show_prompt(f"{start + 1} of {len(rows)}", prompts[batch[0][0]])
        read, began = reader(tokenizer), time.perf_counter()
        new = generate(model, [ids[number] for number, _ in batch], c.max_new_tokens, c.temperature, c.top_k, c.top_p,
                       [np.random.RandomState([c.seed, number, sample]) for number, sample in batch], allowed,
                       None if c.json else lambda _, token, read=read: show(read(token)))
        for (number, sample), tokens in zip(batch, new, strict=True):
            print(json_line(c, tokenizer, step, prompts[number], tokens, sample=sample) if c.json else
                  f"\n---- {len(tokens)} tokens, {len(tokens) / (time.perf_counter() - began):.0f} a second, stopped "
                  "by {stopped_by}, {repeated:.0%} repeated".format(**ending(tokens, tokenizer)), flush=True)


def continuation_check(c, model, tokenizer, step, allowed, corpus):
    """Continuations and signs of every source of the run, then the verdict: pass, fail, or None (fluency.py)."""
    from report import read_log
    folder, found = folder_of(c.out_dir), {}

    def continue_(source, offsets, prompts):
        new = []
        for first in range(0, len(prompts), BATCH_ROWS):
            rows = range(first, min(first + BATCH_ROWS, len(prompts)))
            new += generate(model, [prompts[i] for i in rows], c.max_new_tokens, c.temperature, c.top_k, c.top_p,
                            [np.random.RandomState([c.seed, i, 0]) for i in rows], allowed)
            for i in rows:
                text = tokenizer.decode(prompts[i])
                if c.json:
                    print(json_line(c, tokenizer, step, text, new[i], source=source, val_offset=offsets[i]), flush=True)
                else:
                    show_prompt(f"{source}, {i + 1} of {len(prompts)}", text)
                    show("".join(map(reader(tokenizer), new[i])))
                    print("\n---- stopped by {stopped_by}, {repeated:.0%} repeated".format(**ending(new[i], tokenizer)))
        return new

    evaluated = [row["val_ppl"] for row in read_log(folder) if row["event"] == "eval" and row["step"] <= step]
    for source, written in fluency.written_prompts(folder).items():
        found[source] = fluency.check_source(model, tokenizer, source, corpus, written, (evaluated or [None])[-1],
                                             c.max_new_tokens, continue_)
    failed = any(result and result["failed"] for result in found.values())
    verdict = "fail" if failed else "pass" if corpus and any(found.values()) else None
    if c.json:
        return print(json.dumps(dict(check=found, verdict=verdict, step=step), ensure_ascii=False))
    print("", *(fluency.table(*pair) for pair in found.items()), "", sep="\n")
    print(f"verdict at step {step}: {verdict or 'none, there was nothing to compare with'}. It judges fluency, never "
          f"facts or obedience.")
    if any(getattr(c, key) != getattr(Config, key) for key in ("max_new_tokens", "temperature", "top_k", "top_p")):
        print("Its limits were set with the default max_new_tokens, temperature, top_k and top_p: now it may mislead.")


def main():
    from process import pick_device, pick_dtype
    c = load(Config, sys.argv[1:], __doc__, positional=(words := []))
    if words:
        raise Refused(f"{words[0]!r} is no --key=value and no config file: text to continue is --prompt={words[0]!r}")
    check(c)
    prompts = read_prompts(c)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    device = pick_device(c, 0)
    c = replace(c, dtype=pick_dtype(c, device))
    model, tokenizer, saved = load_model(c.out_dir, device, "float32" if c.score or c.split else c.dtype)
    step, rows, corpus = saved["step"], (), None
    if c.score or c.split:
        rows = score_file(c, model, tokenizer) if c.score else score_split(c, model, tokenizer, saved)
    elif not prompts:
        try:
            corpus = data_of(c, saved)
        except Refused as refused:
            if c.data_dir:
                raise
            print(f"notice: {refused}. Prompts of ours are continued, compared with no text", file=sys.stderr)
    allowed = torch.from_numpy(tokenizer.writable).to(device)
    if not c.json:
        print(f"{c.out_dir}, step {step}, on {device}: " + ", ".join(
            f"{key} {getattr(c, key)}" for key in (("dtype",) if rows else SETTINGS)))
    if rows:
        print_scores(c, rows, step)
    elif prompts:
        continue_prompts(c, model, tokenizer, step, allowed, prompts)
    else:
        continuation_check(c, model, tokenizer, step, allowed, corpus)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` and ctrl-C end it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
