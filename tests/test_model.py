"""The transformer against independent arithmetic: counts, initial loss, causality, cache, packing, loss."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import model
import train
from config import Refused, load
from model import (
    IGNORE,
    PEAK_TFLOPS,
    KVCache,
    Shape,
    Transformer,
    causality_leak,
    count_parameters,
    describe,
    first_nonfinite,
    flops_per_token,
    parameter_groups,
)

SMALL = Shape(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=48, block_size=24, eot_id=96)


def make(shape=SMALL, seed=0, **options):
    torch.manual_seed(seed)
    model = Transformer(shape, **options)
    with torch.no_grad():  # larger weights than at the start, so that every part shows in the logits
        for p in model.parameters():
            p.mul_(3) if p.dim() == 2 else p.add_(0.1 * torch.randn_like(p))
    return model


def ids(batch, length, seed=1, vocab_size=96):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def float64_logits(model, tokens):
    """The forward pass of one row written down again in numpy and float64."""
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    s, T = model.shape, len(tokens)
    hd = s.n_embd // s.n_head

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + s.norm_eps) * weight

    def rope(x):  # (T, hd): pairs (i, i + hd/2) turn by t * theta^(-2i/hd)
        out = x.copy()
        for t in range(T):
            for i in range(hd // 2):
                a = t * s.rope_theta ** (-2 * i / hd)
                p, q = x[t, i], x[t, i + hd // 2]
                out[t, i], out[t, i + hd // 2] = p * math.cos(a) - q * math.sin(a), q * math.cos(a) + p * math.sin(a)
        return out

    x = w["tok_emb.weight"][tokens]
    for i in range(s.n_layer):
        def of(name, i=i):
            return w[f"layers.{i}.{name}.weight"]
        h, heads = norm(x, of("attn_norm")), []
        for head in range(s.n_head):
            group = head // (s.n_head // s.n_kv_head)
            q = rope(h @ of("wq")[head * hd:(head + 1) * hd].T)
            k = rope(h @ of("wk")[group * hd:(group + 1) * hd].T)
            v = h @ of("wv")[group * hd:(group + 1) * hd].T
            scores = np.where(np.tril(np.ones((T, T))) > 0, q @ k.T / math.sqrt(hd), -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(heads, -1) @ of("wo").T
        h = norm(x, of("ffn_norm"))
        gate = h @ of("w_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of("w_up").T)) @ of("w_down").T
    return norm(x, w["norm.weight"]) @ w["tok_emb.weight"].T


def test_logits_equal_an_independent_forward_in_float64():
    model, tokens = make(), ids(1, 20)
    ours = model(tokens)[0].detach().numpy()
    assert np.abs(ours - float64_logits(model, tokens[0].numpy())).max() < 1e-4 * np.abs(ours).max()


def test_the_reference_shape_has_502193664_parameters_and_the_120m_one_109529856():
    for name, expected in (("0p5b", 502_193_664), ("120m", 109_529_856)):
        c = load(train.Config, [f"{ROOT}/config/train_{name}.py"])
        n, lines = describe(Shape.of(c, 32000), c.micro_batch_size)
        assert n == expected and f"{expected:,}" in lines[0]
    c = load(train.Config, [f"{ROOT}/config/train_0p5b.py"])
    assert flops_per_token(n := 502_193_664, Shape.of(c, 32000)) == (6 * n, 6 * n + 12 * 18 * 1536 * 2048)
    assert c.max_steps * c.global_batch_tokens == 9_999_220_736 and c.expect_params == n


@pytest.mark.parametrize("layers, width, heads, vocab", [(2, 64, 4, 16000), (4, 192, 4, 4096), (18, 256, 4, 1000)])
def test_the_initial_loss_is_near_ln_v(layers, width, heads, vocab):
    torch.manual_seed(0)
    model = Transformer(Shape(vocab, layers, heads, 2, width, 2 * width, 256))
    x, y = ids(33, 256, 2, vocab), ids(33, 256, 3, vocab)
    with torch.no_grad():
        loss = model(x, y).item() / y.numel()
    sigma = model.tok_emb.weight.std().item()
    assert abs(loss - math.log(vocab) - width * sigma**2 / 2) < 0.05


@pytest.mark.parametrize("doc_mask", [False, True])
def test_no_position_sees_a_later_one(doc_mask):
    model = make(Shape(**{**SMALL.__dict__, "doc_mask": doc_mask}))
    x = ids(2, 24)
    x[:, 5] = SMALL.eot_id
    changed = x.clone()
    changed[:, 11:] = ids(2, 13, seed=9)
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :11], after[:, :11]) and not torch.equal(before[:, 11:], after[:, 11:])
    embedded = model.tok_emb(x).detach().requires_grad_()
    model.tok_emb.forward = lambda _: embedded
    model(x)[:, 10].sum().backward()
    assert embedded.grad[:, 11:].abs().max() == 0 and embedded.grad[:, 10].abs().max() > 0


def test_packed_documents_equal_each_document_alone():
    model = make(Shape(**{**SMALL.__dict__, "doc_mask": True}))
    plain = make()
    parts = [torch.cat((torch.tensor([SMALL.eot_id]), ids(1, n, seed=n)[0])) for n in (4, 9, 7)]
    packed = model(torch.cat(parts)[None])[0]
    alone = torch.cat([plain(part[None])[0] for part in parts])
    assert torch.allclose(packed, alone, atol=1e-5)
    assert not torch.allclose(plain(torch.cat(parts)[None])[0], alone, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("doc_mask", [False, True])
def test_the_kv_cache_equals_the_uncached_forward_for_rows_of_different_lengths(doc_mask):
    model = make(Shape(**{**SMALL.__dict__, "doc_mask": doc_mask})).eval()
    rows, lengths = ids(3, 24), torch.tensor([14, 3, 9])
    rows[0, 6] = rows[1, 5] = rows[2, 12] = SMALL.eot_id
    full = model(rows)
    cache = KVCache(model, 3, torch.float32)
    prompt = torch.zeros(3, 14, dtype=torch.long)
    for row, length in enumerate(lengths):
        prompt[row, :length] = rows[row, :length]
    first = model(prompt, cache=cache)
    cache.lengths += lengths
    for row, length in enumerate(lengths):
        assert torch.allclose(first[row, :length], full[row, :length], atol=1e-5)
    for i in range(10):
        step = model(rows[torch.arange(3), lengths + i][:, None], cache=cache)
        cache.lengths += 1
        assert torch.allclose(step[:, 0], full[torch.arange(3), lengths + i], atol=1e-5)


@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_loss_and_gradients_do_not_depend_on_the_chunks_and_leave_ignored_targets_out(chunks):
    x, y = ids(2, 24), ids(2, 24, seed=5)
    y[0, 3:9] = y[1, -1] = IGNORE
    model = make(loss_chunks=chunks)
    loss = model(x, y, 0.1)
    loss.backward()
    reference = make()
    valid = y != IGNORE
    expected = F.cross_entropy(reference(x)[valid].double(), y[valid], reduction="sum", label_smoothing=0.1)
    expected.backward()
    assert loss.dtype == torch.float32 and abs(loss.item() / expected.item() - 1) < 1e-6
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    rows, loss_of = [], model.head_loss
    model.head_loss = lambda h, *rest: (rows.append(len(h)), loss_of(h, *rest))[1]
    with torch.no_grad():  # nor in an evaluation
        assert abs(model.eval()(x, y, 0.1).item() / loss.item() - 1) < 1e-6 and max(rows) == -(-48 // chunks)


def test_activation_checkpointing_changes_no_gradient():
    grads = []
    for on in (False, True):
        model = make(activation_checkpointing=on)
        model(ids(2, 24), ids(2, 24, seed=5)).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_tied_embeddings_are_one_parameter_also_after_a_load_and_untied_ones_are_two():
    model = make()
    model.load_state_dict(make(seed=7).state_dict())
    names = set(model.state_dict())
    assert "lm_head.weight" not in names and model.head_weight is model.tok_emb.weight
    assert names == {"tok_emb.weight", "norm.weight"} | {
        f"layers.{i}.{part}.weight" for i in range(2)
        for part in "attn_norm wq wk wv wo ffn_norm w_gate w_up w_down".split()}
    untied = Transformer(Shape(**{**SMALL.__dict__, "tie_embeddings": False}))
    assert count_parameters(untied) - count_parameters(model) == 97 * 32 and "lm_head.weight" in untied.state_dict()


def test_rotary_angles_stay_fp32_when_the_weights_are_bfloat16():
    model = make().bfloat16()
    assert model.cos.dtype == torch.float32 and model.tok_emb.weight.dtype == torch.bfloat16
    assert torch.equal(model.cos, make().cos) and model(ids(1, 8)).isfinite().all()


@pytest.mark.parametrize("short", [0, model.SHORT])  # the flash kernel, and in blocks of queries
@pytest.mark.parametrize("T", [2, 3, 5, 8, 13, 64])
def test_causal_attention_is_the_softmax_over_what_each_query_may_see(T, short, monkeypatch):
    monkeypatch.setattr(model, "SHORT", short)
    B, n_head, n_kv_head, head_dim = 2, 6, 2, 8
    q = torch.randn(B, n_head, T, head_dim, generator=torch.Generator().manual_seed(T))
    k, v = torch.randn(2, B, n_kv_head, T, head_dim, generator=torch.Generator().manual_seed(1))
    for b in range(B):
        for h in range(n_head):
            keys, values = (x[b, h * n_kv_head // n_head].double() for x in (k, v))
            for t in range(T):
                scores = keys[:t + 1] @ q[b, h, t].double() / math.sqrt(head_dim)
                expected = torch.softmax(scores, 0) @ values[:t + 1]
                assert torch.allclose(model.attend(q, k, v, None)[b, h, t].double(), expected, atol=1e-6)


def test_a_model_that_sees_later_tokens_is_noticed(monkeypatch):
    changed = make()
    assert causality_leak(changed) == 0
    changed.layers[0].register_forward_hook(lambda *a: a[2] + 1e-6 * torch.randn_like(a[2]))  # kernels that vary
    assert causality_leak(changed) == 0
    monkeypatch.setattr(model, "attend", lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert causality_leak(changed) > 1e-3


def test_the_first_module_with_a_non_finite_output_is_named():
    model, x = make(), ids(6, 8).view(3, 2, 8)
    largest = max(model(part).abs().max().item() for part in x)
    assert first_nonfinite(model, x, x) == dict(module=None, gradient=None, logit=pytest.approx(largest))
    model.layers[1].w_up.weight.data[0, 0] = torch.nan
    assert first_nonfinite(model, x, x)["module"] == "layers.1.w_up"


def test_decay_falls_on_matrices_alone_and_every_parameter_is_in_one_group():
    model = make()
    groups = parameter_groups(model, 0.1)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all((group["weight_decay"] == 0.1) == (p.dim() == 2) for group in groups for p in group["params"])


@pytest.mark.parametrize("change, part", [(dict(n_embd=30), "n_embd"), (dict(n_kv_head=3), "n_kv_head"),
                                          (dict(n_layer=0), "n_layer"), (dict(dropout=1.0), "dropout")])
def test_an_impossible_shape_is_refused_naming_the_key(change, part):
    with pytest.raises(Refused, match=part):
        Shape.of({**SMALL.__dict__, **change}, 97)


def test_peaks_go_by_the_exact_device_name():
    assert "NVIDIA A10" in PEAK_TFLOPS and PEAK_TFLOPS["NVIDIA A10"] != PEAK_TFLOPS["NVIDIA A100-SXM4-80GB"]
    assert PEAK_TFLOPS.get("NVIDIA A1000") is None
