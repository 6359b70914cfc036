"""Hand the weights on: a folder in the layout of `transformers`' Llama, with tokenizer and model card.

    python export.py --out_dir=out --to=my-model

Then, anywhere: AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model"). The same
folder is what `train.py --init_from=my-model` starts from.
"""
import contextlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass

from config import Refused, load  # before torch: a missing package then ends in one line

import torch

import prepare
from model import Shape, Transformer, load_weights, sha256_of


@dataclass(frozen=True)
class Config:
    out_dir: str = "out"  # the folder train.py wrote; its newest verified checkpoint is taken
    to: str = ""  # the new folder; its last part is the model's name
    dtype: str = "float32"  # float32: what was trained; bfloat16: half the size, rounded


# ---- the layout: our names and theirs

CONFIG = dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
              n_kv_head="num_key_value_heads", n_embd="hidden_size", ffn_hidden="intermediate_size",
              block_size="max_position_embeddings", rope_theta="rope_theta", norm_eps="rms_norm_eps",
              tie_embeddings="tie_word_embeddings", eot_id="eos_token_id")
PARTS = dict(tok_emb="model.embed_tokens", norm="model.norm", lm_head="lm_head", attn_norm="input_layernorm",
             wq="self_attn.q_proj", wk="self_attn.k_proj", wv="self_attn.v_proj", wo="self_attn.o_proj",
             ffn_norm="post_attention_layernorm", w_gate="mlp.gate_proj", w_up="mlp.up_proj", w_down="mlp.down_proj")


def tensors_of(shape):
    """{our name: (their name, size)} of every weight. Raises Refused for one that the layout has no place for."""
    with torch.device("meta"):
        sizes = {name: p.shape for name, p in Transformer(shape).state_dict().items()}
    parts = {name: re.fullmatch(r"(layers\.\d+\.)?(\w+)\.weight", name) for name in sizes}
    if unknown := [name for name, m in parts.items() if m is None or m[2] not in PARTS]:
        raise Refused(f"transformers' Llama has no place for {unknown[0]}")
    return {name: (f"{'model.' + m[1] if m[1] else ''}{PARTS[m[2]]}.weight", sizes[name]) for name, m in parts.items()}


def to_llama(weights, shape, dtype):
    """(config.json as a dict, {their name: tensor}). Raises Refused for weights that do not fit or are not finite."""
    names = tensors_of(shape)
    wrong = [name for name in names.keys() | weights if name not in names or name not in weights
             or weights[name].shape != names[name][1]]
    if wrong:
        raise Refused(f"the checkpoint does not fit its own settings: {min(wrong)}")
    tensors = {}
    for name, weight in weights.items():
        tensors[names[name][0]] = weight = weight.to(getattr(torch, dtype)).contiguous()
        if not weight.isfinite().all():
            raise Refused(f"the weights are broken: {name} holds NaN or infinity in {dtype}")
    config = {theirs: getattr(shape, ours) for ours, theirs in CONFIG.items()}
    return config | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", head_dim=shape.n_embd // shape.n_head,
        hidden_act="silu", attention_bias=False, attention_dropout=0.0, mlp_bias=False, torch_dtype=dtype,
        bos_token_id=shape.eot_id), tensors  # no pad_token_id: torch gives that id's embedding no gradient


def read_llama(path):
    """(fp32 state dict, Shape, dict of step and what else is known) from an export folder or its .safetensors file.

    Reads what `transformers` saves in this layout too. Raises Refused.
    """
    from safetensors import SafetensorError, safe_open
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    path = os.path.join(path, "model.safetensors") if os.path.isdir(path) else path
    said = prepare.read_json(os.path.join(folder, "config.json"))
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if said.get("model_type") != "llama" or rope.get("rope_type", "default") != "default":
        raise Refused(f"{path}: beside it must lie the config.json of a Llama with plain rotary positions")
    try:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "SHA256SUMS")) as f:
            if f"{sha256_of(path)}  {os.path.basename(path)}\n" not in f.readlines():
                raise Refused(f"{path} is not the file that {f.name} names: copy the folder again")
        said = dict(rope_theta=rope.get("rope_theta")) | said
        settings = dict(dropout=0.0, doc_mask=False) | {ours: said[theirs] for ours, theirs in CONFIG.items()}
        shape = Shape.of(settings, settings["vocab_size"], settings["eot_id"])
        names = tensors_of(shape)
        with safe_open(path, "pt") as f:
            if strange := set(f.keys()) ^ {theirs for theirs, _ in names.values()}:
                raise Refused(f"{path} and its config.json do not fit: {min(strange)}")
            weights = {ours: f.get_tensor(theirs).float() for ours, (theirs, _) in names.items()}
        return weights, shape, dict(step=0) | said.get("nanobase", {}) | dict(model=weights, settings=settings)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Refused(f"{path} can't be read as a Llama: {type(error).__name__}: {error}") from None


# ---- the tokenizer

# The one split pattern prepare.py writes, in the form that tokenizers' regex engine reads the same way: it has no
# possessive quantifiers ({1,3}+ would mean "any number"). Here none of them matters: what a possessive class may not
# give back, nothing behind it could take. Split alike at every code point, in eight surroundings each (1.7M strings).
PATTERNS = {prepare.PATTERN: prepare.PATTERN.replace("]?+", "]?").replace("]++", "]+")}


def byte_characters():
    """{byte: the printable character that stands for it in tokenizer.json} (GPT-2's table: the others from U+0100)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def tokenizer_json(tokenizer, special):
    """The tokenizer in the format of the `tokenizers` library; `special` is the text of end-of-text.

    tiktoken joins any two neighbours whose joint bytes have a rank, the lowest rank first: so every way to cut a token
    into two is a merge, not the one by which it was found. Raises Refused where that format can't hold it.
    """
    if tokenizer.pattern not in PATTERNS:
        raise Refused(f"the tokenizer splits by {tokenizer.pattern!r}: only prepare.py's own pattern can be exported")
    if tokenizer.eot_id != len(tokenizer.ranks) or tokenizer.vocab_size != tokenizer.eot_id + 1:
        raise Refused(f"the tokenizer has {len(tokenizer.ranks)} tokens, end-of-text {tokenizer.eot_id} and "
                      f"{tokenizer.vocab_size} ids: end-of-text must be the next id and the last")
    characters = byte_characters()
    pieces = {piece: "".join(characters[b] for b in piece) for piece in tokenizer.ranks}
    merges = [[pieces[piece[:i]], pieces[piece[i:]]] for piece in tokenizer.ranks for i in range(1, len(piece))
              if piece[:i] in pieces and piece[i:] in pieces]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=PATTERNS[tokenizer.pattern]), behavior="Isolated", invert=False)
    return dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None, decoder=byte_level,
        added_tokens=[dict(id=tokenizer.eot_id, content=special, special=True, normalized=False, single_word=False,
                           lstrip=False, rstrip=False)],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=False, byte_fallback=False, ignore_merges=True,  # a piece that is a token stays whole
                   vocab={text: rank for rank, text in enumerate(pieces.values())}, merges=merges))


# ---- the model card

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A base language model of {n_params:,} parameters: it continues text. It was not taught to answer or to be right.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
ids = tokenizer("Water boils when", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

## Data

{data}

Documents, tokens and bytes are those of the train split; val and test were held out by a hash of each document.

## Training

{training}

```
{settings}
```

## Losses

{losses}

## Limits

- It repeats what its data hold, errors and prejudice included, and makes up the rest. Nothing but the losses above was
  measured. What it learnt from belongs to its authors; this card grants no licence.
- The context is {block_size:,} tokens; it was never trained beyond.{doc_mask}
- Don't end a prompt with a space: to this tokenizer it belongs to the next word. An empty prompt is one end-of-text.
- Text that looks like `{special}` is ordinary text, as in training. `transformers` learns that from
  tokenizer_config.json (`split_special_tokens`); who loads tokenizer.json alone must set `encode_special_tokens`.
- Documents of over {piece:,} characters were encoded in pieces for training; this tokenizer takes a text whole.
"""
DOC_MASK = """
- In training attention stayed inside a document, from the end-of-text before it to its end. This layout has no such
  mask: give it one document at a time, then it computes the same."""


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line) + " |"
                     for line in lines)


def model_card(name, out_dir, meta, shape, saved, n_params, special):
    """README.md: what the weights are, learnt from, reach and are not good for, out of the run's own record."""
    run, step, settings, rows = prepare.read_json(f"{out_dir}/run.json"), saved["step"], saved["settings"], []
    if os.path.exists(f"{out_dir}/log.jsonl"):
        with open(f"{out_dir}/log.jsonl", encoding="utf-8") as f:
            rows = [row for row in (json.loads(line) for line in f if line.endswith("\n")) if row["step"] <= step]
    sources = {source["name"]: source for source in meta["recipe"].get("sources", [])}

    def origin(source):  # no path of this machine
        return f"{source['path']} at {source['revision']}" if source.get("hub") else "local files"
    data = [[name, origin(sources.get(name, {})), *(row[key] for key in ("documents", "tokens", "bytes")),
             meta["splits"]["val"][name]["tokens"], meta["splits"]["test"][name]["tokens"],
             sum(meta["dropped"].get(name, {}).values())] for name, row in meta["splits"]["train"].items()]
    losses = ["Not evaluated up to this step."]
    for row in [row for row in rows if row["event"] == "eval"][-1:]:
        losses = [f"On held-out documents (val) at step {row['step']:,}, in nats a token:", table(
            ["source", "loss", "perplexity", "bits per byte"],
            [[part, f"{scores['val_loss']:.4f}", f"{scores['val_ppl']:.2f}", f"{scores['val_bpb']:.4f}"]
             for part, scores in [*row["sources"].items(), ("all", row)]])]
    losses += [f"Training loss at step {row['step']:,}: {row['loss']:.4f}."
               for row in [row for row in rows if row["event"] == "step"][-1:]]
    training = {
        "steps": f"{step:,} of {settings['max_steps']:,}; the run is recorded as {run.get('status', 'not recorded')}",
        "positions read": step * settings["global_batch_tokens"],
        "begun from": "random weights" if settings["init_from"] in ("auto", "scratch") else "other weights",
        "on": f"{run.get('device_count')} x {run.get('device')}, {settings['dtype']}",
        "device-hours": round(max((row.get("gpu_hours") or 0 for row in rows), default=0), 3),
        "versions": ", ".join(f"{key} {value}" for key, value in run.get("versions", {}).items() if value),
        "commit": f"{saved.get('commit')}{' with local changes' if run.get('dirty') else ''}",
        "data fingerprint": saved["data_fingerprint"],
        "times the test split was scored": run.get("test_scorings", "not recorded")}
    columns = ["source", "from", "documents", "tokens", "bytes", "val tokens", "test tokens", "documents dropped"]
    places = ("data_dir", "out_dir", "init_from")
    return CARD.format(
        name=name, n_params=n_params, special=special, block_size=shape.block_size, piece=prepare.PIECE_CHARS,
        doc_mask=DOC_MASK if shape.doc_mask else "", data=table(columns, data), losses="\n\n".join(losses),
        training=table(["", ""], training.items()),
        settings="\n".join(f"{key} = {value!r}" for key, value in settings.items() if key not in places))


# ---- the folder

def write_folder(to, tensors, texts):
    """model.safetensors, `texts` {name: text} and SHA256SUMS under a temporary name beside `to`, fsynced, then renamed.

    Raises Refused, and leaves nothing behind, where that fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    partial = f"{to}.export.tmp"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        os.makedirs(partial)
        for name, text in texts.items():
            prepare.write_atomically(f"{partial}/{name}", text.encode())
        save_file(tensors, f"{partial}/model.safetensors", metadata=dict(format="pt"))
        shutil.copymode(f"{partial}/config.json", f"{partial}/model.safetensors")  # it comes as 0600
        with open(f"{partial}/model.safetensors", "rb") as f:
            os.fsync(f.fileno())
        sums = "".join(f"{sha256_of(f'{partial}/{name}')}  {name}\n" for name in sorted(os.listdir(partial)))
        prepare.write_atomically(f"{partial}/SHA256SUMS", sums.encode())
        os.rename(partial, to)
        prepare.fsync_folder(os.path.dirname(to))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise Refused(f"--to={to} can't be written: {error}") from None


def main():
    c = load(Config, sys.argv[1:], __doc__)
    to = os.path.abspath(c.to)
    if c.dtype not in ("float32", "bfloat16"):
        raise Refused(f"dtype={c.dtype!r} must be float32 or bfloat16")
    if not c.to or os.path.lexists(to) and not (os.path.isdir(to) and not os.listdir(to)):
        raise Refused(f"--to={c.to!r} must name a folder that is not there yet, or an empty one")
    if not os.path.isdir(c.out_dir):
        raise Refused(f"{c.out_dir} does not exist: --out_dir names the folder train.py wrote")
    weights, shape, saved = load_weights(c.out_dir, warn=lambda message: print(message, file=sys.stderr))
    tokenizer, meta = prepare.Tokenizer(c.out_dir), prepare.read_json(f"{c.out_dir}/meta.json")
    if (tokenizer.vocab_size, tokenizer.eot_id) != (shape.vocab_size, shape.eot_id):
        raise Refused(f"{c.out_dir}: the tokenizer has {tokenizer.vocab_size} ids, the weights have "
                      f"{shape.vocab_size}: they are not of one run")
    [special] = [text for text, token in meta["tokenizer"]["special_tokens"].items() if token == shape.eot_id]
    config, tensors = to_llama(weights, shape, c.dtype)
    config["nanobase"] = dict(step=saved["step"], tokenizer_sha256=meta["tokenizer"]["sha256"],
                              data_fingerprint=saved["data_fingerprint"])
    n_params = sum(tensor.numel() for tensor in tensors.values())
    tokenizer_config = dict(
        tokenizer_class="PreTrainedTokenizerFast", model_max_length=shape.block_size, split_special_tokens=True,
        clean_up_tokenization_spaces=False, padding_side="left",
        bos_token=special, eos_token=special)  # no pad_token: who masks padding in a loss would mask every end
    generation_config = dict(
        do_sample=True, temperature=0.8, top_k=50,  # as sample.py
        **{f"{kind}_token_id": shape.eot_id for kind in ("bos", "eos", "pad")})
    texts = {name: json.dumps(value, indent=1, ensure_ascii=False) for name, value in {
        "config.json": config, "tokenizer.json": tokenizer_json(tokenizer, special),
        "tokenizer_config.json": tokenizer_config, "generation_config.json": generation_config}.items()}
    texts["README.md"] = model_card(os.path.basename(to), c.out_dir, meta, shape, saved, n_params, special)
    write_folder(to, tensors, texts)
    print(f"{c.to}: step {saved['step']} of {c.out_dir}, {n_params:,} parameters in {c.dtype}; its README.md says what "
          f"they are")


if __name__ == "__main__":
    main()
