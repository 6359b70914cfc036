"""sample.py: one tiny model that has learnt one text by heart, asked in every way a user would."""
import io
import json
import math
import os
import random
import shutil
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from conftest import finish, start, write_data

import fluency
import prepare
import sample
import train
from config import Refused
from model import Shape, Transformer, sha256_of

TEXT = "# 水在自然界中循环。\nfor row in table:\n    print(row, end='')\n"
VOCAB, EOT, T = 300, 299, 32  # 256 bytes, 43 ids that no text has, end-of-text
SETTINGS = train.Config(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_hidden=128, block_size=T)


def save_run(folder, model, settings=SETTINGS):
    """An out_dir as train.py leaves it, with a byte tokenizer; more than sample.py needs lies there."""
    write_data(folder, [TEXT] * 40, VOCAB)
    os.makedirs(f"{folder}/ckpt", exist_ok=True)
    path = f"{folder}/ckpt/step_00000001.pt"
    torch.save(dict(model=model.state_dict(), settings=asdict(settings), vocab_size=VOCAB, eot_id=EOT, step=1,
                    data_fingerprint=prepare.Corpus(folder).fingerprint), path)
    with open(f"{folder}/run.json", "w") as f:
        json.dump(dict(schema=1, status="finished", test_scorings=0), f)
    with open(f"{folder}/ckpt/step_00000001.json", "w") as f:
        json.dump(dict(bytes=os.path.getsize(path), sha256=sha256_of(path), step=1), f)
    return str(folder)


@pytest.fixture(scope="module")
def model():
    """Has learnt `end-of-text TEXT end-of-text TEXT ...` by heart, from every position."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(Shape.of(SETTINGS, VOCAB, EOT))
    ids = torch.tensor([EOT, *TEXT.encode()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        at = torch.randint(len(ids), (16, 1), generator=generator) + torch.arange(T)
        loss = model(ids[at % len(ids)], ids[(at + 1) % len(ids)]) / at.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def out_dir(model, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), model)


def random_model(settings=SETTINGS, seed=1):
    """Untrained, with weights so large that its choices are far apart."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(Shape.of(settings, VOCAB, EOT))
        for p in model.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.15)
    return model


def rngs(*numbers):
    return [np.random.RandomState([7, number]) for number in numbers]


def call(monkeypatch, capsys, *argv):
    """(JSON lines, stderr) of sample.py in this process."""
    monkeypatch.setattr(sys, "argv", ["sample.py", "--json=True", *argv])
    sample.main()
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_a_fresh_process_continues_a_memorised_text_to_its_end_with_json_lines_only(out_dir):
    code, out, err = finish(start("sample.py", f"--out_dir={out_dir}", "--prompt=# 水在", "--prompt=for row",
                                  "--temperature=0", "--json=True", env=dict(LC_ALL="C", PYTHONUTF8="0")))
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] + line["completion"] for line in lines] == [TEXT, TEXT[TEXT.index("for"):]]
    for line in lines:
        assert line["stopped_by"] == "end_of_text" and line["tokens"] == [*line["completion"].encode(), EOT]
        assert line["temperature"] == line["repeated"] == 0 and line["top_k"] == 50
        assert line["seed"] == 1337 and line["step"] == 1


def test_the_screen_shows_each_character_once_it_is_whole(out_dir, monkeypatch):
    class Screen(io.StringIO):
        def __init__(self):
            super().__init__()
            self.writes = []

        def reconfigure(self, **_):
            pass

        def write(self, text):
            self.writes.append(text)
            return super().write(text)

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={out_dir}", "--prompt=# ", "--temperature=0"])
    sample.main()
    assert TEXT in screen.getvalue() and "\ufffd" not in screen.getvalue() and "0% repeated" in screen.getvalue()
    assert {"水", "在", "自", "。", "f"} <= set(screen.writes), "characters come one by one, as tokens do"


def test_bytes_that_are_no_utf8_are_shown_as_such_and_a_cut_character_is_left_out(out_dir):
    tokenizer = prepare.Tokenizer(out_dir)

    def text(tokens):
        return "".join(map(sample.reader(tokenizer), tokens))
    water = list("水".encode())
    assert text([65, 0xFF, 66]) == "A\ufffdB"
    assert text([65, *water[:2]]) == "A" and text([65, *water]) == "A水"
    assert text([65, *water[:2], EOT]) == "A\ufffd"


def test_escape_sequences_never_reach_the_terminal():
    assert "\x1b[2J\r\x9b\tA\n水".translate(sample.CONTROLS) == "\ufffd[2J\ufffd\ufffd\tA\n水"


@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.9, 9, 0.8)])
def test_draws_follow_the_truncated_distribution(temperature, top_k, top_p):
    logits = np.random.RandomState(0).randn(20) * 2
    p = np.exp(logits / temperature)
    order = np.argsort(-p)
    p[order[top_k or 20:]] = 0
    p /= p.sum()
    kept = 1 + int((np.cumsum(p[order]) < top_p - 1e-12).sum())
    p[order[kept:]] = 0
    p /= p.sum()
    n = 20_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ids = sample.pick(torch.tensor(logits).float().expand(n, -1), temperature, top_k, top_p, uniform)
    assert np.abs(np.bincount(ids.numpy(), minlength=20) / n - p).max() < 2e-4


def test_extreme_settings_still_pick_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0, -torch.inf]])
    for temperature, top_k, top_p in ((0, 0, 1.0), (1e-30, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9)):
        assert sample.pick(logits, temperature, top_k, top_p, torch.tensor([0.999])).item() == 1
    almost_one = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sample.pick(logits, 1.0, 1000, 1.0, almost_one).item() == 0, "the least likely, but never the impossible one"


@pytest.mark.parametrize("doc_mask", [False, True])
def test_the_cache_gives_what_a_forward_over_the_whole_context_gives(doc_mask):
    model = random_model(replace(SETTINGS, doc_mask=doc_mask)).eval()
    prompt, n_new = [5, 9, EOT, 77], 3 * T
    context, expected = list(prompt), []
    with torch.no_grad():
        while len(expected) < n_new:
            logits = model(torch.tensor([context]))[0, -1]
            logits[EOT] = -torch.inf
            expected.append(int(logits.argmax()))
            context.append(expected[-1])
            if len(context) > T:
                context = context[-(T // 2):]
    allowed = torch.arange(VOCAB) != EOT
    [tokens] = sample.generate(model, [prompt], n_new, 0, 0, 1.0, rngs(0), allowed)
    assert tokens == expected


def test_cached_logits_equal_uncached_ones(model):
    contexts = [list(TEXT.encode()[i:i + n]) for i, n in ((0, 3), (5, 20), (1, 11))]
    with torch.no_grad():
        cache, h = sample.prefill(model, contexts)
        next_h = model.hidden(torch.tensor([[65], [66], [67]]), cache)[:, 0]
        for row, context in enumerate(contexts):
            uncached = model.hidden(torch.tensor([[*context, 65 + row]]))[0]
            torch.testing.assert_close(h[row], uncached[-2], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(next_h[row], uncached[-1], rtol=1e-4, atol=1e-5)


def test_eight_prompts_of_different_lengths_in_one_batch_give_what_one_by_one_gives(model):
    prompts = [[EOT], *(list(TEXT.encode()[i:i + 3 * i + 1]) for i in range(7))]
    for m, temperature in ((model, 1.0), (random_model(), 0.8)):
        together = sample.generate(m, prompts, 60, temperature, 40, 0.95, rngs(*range(8)))
        alone = [sample.generate(m, [p], 60, temperature, 40, 0.95, rngs(i))[0] for i, p in enumerate(prompts)]
        assert together == alone
        assert len({len(tokens) for tokens in together}) > 1 or m is not model, "some rows end before others"


def test_generating_leaves_the_global_generators_and_the_model_alone(model):
    model.train()
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    sample.generate(model, [[EOT]], 5, 1.0, 0, 1.0, rngs(0))
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    assert model.training


def test_seed_decides_the_text_and_top_k_may_exceed_the_vocabulary(tmp_path, monkeypatch, capsys):
    out_dir = save_run(tmp_path, random_model())

    def tokens(*argv):
        lines, _ = call(monkeypatch, capsys, f"--out_dir={out_dir}", "--prompt=a", "--prompt=a", "--num_samples=2",
                        "--max_new_tokens=12", "--temperature=3", *argv)
        return [line["tokens"] for line in lines]
    first = tokens("--top_k=0")
    assert len(set(map(tuple, first))) == 4, "samples and equal prompts differ from each other"
    assert tokens("--top_k=0") == first and tokens("--top_k=0", "--seed=5") != first
    assert tokens("--top_k=100000") == first


def test_no_id_outside_the_tokenizer_ever_comes(tmp_path, monkeypatch, capsys):
    out_dir = save_run(tmp_path, random_model())
    lines, _ = call(monkeypatch, capsys, f"--out_dir={out_dir}", "--prompt=", "--num_samples=8", "--temperature=100",
                    "--top_k=0", "--max_new_tokens=40")
    assert max(token for line in lines for token in line["tokens"]) <= EOT


def test_an_empty_prompt_starts_a_document_and_a_long_one_is_cropped_with_a_notice(out_dir, monkeypatch, capsys):
    long = TEXT[:-5] * 3
    lines, err = call(monkeypatch, capsys, f"--out_dir={out_dir}", "--prompt=", f"--prompt={long}", "--temperature=0")
    assert lines[0]["completion"] == TEXT and lines[0]["prompt"] == ""
    assert lines[1]["completion"] == TEXT[-5:] and lines[1]["prompt"] == long
    [notice] = err.splitlines()
    assert "prompt 2" in notice and f"{len(long.encode())} tokens" in notice and f"context is {T}" in notice


def test_prompts_come_from_files_too(out_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_bytes("\ufeff水\r\nb\n\n".encode())
    (tmp_path / "b.jsonl").write_text('"x=1"\n\n{"prompt": "水"}\n', encoding="utf-8")
    lines, _ = call(monkeypatch, capsys, f"--out_dir={out_dir}", f"--prompt_file={tmp_path}/a.txt", "--prompt=first",
                    f"--prompt_file={tmp_path}/b.jsonl", "--max_new_tokens=1")
    assert [line["prompt"] for line in lines] == ["first", "水\nb\n", "x=1", "水"]


def test_out_dir_may_name_one_checkpoint_file(out_dir, monkeypatch, capsys):
    path = f"{out_dir}/ckpt/step_00000001.pt"
    [line], _ = call(monkeypatch, capsys, f"--out_dir={path}", "--prompt=# 水", "--temperature=0")
    assert line["prompt"] + line["completion"] == TEXT


# ---- the continuation check

def test_a_trained_model_passes_the_check_and_a_random_one_fails_it(out_dir, tmp_path, monkeypatch, capsys):
    *lines, last = call(monkeypatch, capsys, f"--out_dir={out_dir}", f"--data_dir={out_dir}", "--temperature=0.01")[0]
    assert last["verdict"] == "pass" and last["step"] == 1 and set(last["check"]) == {"code", "prose"}
    for line in lines:
        assert (line["prompt"] + line["completion"]).replace(prepare.EOT, "") == TEXT
        assert line["source"] in ("code", "prose") and line["stopped_by"] == "end_of_text"
    signs = last["check"]["code"]
    assert signs["continuations"]["ended"] == signs["continuations"]["valid_utf8"] == 1
    assert signs["continuations"] == pytest.approx(signs["documents"], rel=0.1), "it wrote what the documents say"

    other = save_run(tmp_path, random_model())
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={other}", f"--data_dir={other}"])
    sample.main()
    out = capsys.readouterr().out
    assert "verdict at step 1: fail" in out and "never facts or obedience" in out and "no UTF-8" in out


def test_without_the_data_it_continues_written_prompts_says_so_and_passes_nobody(tmp_path, monkeypatch, capsys, model):
    out_dir = save_run(tmp_path / "run", model, replace(SETTINGS, data_dir="gone"))
    (tmp_path / "run" / "log.jsonl").write_text('{"event": "eval", "step": 1, "val_ppl": 1.5}\n')
    (*lines, last), err = call(monkeypatch, capsys, f"--out_dir={out_dir}", "--max_new_tokens=40")
    prompts = [*fluency.WRITTEN_PROMPTS["code"], *fluency.WRITTEN_PROMPTS["prose"]]
    assert [line["prompt"] for line in lines] == prompts == fluency.fixed_prompts(out_dir)
    assert "gone" in err and last["verdict"] in (None, "fail")
    assert last["check"]["code"]["documents"] == dict(perplexity=1.5)
    assert fluency.failures(dict(valid_utf8=1, repeated=0, perplexity=1, ended=1), dict(perplexity=1.5)) == []


def test_prompts_are_written_for_each_source_by_its_name_or_kind(tmp_path):
    meta = dict(splits=dict(train=dict(zh=1, mine=1, wiki=1)), recipe=dict(sources=[dict(name="mine", kind="code")]))
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    expected = [text for name in ("zh", "code", "") for text in fluency.WRITTEN_PROMPTS[name]]
    assert fluency.fixed_prompts(tmp_path) == expected


def ordered_text(rng, length=80):
    """Words of which each is followed by one of three only."""
    word, text = rng.randrange(60), []
    for _ in range(length):
        text.append(f"w{word:02}")
        word = (word * 3 + rng.randrange(3)) % 60
    return " ".join(text)


def mixed(text, rng):
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """(real, shuffled): data of ordered documents, and of the same words in random order."""
    rng = random.Random(0)
    real = [ordered_text(rng) for _ in range(300)]
    return [prepare.Corpus(write_data(tmp_path_factory.mktemp("corpus"), texts, VOCAB))
            for texts in (real, [mixed(text, rng) for text in real])]


@pytest.mark.parametrize("kind,says", [
    ("ordered", None), ("shuffled", "random order"), ("letters", "neighbours"), ("loop", "repeats"), ("bytes", "UTF-8"),
    ("shuffled data", "own neighbours")])
def test_each_sign_tells_the_fault_it_is_for(kind, says, corpora):
    corpus, tokenizer, rng = corpora[kind == "shuffled data"], prepare.Tokenizer(corpora[0].folder), random.Random(1)
    write = dict(ordered=lambda: ordered_text(rng), shuffled=lambda: mixed(ordered_text(rng), rng),
                 letters=lambda: "".join(rng.choice("abw012 ") for _ in range(300)),
                 loop=lambda: ordered_text(rng, 3) * 20, bytes=lambda: ordered_text(rng) + "\udcff\udcfe")

    def continue_(source, offsets, prompts):
        assert source == "prose" and len(prompts) == len(offsets) == 15
        for offset, prompt in zip(offsets, prompts, strict=True):
            assert prompt[0] == EOT and prompt[1:] == corpus.read("val", offset, fluency.PROMPT_TOKENS).tolist()
        new = [write.get(kind, write["shuffled"])().encode("utf-8", "surrogateescape") for _ in prompts]
        return [list(text[:280]) + [EOT] * (kind == "ordered") if kind != "bytes" else list(text) for text in new]
    flat = Transformer(Shape.of(SETTINGS, VOCAB, EOT)).eval()
    result = fluency.check_source(flat, tokenizer, "prose", corpus, (), None, 280, continue_)
    assert (not says and result["failed"] == []) or any(says in words for words in result["failed"]), result
    assert "valid UTF-8" in fluency.table("prose", result)


def test_of_a_long_train_text_only_a_bounded_part_is_read(corpora, monkeypatch):
    corpus, tokenizer = corpora[0], prepare.Tokenizer(corpora[0].folder)
    monkeypatch.setattr(fluency, "PIECE_TOKENS", 512)
    words = [ordered_text(random.Random(2))]
    seen, read = [], corpus.read
    monkeypatch.setattr(corpus, "read", lambda split, at, count: seen.append(count) or read(split, at, count))
    [whole] = fluency.pair_signs(corpus, tokenizer, "code", words)
    assert sum(seen) == corpus.sources("train")["code"]["tokens"] and max(seen) == 512
    seen.clear()
    monkeypatch.setattr(fluency, "TRAIN_BYTES", 2000)
    [part] = fluency.pair_signs(corpus, tokenizer, "code", words)
    assert 2000 <= sum(seen) <= 2600 and 0 < part["pairs"] < whole["pairs"] <= 1
    assert fluency.pair_signs(corpus, tokenizer, "code", words) == [part], "the pieces are the same each time"


def test_repetition_is_the_share_of_runs_of_four_that_came_before():
    assert fluency.repeated(["a b c d e", "a b c d"]) == 0 == fluency.repeated(["", "a b"])
    assert fluency.repeated(["a b c d a b c d"]) == pytest.approx(1 / 5)


def test_units_are_words_single_marks_and_single_chinese_characters():
    assert fluency.UNIT.findall("水在 for_x(1)\n，né") == ["水", "在", "for_x", "(", "1", ")", "，", "né"]


# ---- scoring

def figures(model, ids, n_bytes):
    """The same by hand: one row of T at a time, float64 sums."""
    nats = 0.0
    with torch.no_grad():
        for at in range(0, len(ids), T):
            y = ids[at:at + T]
            x = [ids[at - 1] if at else EOT, *y[:-1]]
            logp = model(torch.tensor([x]))[0].double().log_softmax(dim=-1)
            nats -= sum(logp[i, token].item() for i, token in enumerate(y))
    loss = nats / len(ids)
    return dict(loss=loss, perplexity=math.exp(loss), bits_per_byte=nats / math.log(2) / n_bytes)


def test_score_gives_loss_perplexity_and_bits_per_byte_of_a_text(out_dir, model, tmp_path, monkeypatch, capsys):
    text = TEXT + "<|endoftext|> 水 and more"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as some clusters set it everywhere
    [row], _ = call(monkeypatch, capsys, f"--out_dir={out_dir}", f"--score={tmp_path}/text.txt", "--dtype=float32")
    ids = list(text.encode())
    assert row["tokens"] == row["bytes"] == len(ids) and row["step"] == 1
    expected = figures(model.eval(), ids, len(ids))
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_the_test_split_is_scored_per_source_and_every_time_is_counted(model, tmp_path, monkeypatch, capsys):
    out_dir = save_run(tmp_path, model)
    ask = (f"--out_dir={out_dir}", f"--data_dir={out_dir}", "--split=test", "--dtype=float32")
    rows, _ = call(monkeypatch, capsys, *ask)
    assert [row["source"] for row in rows] == ["code", "prose", "all"]
    ids = [*TEXT.encode(), EOT] * 2
    expected = figures(model.eval(), ids, 2 * len(TEXT.encode()))
    for row in rows:
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        assert row["test_scorings"] == 1 and row["tokens"] == len(ids) * (2 if row["source"] == "all" else 1)
    assert call(monkeypatch, capsys, *ask)[0][0]["test_scorings"] == 2
    call(monkeypatch, capsys, *ask[:2], "--split=val")
    assert prepare.read_json(f"{out_dir}/run.json") == dict(schema=1, status="finished", test_scorings=2)
    with prepare.lock(out_dir), pytest.raises(Refused, match=f"process {os.getpid()}"):
        call(monkeypatch, capsys, *ask)
    assert prepare.read_json(f"{out_dir}/run.json")["test_scorings"] == 2, "not behind the back of a live run"
    os.remove(f"{out_dir}/run.json")
    with pytest.raises(Refused, match="no run.json"):
        call(monkeypatch, capsys, *ask)


def test_a_weight_with_nan_is_one_line_and_exit_code_2(tmp_path):
    broken = random_model()
    with torch.no_grad():
        broken.layers[1].wk.weight[0, 0] = float("nan")
    code, out, err = finish(start("sample.py", f"--out_dir={save_run(tmp_path, broken)}"))
    assert code == 2 and out == ""
    [line] = err.splitlines()
    assert "layers.1.wk.weight" in line and "NaN" in line


def spoil(folder, what, tmp_path):
    if what == "no checkpoint":
        shutil.rmtree(f"{folder}/ckpt")
    elif what == "no tokenizer":
        os.remove(f"{folder}/tokenizer.tiktoken")
    elif what == "other tokenizer":
        meta = json.load(open(f"{folder}/meta.json"))
        json.dump({**meta, "vocab_size": 280}, open(f"{folder}/meta.json", "w"))
    elif what == "--data_dir=other":
        write_data(tmp_path / "other", [TEXT[:-2]] * 20, VOCAB)
    elif what == "other shape":
        save_run(folder, random_model(), replace(SETTINGS, n_layer=3))


@pytest.mark.parametrize("what,says", [
    ("--out_dir=nowhere", "nowhere"), ("--prompt_file=nowhere.txt", "nowhere.txt"), ("--prompt_file=.", "directory"),
    ("--prompt_file=latin.txt", "not UTF-8"), ("--prompt_file=bad.jsonl", "line 2"), ("--prompt=\udcff", "UTF-8"),
    ("--temperature=-1", "temperature=-1"), ("--top_p=0", "top_p=0"), ("--top_p=1.5", "top_p=1.5"),
    ("--seed=4294967296", "seed"), ("--top_k=-1", "top_k=-1"),
    ("--num_samples=0", "num_samples"), ("--max_new_tokens=0", "max_new_tokens"),
    ("once upon a time", "--prompt='once upon a time'"), ("--prompt_file=empty.jsonl", "no prompt"),
    ("--score=nowhere.txt", "nowhere.txt"), ("--score=latin.txt", "not UTF-8"), ("--score=empty.txt", "empty"),
    ("--split=train", "val, test"), ("--split=test --prompt=a", "different jobs"),
    ("--data_dir=nowhere", "no finished"), ("--data_dir=other", "is not the data"),
    ("--out_dir=latin.txt", "is no checkpoint"), ("--out_dir=module.pt", "is no checkpoint"),
    ("--device=gpu", "auto, cpu, cuda"), ("--dtype=int8", "bfloat16"), ("no checkpoint", "no verified checkpoint"),
    ("no tokenizer", "tokenizer.tiktoken"), ("other tokenizer", "280"), ("other shape", "does not fit")])
def test_wrong_input_is_refused_in_one_line(what, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = save_run(tmp_path / "run", random_model())
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('"good"\n{"text": "no prompt"}\n')
    (tmp_path / "empty.txt").write_text("")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    spoil(folder, what, tmp_path)
    words = [what] if "once" in what else what.split() if what.startswith("--") else []
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={folder}", *words])
    with pytest.raises(Refused, match=says) as refused:
        sample.main()
    assert "\n" not in str(refused.value) and capsys.readouterr().out == ""
