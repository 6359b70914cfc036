"""prepare.py on real files in real processes. The oracles do not use it: own parsing of the ranks file, own hashing."""
import base64
import errno
import gzip
import hashlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import regex
import tiktoken
from conftest import train_here

import documents
import prepare
from config import Refused

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPLITS = ("train", "val", "test")
WORDS = "the run waits when data ends and no step is lost before a checkpoint was written to this disk".split()


SMALL = "prepare.SHARD_BYTES = 20_000; prepare.documents.BATCH_BYTES = 4_000\n"


def start(*words, patch="", env=None):
    """prepare.py as a process, some of its constants replaced by the statements in `patch`."""
    code = f"import os, prepare\n{patch}\nprepare.main()"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ROOT, **(env or {})}
    return subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*words, code=0, **options):
    """stdout and stderr of a whole run that must end with exit code `code`."""
    process = start(*words, **options)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err[-3000:]
    assert code != 2 or ("Traceback" not in err and err.splitlines()[-1].startswith("-c: ")), err
    return out + err


def prose(count, seed=0, words=60):
    rng = random.Random(seed)
    return [f"Document {seed}.{i}: " + " ".join(rng.choices(WORDS, k=words)) + "." for i in range(count)]


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def write_jsonl(path, texts):
    write(path, "".join(json.dumps(dict(text=text)) + "\n" for text in texts))


def write_parquet(path, texts, row_group_size):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    table = pyarrow.table(dict(other=list(range(len(texts))), text=texts))
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)


def recipe(folder, **settings):
    """A config file; the values may be anything Python can print."""
    path = f"{folder}/recipe_{len(os.listdir(folder))}.py"
    settings.setdefault("data_dir", f"{folder}/data")
    settings.setdefault("vocab_size", 300)
    write(path, "".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    return path


def ranks_of(data_dir):
    with open(f"{data_dir}/tokenizer.tiktoken") as file:
        return [base64.b64decode(line.split()[0]) for line in file]


def meta_of(data_dir):
    with open(f"{data_dir}/meta.json") as file:
        return json.load(file)


def documents_of(data_dir, split):
    """{source: [text, ...]} read back from the ids alone; checks that every document ends with one end-of-text."""
    meta, ranks, found = meta_of(data_dir), ranks_of(data_dir), {}
    ids = np.fromfile(f"{data_dir}/{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"))
    for name, row in meta["splits"][split].items():
        mine = ids[row["offset"]:row["offset"] + row["tokens"]].tolist()
        ends = [i for i, token in enumerate(mine) if token == meta["eot_id"]]
        assert len(ends) == row["documents"] and (not mine or ends[-1] == len(mine) - 1)
        starts = [0, *[end + 1 for end in ends]]
        raw = [b"".join(ranks[i] for i in mine[a:b]) for a, b in zip(starts, ends, strict=False)]
        assert sum(map(len, raw)) == row["bytes"]
        found[name] = [text.decode() for text in raw]
    assert len(ids) == sum(row["tokens"] for row in meta["splits"][split].values())
    return found


def everything(data_dir):
    """Counter of all documents of all splits and sources."""
    return Counter(text for split in SPLITS for texts in documents_of(data_dir, split).values() for text in texts)


def sums(data_dir):
    names = ["tokenizer.tiktoken", "meta.json", *[f"{split}.bin" for split in SPLITS]]
    return [hashlib.sha256(open(f"{data_dir}/{name}", "rb").read()).hexdigest() for name in names]


def place(text):
    """Where in [0, 1) the split hash puts a document."""
    digest = hashlib.blake2b("".join(text.split()).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


# ---- one finished corpus of every kind of file, prepared once with --docs in a hostile locale ------------------------

CHINESE = "模型在每一步之后写下检查点，断电之后可以继续训练。"
CODE_TEXT = "def f(x):\n\n\n\n    return 'e\u0301'" + " " * 90 + "# no NFC, no shorter runs in code\n"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("mixed"))
    lines = prose(80, 1)
    write_jsonl(f"{folder}/docs/web/a.jsonl", lines[:40])
    write(f"{folder}/docs/web/b.jsonl.gz", gzip.compress("".join(
        json.dumps(dict(text=text, n=1), ensure_ascii=False) + "\n" for text in lines[40:60]).encode()))
    packed = "\n".join(json.dumps(dict(text=text)) for text in lines[60:]).encode()
    write(f"{folder}/docs/web/c.jsonl.zst", pyarrow.Codec("zstd").compress(packed, asbytes=True))
    write_parquet(f"{folder}/docs/rows/x.parquet", prose(60, 2), 7)
    for i, text in enumerate(prose(20, 3)):
        write(f"{folder}/docs/files/{i}.txt", text)
    write(f"{folder}/docs/files/zh.md", CHINESE * 3)
    write(f"{folder}/docs/files/special.txt", "Text with <|endoftext|> in it, <|endoftext|> twice.")
    write(f"{folder}/docs/files/bom.txt", b"\xef\xbb\xbfBOM, CRLF\r\nand NUL\0 and \x1b escape are gone.")
    write(f"{folder}/docs/files/nfc.txt", "Prose e\u0301 is composed, long" + " " * 100 + "runs are capped.")
    write(f"{folder}/docs/files/f.py", CODE_TEXT)
    write(f"{folder}/docs/files/one_bad.txt", b"One bad byte \xe9 in a document of over a hundred characters is "
          b"replaced and counted, the document stays in the corpus.")
    write(f"{folder}/docs/files/latin1.txt", "é è à ü ö: this is Latin-1, which is not UTF-8.".encode("latin-1"))
    write(f"{folder}/docs/files/picture.png", b"\x89PNG")
    write(f"{folder}/docs/files/empty.txt", "")
    write(f"{folder}/docs/files/.hidden.txt", "not read, ever, by anybody")
    write(f"{folder}/docs/files/short.txt", "tiny")
    write(f"{folder}/docs/direct.txt", "A document directly in the folder, not in a sub-folder.")
    write(f"{folder}/docs/direct.png", "No document, though it reads like one.")
    write(f"{folder}/docs/v1/plain.txt", "A document in a folder whose name begins the next one's.")
    write(f"{folder}/docs/v1.0/dotted.txt", "A document in a folder with a dot in its name.")
    write(f"{folder}/docs/images/a.jpg", b"\xff\xd8")
    write(f"{folder}/docs/files/spaces.txt", "begin" + "\n" * 1_000_000 + "end of a million line ends")
    write(f"{folder}/docs/files/a.sql", "a" * 2_000_000)
    write(f"{folder}/docs/files/b.sql", " " * 1_000_000 + "select everything")
    out = run(f"--docs={folder}/docs", f"--data_dir={folder}/data", "--vocab_size=400",
              env=dict(LC_ALL="C", PYTHONUTF8="0"))
    return folder, out


def test_every_kind_of_file_becomes_documents_of_the_source_of_its_folder(mixed):
    folder, _ = mixed
    found = everything(f"{folder}/data")
    for text in [*prose(80, 1), *prose(60, 2), *prose(20, 3), CHINESE * 3]:
        assert found[text] == 1
    assert set(meta_of(f"{folder}/data")["splits"]["train"]) == {"docs", "files", "rows", "web", "v1", "v1.0"}
    assert "not read, ever, by anybody" not in found and "No document, though it reads like one." not in found
    assert found["A document directly in the folder, not in a sub-folder."] == 1
    assert found["A document in a folder with a dot in its name."] == 1
    assert found["A document in a folder whose name begins the next one's."] == 1


def test_a_folder_with_nothing_to_read_is_said_and_left_out(mixed, tmp_path):
    assert "docs/images: nothing to read, passed over: 1 .jpg" in mixed[1]
    assert documents.listed(Counter({f".{i}": 2 for i in range(20)})).endswith("2 .8, 22 with 11 other endings")
    with pytest.raises(Refused, match="no file that can be read"):
        documents.docs_sources(f"{mixed[0]}/docs/images")


def test_text_that_looks_like_a_special_token_is_text_and_end_of_text_only_ends_documents(mixed):
    # documents_of has checked that the count of end-of-text ids is the count of documents
    assert everything(f"{mixed[0]}/data")["Text with <|endoftext|> in it, <|endoftext|> twice."] == 1


def test_cleaning_changes_only_what_it_says_and_leaves_code_alone(mixed):
    found = everything(f"{mixed[0]}/data")
    for text in ("BOM, CRLF\nand NUL and  escape are gone.", CODE_TEXT,
                 "Prose é is composed, long" + " " * 64 + "runs are capped.",
                 "One bad byte � in a document of over a hundred characters is replaced and counted, the document "
                 "stays in the corpus.", "begin\n\nend of a million line ends"):
        assert found[text] == 1, text
    meta = meta_of(f"{mixed[0]}/data")
    assert meta["dropped"]["files"] == dict(empty=1, not_utf8=1, too_short=1)
    assert meta["cleaned"]["files"] == dict(bom=1, control=1, crlf=1, nfc=1, not_utf8=1, white_space=2)


def test_documents_of_millions_of_characters_stay_whole(mixed):
    found = everything(f"{mixed[0]}/data")
    assert found["a" * 2_000_000] == found[" " * 1_000_000 + "select everything"] == 1


def test_the_screen_shows_the_table_what_was_dropped_pieces_and_the_next_command(mixed):
    folder, out = mixed
    meta = meta_of(f"{folder}/data")
    for split in SPLITS:
        row = meta["splits"][split]["web"]
        assert any(line.split()[:5] == ["web", split, *(f"{row[key]:,}" for key in ("documents", "tokens", "bytes"))]
                   for line in out.splitlines() if line.startswith("web"))
    assert "1 not_utf8" in out and "latin1.txt" in out and "iconv" in out and ".png" in out
    assert out.count("train.bin from token") == 3 and f"next: python train.py --data_dir={folder}/data" in out
    assert set(json.load(open(f"{folder}/data/prepare.json"))) == {"device_hours"}


def test_the_fast_pattern_splits_as_the_public_one():
    draw = random.Random(1)
    alphabet = [*"aZ '.!_-\n\r\t093s\u2019\u3000\xa0\u2028\u0663\xb2\u4f60\u0130\U0001f600", "e\u0301"]
    alphabet += ["'s", "'LL", "'Ve", "'rE", "'d", "'M", "'t"]
    texts = ["".join(draw.choices(alphabet, k=draw.randint(1, 12))) for _ in range(20_000)]
    texts += [f"a {chr(i)}b {chr(i)}{chr(i)}\n1{chr(i)}" for i in range(0x3100) if not 0xd800 <= i < 0xe000]
    pieces = {piece.encode() for text in texts for piece in regex.findall(prepare.PATTERN, text)}
    ranks = [bytes([i]) for i in range(256)]
    ranks += sorted(pieces - {*ranks})  # every piece is a token: another split, other ids
    fast, public = prepare.make_encoding(ranks), tiktoken.Encoding(
        "public", pat_str=prepare.PATTERN, special_tokens={}, mergeable_ranks={r: i for i, r in enumerate(ranks)})
    assert [fast.encode_ordinary(text) for text in texts] == [public.encode_ordinary(text) for text in texts]


def test_ids_are_those_of_tiktoken_on_the_file_of_ranks(mixed):
    folder, _ = mixed
    ranks, meta = ranks_of(f"{folder}/data"), meta_of(f"{folder}/data")
    oracle = tiktoken.Encoding("oracle", pat_str=meta["tokenizer"]["pattern"], special_tokens={},
                               mergeable_ranks={piece: i for i, piece in enumerate(ranks)})
    row = meta["splits"]["train"]["web"]
    ids = np.fromfile(f"{folder}/data/train.bin", "<u2")[row["offset"]:row["offset"] + row["tokens"]]
    texts = documents_of(f"{folder}/data", "train")["web"]
    assert ids.tolist() == [i for text in texts for i in [*oracle.encode_ordinary(text), meta["eot_id"]]]
    assert len(ranks) == 399 and meta["eot_id"] == 399 and meta["vocab_size"] == 400
    assert meta["tokenizer"]["special_tokens"] == {"<|endoftext|>": 399}


def test_a_finished_recipe_is_not_done_again_and_another_needs_overwrite(mixed):
    folder, _ = mixed
    words = [f"--docs={folder}/docs", f"--data_dir={folder}/data"]
    before = os.stat(f"{folder}/data/train.bin").st_mtime_ns
    assert "nothing to do" in run(*words, "--vocab_size=400")
    assert "--overwrite=True" in run(*words, "--vocab_size=380", code=2)
    assert os.stat(f"{folder}/data/train.bin").st_mtime_ns == before


def test_verify_hashes_everything_and_names_a_flipped_bit(mixed, tmp_path):
    folder, _ = mixed
    out = run("--verify=True", f"--data_dir={folder}/data")
    assert "every byte is as the sha256" in out and "bytes/token" in out
    subprocess.run(["cp", "-r", f"{folder}/data", f"{tmp_path}/data"], check=True)
    with open(f"{tmp_path}/data/train.bin", "r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    assert "train.bin differs" in run("--verify=True", f"--data_dir={tmp_path}/data", code=2)


def test_tokenizer_gives_back_any_text_within_seconds(mixed):
    tokenizer = prepare.Tokenizer(f"{mixed[0]}/data")
    rng = random.Random(0)
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    start_time = time.time()
    for text in ("a" * 2_000_000, " " * 1_000_000, "\n" * 300_000, letters, CHINESE * 10_000, " \t" * 150_000, "",
                 "<|endoftext|>", "\0 tail   "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eot_id not in ids
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert time.time() - start_time < 20
    assert tokenizer.token_bytes.shape == (400,) and tokenizer.token_bytes[tokenizer.eot_id] == 0
    assert tokenizer.decode([tokenizer.eot_id]) == ""


# ---- what train.py, sample.py and bench.py read ----------------------------------------------------------------------


def tiny_data(folder, ids=(1, 2, 3, 4, 5, 6), vocab_size=10, dtype="uint16"):
    os.makedirs(folder)
    for split in SPLITS:
        np.array(ids, dtype).tofile(f"{folder}/{split}.bin")
    splits = {split: dict(a=dict(offset=0, tokens=len(ids), documents=1, bytes=5)) for split in SPLITS}
    prepare.seal(folder, dict(schema=1, vocab_size=vocab_size, dtype=dtype, eot_id=6, tokenizer={}, splits=splits,
                              recipe={}, dropped={}))
    return folder


def test_corpus_reads_any_window_and_refuses_what_is_damaged(tmp_path):
    folder = tiny_data(f"{tmp_path}/d", ids=list(range(1, 9)))
    corpus = prepare.Corpus(folder)
    assert corpus.tokens("val") == 8 and corpus.sources("train")["a"]["tokens"] == 8
    ids = corpus.read("train", 2, 3)
    assert ids.dtype == np.int64 and ids.tolist() == [3, 4, 5]
    with pytest.raises(Refused, match="train.bin ends within the 4 ids from token 6"):
        corpus.read("train", 6, 4)
    for change, why in ((lambda data: data[:-1], "has 15 bytes"), (lambda data: data[:-2], "has 14 bytes"),
                        (lambda data: data[:4] + b"\7" + data[5:], "sha256"), (lambda data: b"", "has 0 bytes")):
        damaged = tiny_data(f"{tmp_path}/{hashlib.sha256(why.encode()).hexdigest()[:8]}", ids=list(range(1, 9)))
        with open(f"{damaged}/train.bin", "rb") as file:
            data = file.read()
        write(f"{damaged}/train.bin", change(data))
        with pytest.raises(Refused, match=f"train.bin.*{why}"):
            prepare.Corpus(damaged)


def test_corpus_names_the_token_of_an_id_outside_the_vocabulary(tmp_path):
    corpus = prepare.Corpus(tiny_data(f"{tmp_path}/d", ids=[1, 2, 3, 60000, 4, 5]))
    assert corpus.read("train", 0, 3).tolist() == [1, 2, 3]
    with pytest.raises(Refused, match="train.bin has id 60000 at token 3"):
        corpus.read("train", 2, 3)


def test_corpus_says_what_is_missing(tmp_path):
    with pytest.raises(Refused, match="holds no finished data"):
        prepare.Corpus(f"{ROOT}/README.md")
    with pytest.raises(Refused, match="holds no finished data"):
        prepare.Corpus(f"{tmp_path}/nothing")
    folder = tiny_data(f"{tmp_path}/d")
    os.remove(f"{folder}/val.bin")
    with pytest.raises(Refused, match="val.bin cannot be opened"):
        prepare.Corpus(folder)


def test_a_tokenizer_beside_the_wrong_meta_is_refused(mixed, tmp_path):
    subprocess.run(["cp", "-r", f"{mixed[0]}/data", f"{tmp_path}/data"], check=True)
    with open(f"{tmp_path}/data/tokenizer.tiktoken", "ab") as file:
        file.write(base64.b64encode(b"zzz") + b" 399\n")
    for reader in (prepare.Corpus, prepare.Tokenizer):
        with pytest.raises(Refused, match="tokenizer.tiktoken is not the one"):
            reader(f"{tmp_path}/data")


def test_fingerprint_changes_with_the_data_and_not_with_the_place(tmp_path):
    first, same = (prepare.Corpus(tiny_data(f"{tmp_path}/{name}")).fingerprint for name in "ab")
    other = prepare.Corpus(tiny_data(f"{tmp_path}/c", ids=(1, 2, 3, 4, 5, 7))).fingerprint
    wider = prepare.Corpus(tiny_data(f"{tmp_path}/e", vocab_size=11)).fingerprint
    assert first == same and len({first, other, wider}) == 3


def test_seal_refuses_a_file_that_is_not_as_long_as_the_splits_say(tmp_path):
    folder = tiny_data(f"{tmp_path}/d")
    meta = meta_of(folder)
    write(f"{folder}/val.bin", b"\0" * 10)
    with pytest.raises(Refused, match="val.bin has 10 bytes, 12"):
        prepare.seal(folder, meta)


def test_files_over_a_gigabyte_are_checked_at_both_ends(tmp_path):
    folder, block = tiny_data(f"{tmp_path}/d", ids=[0] * 8), 64 << 20
    meta, zeros = meta_of(folder), hashlib.sha256(bytes(block)).hexdigest()
    meta["splits"]["train"]["a"]["tokens"] = 16 * block // 2
    meta["files"]["train.bin"] = dict(bytes=16 * block, sha256="of no use here", blocks=[zeros] * 16)
    write(f"{folder}/meta.json", json.dumps(meta))
    os.truncate(f"{folder}/train.bin", 16 * block)  # sparse
    prepare.Corpus(folder)
    for at in (100, 16 * block - 1):
        with open(f"{folder}/train.bin", "r+b") as file:
            file.seek(at)
            file.write(b"\1")
            file.flush()
            with pytest.raises(Refused, match="train.bin differs from its sha256"):
                prepare.Corpus(folder)
            file.seek(at)
            file.write(b"\0")


# ---- splits, duplicates, budgets -------------------------------------------------------------------------------------


def seven_documents():
    """Seven documents of which the split hash puts at least one into val and one into test."""
    texts = prose(200, 9)
    val, test = (next(t for t in texts if low <= place(t) < high) for low, high in ((0, 0.1), (0.9, 1)))
    return [val, test, *[t for t in texts if 0.1 <= place(t) < 0.9][:5]]


def test_seven_documents_and_four_workers_give_seven_end_of_text_ids(tmp_path):
    texts = seven_documents()
    for i, text in enumerate(texts):
        write(f"{tmp_path}/docs/{i}.txt", text)
    write(f"{tmp_path}/docs/7.txt", "")
    source = dict(name="a", path=f"{tmp_path}/docs")
    patch = "prepare.process_count = lambda: 4; prepare.documents.BATCH_BYTES = 1"
    run(recipe(tmp_path, sources=[source]), patch=patch)
    assert everything(f"{tmp_path}/data") == Counter(texts)  # checks the end-of-text ids and the file sizes as well
    assert documents_of(f"{tmp_path}/data", "val")["a"] == texts[:1]
    assert documents_of(f"{tmp_path}/data", "test")["a"] == texts[1:2]


def test_another_order_holds_the_same_documents_out_and_another_worker_count_gives_the_same_bytes(tmp_path):
    texts = prose(300, 4)
    write_jsonl(f"{tmp_path}/a/x.jsonl", texts)
    write_jsonl(f"{tmp_path}/b/x.jsonl", random.Random(1).sample(texts, len(texts)))
    results = {}
    for name, folder, count in (("one", "a", 1), ("three", "a", 3), ("order", "b", 2)):
        sources = [dict(name="s", path=f"{tmp_path}/{folder}/x.jsonl")]
        run(recipe(tmp_path, sources=sources, data_dir=f"{tmp_path}/{name}"),
            patch=f"prepare.process_count = lambda: {count}; prepare.documents.BATCH_BYTES = 5000")
        results[name] = {split: sorted(documents_of(f"{tmp_path}/{name}", split)["s"]) for split in SPLITS}
    assert results["one"] == results["order"] and sums(f"{tmp_path}/one") == sums(f"{tmp_path}/three")
    assert results["one"]["val"] == sorted(t for t in texts if place(t) < 0.1)
    assert results["one"]["test"] == sorted(t for t in texts if place(t) >= 0.9)


def test_a_duplicate_is_dropped_and_nothing_crosses_splits_between_sources(tmp_path):
    texts = prose(150, 5)
    held = next(t for t in texts if 0.03 < place(t) < 0.09)  # in val of the small source, in train of the large one
    write_jsonl(f"{tmp_path}/small.jsonl", [*texts[:21], *texts[20:], texts[7] + "  \n ", texts[7]])
    write_jsonl(f"{tmp_path}/large/a.jsonl", [*prose(400, 6), held])
    with open(f"{tmp_path}/large/zeros.txt", "wb") as file:
        file.truncate(20_000_000)  # 5M tokens by its size, so 2% are held out; empty once cleaned
    sources = [dict(name="small", path=f"{tmp_path}/small.jsonl"), dict(name="large", path=f"{tmp_path}/large")]
    run(recipe(tmp_path, sources=sources), patch=SMALL)  # copies in different shards, and in one
    found, dropped = everything(f"{tmp_path}/data"), meta_of(f"{tmp_path}/data")["dropped"]
    assert found == Counter([*texts, *prose(400, 6)])
    assert dropped["small"] == dict(duplicate=3) and dropped["large"] == dict(empty=1, held_out_elsewhere=1)
    assert held in documents_of(f"{tmp_path}/data", "val")["small"]


def test_a_source_ends_behind_the_document_that_reaches_its_share_and_a_short_one_is_named(tmp_path):
    for name, count in (("long", 900), ("short", 40)):
        write_parquet(f"{tmp_path}/{name}/x.parquet", prose(count, len(name)), 50)
    sources = [dict(name="long", path=f"{tmp_path}/long", weight=3), dict(name="short", path=f"{tmp_path}/short")]
    out = run(recipe(tmp_path, sources=sources, budget_tokens=40_000), patch="prepare.documents.BATCH_BYTES = 30_000")
    meta, texts = meta_of(f"{tmp_path}/data"), documents_of(f"{tmp_path}/data", "train")["long"]
    last = len(prepare.Tokenizer(f"{tmp_path}/data").encode(texts[-1])) + 1
    assert 30_000 <= meta["splits"]["train"]["long"]["tokens"] < 30_000 + last
    expected = [t for t in prose(900, 4) if 0.1 <= place(t) < 0.9]
    assert texts == expected[:len(texts)]
    assert "source short has only" in out
    assert documents_of(f"{tmp_path}/data", "train")["short"] == [t for t in prose(40, 5) if 0.1 <= place(t) < 0.9]


def test_held_out_fractions_follow_from_budget_or_size_alone(tmp_path):
    def fraction(size, budget=0, path="x.txt"):
        with open(f"{tmp_path}/{path}", "wb") as file:
            file.truncate(size)
        settings = prepare.Config(budget_tokens=budget)
        return documents.resolve(dict(name="a", path=f"{tmp_path}/{path}"), settings, {}, 1.0)["held_out"]
    assert fraction(4_000) == 0.1                                   # never over a tenth
    assert fraction(40_000_000) == pytest.approx(0.01)              # 100k of 10M tokens
    assert fraction(400_000_000) == pytest.approx(0.005)            # half a percent
    assert fraction(40_000_000_000) == pytest.approx(0.0005)        # 5M of 10B tokens
    assert fraction(40_000_000_000, budget=10**7) == pytest.approx(0.01)
    hub = documents.resolve(dict(name="a", path="owner/set", weight=0.5), prepare.Config(), {}, 1.0)
    assert hub["share_tokens"] == 5_005_000_000 and hub["held_out"] == pytest.approx(5e6 / 5.005e9)


def test_too_small_a_corpus_is_refused_with_a_workable_size(tmp_path):
    write_jsonl(f"{tmp_path}/x.jsonl", [t for t in prose(60, 7) if 0.1 < place(t) < 0.9][:5])
    out = run(recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/x.jsonl")]), code=2)
    assert "val would be empty" in out and "50 documents" in out
    assert not os.path.exists(f"{tmp_path}/data/meta.json")


def test_a_vocabulary_the_corpus_cannot_give_is_refused_and_the_number_named_works(tmp_path):
    write_jsonl(f"{tmp_path}/x.jsonl", prose(120, 8))
    sources = [dict(name="a", path=f"{tmp_path}/x.jsonl")]
    out = run(recipe(tmp_path, sources=sources, vocab_size=30_000), code=2)
    most = int(out.split("--vocab_size=")[1].split()[0])
    run(recipe(tmp_path, sources=sources, vocab_size=most))  # in the same folder, as a person would
    assert meta_of(f"{tmp_path}/data")["vocab_size"] == most and len(ranks_of(f"{tmp_path}/data")) == most - 1


def test_the_tokenizer_is_trained_on_train_documents_only(tmp_path):
    held = [text for text in (f"zqxj {i} " + "zqxj " * 60 for i in range(300)) if not 0.1 <= place(text) < 0.9]
    write_jsonl(f"{tmp_path}/x.jsonl", [*held, *prose(120, 19)])
    run(recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/x.jsonl")]))
    assert len(held) > 30 and not any(b"zq" in piece for piece in ranks_of(f"{tmp_path}/data"))


def test_seventy_thousand_ids_take_four_bytes_each(tmp_path):
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdefghijklmnop", k=9)) for _ in range(200)) for _ in range(200)]
    write_jsonl(f"{tmp_path}/x.jsonl", texts)
    run(recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/x.jsonl")], vocab_size=70_000))
    corpus = prepare.Corpus(f"{tmp_path}/data")
    assert corpus.meta["dtype"] == "uint32" and corpus.eot_id == 69_999
    assert os.path.getsize(f"{tmp_path}/data/train.bin") == 4 * corpus.tokens("train")
    assert corpus.read("train", 0, corpus.tokens("train")).max() == 69_999
    assert everything(f"{tmp_path}/data") == Counter(texts)
    assert train_here(f"{tmp_path}/data", f"{tmp_path}/out", "--max_steps=2") == 0


def lines_source(tmp_path, texts):
    write_jsonl(f"{tmp_path}/s/x.jsonl", texts)
    return documents.resolve(dict(name="s", path=f"{tmp_path}/s"), prepare.Config(), {}, 1.0)


def test_the_tokenizer_sample_is_bounded_spread_and_hangs_on_nothing_but_place_and_seed(tmp_path, monkeypatch):
    texts = [text * (300 if i == 40 else 1) for i, text in enumerate(prose(1000, 30))]  # one of over 10k characters
    source = lines_source(tmp_path, texts)
    monkeypatch.setattr(documents, "BATCH_BYTES", 7000)
    everything = prepare.sample_of(source, 1, 10**9, False)
    assert sorted(everything) == sorted(text[:10_000] for text in texts if 0.1 <= place(text) < 0.9)
    some = prepare.sample_of(source, 1, 50_000, False)
    at = [texts.index(text) for text in some]
    assert 40_000 < sum(map(len, some)) <= 50_000 and 300 < sum(at) / len(at) < 700
    monkeypatch.setattr(documents, "BATCH_BYTES", 10**6)
    assert prepare.sample_of(source, 1, 50_000, False) == some != prepare.sample_of(source, 2, 50_000, False)


# ---- bad input -------------------------------------------------------------------------------------------------------

MALFORMED = ['{"text": "cut off in the mid', '{"text": "two"} {"text": "objects"}', '{"text": null}',
             '{"other": "field"}', '{"text": 12}', '"no object"', "[" * 100_000]


def test_the_sample_is_spread_over_files_of_one_name(tmp_path):
    for i, text in enumerate(prose(200, 19)):
        write(f"{tmp_path}/d/{i:03d}/text.txt", f"{i} {text}")
    source = documents.resolve(dict(name="d", path=f"{tmp_path}/d"), prepare.Config(), {}, 1.0)
    drawn = [int(text.split()[0]) for text in prepare.sample_of(source, 1, source["bytes"] // 10, False)]
    assert len(drawn) > 10 and 50 < sum(drawn) / len(drawn) < 150
    assert min(drawn) < 50 and max(drawn) > 150 and sum(n + 1 in drawn for n in drawn) < len(drawn) / 2


def test_each_malformed_line_is_refused_by_file_and_line():
    for line in MALFORMED:
        with pytest.raises(Refused, match="^some/x.jsonl.gz:17: "):
            documents.text_of("some/x.jsonl.gz:17", line.encode(), "text")


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_column_of_text_keeps_what_is_text_and_counts_the_rest(tmp_path, kind):
    texts = prose(20, 40)

    def found(field, values):
        column = pyarrow.array(values, kind.replace("string", "binary")).view(kind)  # bytes as they are, UTF-8 or not
        pyarrow.parquet.write_table(pyarrow.table(dict(text=column)), f"{tmp_path}/x.parquet", row_group_size=7)
        source = {**documents.RECORD, "path": f"{tmp_path}/x.parquet", "hub": False, "held_out": 0.1,
                  "text_field": field}
        tally, usable = Counter(), []
        for batch, *_ in documents.batches(source, [source["path"]]):
            usable += documents.usable(batch, source, True, tally)
        return [text for _, text, *_ in usable], +tally

    values = [text.encode() for text in texts]
    kept, tally = found("text", [*values, None, b"", b"a few words, then half a sign \xe4\xbd"])
    assert kept == texts
    assert [tally[f"dropped {reason}"] for reason in ("malformed", "empty", "not_utf8")] == [1, 1, 1]
    assert found("text.content", values) == ([], {"dropped malformed": len(values)})


def test_a_malformed_line_stops_the_run_or_is_skipped_and_counted_on_request(tmp_path):
    texts = prose(120, 10)
    lines = [json.dumps(dict(text=text)) for text in texts]
    lone = "A lone \ud83d surrogate among more than a hundred characters, under one percent of them all, so it is kept."
    lines[60:60] = ["", *MALFORMED, json.dumps(dict(text=lone))]
    write(f"{tmp_path}/x.jsonl", "\r\n".join(lines))
    config = recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/x.jsonl")])
    assert "x.jsonl:62: " in run(config, code=2)
    assert not os.path.exists(f"{tmp_path}/data/train.bin")
    run(config, "--skip_bad=True")  # goes on with what was begun
    found, meta = everything(f"{tmp_path}/data"), meta_of(f"{tmp_path}/data")
    assert meta["dropped"]["a"] == dict(malformed=len(MALFORMED), empty=1) and meta["cleaned"]["a"] == dict(
        not_utf8=1)
    assert sum(found.values()) == 121 and any("lone \ufffd surrogate" in text for text in found)


def test_a_source_that_is_mostly_not_utf8_is_refused(tmp_path):
    for i, text in enumerate(prose(60, 11)):
        write(f"{tmp_path}/docs/{i:02d}.txt", text.encode("utf-16") if i % 5 == 0 else text)
    config = recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/docs")])
    out = run(config, code=2)
    assert "over 10% of it is not UTF-8" in out and "00.txt" in out
    run(config, "--skip_bad=True")
    assert meta_of(f"{tmp_path}/data")["dropped"]["a"] == dict(not_utf8=12)


def test_names_that_are_no_utf8_and_folders_of_any_name_are_read_in_a_locale_without_letters(tmp_path):
    for i, text in enumerate(prose(60, 17)):
        write(f"{tmp_path}/docs/my notes (2020)/{i}.txt", text)
    write(os.fsencode(f"{tmp_path}/docs/docs/") + b"\xb1\xa8.txt", "A file that was named on another system, in GBK.")
    write(f"{tmp_path}/docs/docs/中文.txt", CHINESE)
    write(f"{tmp_path}/docs/a.txt", "Beside a sub-folder that is called as the folder is.")
    write(f"{tmp_path}/docs/C++/a.txt", "This folder and the next one get one name,")
    write(f"{tmp_path}/docs/C#/a.txt", "if they are not told apart.")
    run(f"--docs={tmp_path}/docs", f"--data_dir={tmp_path}/data", "--vocab_size=300",
        env=dict(LC_ALL="C", PYTHONUTF8="0"))
    assert set(meta_of(f"{tmp_path}/data")["splits"]["train"]) == {
        "my_notes_2020_", "docs", "docs_", "C_", "C__"}
    found = everything(f"{tmp_path}/data")
    assert found["A file that was named on another system, in GBK."] == found[CHINESE] == 1


def test_folders_that_cannot_be_listed_are_refused_and_links_and_what_is_no_file_are_said(tmp_path, monkeypatch):
    write(f"{tmp_path}/docs/a.txt", "the first")
    write(f"{tmp_path}/elsewhere/b.txt", "behind a link")
    os.symlink(f"{tmp_path}/elsewhere", f"{tmp_path}/docs/link")
    os.symlink(f"{tmp_path}/nowhere", f"{tmp_path}/docs/broken.txt")
    os.mkfifo(f"{tmp_path}/docs/pipe.txt")
    files, other = documents.local_files(f"{tmp_path}/docs")
    assert files == [f"{tmp_path}/docs/a.txt"]
    assert other == {"linked folder, not followed": 1, "broken link or no file": 2}

    def refuse(top, real=os.scandir):
        if str(top).endswith("/locked"):
            raise PermissionError(13, "Permission denied", top)
        return real(top)
    os.mkdir(f"{tmp_path}/docs/locked")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="locked"):
        documents.local_files(f"{tmp_path}/docs")


def test_a_file_edited_at_the_same_size_is_another_input(tmp_path):
    write(f"{tmp_path}/d/a.txt", "x" * 200_000)
    digests = []
    for at in (0, 199_999):
        with open(f"{tmp_path}/d/a.txt", "r+") as file:
            file.seek(at)
            file.write("y")
        digests.append(documents.resolve(dict(name="d", path=f"{tmp_path}/d"), prepare.Config(), {}, 1.0)["digest"])
    assert digests[0] != digests[1]


def test_one_document_of_over_two_gigabytes_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_BYTES", 100)
    write(f"{tmp_path}/d/a.txt", "x" * 99)
    write(f"{tmp_path}/d/b.txt.gz", gzip.compress(b"x" * 100))
    source = dict(path=f"{tmp_path}/d", hub=False, text_field="text")
    assert len(list(documents.records(source, f"{tmp_path}/d/a.txt", 0))) == 1
    with pytest.raises(Refused, match="b.txt.gz is one document"):
        list(documents.records(source, f"{tmp_path}/d/b.txt.gz", 0))


def test_bad_bytes_in_another_field_cost_no_document_and_carriage_returns_end_the_lines_where_most_do():
    assert documents.text_of("x.jsonl:1", b'{"u": "\xe9\xe8", "text": "short and good text"}', "text")[2] == 0
    assert documents.text_of("x.jsonl:1", b'{"u": "\xe9", "text": "short \xe9"}', "text")[2] == 1 / 7
    for text, then in (("a b\rc d", "a b\nc d"), ("a b\rc d\re\n", "a b\nc d\ne\n"), ("a b\r\r\nc\r\nd", "a b\nc\nd"),
                       ("a\rb\nc\n", "ab\nc\n")):
        assert documents.clean(text, text.encode(), "prose", Counter())[0] == then


def test_packed_files_are_read_to_their_end_and_a_cut_one_is_refused_by_name(tmp_path):
    texts = prose(400, 31)
    lines = [(json.dumps(dict(text=text)) + "\n").encode() for text in texts]
    packed = gzip.compress(b"".join(lines[:200])) + gzip.compress(b"".join(lines[200:]))  # as two writers appended
    write(f"{tmp_path}/s/a.jsonl.gz", packed)
    source = documents.resolve(dict(name="s", path=f"{tmp_path}/s"), prepare.Config(), {}, 1.0)
    batch, = [batch for batch, _, _ in documents.batches(source, documents.files_of(source))]
    assert [raw for _, _, raw in batch] == lines
    write(f"{tmp_path}/s/a.jsonl.gz", packed[:-20])
    config = recipe(tmp_path, sources=[dict(name="s", path=f"{tmp_path}/s")])
    said = run(config, code=2)
    assert "a.jsonl.gz" in said and "take it away, then --overwrite=True" in said
    os.unlink(f"{tmp_path}/s/a.jsonl.gz")
    write(f"{tmp_path}/s/b.jsonl", b"".join(lines))
    assert "--overwrite=True" in run(config, code=2)
    run(config, "--overwrite=True")


def test_train_refuses_data_that_was_cut_or_mixed_up_or_holds_an_id_outside_the_vocabulary(mixed, tmp_path):
    data, out = f"{tmp_path}/data", f"{tmp_path}/out"
    subprocess.run(["cp", "-r", f"{mixed[0]}/data", data], check=True)
    with open(f"{data}/train.bin", "r+b") as file:
        file.truncate(os.path.getsize(file.name) - 1)
    with pytest.raises(Refused, match="train.bin has .* bytes"):
        train_here(data, out)
    other = np.zeros(os.path.getsize(f"{mixed[0]}/data/train.bin") // 2, "<u2")  # as of another tokenizer
    other.tofile(f"{data}/train.bin")
    with pytest.raises(Refused, match="train.bin differs from its sha256"):
        train_here(data, out)
    meta = meta_of(data)
    other[:] = 400
    other.tofile(f"{data}/train.bin")
    prepare.seal(data, meta)
    with pytest.raises(Refused, match="train.bin has id 400 at token .* vocabulary ends at 400"):
        train_here(data, out)
    assert not os.path.exists(f"{out}/ckpt") or not os.listdir(f"{out}/ckpt")


def test_a_rust_panic_names_the_document(monkeypatch):
    class Panic(BaseException):
        pass

    def fail(*_):
        raise Panic("stack overflow")
    monkeypatch.setattr(prepare, "encode_long", fail)
    monkeypatch.setattr(prepare, "encoding_of", lambda folder: None)
    batch, source = [("docs/strange.txt:1", "prose", b"some strange text")], dict(text_field="text", held_out=0.1)
    with pytest.raises(Refused, match="docs/strange.txt:1.*stack overflow"):
        prepare.encode_batch(batch, source, False, "", "uint16")


@pytest.mark.parametrize("words, why", [
    (['--sources=somewhere'], "'somewhere' is not auto"), (["--vocab_size=200"], "vocab_size must be"),
    (["--budget_tokens=-1"], "budget_tokens"), (["--docs=no/such/folder"], "no such folder"),
    (["--vocab_sise=300"], "vocab_size"), ([dict(name="a", path="/no/such/*.txt")], "no file that can be read"),
    ([dict(name="a", path="tests", wieght=1)], "wieght"), ([dict(name="a", path="tests", weight=0)], "weight"),
    ([dict(name="a", path="tests", weight="3")], "weight"),
    ([dict(name="a", path="tests", data_files={1})], "JSON serializable"),
    ([dict(name=1, path="tests")], "a dict with name, path"), ([dict(name="a", path=None)], "a dict with name, path"),
    ([dict(name="../a", path="tests")], "different names"), ([dict(name="a", path="tests")] * 2, "different names"),
    ([], "different names"), ([dict(name="a", path="EMPTY")], "no file that can be read"),
    ([dict(name="a", path="EMPTY_FILE.txt")], "no usable train document"),
    ([dict(name="a", path="owner/data")], "HF_HUB_OFFLINE is set")])
def test_wrong_settings_are_one_line_and_leave_no_data(tmp_path, words, why):
    os.mkdir(f"{tmp_path}/EMPTY")
    write(f"{tmp_path}/EMPTY_FILE.txt", "")
    if not words or isinstance(words[0], dict):
        sources = [{**s, "path": s["path"] and s["path"].replace("EMPTY", f"{tmp_path}/EMPTY")} for s in words]
        words = [recipe(tmp_path, sources=sources)]
    assert why in run(*words, f"--data_dir={tmp_path}/data", code=2)
    assert not os.path.exists(f"{tmp_path}/data/meta.json")


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [
    lambda data, ids: data[:ids] + bytes([data[ids] ^ 1]) + data[ids + 1:],
    lambda data, ids: data[:ids - 1] + bytes([data[ids - 1] ^ 1]) + data[ids:],
    lambda data, ids: data[:data.index(b"\n") + 1], lambda data, ids: data[:-2],
], ids=["an id", "a row", "cut behind its line", "cut at its end"])
def test_a_damaged_shard_is_refused_by_name_and_not_joined(tmp_path, damage):
    write_jsonl(f"{tmp_path}/x/a.jsonl", prose(100, 12))
    config = recipe(tmp_path, sources=[dict(name="x", path=f"{tmp_path}/x")])
    run(config, code=9, patch=SMALL + "prepare.join = lambda *_: os._exit(9)")
    path = f"{tmp_path}/data/parts/x.000001.shard"
    data = open(path, "rb").read()
    line = data.index(b"\n") + 1
    ids = line + json.loads(data[:line])["documents"] * prepare.INDEX.itemsize
    assert len(data) > ids > line
    open(path, "wb").write(damage(data, ids))
    assert f"{path} is damaged" in run(config, code=2, patch=SMALL)
    assert not os.path.exists(f"{tmp_path}/data/meta.json")


def test_killed_in_any_phase_it_continues_with_the_same_bytes_and_keeps_finished_shards(tmp_path):
    write_jsonl(f"{tmp_path}/x/a.jsonl", prose(100, 12))
    write_jsonl(f"{tmp_path}/y/b.jsonl", prose(200, 13))
    sources = [dict(name=name, path=f"{tmp_path}/{name}") for name in "xy"]
    whole, broken = (recipe(tmp_path, sources=sources, data_dir=f"{tmp_path}/{name}") for name in ("whole", "broken"))
    run(whole, patch=SMALL)
    slow = SMALL + "write = prepare.write_atomically\nimport time\n" \
        "prepare.write_atomically = lambda *a: (write(*a), time.sleep(0.1 * a[0].endswith('shard')))"
    parts = f"{tmp_path}/broken/parts"
    run(broken, code=9, patch="write = prepare.write_atomically\nprepare.write_atomically = lambda path, data: "
        "os._exit(9) if 'tiktoken' in path else write(path, data)")  # killed with the tokenizer trained and not written
    process = start(broken, patch=slow)
    wanted = f"{parts}/y.000003.shard"
    while not os.path.exists(wanted):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    for name in os.listdir(parts):
        os.utime(f"{parts}/{name}", (1e9, 1e9))
    run(broken, code=9, patch=SMALL + "prepare.publish = lambda *_: os._exit(9)")  # killed before the last renames
    assert os.stat(wanted).st_mtime == os.stat(f"{parts}/tokenizer.tiktoken").st_mtime == 1e9  # not done again
    half = "move = os.replace\ndef replace(a, b):\n    os._exit(9) if b.endswith('/test.bin') else move(a, b)\n" \
        "os.replace = replace"
    run(broken, code=9, patch=half)
    tidying = "import shutil\nshutil.rmtree = lambda path: (os.remove(f'{path}/recipe.json'), os._exit(9))"
    run(broken, code=9, patch=tidying)
    run(broken)
    assert sums(f"{tmp_path}/whole") == sums(f"{tmp_path}/broken") and not os.path.exists(parts)


def test_a_dead_worker_ends_the_run_and_no_process_stays_behind(tmp_path):
    write_jsonl(f"{tmp_path}/x.jsonl", prose(1000, 14))
    config = recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/x.jsonl")])
    process, workers = start(config, patch=SMALL + "import time; write = prepare.write_atomically\n"
                             "prepare.write_atomically = lambda *a: (time.sleep('shard' in a[0]), write(*a))"), []
    while not workers:
        assert process.poll() is None
        time.sleep(0.05)
        found = subprocess.run(["pgrep", "-f", f"-P{process.pid}", "spawn_main"], capture_output=True, text=True)
        workers = [int(pid) for pid in found.stdout.split()]
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "a worker process died" in err
    time.sleep(0.5)
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
    assert "same command continues" in err and "nothing to do" not in run(config)


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path):
    write_jsonl(f"{tmp_path}/x.jsonl", prose(120, 15))
    config = recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/x.jsonl")])
    process = start(config, patch="import time; prepare.train_tokenizer = lambda *_: time.sleep(30)")
    while not os.path.exists(f"{tmp_path}/data/parts/recipe.json"):
        time.sleep(0.02)
    assert f"process {process.pid}" in run(config, code=2)
    process.kill()
    process.communicate()
    run(config)


def test_a_file_system_without_locks_or_folder_syncs_is_named_or_done_without(tmp_path, monkeypatch):
    def fail(code):
        def call(*_):
            raise OSError(code, os.strerror(code))
        return call
    with monkeypatch.context() as patch, pytest.raises(Refused, match="can't be locked .No locks available"):
        patch.setattr(prepare.fcntl, "flock", fail(errno.ENOLCK))
        prepare.lock(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    prepare.fsync_folder(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError):
        prepare.fsync_folder(str(tmp_path))


def test_the_hours_of_the_old_data_stay_with_it_and_an_abandoned_attempt_gives_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.glob, "glob", lambda pattern, real=prepare.glob.glob: (
        ["/dev/nvidia0", "/dev/nvidia1"] if pattern.startswith("/dev/nvidia") else real(pattern)))
    times = iter([100.0, 3700.0])
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(times))
    write(f"{tmp_path}/p.json", json.dumps(dict(device_hours=5.0)))
    with pytest.raises(KeyboardInterrupt), prepare.counted(f"{tmp_path}/p.json"):
        raise KeyboardInterrupt
    assert json.load(open(f"{tmp_path}/p.json")) == dict(device_hours=7.0)
    monkeypatch.undo()
    source, usage = dict(share_tokens=10**9, hub=None), type("Usage", (), dict(free=3.9e9))
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Refused, match="4.0 GB"):
        prepare.check_space(dict(sources=[source]), str(tmp_path), "uint16")
    write(f"{tmp_path}/parts/x.000000.shard", "")
    os.truncate(f"{tmp_path}/parts/x.000000.shard", 2 * 10**8)
    prepare.check_space(dict(sources=[source]), str(tmp_path), "uint16")


def test_overwrite_keeps_the_old_data_until_the_new_is_complete(tmp_path):
    write_jsonl(f"{tmp_path}/x.jsonl", prose(120, 16))
    sources = [dict(name="a", path=f"{tmp_path}/x.jsonl")]
    run(recipe(tmp_path, sources=sources))
    before = sums(f"{tmp_path}/data")
    new = recipe(tmp_path, sources=sources, vocab_size=320)
    run(new, "--overwrite=True", code=9, patch="prepare.join = lambda *_: os._exit(9)")
    assert sums(f"{tmp_path}/data") == before
    prepare.Corpus(f"{tmp_path}/data")
    run(new, "--overwrite=True")
    assert prepare.Corpus(f"{tmp_path}/data").vocab_size == 320


def test_a_full_disk_is_one_line_and_leaves_the_old_data(tmp_path):
    write_jsonl(f"{tmp_path}/x.jsonl", prose(120, 17))
    sources = [dict(name="a", path=f"{tmp_path}/x.jsonl")]
    run(recipe(tmp_path, sources=sources))
    before = sums(f"{tmp_path}/data")
    new = recipe(tmp_path, sources=sources, vocab_size=320)
    patch = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); import signal\n" \
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    assert "File too large" in run(new, "--overwrite=True", code=2, patch=patch)
    free = "import shutil, collections; shutil.disk_usage = lambda _: collections.namedtuple('u', 'free')(1e6)"
    assert "0.1 GB, 0.0 GB are free" in run(new, "--overwrite=True", code=2, patch="import shutil\n" + free +
                                            "\nos.system(f'rm -rf {os.sys.argv[1][:-11]}data/parts')")
    assert sums(f"{tmp_path}/data") == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_fills_up_is_one_line_and_with_more_room_the_same_command_goes_on(tmp_path):
    texts = prose(20_000, 18)
    for name, count in (("old", 120), ("new", 20_000)):
        write_jsonl(f"{tmp_path}/{name}.jsonl", texts[:count])
    disk = f"{tmp_path}/disk"
    os.mkdir(disk)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        old, new = (recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/{name}.jsonl")], data_dir=f"{disk}/d")
                    for name in ("old", "new"))
        patch = "prepare.check_space = lambda *_: None; prepare.SHARD_BYTES = 1_000_000"
        run(old, patch=patch)
        before = sums(f"{disk}/d")
        out = run(new, "--overwrite=True", code=2, patch=patch)
        assert "No space left on device" in out and sums(f"{disk}/d") == before
        subprocess.run(["mount", "-o", "remount,size=60m", disk], check=True)
        run(new, "--overwrite=True", patch=patch)
        assert sum(everything(f"{disk}/d").values()) == 20_000
    finally:
        subprocess.run(["umount", disk], check=True)


def test_seven_times_the_input_takes_no_more_memory_than_sixteen_bytes_a_document(tmp_path):
    texts = prose(60_000, 19)
    peaks, patch = {}, "prepare.SHARD_BYTES = 1_000_000; prepare.documents.BATCH_BYTES = 100_000\n" \
        "prepare.BLOCK_BYTES = 1_000_000\nimport atexit\n" \
        "atexit.register(lambda: print(open('/proc/self/status').read()))"
    for count in (8_000, 60_000):
        write_jsonl(f"{tmp_path}/{count}/x.jsonl", texts[:count])
        config = recipe(tmp_path, sources=[dict(name="a", path=f"{tmp_path}/{count}")], data_dir=f"{tmp_path}/d{count}")
        run(config, code=9, patch="prepare.encode_source = lambda *_: os._exit(9)")  # the tokenizer is made
        peaks[count] = int(run(config, patch=patch).split("VmHWM:")[1].split()[0]) * 1024
    assert peaks[60_000] - peaks[8_000] < 6e6 + 16 * 52_000, peaks


# ---- streams and the Hub ---------------------------------------------------------------------------------------------


def test_a_stream_continues_from_every_state_with_the_records_that_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 3000)
    for i in range(2):
        write_parquet(f"{tmp_path}/s/{i}.parquet", prose(160, 20 + i), (11, 150)[i])
    write_jsonl(f"{tmp_path}/s/2.jsonl", prose(30, 22))
    write(f"{tmp_path}/s/3.txt", prose(1, 23)[0])
    source = documents.resolve(dict(name="s", path=f"{tmp_path}/s"), prepare.Config(), {}, 1.0)
    files = documents.files_of(source)
    whole = [(batch, json.loads(json.dumps(state))) for batch, _, state in documents.batches(source, files)]
    rows = [raw for batch, _ in whole for *_, raw in batch][:320]
    assert [row.decode() for row in rows] == prose(160, 20) + prose(160, 21) and len(whole) > 10
    for i, (_, state) in enumerate(whole[:-1]):
        rest = documents.batches(source, files, state)
        assert [batch for batch, _, _ in rest] == [batch for batch, _ in whole[i + 1:]]


@pytest.fixture
def hub():
    """A local endpoint that answers with `hub.status`, or never for None."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.server.status is None:
                time.sleep(60)
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(b"{}")
        do_HEAD = do_GET

        def log_message(self, *_):
            pass
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.status, server.url = 200, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_without_the_hub_a_notice_and_the_embedded_corpus_and_with_it_back_a_refusal(tmp_path, hub):
    data, started = f"{tmp_path}/data", time.time()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        env = dict(HF_HUB_OFFLINE="0", HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
        process = start(f"--data_dir={data}", env=env)
        assert "NOTICE: the Hub cannot be used" in process.stdout.readline() and time.time() - started < 10
        process.communicate(timeout=100)
    meta = meta_of(data)
    assert process.returncode == 0 and meta["vocab_size"] == 32_000 and meta["recipe"]["fallback"] is True
    assert "HF_HUB_OFFLINE is set" in (out := run(f"--data_dir={data}")) and "nothing to do" in out
    live = dict(HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.url)
    assert "--overwrite=True" in run(f"--data_dir={data}", code=2, env=live)
    library = os.path.dirname(os.__file__)
    texts = set(documents_of(data, "train")["code"])
    assert open(f"{library}/argparse.py").read() in texts or open(f"{library}/ast.py").read() in texts
    assert not any("import test.support" in text for text in texts)


def test_the_probe_keeps_its_deadline_when_looking_up_the_name_blocks(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(documents, "PROBE_S", 0.3)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (time.sleep(30), io.BytesIO())[1])
    started = time.time()
    assert "no answer within 0.3 s" in documents.hub_problem.__wrapped__() and time.time() - started < 5


@pytest.mark.parametrize("endpoint", ["hf-mirror.invalid", "http://127.0.0.1:1"])  # without its https://; no server
def test_an_endpoint_that_is_none_is_a_hub_that_cannot_be_used(monkeypatch, endpoint):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    assert documents.hub_problem.__wrapped__().startswith(f"{endpoint}: ")


def test_a_recipe_is_what_comes_back_from_disk_and_no_share_of_a_budget_is_nothing():
    path = f"{ROOT}/config"
    settings = prepare.Config(budget_tokens=1, sources=(dict(name="a", path=path, data_files=("x", "y")),
                                                        dict(name="b", path=path)))
    recipe = documents.make_recipe(settings, {})
    assert recipe == json.loads(json.dumps(recipe)) and [s["share_tokens"] for s in recipe["sources"]] == [1, 1]


def test_auto_never_falls_back_over_another_recipe(mixed):
    before = sums(f"{mixed[0]}/data")
    assert "another recipe" in run(f"--data_dir={mixed[0]}/data", code=2)
    assert "the Hub cannot be used" in run(f"--data_dir={mixed[0]}/data", "--overwrite=True", code=2)
    assert sums(f"{mixed[0]}/data") == before


def test_a_hub_source_that_cannot_be_read_is_refused_by_name_before_any_work(tmp_path, hub):
    hub.status = 401
    config = recipe(tmp_path, sources=[dict(name="mine", path="owner/private", text_field="content")])
    out = run(config, code=2, env=dict(HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.url, HF_HOME=f"{tmp_path}/cache"))
    assert "source mine" in out and "'content'" in out and "HF_TOKEN" in out
    assert not os.path.exists(f"{tmp_path}/data/parts")
