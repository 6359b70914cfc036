"""Turn documents into data/: a tokenizer, train.bin, val.bin, test.bin and meta.json.

    python prepare.py                            the default mixture; without the Hub, this machine's standard library
    python prepare.py --docs=FOLDER              your own documents, every sub-folder one source
    python prepare.py config/data_demo.py        another recipe

HF_ENDPOINT names a mirror of the Hub, HF_TOKEN opens private and gated data sets.
Interrupted, the same command continues. Same recipe and inputs: same bytes, whatever the number of processes.
"""
import base64
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import functools
import glob
import hashlib
import heapq
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections import Counter, deque

import numpy as np

import documents
from config import Refused, load


@dataclasses.dataclass(frozen=True)
class Config:
    sources: tuple = ("auto",)  # auto, embedded, or in a config file a list of dict(name=, path=, weight=, ...)
    docs: str = ""  # a folder of your own documents: every sub-folder becomes a source
    data_dir: str = "data"  # where the result goes; one folder for each corpus
    vocab_size: int = 32_000  # ids, the end-of-text id included
    budget_tokens: int = 0  # train tokens over all sources; 0: 10.01B from the Hub, everything from local files
    seed: int = 1337  # of the sample the tokenizer is trained on
    overwrite: bool = False  # replace data of another recipe (it stays until the new is complete)
    skip_bad: bool = False  # skip and count malformed records instead of stopping at the first
    verify: bool = False  # only hash everything in data_dir again and print the table


SPLITS = ("train", "val", "test")
BLOCK_BYTES = 64 << 20  # meta.json holds a sha256 for each of these
SHARD_BYTES = 32 << 20  # raw text that a restart may have to repeat
SAMPLE_BYTES = 32 << 20  # a source's part in the tokenizer sample, 3 times that for all of them; training takes 3 times
# that memory, Chinese 30 times. Measured on held-out text: 8 to 28 MB of English gain 1.4% bytes a token
PIECE_CHARS = 200_000  # encoded at once; tiktoken's regex engine overflows its stack on 1M white-space characters
EOT = "<|endoftext|>"
# The public cl100k split pattern, as tiktoken 0.7 has it: words, numbers of up to three digits, runs of marks, spaces.
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
           r"|\s*[\r\n]|\s+(?!\S)|\s+")
# The same splits: without the possessive quantifiers, which change nothing, and with all that needs no look-ahead in
# one group, which tiktoken's engine tries at once. A MB of English takes 65 ms instead of 94, Chinese 88 instead of
# 120, code 54 instead of 100 (medians over 20 MB, in turn).
FAST = (r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n])"
        r"|\s+(?!\S)|\s+")
INDEX = np.dtype([("digest", "S16"), ("split", "u1"), ("tokens", "<u4"), ("bytes", "<u4")])  # a document of a shard
log = logging.getLogger("prepare")

# ---- data/ as the other stages read it -----------------------------------------------------------


def fsync_folder(path):
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't: their names need no sync
            raise
    finally:
        os.close(descriptor)


def write_atomically(path, data):
    """`data` under a temporary name, fsynced, renamed, the folder fsynced: never half a file."""
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
    fsync_folder(os.path.dirname(path))


def read_json(path):
    """The object in a JSON file, {} if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise Refused(f"{path} can't be read as JSON ({error}): copy it again, or prepare again in another folder"
                      ) from None


def seal(data_dir, meta):
    """Hash the token files, check their sizes against meta["splits"], write meta.json: the folder is complete.

    `meta` is meta.json without `files`. Raises Refused when a file is not as long as `splits` says.
    """
    meta = {**meta, "files": {}}
    for split in SPLITS:
        whole, blocks, size = hashlib.sha256(), [], 0
        with open(f"{data_dir}/{split}.bin", "rb") as file:
            while block := file.read(BLOCK_BYTES):
                whole.update(block)
                blocks.append(hashlib.sha256(block).hexdigest())
                size += len(block)
        expected = sum(s["tokens"] for s in meta["splits"][split].values()) * np.dtype(meta["dtype"]).itemsize
        if size != expected:
            raise Refused(f"{data_dir}/{split}.bin has {size} bytes, {expected} were written: start in an empty folder")
        meta["files"][f"{split}.bin"] = dict(bytes=size, sha256=whole.hexdigest(), blocks=blocks)
    write_atomically(f"{data_dir}/meta.json", json.dumps(meta, indent=1, sort_keys=True).encode())


class Corpus:
    """A finished data_dir. `check` compares sizes and sha256 with meta.json: every byte of files up to 1 GB (of all
    files for check="all"), else the first, the last and 8 more blocks. Raises Refused: what is wrong, what to do."""

    def __init__(self, data_dir, check=True):
        self.folder, self.meta, self.files = data_dir, read_json(f"{data_dir}/meta.json"), {}
        if not self.meta:
            raise Refused(f"{data_dir} holds no finished data (no meta.json): fill it by `python prepare.py "
                          f"--data_dir={data_dir}` with its config or --docs, or name another --data_dir")
        self.vocab_size, self.eot_id = self.meta["vocab_size"], self.meta["eot_id"]
        self.dtype, tokenizer = np.dtype(self.meta["dtype"]), self.meta.get("tokenizer") or {}
        identity = [self.meta["files"][f"{split}.bin"]["sha256"] for split in SPLITS]
        identity += [tokenizer.get("sha256"), tokenizer.get("pattern"), self.vocab_size, self.eot_id]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        if tokenizer.get("sha256"):
            read_ranks(data_dir, tokenizer["sha256"])
        for split in SPLITS:
            try:
                self.files[split] = os.open(f"{data_dir}/{split}.bin", os.O_RDONLY)
            except OSError as error:
                raise self._bad(split, f"cannot be opened ({error.strerror})") from None
            if check:
                self._check(split, everything=check == "all")

    def _bad(self, split, why):
        return Refused(f"{self.folder}/{split}.bin {why}: it is damaged or of another meta.json; copy the folder "
                       "again, or remove it and prepare it again")

    def _check(self, split, everything):
        expected, size = self.meta["files"][f"{split}.bin"], os.fstat(self.files[split]).st_size
        if size != expected["bytes"] or size != self.tokens(split) * self.dtype.itemsize:
            raise self._bad(split, f"has {size} bytes, not the {expected['bytes']} of meta.json")
        numbers = np.arange(len(expected["blocks"]))
        if size > 1e9 and not everything:
            numbers = np.unique([0, len(numbers) - 1, *np.random.RandomState(0).permutation(numbers)[:8]])
        for at in numbers.tolist():
            block = os.pread(self.files[split], BLOCK_BYTES, at * BLOCK_BYTES)
            if hashlib.sha256(block).hexdigest() != expected["blocks"][at]:
                raise self._bad(split, f"differs from its sha256 somewhere in block {at} of {BLOCK_BYTES} bytes")

    def sources(self, split):
        """{source: {offset, tokens, documents, bytes}} of a split; offset and tokens count ids."""
        return self.meta["splits"][split]

    def tokens(self, split):
        """Length of a split in ids."""
        return sum(source["tokens"] for source in self.sources(split).values())

    def read(self, split, offset, count):
        """int64 (count,): the ids from `offset` on. Raises Refused on a short read or an id outside the vocabulary."""
        data = os.pread(self.files[split], count * self.dtype.itemsize, offset * self.dtype.itemsize)
        if len(data) != count * self.dtype.itemsize:
            raise self._bad(split, f"ends within the {count} ids from token {offset}")
        ids = np.frombuffer(data, self.dtype).astype(np.int64)
        if count and ids.max() >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise self._bad(split, f"has id {ids[at]} at token {offset + at}, the vocabulary ends at {self.vocab_size}")
        return ids


def read_ranks(folder, sha256=None):
    """[bytes of id 0, of id 1, ...]. A line of tokenizer.tiktoken is base64, space, rank (tiktoken's own format)."""
    path = f"{folder}/tokenizer.tiktoken"
    if not os.path.exists(path):
        raise Refused(f"{path} is missing: copy the whole folder again, or prepare it again")
    with open(path, "rb") as file:
        data = file.read()
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise Refused(f"{path} is not the one {folder}/meta.json names (sha256 differs): copy both again")
    return [base64.b64decode(line.split()[0]) for line in data.splitlines()]


def make_encoding(ranks, pattern=PATTERN):
    import tiktoken  # its encode_to_numpy looks for special tokens; where there is none it stops at every character
    return tiktoken.Encoding("nanobase", pat_str=FAST if pattern == PATTERN else pattern,
                             special_tokens={EOT: len(ranks)},
                             mergeable_ranks={piece: rank for rank, piece in enumerate(ranks)})


def encode_long(encoding, text):
    """uint32 ids of text of any length, cut behind a line that ends in the last tenth of a piece, else anywhere."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARS:
        stop = start + PIECE_CHARS
        stop = text.rfind("\n", stop - PIECE_CHARS // 10, stop) + 1 or stop
        pieces.append(text[start:stop])
        start = stop
    return np.concatenate([encoding.encode_to_numpy(piece, disallowed_special=()) for piece in [*pieces, text[start:]]])


class Tokenizer:
    """The tokenizer of a folder with tokenizer.tiktoken and meta.json (data_dir or out_dir); only encoding needs
    tiktoken. Raises Refused when a file is missing or they do not belong together."""

    def __init__(self, folder):
        meta = read_json(f"{folder}/meta.json")
        if not meta.get("tokenizer"):
            raise Refused(f"{folder} has no tokenizer (no meta.json that names one): run `python prepare.py` first")
        self.eot_id, self.vocab_size, self.pattern = meta["eot_id"], meta["vocab_size"], meta["tokenizer"]["pattern"]
        self.ranks = read_ranks(folder, meta["tokenizer"]["sha256"])
        if max(len(self.ranks) - 1, self.eot_id) >= self.vocab_size:
            raise Refused(f"{folder}/meta.json speaks of {self.vocab_size} ids, its tokenizer has {len(self.ranks)}, "
                          f"end-of-text is {self.eot_id}: copy both again")
        self.token_bytes = np.zeros(self.vocab_size, np.int64)  # UTF-8 bytes an id stands for, specials for none
        self.token_bytes[:len(self.ranks)] = [len(piece) for piece in self.ranks]
        self.writable = self.token_bytes > 0  # what a model may write: those, and an end-of-text
        self.writable[self.eot_id] = True

    @functools.cached_property
    def encoding(self):
        return make_encoding(self.ranks, self.pattern)

    def encode(self, text):
        """[ids] of ordinary text; what looks like a special token is text as well."""
        return encode_long(self.encoding, text).tolist()

    def decode_bytes(self, ids):
        return b"".join(self.ranks[i] for i in ids if i < len(self.ranks))

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

# ---- the worker processes ----------------------------------------------------------------------------------------


@functools.cache
def encoding_of(folder):
    return make_encoding(read_ranks(folder))


def encode_batch(batch, source, skip_bad, folder, dtype):
    """(INDEX rows, ids, tally) of the documents of a batch, end-of-text behind each."""
    encoding, tally, rows, ids = encoding_of(folder), Counter(), [], [np.zeros(0, dtype)]
    # first all of them cleaned, then all encoded: in turn, each would find the other's work in the processor's caches
    for where, text, size, digest, split in list(documents.usable(batch, source, skip_bad, tally)):
        try:
            own = encode_long(encoding, text)
        except BaseException as error:  # a Rust panic is no Exception
            raise Refused(f"{where}: tiktoken cannot encode this document ({error})") from None
        ids += own, [encoding.eot_token]
        rows.append((digest, split, len(own) + 1, size))
    return np.array(rows, INDEX), np.concatenate(ids, dtype=dtype, casting="unsafe"), tally


def start_worker():
    """Ctrl-C is for the parent; when the parent is gone, so is the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def process_count():
    return len(os.sched_getaffinity(0))


def in_order(pool, function, work, *arguments):
    """(result, bytes, state) of every batch in the order of reading; a few batches are in flight, no more."""
    waiting = deque()
    try:
        for batch, *rest in work:
            waiting.append((pool.submit(function, batch, *arguments), *rest))
            if len(waiting) > 3 * process_count():
                future, *rest = waiting.popleft()
                yield future.result(), *rest
        for future, *rest in waiting:
            yield future.result(), *rest
    finally:  # also when the caller has enough: nothing is read or encoded any more
        work.close()
        for future, *_ in waiting:
            future.cancel()

# ---- the stages ------------------------------------------------------------------------------------------------------


def progress(name, total, unit, done=0):
    from tqdm import tqdm
    watched = sys.stderr.isatty()  # in a file every line stays, so few of them are written
    return tqdm(desc=name, total=total, initial=done, unit=unit, unit_scale=True,
                leave="sample" not in name or not watched, mininterval=0.2 if watched else 30,
                bar_format="{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt}{unit}, {remaining} left{postfix}")


def sample_of(source, seed, room, skip_bad):
    """`room` bytes of a source's train documents, at most 10k characters of each: those with the lowest lots, drawn
    for their place in the source. Of the Hub only the beginnings of 16 files take part: they are downloaded again."""
    def lot(where):
        path, _, number = where.rpartition(":")
        name = f"{seed} {place[path]} {number}".encode()  # of such near names crc32 would make near numbers
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
    heap, size, highest, files, most = [], 0, [1.0], documents.files_of(source), math.inf
    place = {path: number for number, path in enumerate(files)}  # names may repeat from folder to folder
    if source["hub"]:
        files = files[::-(-len(files) // 16)]
        most = 2 * room / len(files)
    work = documents.batches(source, files, None, most, lambda where: lot(where) < highest[0])
    with progress(f"{source['name']}, sample", source.get("bytes", 2 * room), "B") as bar:
        for batch, read, _ in work:
            bar.update(read)
            for where, text, *_, split in documents.usable(batch, source, skip_bad, Counter()):
                if split == 0:
                    text = text[:10_000]
                    size += len(text.encode())
                    heapq.heappush(heap, (-lot(where), text))
            while size > room:
                least, text = heapq.heappop(heap)
                highest[0], size = -least, size - len(text.encode())
        bar.total = bar.n
    return [text for _, text in sorted(heap)]


def train_tokenizer(recipe, parts, skip_bad):
    """parts/tokenizer.tiktoken from a capped, seeded sample of the train documents. Raises Refused if these documents
    do not give so many ids; the fallback to the embedded corpus takes what there is."""
    import rustbpe
    held_out, sample = max(source["held_out"] for source in recipe["sources"]), []
    room = min(SAMPLE_BYTES, 3 * SAMPLE_BYTES // len(recipe["sources"]))
    for source in recipe["sources"]:
        sample += sample_of({**source, "held_out": held_out}, recipe["seed"], room, skip_bad)
    if not sample:
        raise Refused("there is no usable train document in these sources")
    log.info("tokenizer: training %d ids on %d documents, %.1f MB", recipe["vocab_size"], len(sample),
             sum(len(text.encode()) for text in sample) / 1e6)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(sample), recipe["vocab_size"] - 1, pattern=FAST)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) + 1 < recipe["vocab_size"] and not recipe["fallback"]:
        shutil.rmtree(parts, ignore_errors=True)  # the corrected command must find the folder free
        raise Refused(f"these documents give {len(ranks) + 1} ids at most, {recipe['vocab_size']} were asked for: "
                      f"--vocab_size={len(ranks) + 1} or less, or more documents")
    lines = [base64.b64encode(bytes(piece)) + b" %d\n" % rank for piece, rank in ranks]
    write_atomically(f"{parts}/tokenizer.tiktoken", b"".join(lines))


def shards_of(parts, source):
    """(about, INDEX rows, file) of the finished shards of a source; the file stands where the ids begin. Raises
    Refused."""
    for path in sorted(glob.glob(f"{glob.escape(parts)}/{source['name']}.{'[0-9]' * 6}.shard")):
        with open(path, "rb") as file:
            about = json.loads(file.readline())
            index = np.fromfile(file, INDEX, about["documents"])
            if zlib.crc32(index.tobytes()) != about["index_crc"]:
                raise Refused(f"{path} is damaged: remove {parts} and prepare again")
            yield about, index, file


def ids_of(keep, index, ids):
    """[ids] of the documents that the mask `keep` names, neighbours as one view: a mask over ids would look at each."""
    ends, edges = np.cumsum(index["tokens"], dtype=np.int64), np.flatnonzero(np.diff(keep, prepend=False, append=False))
    bounds = np.concatenate([[0], ends])[edges].tolist()
    return [ids[start:stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]


def encode_source(source, parts, pool, skip_bad, dtype):
    """Write the shards of a source that are not there yet. A shard is one file: a line of JSON, what was dropped and
    the state of the source behind it, then the documents' INDEX rows and their ids; the last one says `end`."""
    share, about = source["share_tokens"], dict(state=None, end=False, read=0, tokens=0)
    digests = [np.array([b""], "S16")]  # stands before every other, so that there is one to compare with
    for about, index, _ in shards_of(parts, source):  # noqa: B007
        digests.append(index["digest"])
    seen, number, started, before = np.sort(np.concatenate(digests)), len(digests) - 1, time.time(), about["read"]
    state, end, read, tokens = (about[key] for key in ("state", "end", "read", "tokens"))
    work = documents.batches(source, [] if end else documents.files_of(source), state)
    results = in_order(pool, encode_batch, work, source, skip_bad, parts, dtype)
    total, unit, done = (share, " tokens", tokens) if share else (source["bytes"], "B", read)
    with contextlib.closing(results), progress(source["name"], total, unit, done) as bar:
        while not end:
            rows, ids, tally, full, shown = [], [], Counter(), read + SHARD_BYTES, tokens
            for (batch_rows, batch_ids, counts), size, state in results:  # noqa: B007
                rows.append(batch_rows)
                ids.append(batch_ids)
                tally.update(counts)
                read, shown = read + size, shown + int(batch_rows["tokens"][batch_rows["split"] == 0].sum())
                speed = (read - before) / 1e6 / (time.time() - started)
                bar.set_postfix_str(f"{speed:.1f} MB/s, {shown / 1e6:.1f}M tokens", refresh=False)
                bar.update((shown if share else read) - bar.n)
                if read >= full:
                    break
            index, end = np.concatenate(rows), state is None
            keep = np.zeros(len(index), bool)
            keep[np.unique(index["digest"], return_index=True)[1]] = True  # the first copy in this shard
            keep &= seen[np.searchsorted(seen, index["digest"], "right") - 1] != index["digest"]
            tally["dropped duplicate"] += int((~keep).sum())
            reached = tokens + np.cumsum(index["tokens"] * (keep & (index["split"] == 0)), dtype=np.int64)
            if share and len(index) and reached[-1] >= share:
                keep[np.searchsorted(reached, share) + 1:], end = False, True  # behind the document that reaches it
            new = np.sort(index["digest"][keep])
            seen = np.insert(seen, np.searchsorted(seen, new), new)
            tokens += int(index["tokens"][keep & (index["split"] == 0)].sum())
            kept, body = index[keep].tobytes(), b"".join(ids_of(keep, index, np.concatenate(ids)))
            about = dict(state=state, end=end, read=read, tokens=tokens, tally=tally, documents=int(keep.sum()),
                         index_crc=zlib.crc32(kept), ids_crc=zlib.crc32(body))
            write_atomically(f"{parts}/{source['name']}.{number:06d}.shard",
                             json.dumps(about).encode() + b"\n" + kept + body)
            number += 1
        bar.total = bar.n  # known only now: sizes were packed, or a share is cut at a document
    if tokens < share:
        log.warning("NOTICE: source %s has only %d of its %d tokens; nothing is repeated", source["name"], tokens,
                    share)


def check_utf8(name, tally, skip_bad):
    """Say which records were no UTF-8. Raises Refused when they are over a tenth of the source."""
    if not (strange := tally["dropped not_utf8"]):
        return
    paths = [key.removeprefix("not_utf8 ") for key in tally if key.startswith("not_utf8 ")][:3]
    log.warning("source %s: %d records are not UTF-8: %s, ...; iconv -f GB18030 -t UTF-8 (or -f LATIN1, UTF-16) "
                "mends a file", name, strange, ", ".join(paths))
    if strange > 0.1 * sum(n for key, n in tally.items() if key.startswith(("dropped ", "documents"))) and not skip_bad:
        raise Refused(f"source {name}: over 10% of it is not UTF-8: mend it, or drop that with --skip_bad=True")


def join(recipe, parts, dtype, skip_bad):
    """Shards -> train.bin, val.bin, test.bin and meta.json in parts, a complete data folder. Raises Refused when a
    split is empty or over a tenth of a source is not UTF-8."""
    held, splits, dropped, cleaned = {}, {split: {} for split in SPLITS}, {}, {}
    for source in recipe["sources"]:
        indices = (index for _, index, _ in shards_of(parts, source))
        held[source["name"]] = np.concatenate([index["digest"][index["split"] > 0] for index in indices])
    bins = [open(f"{parts}/{split}.bin", "wb") for split in SPLITS]
    for source in recipe["sources"]:
        name, tally = source["name"], Counter()
        elsewhere = np.concatenate([np.zeros(0, "S16"), *[held[other] for other in held if other != name]])
        rows = [dict(offset=file.tell() // np.dtype(dtype).itemsize, tokens=0, documents=0, bytes=0) for file in bins]
        for about, index, file in shards_of(parts, source):
            ids = np.fromfile(file, dtype)
            if zlib.crc32(ids) != about["ids_crc"]:
                raise Refused(f"{file.name} is damaged: remove {parts} and prepare again")
            lost = (index["split"] == 0) & np.isin(index["digest"], elsewhere)
            tally.update(about["tally"], **{"dropped held_out_elsewhere": int(lost.sum())})
            for number, row in enumerate(rows):
                keep = (index["split"] == number) & ~lost
                bins[number].writelines(ids_of(keep, index, ids))
                row["documents"] += int(keep.sum())
                for key in ("tokens", "bytes"):
                    row[key] += int(index[key][keep].sum())
        for split, row in zip(SPLITS, rows, strict=True):
            splits[split][name] = row
            tally["documents"] += row["documents"]
        check_utf8(name, tally, skip_bad)
        dropped[name], cleaned[name] = ({key.removeprefix(kind): n for key, n in sorted(tally.items())
                                         if key.startswith(kind) and n} for kind in ("dropped ", "cleaned "))
    for file in bins:
        file.flush()
        os.fsync(file.fileno())
        file.close()
    for split, rows in splits.items():
        if not sum(row["tokens"] for row in rows.values()):
            enough = int(5 / min(source["held_out"] for source in recipe["sources"]))
            raise Refused(f"{split} would be empty, the corpus is too small: about {enough} documents are enough")
    ranks = read_ranks(parts)
    with open(f"{parts}/tokenizer.tiktoken", "rb") as file:
        sha256 = hashlib.sha256(file.read()).hexdigest()
    tokenizer = dict(pattern=PATTERN, special_tokens={EOT: len(ranks)}, sha256=sha256)
    seal(parts, dict(schema=1, vocab_size=len(ranks) + 1, dtype=dtype, eot_id=len(ranks), tokenizer=tokenizer,
                     splits=splits, recipe=recipe, dropped=dropped, cleaned=cleaned))


def publish(parts, data_dir):
    """Move the complete folder up, meta.json last; killed in between, the next start goes on here."""
    if os.path.exists(f"{data_dir}/meta.json"):
        os.unlink(f"{data_dir}/meta.json")
    for name in ("tokenizer.tiktoken", "train.bin", "val.bin", "test.bin", "prepare.json", "meta.json"):
        if os.path.exists(f"{parts}/{name}"):
            os.replace(f"{parts}/{name}", f"{data_dir}/{name}")
            fsync_folder(data_dir)
    shutil.rmtree(parts)


def show(data_dir):
    """The closing table, what was dropped and changed, three decoded pieces, the next command."""
    corpus, tokenizer = Corpus(data_dir, check=False), Tokenizer(data_dir)
    log.info("\n%-12s %-6s %12s %15s %15s %12s", "source", "split", "documents", "tokens", "bytes", "bytes/token")
    for split in SPLITS:
        rows = corpus.sources(split)
        total = {key: sum(row[key] for row in rows.values()) for key in ("documents", "tokens", "bytes")}
        for name, row in [*rows.items(), ("all", total)]:
            log.info("%-12s %-6s %12s %15s %15s %12.2f", name, split, *(f"{row[key]:,}" for key in total),
                     row["bytes"] / max(1, row["tokens"]))
    for what in ("dropped", "cleaned"):
        for name, reasons in corpus.meta[what].items():
            said = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
            log.info("%s %s: %s", name, what, said or "nothing")
    length = min(40, corpus.tokens("train"))
    for at in np.random.RandomState(0).randint(0, corpus.tokens("train") - length + 1, 3).tolist():
        log.info("train.bin from token %d: %r", at, tokenizer.decode(corpus.read("train", at, length)))
    configs = [word.replace("data_", "train_") for word in sys.argv[1:] if word.endswith(".py") and "data_" in word]
    log.info("vocabulary %d, fingerprint %s\nnext: python train.py %s", corpus.vocab_size, corpus.fingerprint[:16],
             " ".join([*filter(os.path.exists, configs), f"--data_dir={data_dir}"]))


def lock(folder):
    """The one writer of a folder, until its process ends: keep the file that is returned. Raises Refused."""
    os.makedirs(folder, exist_ok=True)
    file = open(f"{folder}/.lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise Refused(f"{folder} is being written by process {file.read().strip()}: wait for it, or end it") from None
    except OSError as error:
        raise Refused(f"{folder} can't be locked ({error.strerror}): mount it with its locks (Lustre: -o flock; NFS: "
                      "its lock service running, or nolock), or choose another folder") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


@contextlib.contextmanager
def counted(path):
    """Adds to those in `path` the hours that this machine's GPUs, rented perhaps, stand by, for the report's costs."""
    before, began = read_json(path).get("device_hours", 0.0), time.monotonic()
    try:
        yield
    finally:
        hours = (time.monotonic() - began) / 3600 * len(glob.glob("/dev/nvidia[0-9]*"))
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(dict(device_hours=before + hours)).encode())


def check_space(recipe, data_dir, dtype):
    """Shards and the joined files stand side by side until the end. Raises Refused before anything is written."""
    tokens = sum(source["share_tokens"] or source["bytes"] / 2.5 for source in recipe["sources"])
    need = 2 * np.dtype(dtype).itemsize * tokens + (2e9 if any(s["hub"] for s in recipe["sources"]) else 5e7)
    free = shutil.disk_usage(data_dir).free + sum(  # what an abandoned attempt holds goes first
        map(os.path.getsize, glob.glob(f"{glob.escape(data_dir)}/parts/*")))
    log.info("disk: up to %.2f GB more in %s, %.1f GB are free", need / 1e9, data_dir, free / 1e9)
    if free < need:
        raise Refused(f"{data_dir} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: choose another --data_dir")


def prepare(settings):
    """All stages, or what is left of them."""
    data_dir, started = settings.data_dir.rstrip("/"), time.time()
    parts = f"{data_dir}/parts"  # everything is made here and moved up when complete
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    if settings.verify:
        Corpus(data_dir, check="all")
        log.info("%s: every byte is as the sha256 in meta.json say", data_dir)
        return show(data_dir)
    if not 257 < settings.vocab_size <= 1 << 24 or settings.budget_tokens < 0:
        raise Refused("vocab_size must be 258 to 16,777,216, budget_tokens 0 or more")
    begun, finished = read_json(f"{parts}/recipe.json"), read_json(f"{data_dir}/meta.json")
    finished = finished and (finished.get("recipe") or {"sources": []})
    recipe = documents.make_recipe(settings, begun or finished)
    complete, resumed = ({**other, "fallback": 0} == {**recipe, "fallback": 0} for other in (finished, begun))
    if complete:
        if resumed or not begun:  # it was killed while it tidied up
            shutil.rmtree(parts, ignore_errors=True)
        show(data_dir)
        return log.info("%s is finished and of this recipe: nothing to do", data_dir)
    if not settings.overwrite and not resumed and (begun or finished or os.path.exists(f"{data_dir}/train.bin")):
        raise Refused(f"{data_dir} holds data, finished or not, of another recipe, or the inputs changed: choose "
                      "another --data_dir, or --overwrite=True")
    hub = [source for source in recipe["sources"] if source["hub"]]
    if hub and documents.hub_problem():
        raise Refused(f"{hub[0]['path']} is no local path and the Hub cannot be used: {documents.hub_problem()}; the "
                      "same command continues when it can")
    with lock(data_dir):
        file_handler = logging.FileHandler(f"{data_dir}/prepare.log", encoding="utf-8", errors="backslashreplace")
        file_handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(file_handler)
        dtype = "uint32" if recipe["vocab_size"] > 1 << 16 else "uint16"
        if not resumed:
            for source in hub:
                documents.check_hub(source)
            check_space(recipe, data_dir, dtype)
            shutil.rmtree(parts, ignore_errors=True)
            os.makedirs(parts)
            write_atomically(f"{parts}/recipe.json", json.dumps(recipe).encode())
        with counted(f"{parts}/prepare.json"):
            if not os.path.exists(f"{parts}/meta.json"):
                # workers with huge pages, where glibc and Linux have them: encoding jumps about in its table of tokens,
                # and took 5% longer with small ones (two processes, in turn)
                os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
                spawn = multiprocessing.get_context("spawn")
                with concurrent.futures.ProcessPoolExecutor(process_count(), spawn, start_worker) as pool:
                    for _ in range(process_count()):
                        pool.submit(os.getpid)  # they start while the sample is drawn
                    if not os.path.exists(f"{parts}/tokenizer.tiktoken"):
                        train_tokenizer(recipe, parts, settings.skip_bad)
                    for source in recipe["sources"]:
                        encode_source(source, parts, pool, settings.skip_bad, dtype)
                join(recipe, parts, dtype, settings.skip_bad)
        publish(parts, data_dir)
        show(data_dir)
        log.info("done in %.1f s", time.time() - started)


def main():
    try:
        prepare(load(Config, sys.argv[1:], __doc__))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")
    except concurrent.futures.BrokenExecutor:
        sys.exit("prepare.py: a worker process died (out of memory?); the same command continues")
    except OSError as error:
        raise Refused(f"{error}; nothing old was touched; once that is mended the same command continues") from None


if __name__ == "__main__":
    main()
