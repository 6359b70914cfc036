"""The continuation check of sample.py: do continuations read like the documents they continue?

Each sign is measured on what the model wrote and on what really follows the same prompts. It judges fluency: whether
words stand as they do in real text. It knows nothing of facts, sense or obedience.
"""
import codecs
import math
import os
import re

import numpy as np
import torch

from model import IGNORE
from prepare import read_json

PROMPTS, PROMPT_TOKENS = 16, 32  # how that many val documents of a source begin, evenly spread over it
TRAIN_BYTES, PIECE_TOKENS = 32 << 20, 1 << 16  # pairs are looked up in this much of a source's train text
SHUFFLES = 4  # random orders that chance is averaged over
HAN = "\u3400-\u9fff\uf900-\ufaff"
UNIT = re.compile(rf"[{HAN}]|[^\W{HAN}]+|[^\w\s]")  # a Han character, a run of other word characters, a mark

WRITTEN_PROMPTS = {  # by us; none ends in a space: to these tokenizers a word's space is part of the word
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


def written_prompts(out_dir):
    """{source: prompts written for it} of the sources the run was trained on, as its meta.json names them."""
    meta = read_json(os.path.join(out_dir, "meta.json"))
    kinds = {source["name"]: source.get("kind") for source in meta.get("recipe", {}).get("sources", [])}
    return {name: WRITTEN_PROMPTS.get("code" if kinds.get(name) == "code" else name, WRITTEN_PROMPTS[""])
            for name in meta["splits"]["train"]}


def fixed_prompts(out_dir):
    """[text]: what train.py continues from time to time."""
    return list(dict.fromkeys(text for texts in written_prompts(out_dir).values() for text in texts))


def val_prompts(corpus, source, length):
    """(offsets in val.bin, prompts, the ids that really follow, `length` at most) of documents of a source: three
    lists, empty when none of its documents is longer than a prompt: an end-of-text and PROMPT_TOKENS ids."""
    s = corpus.sources("val").get(source, dict(offset=0, tokens=0))
    ids = corpus.read("val", s["offset"], s["tokens"]).tolist()
    starts = [0] + [at + 1 for at, token in enumerate(ids) if token == corpus.eot_id]
    documents = [(a, b) for a, b in zip(starts, starts[1:], strict=False) if b - a > PROMPT_TOKENS + 1]
    chosen = list(dict.fromkeys(documents[i * len(documents) // PROMPTS] for i in range(PROMPTS) if documents))
    return ([s["offset"] + a for a, _ in chosen], [[corpus.eot_id, *ids[a:a + PROMPT_TOKENS]] for a, _ in chosen],
            [ids[a + PROMPT_TOKENS:b][:length] for a, b in chosen])


def pairs_of(units):
    return list(zip(units, units[1:], strict=False))


def repeated(texts):
    """Share of the runs of four units that stood in the same text before."""
    runs = [list(zip(*(units[i:] for i in range(4)), strict=False)) for units in map(UNIT.findall, texts)]
    return 1 - sum(len(set(r)) for r in runs) / sum(map(len, runs)) if any(runs) else 0.0


@torch.inference_mode()
def signs_of(model, tokenizer, prompts, new):
    """What continuations tell by themselves: (texts, dict) with valid_utf8, the share of characters that came from
    valid bytes; ended, the share of texts; repeated; perplexity, under the model at temperature 1 and among all ids."""
    texts = [codecs.utf_8_decode(tokenizer.decode_bytes(ids), "replace")[0] for ids in new]  # without a cut end
    nats, count = 0.0, 0
    for prompt, ids in zip(prompts, new, strict=True):
        row = torch.tensor((prompt + ids)[-model.shape.block_size - 1:], device=model.head_weight.device)
        targets = row[1:].clone()
        targets[:max(0, len(targets) - len(ids))] = IGNORE
        nats += model(row[None, :-1], targets[None]).item()
        count += int((targets != IGNORE).sum())
    return texts, dict(
        valid_utf8=1 - sum(text.count("\ufffd") for text in texts) / max(1, sum(map(len, texts))),
        ended=sum(ids[-1] == tokenizer.eot_id for ids in new) / len(new),
        repeated=repeated(texts), perplexity=math.exp(min(nats / count, 700)))


def pair_signs(corpus, tokenizer, source, *groups):
    """For each group of texts dict(pairs, beyond_chance): the share of adjacent units that are adjacent somewhere in
    the source's train text, and that share less the one which the same units reach in random order.

    A source's train text of more than TRAIN_BYTES is read in pieces, drawn with a fixed seed, up to that; memory
    holds one piece.
    """
    rng, bags = np.random.RandomState(0), []
    for texts in groups:
        units = [UNIT.findall(text) for text in texts]
        every = np.array([unit for text in units for unit in text], dtype=object)
        bags += [[pair for text in units for pair in pairs_of(text)],
                 [pair for _ in range(SHUFFLES) for pair in pairs_of(rng.permutation(every).tolist())]]
    s, wanted, seen, n_bytes = corpus.sources("train")[source], set().union(*bags), set(), 0
    for at in (rng.permutation(-(-s["tokens"] // PIECE_TOKENS)) * PIECE_TOKENS).tolist():
        ids = corpus.read("train", s["offset"] + at, min(PIECE_TOKENS, s["tokens"] - at))
        seen |= wanted.intersection(pairs_of(UNIT.findall(tokenizer.decode(ids))))
        n_bytes += int(tokenizer.token_bytes[ids].sum())
        if n_bytes >= TRAIN_BYTES:
            break
    shares = [sum(pair in seen for pair in bag) / max(1, len(bag)) for bag in bags]
    return [dict(pairs=share, beyond_chance=share - chance)
            for share, chance in zip(shares[::2], shares[1::2], strict=True)]


# Limits were set from these runs. demo: config/data_demo.py, then train.py config/train_demo.py --optimizer=muon
# --learning_rate=4e-3 --max_steps=640 --save_interval=160, each checkpoint by sample.py --out_dir=out/demo/ckpt/
# step_N.pt; shuffled: the same on ids in random order; zh: the same on 71 MB of zh, en and code, its zh figures; last,
# runs/zh_en_code_13m (code, en, zh). valid_utf8 and repeated as they are, the others as ratio to the documents' own;
# where two figures stand, code and prose.
#                            valid_utf8       repeated    pairs        beyond_chance
#   step 0                   0.995 0.994      0.03 0.03   0.30 0.23    0.16  0.19    fails
#   demo, step 160           1     1          0.03 0.03   0.84 0.69    0.42  0.63    passes
#   demo, step 320           1     1          0.03 0.08   0.89 0.86    0.38  0.65    passes
#   demo, step 640           1     1          0.04 0.05   0.88 0.90    0.52  0.71    passes
#   demo, temperature 0      1     1          0.83 0.94   1.07 1.28    0.68  0.45    fails
#   shuffled, step 640       1     1          0.00 0.00   0.92 0.81    0.04 -0.04    fails, here with the real documents
#   zh, step 640 (loss 7.08) 0.994            0.14        0.96         0.46          fails: its characters still break
#   13m, step 2100           1  1  0.9998     0.22 0.14 0.32  0.96 0.99 1.01   0.94 0.82 0.82   passes
#   zh shuffled, step 200    1                0.00        0.95         0.09          fails
#   40, 70, 100 steps on 2 MB of code, loss 6.4 to 5.8: beyond_chance 0.35 0.27 0.26: passes, and is hardly fluent yet
#   its like on three sources at loss 7.1: code 0.16, en 0.09: fails
# The documents' own beyond_chance is 0.29 to 0.61, that of shuffled ones 0.10 at most. The continuations' perplexity is
# 0.02 to 0.42 of the documents'; 2.4 where temperature 1 with top_k 0 led the demo model astray.

def failures(mine, theirs):
    """What keeps continuations with the signs `mine` from passing for the documents', whose signs are `theirs`."""
    found = [(mine["valid_utf8"] < 0.998, "bytes that are no UTF-8"),
             (mine["repeated"] > theirs.get("repeated", 0.1) + 0.3, "it repeats itself"),
             (mine["perplexity"] > 1.5 * theirs.get("perplexity", float("inf")), "its own text surprises it")]
    if "pairs" in theirs:
        found += [(mine["pairs"] < 0.6 * theirs["pairs"], "neighbours that train text does not have"),
                  (mine["beyond_chance"] < 0.25 * theirs["beyond_chance"], "its words are in random order"),
                  (theirs["beyond_chance"] < 0.1, "train text hardly knows the documents' own neighbours")]
    return [words for holds, words in found if holds]


def check_source(model, tokenizer, source, corpus, written, val_ppl, length, continue_):
    """dict(continuations, documents, failed): the signs of both, and in words why the first don't pass for the second.
    None when val has no prompt for the source.

    `continue_(source, offsets, prompts)` returns the model's ids. Without a corpus the prompts are the texts `written`,
    and of the documents' signs only the perplexity is known, `val_ppl` or None.
    """
    if corpus:
        offsets, prompts, own = val_prompts(corpus, source, length)
    else:
        prompts = [tokenizer.encode(text) for text in written]
        offsets = [None] * len(prompts)
    if not prompts:
        return None
    texts, mine = signs_of(model, tokenizer, prompts, continue_(source, offsets, prompts))
    if corpus:
        own_texts, theirs = signs_of(model, tokenizer, prompts, own)
        for signs, pairs in zip((mine, theirs), pair_signs(corpus, tokenizer, source, texts, own_texts), strict=True):
            signs |= pairs
    else:
        theirs = dict(perplexity=val_ppl) if val_ppl else {}
    return dict(continuations=mine, documents=theirs, failed=failures(mine, theirs))


def table(source, result):
    """The signs of a source as lines for the screen."""
    if not result:
        return f"==== {source}: no val document is longer than a prompt; not checked"
    lines = [f"==== {source:<37}{'continuations':>15}{'documents':>15}"]
    for key, words, form in (
            ("valid_utf8", "characters of valid UTF-8", ".2%"), ("ended", "ended by end-of-text", ".0%"),
            ("repeated", "runs of four words that came before", ".1%"), ("perplexity", "perplexity", ".5g"),
            ("pairs", "neighbours that train text has too", ".1%"),
            ("beyond_chance", "more than in random order", ".1%")):
        columns = (result[column].get(key) for column in ("continuations", "documents"))
        lines.append(f"     {words:<37}" + "".join(f"{format(x, form) if x is not None else '-':>15}" for x in columns))
    return "\n".join([*lines, "     " + ("; ".join(result["failed"]) or "nothing speaks against them")])
