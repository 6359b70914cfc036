"""export.py against `transformers` itself: tokenizer, logits, gradients, continuations; and what it refuses."""
import json
import os
import random
import resource
import shutil
import signal
import sys

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, checkpoint, finish, rows, start, train_here
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import export
import prepare
import sample
from config import Refused
from model import Shape, Transformer, load_weights, sha256_of

FILES = {"README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"}
CHINESE = ("模型在每一步之后写下检查点，断电之后可以继续训练。", "数据先按文档的散列分开，然后才训练分词器。",
           "学习率先升高，再慢慢降到零。", "困惑度越低，模型对文本的预测越准。",
           "同样的命令再运行一次，训练就从上次的检查点继续。")
HARD = ["", " ", "  ", "a ", "a  ", "a   \n", " \n\n  x", "\t\t\n x", "a\r\nb\r", "\n" * 9, "x" * 1000, " " * 1000,
        "\0\x1b\ufeff", "<|endoftext|>", "a<|endoftext|> <|endoftext|>b", "<s>[PAD]", "it's IT'S we'll 'LL 'ſ don't'",
        "e\u0301 é ﬁ ß Σς", "模型在每一步之后", "　全角，空格。\u2028\u0085\xa0x", "x=1;y=[2,3]#!?...", "a_b-c--d",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1f3 \U0001f44d\U0001f3fd", "ไทย हिन्दी עברית",
        "العربية \U000f0000\u1c89\ud7ff\ufffd", *("0" * n for n in range(1, 13)), "v1234567890.12345",
        "٣٤٥٦٧ ½ Ⅷ 二〇二六"]


def main(*words):
    """export.py's main in this process."""
    argv, sys.argv = sys.argv, ["export.py", *words]
    try:
        export.main()
    finally:
        sys.argv = argv


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    """A run on code, prose and Chinese with a tokenizer of their own: 2 checkpoints, evaluated."""
    folder, rng = str(tmp_path_factory.mktemp("export")), random.Random(0)
    for name, texts in dict(code=library()[:60], zh=["".join(rng.choices(CHINESE, k=8)) for _ in range(60)]).items():
        os.makedirs(f"{folder}/docs/{name}")
        for i, text in enumerate(texts):
            with open(f"{folder}/docs/{name}/{i}.{'py' if name == 'code' else 'txt'}", "w", encoding="utf-8") as f:
                f.write(text)
    process = start("prepare.py", f"--docs={folder}/docs", f"--data_dir={folder}/data", "--vocab_size=1500")
    assert finish(process)[0] == 0
    assert train_here(f"{folder}/data", f"{folder}/out", "--max_steps=40", "--save_interval=20",
                      "--log_interval=10") in (0, None)
    return f"{folder}/out"


def library():
    """Some hundred files of the standard library."""
    folder = os.path.dirname(os.__file__)
    paths = [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.endswith(".py")]
    return [open(path, encoding="utf-8").read() for path in paths]


@pytest.fixture(scope="module")
def folder(out_dir):
    main(f"--out_dir={out_dir}", f"--to={out_dir}-export")
    return f"{out_dir}-export"


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(out_dir):
    model, tokenizer, _ = sample.load_model(out_dir, torch.device("cpu"), "float32")
    return tokenizer, model


@pytest.fixture
def copy(out_dir, tmp_path):
    shutil.copytree(out_dir, f"{tmp_path}/out")
    return f"{tmp_path}/out"


def flip(path):
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))


# ---- the tokenizer

def test_text_is_split_alike_around_every_kind_of_character(theirs):
    """The oracle is tiktoken with a vocabulary in which every substring is a token: its ids are the pieces."""
    split, rng = theirs[0].backend_tokenizer.pre_tokenizer, random.Random(0)
    characters = [chr(rng.choice((rng.randrange(0x3400), rng.randrange(0xe000, 0x20000)))) for _ in range(1000)]
    forms = ("a{0}b", "'{0}l 're{0}", "1{0}234", " {0}{0} x", "!{0}!\n \n{0} ")
    texts = [text for text in HARD if len(text) < 40] + [form.format(c) for c in characters for form in forms]
    for i in range(0, len(texts), 500):
        some = [text.encode() for text in texts[i:i + 500]]
        pieces = {raw[a:b] for raw in some for a in range(len(raw)) for b in range(a + 2, len(raw) + 1)}
        encoding = prepare.make_encoding([bytes([b]) for b in range(256)] + sorted(pieces))
        for text in texts[i:i + 500]:
            expected = encoding.decode_tokens_bytes(encoding.encode_ordinary(text))
            assert [text[a:b].encode() for _, (a, b) in split.pre_tokenize_str(text)] == expected, repr(text)


def test_every_hard_string_has_the_same_ids_and_comes_back(ours, theirs):
    for text in HARD:
        ids = theirs[0](text)["input_ids"]
        assert ids == ours[0].encode(text), repr(text)
        assert theirs[0].decode(ids) == text
    assert theirs[0].eos_token_id == ours[0].eot_id and len(theirs[0]) == ours[0].vocab_size


def test_documents_and_random_characters_have_the_same_ids_and_come_back(ours, theirs):
    rng = random.Random(0)
    words = [piece.decode("utf-8", "ignore") for piece in ours[0].ranks]
    texts = [text for text in library()[40:110] if len(text) < 60_000] + list(CHINESE)
    for _ in range(1500):
        some = [chr(rng.randrange(0xd800)), chr(rng.randrange(0xe000, 0x20000)), *rng.choices(words, k=6), *" \n'12"]
        texts.append("".join(rng.choices(some, k=rng.randint(1, 30))))
    for text in texts:
        ids = theirs[0](text)["input_ids"]
        assert ids == ours[0].encode(text), repr(text[:200])
        assert theirs[0].decode(ids) == text


def test_ids_that_are_no_utf8_decode_alike_and_end_of_text_is_only_ever_an_id(ours, theirs):
    rng, (tokenizer, _) = random.Random(0), ours
    for _ in range(2000):
        ids = [rng.choice((rng.randrange(128, 256), rng.randrange(tokenizer.vocab_size))) for _ in range(9)]
        assert theirs[0].decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert theirs[0].decode([tokenizer.eot_id]) == prepare.EOT
    assert tokenizer.eot_id not in theirs[0](prepare.EOT)["input_ids"]


# ---- the model

def pair(shape):
    """A model of larger weights than at the start, so that every part shows, and the same in transformers."""
    torch.manual_seed(0)
    model = Transformer(shape).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.dim() == 2 else p.add_(0.1 * torch.randn_like(p))
    config, tensors = export.to_llama(model.state_dict(), shape, "float32")
    llama = LlamaForCausalLM(LlamaConfig(**config)).eval()
    missing = llama.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) == {"lm_head.weight"} - set(tensors)
    llama.tie_weights()
    return model, llama


def compare(shape, tokens):
    """Largest differences of logits and gradients between the two, relative."""
    model, llama = pair(shape)
    logits, expected = model(tokens), llama(tokens).logits
    for values in (logits, expected):
        F.cross_entropy(values[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {export.tensors_of(shape)[name][0]: p.grad for name, p in model.named_parameters()}
    found = {name: p.grad for name, p in llama.named_parameters()}
    assert gradients.keys() == found.keys()
    return ((logits - expected).abs().max() / expected.abs().max(),
            max((gradients[name] - found[name]).abs().max() / found[name].abs().max() for name in found))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_transformers_llama_gives_the_same_logits_and_gradients(kv_heads, tied):
    shape = Shape(97, 3, 4, kv_heads, 32, 48, 64, rope_theta=5e4, norm_eps=1e-6, tie_embeddings=tied, eot_id=96)
    tokens = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(1))
    tokens[0, 5] = tokens[1, 40] = 96  # end-of-text learns as any other id
    logits, gradients = compare(shape, tokens)
    assert logits < 1e-4 and gradients < 1e-4


def test_a_model_trained_inside_documents_gives_the_same_logits_on_one_document_alone():
    shape = Shape(97, 2, 4, 2, 32, 48, 64, doc_mask=True, eot_id=96)
    tokens = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 96
    assert max(compare(shape, tokens)) < 1e-4
    tokens[:, 16] = 96
    assert compare(shape, tokens)[0] > 1e-2  # two documents: what the card warns of


@torch.no_grad()
def test_the_exported_folder_loads_with_the_logits_of_the_run(out_dir, ours, theirs):
    corpus = prepare.Corpus(f"{os.path.dirname(out_dir)}/data")
    tokens = torch.from_numpy(corpus.read("val", 0, 128)).view(4, 32)
    expected = ours[1](tokens)
    assert theirs[1].dtype == torch.float32
    assert (theirs[1](tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_greedy_continuations_are_the_same():
    model, llama = pair(Shape(97, 2, 4, 2, 32, 48, 64, eot_id=96))
    seen = set()
    for seed in range(6):
        ids = torch.randint(96, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        new = sample.generate(model, [ids], 40, 0, 0, 1.0, [np.random.RandomState(0)])[0]
        out = llama.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)
        assert out[0, len(ids):].tolist() == new
        seen.update(new)
    assert len(seen) > 20 and 96 in seen  # not one loop, and some end by end-of-text


# ---- the folder

def test_the_model_card_says_data_settings_losses_and_limits_and_names_no_place_of_this_machine(out_dir, folder):
    assert set(os.listdir(folder)) == FILES
    with open(f"{folder}/README.md", encoding="utf-8") as f:
        card = f.read()
    meta, last = prepare.read_json(f"{out_dir}/meta.json"), rows(out_dir, "eval")[-1]
    for name, row in meta["splits"]["train"].items():
        assert f"| {name} | local files | {row['documents']:,} | {row['tokens']:,} |" in card
        assert f"| {name} | {last['sources'][name]['val_loss']:.4f} |" in card
    for part in ("Step 40 of a run that began from random weights", "learning_rate = 0.01", "block_size = 32\n",
                 f"{sum(p.numel() for p in checkpoint(out_dir, 40)['model'].values()):,} parameters",
                 f"| all, at step 40 | {last['val_loss']:.4f} |", "## Limits"):
        assert part in card, part
    assert os.path.dirname(out_dir) not in card
    meta["recipe"] = dict(sources=[dict(name="code", path="owner/data", hub=True, revision=None, commit="c0ffee")])
    card = export.model_card("x", out_dir, meta, load_weights(out_dir)[2], 1)
    assert "| code | owner/data at c0ffee |" in card


def test_bfloat16_is_the_rounded_weights_at_half_the_size(out_dir, folder, tmp_path):
    main(f"--out_dir={out_dir}", f"--to={tmp_path}/half", "--dtype=bfloat16")
    model = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/half")
    assert model.dtype == torch.bfloat16
    weights = checkpoint(out_dir, 40)["model"]
    assert torch.equal(model.model.layers[1].self_attn.k_proj.weight, weights["layers.1.wk.weight"].bfloat16())
    sizes = [os.path.getsize(f"{where}/model.safetensors") for where in (f"{tmp_path}/half", folder)]
    assert 0.49 < sizes[0] / sizes[1] < 0.53


def test_weights_come_back_from_the_folder_the_file_and_what_transformers_saves(out_dir, folder, theirs, tmp_path):
    theirs[1].save_pretrained(f"{tmp_path}/again")
    weights, shape, _ = load_weights(out_dir)
    for path in (folder, f"{folder}/model.safetensors", f"{tmp_path}/again"):
        read, read_shape, saved = load_weights(path)
        assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in read)
        assert read_shape == shape and saved["step"] == 40


def test_a_run_starts_from_the_exported_weights(out_dir, folder, tmp_path):
    data_dir = f"{os.path.dirname(out_dir)}/data"
    for name, init_from in (("warm", folder), ("cold", "scratch")):
        words = ("--max_steps=1", f"--init_from={init_from}", "--save_interval=0")
        assert train_here(data_dir, f"{tmp_path}/{name}", *words) in (0, None)
    warm, cold = (prepare.read_json(f"{tmp_path}/{name}/run.json")["initial_loss"] for name in ("warm", "cold"))
    assert warm < cold - 0.5 and abs(warm - rows(out_dir)[-1]["loss"]) < 0.5


def test_damaged_or_foreign_weights_are_not_started_from(folder, tmp_path):
    shutil.copytree(folder, f"{tmp_path}/flipped")
    flip(f"{tmp_path}/flipped/model.safetensors")
    with pytest.raises(Refused, match="copy the folder again"):
        load_weights(f"{tmp_path}/flipped")
    for change in (dict(model_type="gpt2"), dict(rope_scaling=dict(rope_type="yarn")),
                   dict(rope_scaling=dict(type="linear", factor=4.0)), dict(num_hidden_layers=3),
                   dict(num_hidden_layers=1), dict(num_key_value_heads=3), dict(num_key_value_heads=4),
                   dict(hidden_act="gelu"), dict(hidden_size="wide")):
        shutil.copytree(folder, f"{tmp_path}/other", dirs_exist_ok=True)
        with open(f"{tmp_path}/other/config.json", "w") as f:
            json.dump(prepare.read_json(f"{folder}/config.json") | change, f)
        with pytest.raises(Refused):
            load_weights(f"{tmp_path}/other")
    shutil.copy(f"{ROOT}/LICENSE", f"{tmp_path}/other/model.safetensors")
    os.unlink(f"{tmp_path}/other/SHA256SUMS")
    shutil.copy(f"{folder}/config.json", f"{tmp_path}/other/config.json")
    with pytest.raises(Refused, match="can't be read"):
        load_weights(f"{tmp_path}/other")


# ---- what is refused, and what is left behind

def test_an_unverified_checkpoint_is_never_exported(copy, tmp_path, capsys):
    flip(f"{copy}/ckpt/step_00000040.pt")
    main(f"--out_dir={copy}", f"--to={tmp_path}/older")
    assert "step_00000040.pt is not used" in capsys.readouterr().err
    weights, expected = load_weights(f"{tmp_path}/older")[0], checkpoint(copy, 20)["model"]
    assert torch.equal(weights["norm.weight"], expected["norm.weight"])
    flip(f"{copy}/ckpt/step_00000020.pt")
    with pytest.raises(Refused, match="no verified checkpoint"):
        main(f"--out_dir={copy}", f"--to={tmp_path}/none")
    assert not os.path.exists(f"{tmp_path}/none")


@pytest.mark.parametrize("change, part", [
    (dict(pattern=r"\p{L}+|\p{N}{1,3}+|\s+"), "only prepare.py's own pattern"), (dict(eot_id=7), "end-of-text 7"),
    (dict(swapped=True), "not of one run")])
def test_a_tokenizer_that_the_layout_cannot_hold_is_refused(copy, tmp_path, change, part):
    meta = prepare.read_json(f"{copy}/meta.json")
    meta["tokenizer"]["pattern"] = change.pop("pattern", prepare.PATTERN)
    if change.pop("swapped", False):
        with open(f"{copy}/tokenizer.tiktoken", "r+b") as f:
            lines = f.read().splitlines(keepends=True)
            f.seek(0)
            f.writelines([lines[1].replace(b" 1", b" 0"), lines[0].replace(b" 0", b" 1"), *lines[2:]])
        meta["tokenizer"]["sha256"] = sha256_of(f"{copy}/tokenizer.tiktoken")
    with open(f"{copy}/meta.json", "w") as f:
        json.dump(meta | change, f)
    with pytest.raises(Refused, match=part):
        main(f"--out_dir={copy}", f"--to={tmp_path}/new")


def test_weights_that_the_layout_cannot_hold_are_refused():
    shape = Shape(97, 1, 2, 1, 8, 8, 16, eot_id=96)
    weights = Transformer(shape).state_dict()
    for name, value, part in (("norm.weight", torch.full((8,), torch.nan), "norm.weight holds NaN"),
                              ("layers.0.q_norm.weight", torch.ones(4), "layers.0.q_norm.weight"),
                              ("layers.0.wk.weight", torch.ones(8, 8), "layers.0.wk.weight")):
        with pytest.raises(Refused, match=part):
            export.to_llama(weights | {name: value}, shape, "float32")


def test_a_layer_part_without_a_place_in_the_layout_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(export.PARTS, "w_up")
    with pytest.raises(Refused, match=r"no place for layers.0.w_up.weight"):
        export.tensors_of(Shape(97, 1, 2, 1, 8, 8, 16, eot_id=96))


def test_wrong_inputs_end_in_one_line_with_exit_code_2_and_write_nothing(out_dir, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for words, part in (((f"--out_dir={tmp_path}/nowhere", f"--to={tmp_path}/new"), "nowhere"),
                        ((f"--out_dir={out_dir}",), "must name a folder"),
                        ((f"--out_dir={out_dir}", f"--to={tmp_path}/full"), "must name a folder"),
                        ((f"--out_dir={out_dir}", f"--to={tmp_path}/file"), "must name a folder"),
                        ((f"--out_dir={out_dir}", f"--to={tmp_path}/new", "--dtype=float16"), "dtype")):
        with pytest.raises(Refused, match=part):
            main(*words)
    code, out, err = finish(start("export.py", f"--out_dir={out_dir}", f"--to={tmp_path}/file/new"))
    assert code == 2 and not out and err.count("\n") == 1 and "can't be written" in err
    assert sorted(os.listdir(tmp_path)) == ["file", "full"] and os.listdir(tmp_path / "full") == ["mine.txt"]


def test_everything_is_synced_before_the_folder_gets_its_name(out_dir, tmp_path, monkeypatch):
    synced, fsync, rename = set(), os.fsync, os.rename

    def record(descriptor):
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).removesuffix(".tmp"))
        fsync(descriptor)

    def check(a, b):
        assert set(os.listdir(a)) == FILES <= synced and not os.path.exists(b)
        synced.clear()
        rename(a, b)
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check)
    main(f"--out_dir={out_dir}", f"--to={tmp_path}/new")
    assert synced == {os.path.basename(tmp_path)} and os.listdir(tmp_path) == ["new"]


def test_killed_or_out_of_space_it_leaves_no_half_folder_and_the_same_command_then_works(out_dir, folder, tmp_path):
    def killed():
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def full():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    for name, fault, code in (("killed", killed, -signal.SIGKILL), ("full", full, 2)):
        words = (f"--out_dir={out_dir}", f"--to={tmp_path}/{name}")
        child = os.fork()  # a process of its own, without the seconds of its imports
        if not child:
            try:
                fault()
                main(*words)
            except Refused:
                os._exit(2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        assert os.listdir(tmp_path) == (["killed.export.tmp"] if name == "killed" else [])
        main(*words)
        assert os.listdir(tmp_path) == [name]
        for file in FILES - {"README.md", "SHA256SUMS"}:  # the card has the folder's name
            assert open(f"{tmp_path}/{name}/{file}", "rb").read() == open(f"{folder}/{file}", "rb").read()
        shutil.rmtree(f"{tmp_path}/{name}")
