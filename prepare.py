"""Turn documents into data/: a tokenizer, train.bin, val.bin, test.bin and meta.json.

    python prepare.py                            the default mixture; without the Hub, this machine's standard library
    python prepare.py --docs=FOLDER              your own documents, every sub-folder one source
    python prepare.py config/data_demo.py        another recipe

Interrupted, the same command continues. Same recipe and inputs: same bytes, whatever the number of processes.
"""
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import unicodedata
import urllib.error
import urllib.request
from collections import Counter

import numpy as np

from config import Refused, load


@dataclasses.dataclass(frozen=True)
class Config:
    sources: tuple = ("auto",)  # auto, embedded, or in a config file a list of dict(name=, path=, weight=, ...) (README)
    docs: str = ""  # a folder of your own documents: every sub-folder becomes a source
    data_dir: str = "data"  # where the result goes; one folder for each corpus
    vocab_size: int = 32_000  # ids, the end-of-text id included
    budget_tokens: int = 0  # train tokens over all sources; 0: 10.01B from the Hub, everything from local files
    seed: int = 1337  # of the sample the tokenizer is trained on
    overwrite: bool = False  # replace the data of another recipe (the old stays until the new is complete)
    skip_bad: bool = False  # skip and count malformed records instead of stopping at the first
    verify: bool = False  # hash everything in data_dir again and print the table, nothing else


SCHEMA = 1
SPLITS = ("train", "val", "test")
BLOCK_BYTES = 64 << 20  # meta.json holds a sha256 for each of these
SHARD_BYTES = 256 << 20  # raw text a restart may have to repeat: under a minute on two cores
BATCH_BYTES = 1 << 20  # raw text a worker gets at once
SAMPLE_BYTES = 64 << 20  # a source's part in the tokenizer sample: 20 bytes of memory each for Chinese, 2 for English
MIN_CHARS = 10  # shorter documents are dropped
PIECE_CHARS = 200_000  # longer white-space runs overflow the stack of tiktoken's regex engine
HUB_TOKENS = 10_010_000_000  # 9,536 steps of 1,048,576 and a reserve for documents dropped at the join
EOT = "<|endoftext|>"
# The public cl100k split pattern: words, numbers of up to three digits, runs of marks, white space.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
           r"|\s*[\r\n]|\s+(?!\S)|\s+")
RECORD = dict(name=None, path=None, config=None, split="train", text_field="text", data_dir=None, data_files=None,
              revision=None, weight=1.0, kind=None)  # kind: prose or code; None decides by each file's ending
HUB = (dict(name="en", path="HuggingFaceFW/fineweb-edu", config="sample-10BT", weight=0.50, kind="prose"),
       dict(name="zh", path="opencsg/chinese-fineweb-edu-v2", weight=0.35, kind="prose"),
       dict(name="code", path="common-pile/stackv2_edu_filtered", weight=0.15, kind="code"))
EMBEDDED = (dict(name="code", path="python:stdlib", kind="code"), dict(name="prose", path="python:topics", kind="prose"))
PROSE = set("txt md rst".split())
CODE = set("py pyi js jsx ts tsx java kt scala c h cc cpp hpp cu cs go rs rb php swift lua pl r jl sh bash sql html css "
           "xml yaml yml toml tex".split())
log = logging.getLogger("prepare")

# ---- data/ as the other stages read it ------------------------------------------------------------------------------


def write_atomically(path, data):
    """`data` (bytes) under a temporary name, fsynced, renamed, the folder fsynced: never half a file."""
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
    fsync_folder(os.path.dirname(path))


def fsync_folder(path):
    descriptor = os.open(path or ".", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def width(meta):
    return np.dtype(meta["dtype"]).itemsize


def hash_file(path):
    """{bytes, sha256, blocks} of a file, blocks being the sha256 of each 64 MiB."""
    whole, blocks, size = hashlib.sha256(), [], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            blocks.append(hashlib.sha256(block).hexdigest())
            size += len(block)
    return dict(bytes=size, sha256=whole.hexdigest(), blocks=blocks)


def seal(data_dir, meta):
    """Hash the three token files, check their sizes against meta["splits"], write meta.json: the folder is complete.

    `meta` is meta.json without `files`. Raises Refused when a size is not what `splits` says.
    """
    files = {f"{split}.bin": hash_file(f"{data_dir}/{split}.bin") for split in SPLITS}
    for split in SPLITS:
        tokens = sum(source["tokens"] for source in meta["splits"][split].values())
        if files[f"{split}.bin"]["bytes"] != tokens * width(meta):
            raise Refused(f"{data_dir}/{split}.bin has {files[f'{split}.bin']['bytes']} bytes, {tokens} tokens of "
                          f"{width(meta)} bytes were written: start again with an empty folder")
    meta = {**meta, "files": files}
    write_atomically(f"{data_dir}/meta.json", json.dumps(meta, indent=1, sort_keys=True).encode())
    return meta


class Corpus:
    """A finished data_dir. `check` compares sizes and hashes with meta.json: every byte of files up to 1 GB (of all
    with check="all"), else the first, the last and 8 further blocks. Raises Refused: what is wrong, and what to do."""

    def __init__(self, data_dir, check=True):
        self.folder = data_dir
        if not os.path.exists(f"{data_dir}/meta.json"):
            raise Refused(f"{data_dir} holds no finished data (no meta.json): run `python prepare.py` first, "
                          f"with --data_dir={data_dir} or its config file")
        try:
            self.meta = meta = read_json(f"{data_dir}/meta.json")
            self.vocab_size, self.eot_id, self.dtype = meta["vocab_size"], meta["eot_id"], np.dtype(meta["dtype"])
            parts = [meta["files"][f"{split}.bin"]["sha256"] for split in SPLITS]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{data_dir}/meta.json cannot be read ({error!r}): remove {data_dir} and prepare it "
                          "again") from None
        tokenizer = meta.get("tokenizer") or {}
        parts += [tokenizer.get("sha256"), tokenizer.get("pattern"), self.vocab_size, self.eot_id]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self.files = {}
        for split in SPLITS:
            path = f"{data_dir}/{split}.bin"
            try:
                self.files[split] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise Refused(f"{path}: {error.strerror}: remove {data_dir} and prepare it again") from None
            if check:
                self._check(split, path, everything=check == "all")
        if tokenizer.get("sha256"):
            read_ranks(data_dir, tokenizer["sha256"])

    def _check(self, split, path, everything):
        def bad(why):
            return Refused(f"{path} {why}: it is damaged or not of this meta.json; copy it again, or remove "
                           f"{self.folder} and prepare it again")
        expected, size = self.meta["files"][f"{split}.bin"], os.fstat(self.files[split]).st_size
        if size != expected["bytes"] or size != self.tokens(split) * self.dtype.itemsize:
            raise bad(f"has {size} bytes, {expected['bytes']} expected")
        chosen = range(len(expected["blocks"]))
        if size > 1e9 and not everything:
            some = np.random.RandomState(0).permutation(len(chosen))[:8]
            chosen = sorted({0, len(chosen) - 1, *some.tolist()})
        for number in chosen:
            block = os.pread(self.files[split], BLOCK_BYTES, number * BLOCK_BYTES)
            if hashlib.sha256(block).hexdigest() != expected["blocks"][number]:
                raise bad(f"differs from its sha256 in bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(block)}")

    def sources(self, split):
        """{source: {offset, tokens, documents, bytes}} of a split; offset and tokens count ids."""
        return self.meta["splits"][split]

    def tokens(self, split):
        """Length of a split in ids."""
        return sum(source["tokens"] for source in self.sources(split).values())

    def read(self, split, offset, count):
        """int64 (count,): the ids from `offset` on. Raises Refused on a short read and on an id outside the vocabulary."""
        size = self.dtype.itemsize
        data = os.pread(self.files[split], count * size, offset * size)
        if len(data) != count * size:
            raise Refused(f"{self.folder}/{split}.bin ends inside the {count} ids from token {offset}: was it changed "
                          "while in use? Copy it again, or prepare it again")
        ids = np.frombuffer(data, self.dtype).astype(np.int64)
        if count and ids.max() >= self.vocab_size:
            at = offset + int(np.argmax(ids >= self.vocab_size))
            raise Refused(f"{self.folder}/{split}.bin: token {at} is id {ids[at - offset]}, the vocabulary has "
                          f"{self.vocab_size}: the file is damaged or of another tokenizer; prepare it again")
        return ids


def read_ranks(folder, sha256=None):
    """[bytes of id 0, of id 1, ...] from tokenizer.tiktoken: a line is base64, space, rank (tiktoken's own format)."""
    path = f"{folder}/tokenizer.tiktoken"
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}: copy the whole folder again, or prepare it again") from None
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise Refused(f"{path} is not the file of {folder}/meta.json (sha256 differs): copy both again, or prepare again")
    ranks = [line.split() for line in data.splitlines()]
    assert [int(rank) for _, rank in ranks] == list(range(len(ranks))), f"{path}: ranks out of order"
    return [base64.b64decode(text) for text, _ in ranks]


def make_encoding(ranks, pattern=PATTERN):
    import tiktoken
    return tiktoken.Encoding("nanobase", pat_str=pattern, special_tokens={},
                             mergeable_ranks={piece: rank for rank, piece in enumerate(ranks)})


def encode_pieces(encoding, text):
    """[ids] of ordinary text of any length: cut behind a line where one ends in the last tenth of a piece, else anywhere."""
    ids, start = [], 0
    while len(text) - start > PIECE_CHARS:
        stop = start + PIECE_CHARS
        stop = text.rfind("\n", stop - PIECE_CHARS // 10, stop) + 1 or stop
        ids += encoding.encode_ordinary(text[start:stop])
        start = stop
    return ids + encoding.encode_ordinary(text[start:] if start else text)


class Tokenizer:
    """The tokenizer of a folder with tokenizer.tiktoken and meta.json (data_dir or out_dir). tiktoken is only needed
    to encode and decode. Raises Refused when the file is missing or not the one meta.json names."""

    def __init__(self, folder):
        meta = read_json(f"{folder}/meta.json") if os.path.exists(f"{folder}/meta.json") else None
        if not meta or not meta.get("tokenizer"):
            raise Refused(f"{folder} has no tokenizer (no meta.json that names one): run `python prepare.py` first")
        self.eot_id, self.vocab_size, self.pattern = meta["eot_id"], meta["vocab_size"], meta["tokenizer"]["pattern"]
        self.ranks = read_ranks(folder, meta["tokenizer"]["sha256"])
        self.token_bytes = np.zeros(self.vocab_size, np.int64)  # UTF-8 bytes an id stands for; specials stand for 0
        self.token_bytes[:len(self.ranks)] = [len(piece) for piece in self.ranks]

    @functools.cached_property
    def encoding(self):
        return make_encoding(self.ranks, self.pattern)

    def encode(self, text):
        """Ids of ordinary text; what looks like a special token is text as well."""
        return encode_pieces(self.encoding, text)

    def decode_bytes(self, ids):
        """The exact bytes; special tokens and unused ids stand for none."""
        return b"".join(self.ranks[i] for i in ids if i < len(self.ranks))

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

# ---- which documents -----------------------------------------------------------------------------------------------


def ending(path):
    return re.sub(r"\.(gz|zst)$", "", path.lower()).rpartition(".")[2]


def local_files(path):
    """(sorted files to read, {ending: files passed over}) of a file, a folder or a glob; hidden names are passed over."""
    files, other = [], Counter()
    if path == "python:stdlib":
        path = sysconfig.get_path("stdlib")
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
        for folder, below, names in os.walk(path):
            below[:] = sorted(set(below) - skipped)
            files += [f"{folder}/{name}" for name in names if name.endswith(".py")]
        return sorted(files), other
    for top in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
        if os.path.isfile(top):
            files.append(top)
            continue
        for folder, below, names in os.walk(top):
            other["hidden folders"] += sum(name.startswith(".") for name in below)
            below[:] = [name for name in below if not name.startswith(".")]
            for name in names:
                if ending(name) in PROSE | CODE | {"jsonl", "parquet"} and not name.startswith("."):
                    files.append(f"{folder}/{name}")
                else:
                    other["." + ending(name)] += 1
    return sorted(set(files)), +other


def inputs(source):
    """The files of a local source in order; for a Hub data set the one stream it is."""
    if source["path"] == "python:topics":
        return ["python:topics"]
    return [source["path"]] if source["hub"] else local_files(source["path"])[0]


def docs_sources(folder):
    if not os.path.isdir(folder):
        raise Refused(f"--docs={folder}: no such folder")
    folder, found = folder.rstrip("/"), []
    for name in sorted(os.listdir(folder)):
        if os.path.isdir(f"{folder}/{name}") and not name.startswith("."):
            found.append(dict(name=name, path=f"{folder}/{name}"))
    if local_files(f"{glob.escape(folder)}/*.*")[0]:
        found.append(dict(name=os.path.basename(folder), path=f"{glob.escape(folder)}/*.*"))
    return found


def hub_problem():
    """Why the Hub cannot be used, or "". Asks from a thread with a deadline: name servers may block for minutes."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    from huggingface_hub import constants
    answer = [f"{constants.ENDPOINT} did not answer within 5 s"]

    def ask():
        try:
            urllib.request.urlopen(f"{constants.ENDPOINT}/api/datasets/{HUB[0]['path']}", timeout=5).close()
            answer[0] = ""
        except urllib.error.HTTPError as error:  # an answer, if a bad one: the check of the first row says more
            answer[0] = "" if error.code < 500 else f"{constants.ENDPOINT}: {error}"
        except OSError as error:
            answer[0] = f"{constants.ENDPOINT}: {error}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)
    return answer[0]


def open_dataset(source, path):
    """An IterableDataset over the text field of one parquet file or of the Hub data set."""
    import datasets
    datasets.utils.logging.set_verbosity_error()
    if source["hub"]:
        stream = datasets.load_dataset(path, source["config"], split=source["split"], data_dir=source["data_dir"],
                                       data_files=source["data_files"], revision=source["revision"], streaming=True)
    else:
        stream = datasets.load_dataset("parquet", data_files=[glob.escape(path)], split="train", streaming=True)
    return stream.select_columns([source["text_field"]])


def resolve(source, begun, budget):
    """The record with what it means today: a Hub revision, or the files' number, size and digest; share and split."""
    source = {**RECORD, **source}
    source["hub"] = re.fullmatch(r"[\w.-]+/[\w.-]+", source["path"]) is not None and not os.path.exists(source["path"])
    if source["hub"]:
        known = [old for old in begun.get("sources", []) if (old["name"], old["path"]) == (source["name"], source["path"])]
        if not source["revision"] and known:
            source["revision"] = known[0]["revision"]
        size = 0
    else:
        files = inputs(source)
        if not files:
            raise Refused(f"source {source['name']}: {source['path']} matches no file that can be read")
        if source["path"] == "python:topics":
            import pydoc_data.topics
            sizes = [[name, len(text)] for name, text in pydoc_data.topics.topics.items()]
        else:
            sizes = [[os.path.basename(name), os.path.getsize(name)] for name in files]
        packed = [size * (4 if name.endswith((".gz", ".zst", ".parquet")) else 1) for name, size in sizes]
        size = sum(packed)
        source |= dict(files=len(sizes), bytes=size, digest=hashlib.sha256(json.dumps(sizes).encode()).hexdigest())
    source["share_tokens"] = share = int(budget) if budget else 0
    expected = min(share or size / 4, size / 4 or share) or 1  # four bytes a token, roughly
    source["held_out"] = min(0.1, min(max(0.005 * expected, 1e5), 5e6) / expected)  # the fraction of val, and of test
    return source


def checked_records(records):
    """Plain mistakes in source records, before anything is read. Raises Refused."""
    for record in records:
        unknown = sorted(set(record) - set(RECORD)) if isinstance(record, dict) else [repr(record)]
        if unknown or not record.get("name") or not record.get("path"):
            raise Refused(f"sources: {record!r} is no source: auto, embedded, or dict(name=, path=, ...) with keys of "
                          f"{', '.join(RECORD)}")
        weight, kind = record.get("weight", 1.0), record.get("kind")
        if not isinstance(weight, (int, float)) or not weight > 0 or kind not in (None, "prose", "code"):
            raise Refused(f"source {record['name']}: weight must be a number over 0, kind prose or code")
        if not re.fullmatch(r"[\w.-]+", record["name"]) or record["name"].startswith("."):
            raise Refused(f"source name {record['name']!r}: letters, digits, - and _ only")
    names = Counter(record["name"] for record in records)
    if max(names.values(), default=0) != 1:
        raise Refused(f"sources: names must differ, got {', '.join(names.elements()) or 'none'}")
    return records


def plan(settings, begun, finished):
    """The recipe: every source resolved, everything the bytes depend on. Raises Refused; writes nothing."""
    if not 257 < settings.vocab_size <= 2**24 or settings.budget_tokens < 0:
        raise Refused("vocab_size must be 258 to 16,777,216 and budget_tokens 0 or more")
    records = [record for name in settings.sources for record in
               ({"auto": HUB, "embedded": EMBEDDED}.get(name, [name]) if isinstance(name, str) else [name])]
    fallback, auto = "", settings.sources == ("auto",)
    if settings.docs:
        records = docs_sources(settings.docs) + ([] if auto else records)
    elif auto:
        same_hub = [s["path"] for s in begun.get("sources", [])] == [s["path"] for s in HUB]
        problem = "" if same_hub and finished else hub_problem()
        if problem and begun and not begun.get("fallback"):
            raise Refused(f"the Hub cannot be reached ({problem}) and {settings.data_dir} holds another recipe: the same "
                          "command continues when it can, or choose another --data_dir")
        if problem:
            fallback, records = problem, EMBEDDED
    records = checked_records(records)
    total = sum(record.get("weight", 1.0) for record in records)
    recipe = dict(schema=SCHEMA, sources=[], vocab_size=settings.vocab_size, budget_tokens=settings.budget_tokens,
                  seed=settings.seed, fallback=bool(fallback))
    for record in records:
        source = resolve(record, begun, settings.budget_tokens * record.get("weight", 1.0) / total)
        if source["hub"] and not settings.budget_tokens:
            source = resolve(record, begun, HUB_TOKENS * source["weight"] / total)
        recipe["sources"].append(source)
    return recipe, fallback


def check_hub(source):
    """Pin the revision and read one row, before any work. Raises Refused naming source, field and HF_TOKEN."""
    from huggingface_hub import HfApi
    try:
        source["revision"] = source["revision"] or HfApi().dataset_info(source["path"], timeout=20).sha
        row = next(iter(open_dataset(source, source["path"])))
        if not isinstance(row[source["text_field"]], str):
            raise ValueError(f"the field {source['text_field']} holds {type(row[source['text_field']]).__name__}, not text")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise Refused(f"source {source['name']}: cannot read field '{source['text_field']}' of {source['path']} "
                      f"({type(error).__name__}: {reason}); if it is private or gated set HF_TOKEN") from None

# ---- reading -------------------------------------------------------------------------------------------------------


def open_file(path):
    """A binary file, unpacked on the way."""
    if path.endswith(".zst"):
        import pyarrow
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


def patiently(stream, source):
    """The rows of a stream's text field; a read that fails is tried again from there, with the wait shown."""
    failures = 0
    while True:
        try:
            for row in stream:
                failures = 0
                yield row[source["text_field"]]
            return
        except Exception as error:
            failures += 1
            if not source["hub"] or failures == 6:
                raise Refused(f"source {source['name']}: {type(error).__name__}: {error}; the same command "
                              "continues from here") from None
            log.warning("source %s: %s: %s; trying again in %d s", source["name"], type(error).__name__, error,
                        2**failures)
            time.sleep(2**failures)
            stream.load_state_dict(stream.state_dict())


def batches(source, state):
    """([(where, is_code, raw), ...], state behind them): about 1 MiB each, the same however it is restarted.

    `raw` is a line of a .jsonl file (where ends in its number) or a row's value or a whole file. `state` is JSON:
    [input, records of it that were read, state of the data set], None at the beginning.
    """
    paths = inputs(source)
    first, number, inner = state or (0, 0, None)
    batch, size = [], 0
    for index in range(first, len(paths)):
        path, stream = paths[index], None
        is_code = source["kind"] == "code" or (source["kind"] is None and ending(path) in CODE)
        if path == "python:topics":
            import pydoc_data.topics
            values = itertools.islice(pydoc_data.topics.topics.values(), number, None)
        elif source["hub"] or ending(path) == "parquet":
            stream = open_dataset(source, path)
            if inner:
                stream.load_state_dict(inner)
            values = patiently(stream, source)
        elif ending(path) == "jsonl":
            values = itertools.islice(open_file(path), number, None)
        else:
            values = itertools.islice([open_file(path).read()], number, None)
        for raw in values:
            number += 1
            batch.append((f"{path}:{number}", is_code, raw))
            size += 100 + (len(raw) if isinstance(raw, (str, bytes)) else 0)
            if size >= BATCH_BYTES:
                yield batch, size, [index, number, stream.state_dict() if stream else None]
                batch, size = [], 0
        number, inner = 0, None
    yield batch, size, None

# ---- one document (in the workers) ---------------------------------------------------------------------------------

SURROGATES = re.compile("[\ud800-\udfff]")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f]")
LONG_SPACE = re.compile(r"\s{65,}")


def text_of(where, raw, field):
    """(text, characters of it that were not UTF-8) of a record. Raises Refused when the record is malformed."""
    bad = 0
    if isinstance(raw, bytes):
        text = raw.decode("utf-8", "replace")
        bad = text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
        if ending(where.rpartition(":")[0]) != "jsonl" or not text.strip("\ufeff \t\r\n"):
            return text, len(text) if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else bad  # a UTF-16 mark: nothing is usable
        try:
            raw = json.loads(text.removeprefix("\ufeff"))
            raw = raw.get(field) if isinstance(raw, dict) else None
        except (ValueError, RecursionError) as error:
            raise Refused(f"{where}: not one JSON object ({error})") from None
    if not isinstance(raw, str):
        raise Refused(f"{where}: the field '{field}' is missing or no text")
    return raw, bad


def clean(text, is_code, fixed):
    """The text as it is encoded; `fixed` counts the documents each rule changed. Code: only what no tool can use goes."""
    def step(rule, new):
        fixed[rule] += new != text
        return new
    text = step("surrogates", SURROGATES.sub("\ufffd", text))
    text = step("bom", text.removeprefix("\ufeff"))
    text = step("crlf", text.replace("\r\n", "\n"))
    text = step("controls", CONTROLS.sub("", text))
    if not is_code:
        text = step("nfc", unicodedata.normalize("NFC", text))
        text = step("white_space", LONG_SPACE.sub(lambda run: "\n\n" if run[0].count("\n") > 1 else
                                                  "\n" if "\n" in run[0] else run[0][:64], text))
    return text


def documents(batch, source, skip_bad, tally):
    """(where, text, digest, split) of every usable record; the others are counted in `tally`, see encode_batch.

    The split depends on the 128-bit digest of the white-space-normalised text and on nothing else.
    """
    for where, is_code, raw in batch:
        try:
            text, bad = text_of(where, raw, source["text_field"])
        except Refused:
            if not skip_bad:
                raise
            tally["dropped"]["malformed"] += 1
            continue
        tally["records"] += 1
        bad += len(SURROGATES.findall(text))
        if bad > 0.01 * len(text):
            tally["dropped"]["not_utf8"] += 1
            tally["not_utf8"].append(where.rpartition(":")[0])
            continue
        tally["fixed"]["not_utf8"] += bad > 0
        text = clean(text, is_code, tally["fixed"])
        words = " ".join(text.split())
        if len(words) < MIN_CHARS:
            tally["dropped"]["too_short" if words else "empty"] += 1
            continue
        digest = hashlib.blake2b(words.encode(), digest_size=16).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        held_out = source["held_out"]
        yield where, text, digest, 1 if place < held_out else 2 if place >= 1 - held_out else 0


def new_tally():
    return dict(records=0, dropped=Counter(), fixed=Counter(), not_utf8=[])


def sample_batch(batch, source, skip_bad, seed, held_out, fraction):
    """[(digest, first 10k characters)] of a seeded fraction of the train documents, `held_out` being the largest used."""
    taken = []
    for _, text, digest, split in documents(batch, {**source, "held_out": held_out}, skip_bad, new_tally()):
        draw = hashlib.blake2b(digest, digest_size=8, key=str(seed).encode()).digest()
        if split == 0 and int.from_bytes(draw, "big") < fraction * 2**64:
            taken.append((digest, text[:10_000]))
    return taken


INDEX = np.dtype([("digest", "S16"), ("split", "u1"), ("tokens", "<u4"), ("bytes", "<u4")])


def encode_batch(batch, source, skip_bad, folder, dtype):
    """(index, ids, tally): a row of INDEX and the ids, end-of-text last, of every document of the batch."""
    encoding = worker_encoding(folder)
    tally, rows, ids = new_tally(), [], []
    for where, text, digest, split in documents(batch, source, skip_bad, tally):
        try:
            own = encode_pieces(encoding, text)
        except BaseException as error:  # a Rust panic is no Exception
            raise Refused(f"{where}: the tokenizer fails on this document ({type(error).__name__}: {error})") from None
        ids.append(np.array([*own, encoding.n_vocab], dtype))
        rows.append((digest, split, len(own) + 1, len(text.encode())))
    return np.array(rows, INDEX), np.concatenate(ids) if ids else np.zeros(0, dtype), tally


@functools.cache
def worker_encoding(folder):
    return make_encoding(read_ranks(folder))


def start_worker():
    """Ctrl-C is the parent's to handle, and a worker does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=leave, daemon=True).start()


def process_count():
    return len(os.sched_getaffinity(0))


def in_order(pool, function, work, *arguments):
    """(result, size, state) of every batch, in the order of the batches; only a few are in memory."""
    waiting = collections.deque()
    try:
        for batch, size, state in work:
            waiting.append((pool.submit(function, batch, *arguments), size, state))
            if len(waiting) > 3 * process_count():
                future, size, state = waiting.popleft()
                yield future.result(), size, state
        while waiting:
            future, size, state = waiting.popleft()
            yield future.result(), size, state
    finally:
        work.close()
        for future, _, _ in waiting:
            future.cancel()

# ---- the stages ----------------------------------------------------------------------------------------------------


def train_tokenizer(recipe, parts, pool, skip_bad):
    """parts/tokenizer.tiktoken from a capped, seeded sample of the train documents. Raises Refused if the corpus cannot
    give so many ids; the embedded corpus of a fallback takes what it can get."""
    import rustbpe
    held_out, sample = max(source["held_out"] for source in recipe["sources"]), []
    for source in recipe["sources"]:
        room, seen = SAMPLE_BYTES, set()
        fraction = min(1.0, SAMPLE_BYTES / source.get("bytes", SAMPLE_BYTES))
        stream = in_order(pool, sample_batch, batches(source, None), source, skip_bad, recipe["seed"], held_out, fraction)
        for documents_taken, _, _ in stream:
            for digest, text in documents_taken:
                if digest not in seen and room > 0:
                    seen.add(digest)
                    sample.append(text)
                    room -= len(text.encode())
            if room <= 0:
                break
        stream.close()
    log.info("tokenizer: %s ids from %s train documents, %.1f M characters", f"{recipe['vocab_size']:,}",
             f"{len(sample):,}", sum(map(len, sample)) / 1e6)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(sample), recipe["vocab_size"] - 1, pattern=PATTERN)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) + 1 < recipe["vocab_size"] and not recipe["fallback"]:
        raise Refused(f"these documents give {len(ranks) + 1:,} ids at most, {recipe['vocab_size']:,} were asked for: "
                      f"--vocab_size={len(ranks) + 1} or less, or more documents")
    lines = [base64.b64encode(bytes(piece)) + b" %d\n" % rank for piece, rank in ranks]
    write_atomically(f"{parts}/tokenizer.tiktoken", b"".join(lines))


class Seen:
    """The digests met so far, 16 bytes each: one sorted array, the newest apart until they are merged into it."""

    def __init__(self):
        self.old, self.new = np.zeros(0, "S16"), set()

    def first(self, digests):
        """bool (n,): true for those never met before, which are now met."""
        mask = np.ones(len(digests), bool)
        if len(self.old):
            at = np.minimum(np.searchsorted(self.old, digests), len(self.old) - 1)
            mask = self.old[at] != digests
        for i, digest in enumerate(digests.tolist()):
            mask[i] &= digest not in self.new
            self.new.add(digest)
        if len(self.new) > 1 << 20:
            fresh = np.setdiff1d(np.array(list(self.new), "S16"), self.old)
            self.old, self.new = np.sort(np.concatenate([self.old, fresh]), kind="stable"), set()
        return mask


def shards_of(parts, source):
    """[(folder, shard.json)] of the finished shards of a source, in order."""
    folders = sorted(glob.glob(f"{glob.escape(parts)}/{source['name']}/[0-9]*"))
    return [(folder, read_json(f"{folder}/shard.json")) for folder in folders]


def encode_source(source, parts, pool, skip_bad, dtype):
    """The shards of a source not finished yet: folders with the ids of each split, an index of the documents and the
    state of the source behind them, renamed into place when complete. The last one says `end`."""
    shards, seen, start = shards_of(parts, source), Seen(), time.time()
    for folder, _ in shards:
        seen.first(np.fromfile(f"{folder}/index.bin", INDEX)["digest"])
    if shards and shards[-1][1]["end"]:
        return
    share, count = source["share_tokens"], sum(shard["train_tokens"] for _, shard in shards)
    stream = in_order(pool, encode_batch, batches(source, shards[-1][1]["state"] if shards else None), source, skip_bad,
                      parts, dtype)
    total = dict(total=share, unit=" tokens", initial=count) if share else \
        dict(total=source["bytes"], unit="B", initial=sum(shard["raw_bytes"] for _, shard in shards))
    done = 0
    with tqdm_bar(desc=source["name"], **total) as bar, contextlib.closing(stream):
        end = False
        while not end:
            temporary = f"{parts}/{source['name']}/tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            os.makedirs(temporary)
            tally, raw_bytes, before = new_tally(), 0, count
            with contextlib.ExitStack() as stack:
                bins = [stack.enter_context(open(f"{temporary}/{split}.bin", "wb")) for split in SPLITS]
                index_file = stack.enter_context(open(f"{temporary}/index.bin", "wb"))
                while not end and raw_bytes < SHARD_BYTES:
                    (index, ids, part), size, state = next(stream)
                    keep = seen.first(index["digest"])
                    tally["dropped"]["duplicate"] += int((~keep).sum())
                    reached = count + np.cumsum(np.where(keep & (index["split"] == 0), index["tokens"], 0))
                    end = state is None
                    if share and len(reached) and reached[-1] >= share:
                        end = True
                        keep[np.searchsorted(reached, share) + 1:] = False  # cut behind the document that reaches it
                    for split, file in enumerate(bins):
                        ids[np.repeat(keep & (index["split"] == split), index["tokens"])].tofile(file)
                    index[keep].tofile(index_file)
                    grown = int(index["tokens"][keep & (index["split"] == 0)].sum())
                    count, raw_bytes, done = count + grown, raw_bytes + size, done + size
                    for key in ("dropped", "fixed"):
                        tally[key].update(part[key])
                    tally["records"] += part["records"]
                    tally["not_utf8"] = (tally["not_utf8"] + part["not_utf8"])[:3]
                    bar.set_postfix_str(f"{count / 1e6:.1f}M tokens, {done / 1e6 / (time.time() - start):.1f} MB/s", False)
                    bar.update(grown if share else size)
                for file in [*bins, index_file]:
                    file.flush()
                    os.fsync(file.fileno())
            shard = dict(tally, state=state, end=end, train_tokens=count - before, raw_bytes=raw_bytes)
            write_atomically(f"{temporary}/shard.json", json.dumps(shard).encode())
            os.rename(temporary, f"{parts}/{source['name']}/{len(shards):06d}")
            fsync_folder(f"{parts}/{source['name']}")
            shards.append((None, shard))
    if share and count < share:
        log.warning("NOTICE: source %s ended at %s of its %s tokens; nothing is repeated", source["name"], f"{count:,}",
                    f"{share:,}")


def join(recipe, parts, dtype):
    """Shards -> train.bin, val.bin, test.bin and meta.json in parts: a complete data folder."""
    splits, dropped, fixed = {split: {} for split in SPLITS}, {}, {}
    held = {}
    for source in recipe["sources"]:
        indexes = [np.fromfile(f"{folder}/index.bin", INDEX) for folder, _ in shards_of(parts, source)]
        held[source["name"]] = np.concatenate([index["digest"][index["split"] > 0] for index in indexes])
    offset = Counter()
    with contextlib.ExitStack() as stack:
        bins = [stack.enter_context(open(f"{parts}/{split}.bin", "wb")) for split in SPLITS]
        for source in recipe["sources"]:
            name = source["name"]
            others = np.concatenate([np.zeros(0, "S16"), *[held[key] for key in held if key != name]])
            counts = {split: dict(offset=offset[split], tokens=0, documents=0, bytes=0) for split in SPLITS}
            dropped[name], fixed[name], records, not_utf8 = Counter(), Counter(), 0, []
            for folder, shard in shards_of(parts, source):
                index = np.fromfile(f"{folder}/index.bin", INDEX)
                elsewhere = (index["split"] == 0) & np.isin(index["digest"], others)
                dropped[name].update({**shard["dropped"], "held_out_elsewhere": int(elsewhere.sum())})
                fixed[name].update(shard["fixed"])
                records, not_utf8 = records + shard["records"], not_utf8 + shard["not_utf8"]
                for number, split in enumerate(SPLITS):
                    rows = index["split"] == number
                    keep = ~elsewhere[rows]
                    ids = np.fromfile(f"{folder}/{split}.bin", dtype)
                    (ids if keep.all() else ids[np.repeat(keep, index["tokens"][rows])]).tofile(bins[number])
                    counts[split]["documents"] += int(keep.sum())
                    for key in ("tokens", "bytes"):
                        counts[split][key] += int(index[key][rows][keep].sum())
            for split in SPLITS:
                splits[split][name] = counts[split]
                offset[split] += counts[split]["tokens"]
            dropped[name], fixed[name] = +dropped[name], +fixed[name]
            if not_utf8:
                log.warning("source %s: %d of %d records are not UTF-8, such as %s; iconv -f GB18030 -t UTF-8 FILE mends "
                            "one (or -f LATIN1, -f UTF-16)", name, dropped[name]["not_utf8"], records,
                            ", ".join(not_utf8[:3]))
                if dropped[name]["not_utf8"] > 0.1 * records and not recipe["skip_bad"]:
                    raise Refused(f"source {name}: over 10% of the records are not UTF-8: mend them, or drop them "
                                  "with --skip_bad=True")
        for file in bins:
            file.flush()
            os.fsync(file.fileno())
    for split in SPLITS:
        if not offset[split]:
            least = min(source["held_out"] for source in recipe["sources"])
            raise Refused(f"{split} would be empty: {sum(s['documents'] for s in splits['train'].values())} documents are "
                          f"too few when {least:.1%} are held out; {int(5 / least)} documents are enough")
    ranks = read_ranks(parts)
    with open(f"{parts}/tokenizer.tiktoken", "rb") as file:
        sha256 = hashlib.sha256(file.read()).hexdigest()
    tokenizer = dict(pattern=PATTERN, special_tokens={EOT: len(ranks)}, sha256=sha256)
    seal(parts, dict(schema=SCHEMA, vocab_size=len(ranks) + 1, dtype=np.dtype(dtype).name, eot_id=len(ranks),
                     tokenizer=tokenizer, splits=splits, recipe=recipe, dropped=dropped, cleaned=fixed))


def publish(parts, data_dir):
    """Move the complete folder up, meta.json last; killed in between, the next start goes on from here."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{data_dir}/meta.json")
    for name in ("tokenizer.tiktoken", *[f"{split}.bin" for split in SPLITS], "meta.json"):
        if os.path.exists(f"{parts}/{name}"):
            os.replace(f"{parts}/{name}", f"{data_dir}/{name}")
        fsync_folder(data_dir)
    shutil.rmtree(parts)


def tqdm_bar(**settings):
    from tqdm import tqdm
    return tqdm(unit_scale=True, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 30, **settings)


def show(data_dir):
    """The closing table, what was dropped, three decoded pieces, the next command."""
    corpus, tokenizer = Corpus(data_dir, check=False), Tokenizer(data_dir)
    log.info("\n%-12s %-6s %12s %15s %15s %12s", "source", "split", "documents", "tokens", "bytes", "bytes/token")
    for split in SPLITS:
        for name, row in [*corpus.sources(split).items(), ("all", None)]:
            if row is None:
                row = {key: sum(s[key] for s in corpus.sources(split).values()) for key in ("documents", "tokens", "bytes")}
            log.info("%-12s %-6s %12s %15s %15s %12.2f", name, split, f"{row['documents']:,}", f"{row['tokens']:,}",
                     f"{row['bytes']:,}", row["bytes"] / max(1, row["tokens"]))
    for title in ("dropped", "cleaned"):
        for name, reasons in corpus.meta[title].items():
            log.info("%s, %s: %s", title, name, ", ".join(f"{k} {v:,}" for k, v in sorted(reasons.items())) or "nothing")
    for at in np.random.RandomState(0).randint(0, max(1, corpus.tokens("train") - 40), 3):
        ids = corpus.read("train", int(at), min(40, corpus.tokens("train")))
        log.info("train.bin from token %d: %r", at, tokenizer.decode(ids))
    log.info("vocabulary %d, fingerprint %s", corpus.vocab_size, corpus.fingerprint[:16])
    files = [word.replace("data_", "train_") for word in sys.argv[1:] if word.endswith(".py")]
    log.info("next: python train.py %s", " ".join(f for f in files if os.path.exists(f)) or f"--data_dir={data_dir}")


def lock(data_dir):
    """One writer a folder, by an flock that ends with the process."""
    os.makedirs(data_dir, exist_ok=True)
    file = open(f"{data_dir}/.lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        raise Refused(f"{data_dir} is being written by process {file.read().strip()}: wait for it or end it") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def check_space(recipe, data_dir, dtype):
    """Shards and the joined files stand side by side. Raises Refused before anything is written."""
    tokens = sum(s["share_tokens"] or s["bytes"] / 2.5 for s in recipe["sources"])
    need = 2 * np.dtype(dtype).itemsize * tokens + (2e9 if any(s["hub"] for s in recipe["sources"]) else 5e7)
    free = shutil.disk_usage(data_dir).free
    log.info("disk: %.2f GB needed at most in %s, %.1f GB free", need / 1e9, data_dir, free / 1e9)
    if free < need:
        raise Refused(f"{data_dir}: {need / 1e9:.1f} GB of disk needed, {free / 1e9:.1f} GB free: make room, or choose "
                      "another --data_dir")


def main():
    settings, started = load(Config, sys.argv[1:], __doc__), time.time()
    data_dir, parts = settings.data_dir.rstrip("/"), f"{settings.data_dir.rstrip('/')}/parts"
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    if settings.verify:
        Corpus(data_dir, check="all")
        return show(data_dir)
    finished = read_json(f"{data_dir}/meta.json").get("recipe", {}) if os.path.exists(f"{data_dir}/meta.json") else {}
    begun = read_json(f"{parts}/recipe.json") if os.path.exists(f"{parts}/recipe.json") else {}
    recipe, fallback = plan(settings, begun or finished, bool(finished) and not begun)
    if fallback:
        log.warning("NOTICE: the Hub cannot be used: %s.\nNOTICE: taking the embedded corpus (this machine's Python "
                    "standard library) instead of the real mixture, into %s", fallback, data_dir)

    def same(other):
        return other and {**other, "fallback": 0} == {**recipe, "fallback": 0}
    if same(finished) and not begun:
        show(data_dir)
        return log.info("finished already: %s is of this recipe; nothing to do", data_dir)
    bins = any(os.path.exists(f"{data_dir}/{name}") for name in ("meta.json", "train.bin")) and not same(begun)
    if (bins or begun and not same(begun)) and not settings.overwrite:
        raise Refused(f"{data_dir} holds data of another recipe, or its inputs have changed: choose another --data_dir, "
                      "or --overwrite=True")
    dtype = "uint32" if recipe["vocab_size"] > 65536 else "uint16"
    with lock(data_dir):
        handler = logging.FileHandler(f"{data_dir}/prepare.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        for source in recipe["sources"]:
            if source["hub"]:
                check_hub(source)
        if not same(begun):
            check_space(recipe, data_dir, dtype)
            shutil.rmtree(parts, ignore_errors=True)
            os.makedirs(parts)
            write_atomically(f"{parts}/recipe.json", json.dumps(recipe).encode())
        context = multiprocessing.get_context("spawn")
        if not os.path.exists(f"{parts}/meta.json"):
            with concurrent.futures.ProcessPoolExecutor(process_count(), context, start_worker) as pool:
                if not os.path.exists(f"{parts}/tokenizer.tiktoken"):
                    train_tokenizer(recipe, parts, pool, settings.skip_bad)
                for source in recipe["sources"]:
                    encode_source(source, parts, pool, settings.skip_bad, dtype)
            join({**recipe, "skip_bad": settings.skip_bad}, parts, dtype)
        publish(parts, data_dir)
        show(data_dir)
        log.info("done in %.1f s", time.time() - started)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")
    except concurrent.futures.process.BrokenProcessPool:
        sys.exit("prepare.py: a worker process died (out of memory?); the same command continues")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refused(f"the disk is full ({error.filename}): make room, then the same command continues") from None
        raise
