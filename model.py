"""The decoder-only transformer: shape, init, loss, counts; and reading checkpoints.

    python model.py config/train_0p5b.py        prints parameters, FLOPs a token and static memory of a run's model

Pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases: the layout of `transformers`' Llama,
so weights leave under names that other tools understand.
"""
import hashlib
import json
import math
import os
import pickle
import re
import sys
from dataclasses import dataclass, fields

from config import Refused, load  # before torch: a missing package then ends in one line

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SHORT = 1024  # up to this context attention on a CPU goes block by block
IGNORE = -100  # a target of this value is no target: it adds nothing to the loss and is not counted


@dataclass(frozen=True)
class Shape:
    """What fixes the tensors of a model. head_dim is n_embd / n_head."""
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    ffn_hidden: int
    block_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tie_embeddings: bool = True
    doc_mask: bool = False
    eot_id: int = -1

    @classmethod
    def of(cls, settings, vocab_size, eot_id=-1):
        """The shape that `settings` (a train.Config, or the dict a checkpoint holds) describes. Raises Refused."""
        get = settings.get if isinstance(settings, dict) else lambda key: getattr(settings, key)
        names = [f.name for f in fields(cls) if f.name not in ("vocab_size", "eot_id")]
        s = cls(vocab_size=vocab_size, eot_id=eot_id, **{name: get(name) for name in names})
        for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "block_size"):
            if getattr(s, name) < 1:
                raise Refused(f"{name}={getattr(s, name)} must be at least 1")
        if s.n_embd % s.n_head or s.n_embd // s.n_head % 2:
            raise Refused(f"n_embd={s.n_embd} must be n_head={s.n_head} times an even head size")
        if s.n_head % s.n_kv_head:
            raise Refused(f"n_head={s.n_head} must be a multiple of n_kv_head={s.n_kv_head}")
        if not 0 <= s.dropout < 1:
            raise Refused(f"dropout={s.dropout} must be at least 0 and under 1")
        return s


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


def rope_table(block_size, head_dim, theta):
    """cos and sin, both (block_size, head_dim) in fp32, for rotate-half RoPE (Su et al. 2021), as in `transformers`."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """RoPE on x (B, heads, T, head_dim) with cos, sin (T, head_dim) or (B, 1, T, head_dim). fp32 inside."""
    left, right = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def attend(q, k, v, mask):
    """Attention of q (B, n_head, T, head_dim) to k, v (B, n_kv_head, seen, head_dim), causal unless `mask` or T = 1."""
    (B, n_head, T, head_dim), n_kv_head = q.shape, k.shape[1]
    if mask is None and 1 < T <= SHORT and q.device.type == "cpu":
        return attend_in_blocks(q, k, v)
    if T == 1:  # the heads of a group stand as the queries of their KV head: nothing is expanded
        q = q.reshape(B, n_kv_head, -1, head_dim)
    elif mask is not None or (q.is_cuda and q.dtype != torch.bfloat16):  # not every kernel groups heads
        k, v = (t.repeat_interleave(n_head // n_kv_head, dim=1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                       enable_gqa=k.shape[1] != q.shape[1])
    return y.reshape(B, n_head, T, head_dim)


def attend_in_blocks(q, k, v):
    """Causal attention, a quarter of the queries at a time against the keys they may see; shapes as in `attend`.

    Two to three times as fast as the CPU's flash kernel, since the heads of a group share one product; but T x T scores
    a head stand in memory, so it is for short contexts.
    """
    T, n_kv_head, quarter, y = q.shape[2], k.shape[1], -(-q.shape[2] // 4), []
    q = (q * q.shape[3]**-0.5).unflatten(1, (n_kv_head, -1))  # (B, n_kv_head, group, T, head_dim)
    for first in range(0, T, quarter):
        rows, seen = q[:, :, :, first:first + quarter], min(T, first + quarter)
        scores = rows.flatten(2, 3) @ k[:, :, :seen].transpose(2, 3)  # (B, n_kv_head, group * rows, seen)
        future = torch.full((seen - first, seen), -math.inf).triu(first + 1)  # added: masked_fill takes twice the time
        weights = (scores.float().unflatten(2, (-1, seen - first)) + future).softmax(dim=-1)
        y.append((weights.to(v.dtype).flatten(2, 3) @ v[:, :, :seen]).unflatten(2, (-1, seen - first)))
    return torch.cat(y, dim=3).flatten(1, 2)


class Layer(nn.Module):
    """Attention, then a SwiGLU feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, s):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = s.n_head, s.n_kv_head, s.n_embd // s.n_head
        self.dropout = s.dropout
        kv_dim = s.n_kv_head * self.head_dim
        self.attn_norm = RMSNorm(s.n_embd, s.norm_eps)
        self.wq = nn.Linear(s.n_embd, s.n_embd, bias=False)
        self.wk = nn.Linear(s.n_embd, kv_dim, bias=False)
        self.wv = nn.Linear(s.n_embd, kv_dim, bias=False)
        self.wo = nn.Linear(s.n_embd, s.n_embd, bias=False)
        self.ffn_norm = RMSNorm(s.n_embd, s.norm_eps)
        self.w_gate = nn.Linear(s.n_embd, s.ffn_hidden, bias=False)
        self.w_up = nn.Linear(s.n_embd, s.ffn_hidden, bias=False)
        self.w_down = nn.Linear(s.ffn_hidden, s.n_embd, bias=False)

    def attention(self, x, cos, sin, mask, cache):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2)  # (B, n_head, T, head_dim)
        k = self.wk(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)  # (B, n_kv_head, T, head_dim)
        v = self.wv(x).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache(k, v)  # all keys and values so far, (B, n_kv_head, cached, head_dim)
        y = attend(q, k, v, mask)  # (B, n_head, T, head_dim)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x, cos, sin, mask=None, cache=None):
        x = x + F.dropout(self.attention(self.attn_norm(x), cos, sin, mask, cache), self.dropout, self.training)
        h = self.ffn_norm(x)
        return x + F.dropout(self.w_down(F.silu(self.w_gate(h)) * self.w_up(h)), self.dropout, self.training)


def head_loss(h, weight, targets, label_smoothing):
    """Summed cross-entropy in fp32 of h (N, n_embd) against targets (N,), through the head's weight (vocab, n_embd)."""
    logits = F.linear(h, weight)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum",
                           label_smoothing=label_smoothing)


class Transformer(nn.Module):
    """`forward(idx)` gives logits, `forward(idx, targets)` the summed token loss, without holding more than it must."""

    def __init__(self, shape, activation_checkpointing=False, loss_chunks=1):
        super().__init__()
        self.shape, self.activation_checkpointing, self.loss_chunks = shape, activation_checkpointing, loss_chunks
        self.tok_emb = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.norm = RMSNorm(shape.n_embd, shape.norm_eps)
        if not shape.tie_embeddings:
            self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.head_loss = head_loss  # train.py puts the compiled one here
        self.init_weights()
        self.to(self.tok_emb.weight.device)

    def _apply(self, fn, recurse=True):
        """After every move or cast of the weights the RoPE angles are made anew, in fp32 whatever the weights are."""
        super()._apply(fn, recurse)
        s = self.shape
        table = rope_table(s.block_size, s.n_embd // s.n_head, s.rope_theta)
        self.cos, self.sin = (t.to(self.tok_emb.weight.device) for t in table)
        return self

    def init_weights(self):
        """Normal, of standard deviation 0.02 / sqrt(2 n_layer) for what writes to the residual stream (GPT-2),
        0.8 / sqrt(n_embd) for what reads it (0.02 at 1536), 0.5 / sqrt(n_embd) for embeddings.

        The head's logits then start with a variance of 1/4 at any width, and the loss at ln V + 1/8. On the demo's data
        and width 192 a tied embedding of 0.01 learned far slower (2.47 bits per byte after 200 steps against 2.03).
        """
        s = self.shape
        for name, p in self.named_parameters():
            if p.dim() == 2:
                kind = name.split(".")[-2]
                std = (0.5 / math.sqrt(s.n_embd) if kind in ("tok_emb", "lm_head") else
                       0.02 / math.sqrt(2 * s.n_layer) if kind in ("wo", "w_down") else 0.8 / math.sqrt(s.n_embd))
                nn.init.normal_(p, std=std)

    @property
    def head_weight(self):
        return self.tok_emb.weight if self.shape.tie_embeddings else self.lm_head.weight

    def hidden(self, idx, cache=None):
        """idx (B, T) -> normed hidden states (B, T, n_embd). With a `KVCache`, idx continues what the cache holds."""
        cos, sin, mask = self.cos[:idx.shape[1]], self.sin[:idx.shape[1]], None
        if cache is not None:
            cos, sin, mask = cache.place(idx, self.cos, self.sin)
        elif self.shape.doc_mask:
            mask = document_mask(idx, self.shape.eot_id)
        x = F.dropout(self.tok_emb(idx), self.shape.dropout, self.training)
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and self.training:
                x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False)
            else:
                x = layer(x, cos, sin, mask, cache and cache.of_layer(i))
        return self.norm(x)

    def forward(self, idx, targets=None, label_smoothing=0.0, cache=None):
        """idx (B, T) -> logits (B, T, vocab); with targets (B, T): the fp32 sum of their losses, IGNORE left out.

        The sum, not the mean: what to divide by is known only to whoever sees all micro-batches and ranks.
        """
        h = self.hidden(idx, cache)
        if targets is None:
            return F.linear(h, self.head_weight)
        h, targets = h.flatten(0, 1), targets.flatten()  # (B * T, n_embd), (B * T,)
        if self.loss_chunks == 1:
            return self.head_loss(h, self.head_weight, targets, label_smoothing)
        return sum(checkpoint(self.head_loss, rows, self.head_weight, t, label_smoothing, use_reentrant=False)
                   for rows, t in zip(h.chunk(self.loss_chunks), targets.chunk(self.loss_chunks), strict=True))


def document_mask(idx, eot_id):
    """Boolean mask (B, 1, T, T): query t may see key s <= t of its own document. End-of-text opens its successor."""
    T = idx.shape[1]
    document = (idx == eot_id).cumsum(dim=1)  # (B, T)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()


class KVCache:
    """Keys and values of every layer for B rows of different lengths, at most block_size each.

    Row b's next token stands at position lengths[b]. Rows of a prefill are padded on the right: a pad's key lies
    after its row's last token, where no query of the row looks before the next token overwrites it.
    """

    def __init__(self, model, batch, dtype):
        s, device = model.shape, model.tok_emb.weight.device
        size = (s.n_layer, 2, batch, s.n_kv_head, s.block_size, s.n_embd // s.n_head)
        self.kv = torch.zeros(size, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.long)  # on the CPU: looking at them must not wait for a GPU
        self.document = torch.zeros(batch, s.block_size, dtype=torch.long, device=device) if s.doc_mask else None
        self.eot_id = s.eot_id

    def keep(self, rows):
        """Goes on with these rows (a list) alone."""
        self.kv, self.lengths = self.kv[:, :, rows], self.lengths[rows]
        self.document = None if self.document is None else self.document[rows]

    def place(self, idx, cos, sin):
        """(cos, sin, mask) for idx (B, T), which follows what is stored: (B, 1, T, head_dim) and (B, 1, T, seen); or
        (T, head_dim) and None where all rows are equally long, and either begin or get one token more."""
        B, T = idx.shape
        first, last = int(self.lengths.min()), int(self.lengths.max())
        self.seen, self.span = last + T, slice(first, first + T)
        if first == last and (T == 1 or first == 0) and self.document is None:
            self.rows = None
            return cos[self.span], sin[self.span], None
        positions = self.positions = (self.lengths[:, None] + torch.arange(T)).to(idx.device)  # (B, T)
        rows = self.rows = torch.arange(B, device=idx.device)[:, None]
        mask = torch.arange(self.seen, device=idx.device) <= positions[:, None, :, None]
        if self.document is not None:
            before = self.document[rows, (positions[:, :1] - 1).clamp(min=0)]  # (B, 1); zero at the start
            self.document[rows, positions] = before + (idx == self.eot_id).cumsum(dim=1)
            own = self.document[rows, positions]
            mask = mask & (self.document[:, None, None, :self.seen] == own[:, None, :, None])
        return cos[positions][:, None], sin[positions][:, None], mask

    def of_layer(self, i):
        def append(k, v):  # (B, n_kv_head, T, head_dim), both
            keys, values = self.kv[i]
            if self.rows is None:
                keys[:, :, self.span], values[:, :, self.span] = k, v
            else:
                keys[self.rows, :, self.positions] = k.transpose(1, 2).to(keys.dtype)
                values[self.rows, :, self.positions] = v.transpose(1, 2).to(values.dtype)
            return keys[:, :, :self.seen].to(k.dtype), values[:, :, :self.seen].to(v.dtype)
        return append


# ---- counts

def count_parameters(model):
    """Every parameter once; tied embeddings are one."""
    return sum(p.numel() for p in model.parameters())


def flops_per_token(n_params, shape):
    """(6N, 6N + attention): training FLOPs a token, forward and backward.

    6N is the reference convention (Kaplan et al. 2020, with every parameter counted once: a tied embedding does its
    work as the head). The second adds the two T x T products, 12 * n_layer * n_embd * T (PaLM, appendix B).
    """
    return 6 * n_params, 6 * n_params + 12 * shape.n_layer * shape.n_embd * shape.block_size


# Dense bf16 TFLOP/s by exact device name, from NVIDIA's datasheets (SXM parts at full power).
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989, "NVIDIA A10": 125, "NVIDIA L4": 121, "NVIDIA L40S": 362,
}


def parameter_groups(model, weight_decay):
    """[layers' matrices, other matrices (embeddings, head), norms], by name: decay on all but the norms. Covers every
    parameter once."""
    of = dict(model.named_parameters())
    kinds = [[n for n, p in of.items() if p.dim() == 2 and n.startswith("layers.")],
             [n for n, p in of.items() if p.dim() == 2 and not n.startswith("layers.")],
             [n for n, p in of.items() if p.dim() < 2]]
    assert sum(of[name].numel() for names in kinds for name in names) == count_parameters(model)
    return [dict(names=names, params=[of[name] for name in names], weight_decay=decay)
            for names, decay in zip(kinds, (weight_decay, weight_decay, 0.0), strict=True)]


@torch.no_grad()
def causality_leak(model):
    """How far the logits of early positions move when every later token changes: 0 where that is within ten times what
    two passes over the same tokens differ by (nothing, with kernels that repeat); else the model sees its targets."""
    T, V, was_training = min(model.shape.block_size, 64), model.shape.vocab_size, model.training
    idx = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(0)).to(model.tok_emb.weight.device)
    other = torch.cat((idx[:, :T // 2], (idx[:, T // 2:] + 1) % V), dim=1)
    model.eval()
    logits, again, changed = (model(ids)[:, :T // 2] for ids in (idx, idx, other))
    moved, noise = (logits - changed).norm().item(), (logits - again).norm().item()
    model.train(was_training)
    return 0.0 if moved <= 10 * noise else moved


def first_nonfinite(model, x, y):
    """Where NaN or infinity begins on the micro-batches x, y (n, B, T), eagerly: dict of the first `module` with a
    non-finite output, else the parameter nearest the loss with a non-finite `gradient`, and the largest `logit`."""
    found = dict(module=None, gradient=None, logit=0.0)

    def look(name):
        def hook(module, inputs, output):
            if found["module"] is None and not output.isfinite().all():
                found["module"] = name
        return hook
    hooks = [module.register_forward_hook(look(name or "loss")) for name, module in model.named_modules()]
    for idx, targets in zip(x, y, strict=True):
        model.zero_grad(set_to_none=True)
        model(idx, targets).backward()
        with torch.no_grad():
            found["logit"] = max(found["logit"], model(idx).abs().max().item())
        broken = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        if found["module"] or broken:
            found["gradient"] = broken[-1] if broken else None
            break
    for hook in hooks:
        hook.remove()
    return found


def describe(shape, micro_batch_size):
    """(parameters, the lines about a model that train.py prints at its start). Allocates nothing."""
    with torch.device("meta"):
        n = count_parameters(Transformer(shape))
    plain, with_attention = flops_per_token(n, shape)
    logits = micro_batch_size * shape.block_size * shape.vocab_size
    return n, [
        f"parameters     {n:,}" + (" (tied embeddings counted once)" if shape.tie_embeddings else ""),
        f"shape          {shape.n_layer} layers x {shape.n_embd} wide, {shape.n_head} heads of "
        f"{shape.n_embd // shape.n_head}, {shape.n_kv_head} KV heads, ffn {shape.ffn_hidden}, "
        f"context {shape.block_size}, vocabulary {shape.vocab_size:,}",
        f"FLOPs a token  {plain:.4g} (6N), {with_attention:.4g} with attention",
        f"static memory  {16 * n / 2**30:.2f} GiB: 16 bytes a parameter (fp32 weight, gradient, two AdamW moments)",
        f"logits         {4 * logits / 2**30:.2f} GiB in fp32 for a micro-batch of {micro_batch_size}",
    ]


# ---- reading checkpoints

def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def saved_steps(out_dir, kinds=("step", "weights")):
    """[(step, path)] of the finished-looking checkpoints in out_dir/ckpt, newest first."""
    folder, found = os.path.join(out_dir, "ckpt"), []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        m = re.fullmatch(r"(step|weights)_(\d{8,})\.pt", name)
        if m and m[1] in kinds and os.path.isfile(os.path.join(folder, name)):
            found.append((int(m[2]), m[1] == "step", os.path.join(folder, name)))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def why_bad(path):
    """None when the checkpoint at `path` is what its json says (bytes, sha256, step); else the reason in words."""
    try:
        with open(path[:-len(".pt")] + ".json", encoding="utf-8") as f:
            said = json.load(f)
        size = os.path.getsize(path)
        if size != said["bytes"]:
            return f"{size} bytes instead of {said['bytes']}"
        if sha256_of(path) != said["sha256"]:
            return "sha256 differs from its json: the file is damaged"
        named = re.search(r"_(\d+)\.pt$", path)  # not after a person called it best.pt
        if named and said["step"] != int(named[1]):
            return f"its json speaks of step {said['step']}"
    except FileNotFoundError:
        return "its json is missing: the save never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable: {type(error).__name__}: {error}"
    return None


def newest_verified(out_dir, kinds=("step", "weights"), warn=lambda message: None):
    """(step, path) of the newest checkpoint whose bytes match its json, or None. `warn` hears of those passed over."""
    for step, path in saved_steps(out_dir, kinds):
        reason = why_bad(path)
        if reason is None:
            return step, path
        warn(f"checkpoint {path} is not used: {reason}")
    return None


def load_weights(path, warn=lambda message: None):
    """(fp32 state dict, Shape, whole checkpoint) on the CPU, from a run folder, a checkpoint file, an export folder or
    its .safetensors file. Raises Refused."""
    if path.endswith(".safetensors") or os.path.exists(os.path.join(path, "model.safetensors")):
        from export import read_llama
        return read_llama(path)
    if os.path.isdir(path):
        newest = newest_verified(path, warn=warn)
        if newest is None:
            raise Refused(f"no verified checkpoint in {path}: train first, or name another --out_dir")
        path = newest[1]
    elif not os.path.isfile(path):
        raise Refused(f"{path} does not exist: name the folder of a run or one of its checkpoint files "
                      "(for --init_from an exported folder will do)")
    elif os.path.exists(path[:-len(".pt")] + ".json") and (reason := why_bad(path)):
        raise Refused(f"checkpoint {path}: {reason}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        shape = Shape.of(saved["settings"], saved["vocab_size"], saved["eot_id"])
        return saved["model"], shape, saved
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise Refused(f"{path} is no checkpoint of this project: {type(error).__name__}: "
                      f"{' '.join(str(error).split())[:200]}") from None


def main():
    from prepare import Corpus
    from train import Config

    c = load(Config, sys.argv[1:], __doc__)
    try:
        vocab_size, note = Corpus(c.data_dir, check=False).vocab_size, f" (of {c.data_dir})"
    except Refused:
        vocab_size, note = 32000, f" (assumed: {c.data_dir} holds no finished data)"
    n, lines = describe(Shape.of(c, vocab_size), c.micro_batch_size)
    print("\n".join(lines) + f"\nvocabulary     {vocab_size:,}{note}")
    if c.expect_params and n != c.expect_params:
        raise Refused(f"expect_params={c.expect_params:,}, but the model has {n:,} parameters")


if __name__ == "__main__":
    main()
