"""Hand the weights on: a folder in the layout of `transformers`' Llama, with tokenizer and model card.

    python export.py --out_dir=out --to=my-model

Then, anywhere: AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model"). The same
folder is what `train.py --init_from=my-model` starts from.
"""
import contextlib
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass

from config import Refused, load  # before torch: a missing package then ends in one line

import torch

import prepare
import report
from model import Shape, Transformer, load_weights, sha256_of


@dataclass(frozen=True)
class Config:
    out_dir: str = "out"  # the folder train.py wrote, for its newest verified checkpoint; or a file in its ckpt/
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
    names = {}
    with torch.device("meta"):
        weights = Transformer(shape).state_dict()
    for name, weight in weights.items():
        *layer, part, kind = name.split(".")
        if part not in PARTS or kind != "weight":
            raise Refused(f"transformers' Llama has no place for {name}")
        where = f"model.{'.'.join(layer)}." if layer else ""
        names[name] = f"{where}{PARTS[part]}.weight", weight.shape
    return names


def to_llama(weights, shape, dtype):
    """(config.json as a dict, {their name: tensor}). Raises Refused for weights that do not fit or are not finite."""
    names, sizes = tensors_of(shape), {name: weight.shape for name, weight in weights.items()}
    if wrong := sizes.items() ^ {name: size for name, (_, size) in names.items()}.items():
        raise Refused(f"the checkpoint does not fit its own settings: {min(wrong)[0]}")
    tensors = {names[name][0]: w.to(getattr(torch, dtype)).contiguous() for name, w in weights.items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise Refused(f"the weights are broken: {name} holds NaN or infinity in {dtype}")
    config = {theirs: getattr(shape, ours) for ours, theirs in CONFIG.items()}
    return config | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", head_dim=shape.n_embd // shape.n_head,
        hidden_act="silu", torch_dtype=dtype, bos_token_id=shape.eot_id,
    ), tensors  # no pad_token_id: torch gives that id's embedding no gradient


def read_llama(path):
    """(fp32 state dict, Shape, dict of step and what else is known) from an export folder, one that `transformers`
    saved, or its .safetensors file. Raises Refused."""
    from safetensors import SafetensorError, safe_open
    path = os.path.join(path, "model.safetensors") if os.path.isdir(path) else path
    folder = os.path.dirname(path)
    said = prepare.read_json(os.path.join(folder, "config.json"))
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if (said.get("model_type") != "llama" or rope.get("rope_type", rope.get("type", "default")) != "default"
            or said.get("hidden_act", "silu") != "silu"):
        raise Refused(f"{path}: beside it must lie the config.json of a Llama with plain rotary positions and silu")
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
        if wrong := [theirs for ours, (theirs, size) in names.items() if weights[ours].shape != size]:
            raise Refused(f"{path} and its config.json do not fit: {wrong[0]}")
        return weights, shape, dict(step=0) | said.get("nanobase", {})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Refused(f"{path} can't be read as a Llama: {type(error).__name__}: {error}") from None


# ---- the tokenizer

def tokenizer_json(tokenizer, shape):
    """The tokenizer in the format of the `tokenizers` library. Raises Refused where that can't hold it."""
    if tokenizer.pattern != prepare.PATTERN:
        raise Refused(f"the tokenizer splits by {tokenizer.pattern!r}: only prepare.py's own pattern can be exported")
    if not len(tokenizer.ranks) == tokenizer.eot_id == shape.eot_id == shape.vocab_size - 1:
        raise Refused(f"end-of-text {tokenizer.eot_id} of {len(tokenizer.ranks)} tokens, {shape.eot_id} of "
                      f"{shape.vocab_size} ids of the weights: it must be the id behind the tokens, and the last")
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    characters = [chr(b if b in printable else next(others)) for b in range(256)]  # one for each byte (GPT-2's table)
    pieces = {piece: "".join(characters[b] for b in piece) for piece in tokenizer.ranks}
    # tiktoken joins any neighbours whose joint bytes have a rank: every way to cut a token into two is a merge
    merges = [[pieces[piece[:i]], pieces[piece[i:]]] for piece in pieces for i in range(1, len(piece))
              if piece[:i] in pieces and piece[i:] in pieces]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=prepare.FAST), behavior="Isolated", invert=False)
    return dict(
        version="1.0", decoder=byte_level, pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
        added_tokens=[dict(id=shape.eot_id, content=prepare.EOT, special=True, normalized=False, single_word=False,
                           lstrip=False, rstrip=False)],
        model=dict(type="BPE", ignore_merges=True,  # a piece that is a token stays whole
                   vocab={text: rank for rank, text in enumerate(pieces.values())}, merges=merges))


# ---- the model card

HEAD = """# {name}

A base language model of {n_params:,} parameters: it continues text. It was not taught to answer or to be right.
Step {step:,} of a run that began from {start} weights; code {commit}, data {data}.
"""
LIMITS = f"""
## Limits

- It repeats what its data hold, errors and prejudice included, and makes up the rest. Nothing but the losses above was
  measured. What it learnt from belongs to its authors; this card grants no licence.
- It never saw more than block_size tokens, nor two documents at once if doc_mask is True: give it one, then.
- Don't end a prompt with a space: to this tokenizer it belongs to the next word.
- Text that looks like `{prepare.EOT}` is ordinary text, as in training, thanks to `split_special_tokens` in
  tokenizer_config.json: who loads tokenizer.json alone must set `encode_special_tokens`.
"""


def model_card(name, out_dir, meta, saved, n_params):
    """README.md: what the weights learnt from, how well, by which settings, and what they are not good for."""
    settings, scores = saved["settings"], {}
    origin = {source["name"]: f"{source['path']} at {source['commit']}"
              for source in meta["recipe"].get("sources", []) if source.get("hub")}  # no path of this machine
    data = [[source, origin.get(source, "local files"), *(f"{row[key]:,}" for key in ("documents", "tokens", "bytes"))]
            for source, row in meta["splits"]["train"].items()]
    for row in report.read_log(out_dir):
        if row["event"] == "eval" and row["step"] <= saved["step"]:
            scores = row["sources"] | {f"all, at step {row['step']:,}": row}
    losses = [[source, *(report.cell(row[key], "{:.4f}") for key in ("val_loss", "val_ppl", "val_bpb"))]
              for source, row in scores.items()] or [["not evaluated", "", "", ""]]
    start = "random" if settings["init_from"] in ("auto", "scratch") else "other"
    return "\n".join([
        HEAD.format(name=name, n_params=n_params, step=saved["step"], start=start, commit=saved["commit"],
                    data=saved["data_fingerprint"]),
        *report.table("Data: the train split", ["source", "from", "documents", "tokens", "bytes"], data),
        *report.table("Losses on held-out documents (val)", ["source", "nats a token", "perplexity", "bits per byte"],
                      losses),
        "## Settings\n\n```",
        *(f"{key} = {value!r}" for key, value in settings.items() if key not in ("data_dir", "out_dir", "init_from")),
        "```", LIMITS])


# ---- the folder

def write_folder(to, files):
    """`files` {name: bytes} and their SHA256SUMS: beside `to`, fsynced, renamed. Raises Refused, leaving nothing."""
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    partial = f"{to}.export.tmp"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        os.makedirs(partial)
        for name, data in (files | {"SHA256SUMS": sums.encode()}).items():
            prepare.write_atomically(f"{partial}/{name}", data)
        os.rename(partial, to)
        prepare.fsync_folder(os.path.dirname(to))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise Refused(f"--to={to} can't be written: {error}") from None


def main():
    from safetensors.torch import save

    c = load(Config, sys.argv[1:], __doc__)
    to = os.path.abspath(c.to)
    if c.dtype not in ("float32", "bfloat16"):
        raise Refused(f"dtype={c.dtype!r} must be float32 or bfloat16")
    if not c.to or os.path.lexists(to) and not (os.path.isdir(to) and not os.listdir(to)):
        raise Refused(f"--to={c.to!r} must name a folder that is not there yet, or an empty one")
    weights, shape, saved = load_weights(c.out_dir, warn=lambda message: print(message, file=sys.stderr))
    folder = os.path.dirname(os.path.dirname(os.path.abspath(c.out_dir))) if os.path.isfile(c.out_dir) else c.out_dir
    tokenizer, meta = prepare.Tokenizer(folder), prepare.read_json(f"{folder}/meta.json")
    if meta["tokenizer"]["sha256"] != saved["tokenizer_sha256"]:
        raise Refused(f"{folder}: the tokenizer is not the one of the weights: they are not of one run")
    config, tensors = to_llama(weights, shape, c.dtype)
    config["nanobase"] = {key: saved[key] for key in ("step", "tokenizer_sha256", "data_fingerprint")}
    n_params = sum(tensor.numel() for tensor in tensors.values())
    said = {
        "config.json": config,
        "tokenizer.json": tokenizer_json(tokenizer, shape),
        "tokenizer_config.json": dict(  # no pad_token: who masks padding in a loss would mask every end
            tokenizer_class="PreTrainedTokenizerFast", model_max_length=shape.block_size, split_special_tokens=True,
            clean_up_tokenization_spaces=False, padding_side="left", bos_token=prepare.EOT, eos_token=prepare.EOT),
        "generation_config.json": dict(do_sample=True, temperature=0.8, top_k=50,  # as sample.py
                                       **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), shape.eot_id))}
    files = {name: json.dumps(value, indent=1, ensure_ascii=False).encode() for name, value in said.items()}
    files["README.md"] = model_card(os.path.basename(to), folder, meta, saved, n_params).encode()
    files["model.safetensors"] = save(tensors, dict(format="pt"))
    write_folder(to, files)
    print(f"{c.to}: step {saved['step']} of {c.out_dir}, {n_params:,} parameters in {c.dtype}; its README.md says more")


if __name__ == "__main__":
    main()
