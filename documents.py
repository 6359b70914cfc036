"""Which documents, and what is in them: the recipe of prepare.py, reading, cleaning.

From a name, a folder or a Hub data set to one usable text after the other; what is not usable is counted.
"""
import functools
import glob
import hashlib
import io
import itertools
import json
import logging
import math
import multiprocessing.pool
import os
import re
import time
import unicodedata
import zlib
from collections import Counter

from config import Refused

BATCH_BYTES = 1 << 20  # raw text that a worker gets at once
FETCH_BYTES = 16 << 20  # asked of the Hub at once
MAX_BYTES = 1 << 31  # of a document, which stands in memory
MIN_BYTES = 10  # documents of less, white space not counted, are dropped
HUB_TOKENS = 10_010_000_000  # 9,536 steps of 1,048,576 tokens, and a reserve for what is dropped at the join
PROBE_S = 5  # the Hub has this long to answer
LIST_S = 60  # and this long to name the files of a data set, or to open one
# kind: prose or code; None: by each file's ending. text_field may lead into a row: "files.content" is the content of
# every file in a list of files. revision: a commit, tag or branch; None: today's, which the recipe keeps.
RECORD = dict(name="", path="", config=None, split="train", text_field="text", data_dir=None, data_files=None,
              revision=None, weight=1.0, kind=None)
NAMED = dict(
    auto=[dict(name="en", path="HuggingFaceFW/fineweb-edu", config="sample-10BT", weight=0.50),
          dict(name="zh", path="opencsg/chinese-fineweb-edu-v2", weight=0.35),
          dict(name="code", path="common-pile/stackv2_edu_filtered", weight=0.15, kind="code")],
    embedded=[dict(name="code", path="python:library"), dict(name="prose", path="python:topics", kind="prose")])
NO_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
CODE = set("py pyi js jsx ts tsx java kt scala c h cc cpp hpp cu cs go rs rb php swift lua pl r jl sh bash sql html css"
           " xml yaml yml toml tex".split())
LINES = {"jsonl", "json", "ndjson"}  # one object a line
READABLE = CODE | {"txt", "md", "rst", "jsonl", "parquet"}
CONTROLS = bytes(set(range(32)) - set(b"\t\n"))
SURROGATE = re.compile("[\ud800-\udfff]")
BLANK = bytes.maketrans(b"\t\n", b"  ")
LONG_SPACE = re.compile(rb"[ \t\n]{65,}")
log = logging.getLogger("prepare")

# ---- the recipe ------------------------------------------------------------------------------------------------------


def ending(path):
    return re.sub(r"\.(gz|zst)$", "", path.lower()).rpartition(".")[2]


def local_files(path):
    """(sorted files to read, {ending: number passed over}) of a file, a folder, a glob or an embedded corpus."""
    library, other = os.path.dirname(os.__file__), Counter()
    if os.path.isfile(path) or path == "python:topics":
        return [path if os.path.isfile(path) else f"{library}/pydoc_data/topics.py"], other
    hidden, endings = (NO_LIBRARY, {"py"}) if path == "python:library" else ((), READABLE | {ending(path)})
    top, files = library if hidden else path, set()

    def fail(error):  # a folder that can't be listed must not be left out in silence
        raise error
    found = os.walk(top, onerror=fail) if os.path.isdir(top) else [
        (os.path.dirname(file), [], [os.path.basename(file)]) for file in glob.glob(top, recursive=True)
        if os.path.isfile(file)]
    for folder, below, names in found:
        below[:] = [name for name in below if not name.startswith(".") and name not in hidden]
        if links := sum(os.path.islink(os.path.join(folder, name)) for name in below):
            other["linked folder, not followed"] += links
        for name in names:
            if not os.path.isfile(os.path.join(folder, name)):
                other["broken link or no file"] += 1
            elif ending(name) in endings and not name.startswith("."):
                files.add(os.path.join(folder, name))
            else:
                other["." + ending(name) if "." in name else "without an ending"] += 1
    return sorted(files), Counter() if hidden else other


def listed(other):
    kinds = other.most_common()
    rest = [f"{sum(n for _, n in kinds[9:]):,} with {len(kinds) - 9:,} other endings"] if kinds[9:] else []
    return ", ".join([f"{n:,} {kind}" for kind, n in kinds[:9]] + rest)


def docs_sources(folder):
    """The sub-folders of a folder and, as one source more, the files directly in it; what holds nothing to read is said
    and left out."""
    if not os.path.isdir(folder):
        raise Refused(f"--docs={folder}: no such folder")
    def named(name, path):
        return dict(name=re.sub(r"[^\w.-]+", "_", name).lstrip(".-") or "_", path=path)
    names = [name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    records = [named(name, os.path.join(folder, name)) for name in names]
    below = [record for record in records if os.path.isdir(record["path"])]
    direct = named(os.path.basename(os.path.abspath(folder)), os.path.join(glob.escape(folder), "*"))
    found, taken = [], set()
    for record in below + [direct] * (len(below) < len(records)):
        while record["name"] in taken:
            record["name"] += "_"
        taken.add(record["name"])
        files, other = local_files(record["path"])
        if files:
            found.append(record)
        else:
            log.info("%s: nothing to read, passed over: %s", record["path"], listed(other) or "an empty folder")
    if not found:
        raise Refused(f"--docs={folder}: no file that can be read in it or in its sub-folders")
    return found


def within(seconds, function):
    """function() in a thread, given up after `seconds`: looking a name up or asking for a list may block for ever.
    Raises TimeoutError, and whatever the function raises."""
    thread = multiprocessing.pool.ThreadPool(1)
    try:
        return thread.apply_async(function).get(seconds)
    except multiprocessing.TimeoutError:
        raise TimeoutError(f"no answer within {seconds} s") from None
    finally:
        thread.close()


@functools.cache
def hub_problem():
    """Why the Hub cannot be used, or ""."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    import urllib.request

    from huggingface_hub.constants import ENDPOINT
    url = f"{ENDPOINT}/api/datasets/{NAMED['auto'][0]['path']}"
    try:
        within(PROBE_S, lambda: urllib.request.urlopen(url, timeout=PROBE_S).close())
    except Exception as error:  # 401, 404, ... are answers too: reading the first row says what is wrong
        return f"{ENDPOINT}: {error}" * (getattr(error, "code", 500) >= 500)
    return ""


def both_ends(path):
    """crc32 of the first and the last 64 KiB of a file, by which one that was edited is known."""
    with open(path, "rb") as file:
        first = file.read(1 << 16)
        file.seek(max(0, os.path.getsize(path) - (1 << 16)))
        return zlib.crc32(file.read(), zlib.crc32(first))


def resolve(record, settings, begun, total_weight):
    """A record with what it stands for today: Hub commit or digest of the files, share, held-out fraction."""
    source = {**RECORD, **record, "commit": None}
    source["hub"] = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source["path"])) and not os.path.exists(source["path"])
    budget, size = settings.budget_tokens or HUB_TOKENS * source["hub"], 0
    source["share_tokens"] = share = max(min(1, budget), int(budget * source["weight"] / total_weight))  # 0: all
    if source["hub"]:
        for old in begun.get("sources", []):
            if all(old.get(key) == source[key] for key in ("name", "path", "revision")):
                source["commit"] = old.get("commit")
    else:
        files, other = local_files(source["path"])
        if other:
            log.info("source %s: passed over: %s", source["name"], listed(other))
        seen = [(os.path.basename(file), os.path.getsize(file), both_ends(file)) for file in files]
        if not seen:
            raise Refused(f"source {source['name']}: {source['path']} has no file that can be read")
        size = sum(n * (4 if file.endswith((".gz", ".zst", ".parquet")) else 1) for file, n, _ in seen)
        source |= dict(files=len(seen), bytes=size, digest=hashlib.sha256(json.dumps(seen).encode()).hexdigest())
    expected = max(1, min(share or size / 4, size / 4 or share))  # tokens, at four bytes each
    source["held_out"] = min(0.1, min(max(0.005 * expected, 1e5), 5e6) / expected)  # for val, and again for test
    return source


def make_recipe(settings, begun):
    """What decides every byte, of the settings and of what they find; begun: the recipe that is there already."""
    named, fallback, auto = dict(NAMED), False, settings.sources == ("auto",)
    if auto and settings.docs:
        named["auto"] = []
    elif auto and (not begun or begun.get("fallback")) and hub_problem():
        named["auto"], fallback = named["embedded"], True
        log.warning("NOTICE: the Hub cannot be used: %s.\nNOTICE: %s gets the embedded corpus, the Python standard "
                    "library of this machine, not the real mixture.", hub_problem(), settings.data_dir)
    records = docs_sources(settings.docs) if settings.docs else []
    for source in settings.sources:
        records += named.get(source, [source]) if isinstance(source, str) else [source]
    for record in records:
        if (not isinstance(record, dict) or not {"name", "path"} <= set(record) <= set(RECORD)
                or not all(isinstance(record[key], str) for key in ("name", "path"))
                or not isinstance(record.get("weight", 1), (int, float)) or not 0 < record.get("weight", 1) < math.inf
                or record.get("kind") not in (None, "prose", "code")):
            raise Refused(f"sources: {record!r} is not auto, embedded or a dict with name, path and maybe "
                          f"{', '.join(list(RECORD)[2:])}; weight must be over 0, kind prose or code")
    names = [record["name"] for record in records]
    if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"\w[\w.-]*", name) for name in names):
        raise Refused(f"sources need different names of letters, digits, '.', '-' and '_', got {names}")
    total_weight = sum(record.get("weight", 1.0) for record in records)
    recipe = dict(schema=1, vocab_size=settings.vocab_size, budget_tokens=settings.budget_tokens, seed=settings.seed,
                  fallback=fallback, sources=[resolve(record, settings, begun, total_weight) for record in records])
    try:
        return json.loads(json.dumps(recipe))  # as it will come back from disk, where a tuple is a list
    except TypeError as error:
        raise Refused(f"sources: {error}; they are of text, numbers, lists and dicts") from None

# ---- reading ---------------------------------------------------------------------------------------------------------


def patiently(read, source, path, done=0):
    """What read(done) yields, `done` being how many there were before. A Hub that fails is asked for what is left,
    five times in a row, with the wait shown. Raises Refused when that is of no use."""
    failures = 0
    while True:
        try:
            for item in read(done):
                done, failures = done + 1, 0
                yield item
            return
        except Refused:
            raise
        except Exception as error:
            failures += 1
            status = getattr(getattr(error, "response", None), "status_code", None)
            why = f"source {source['name']}, {path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if (not source["hub"] or failures > 5 or status in (401, 403, 404) or isinstance(
                    error, (FileNotFoundError, ValueError, LookupError, RuntimeError))):
                raise Refused(why + ("" if source["hub"] else ": mend that file or take it away, then --overwrite=True")
                              ) from None
            log.warning("%s; trying again in %d s", why, 2**failures)
            time.sleep(2**failures)


def files_of(source):
    """The files of a source in the order they are read; of a Hub data set hf:// paths at its commit, as its card,
    `config`, `data_dir` and `data_files` name them for the split."""
    def ask():
        import datasets
        names = datasets.load_dataset_builder(
            source["path"], source["config"], data_dir=source["data_dir"], data_files=source["data_files"],
            revision=source["commit"] or source["revision"]).config.data_files or {}
        if not names.get(source["split"]):
            raise Refused(f"no files for the split '{source['split']}', only for {', '.join(map(str, names))}")
        return list(names[source["split"]])
    if not source["hub"]:
        return local_files(source["path"])[0]
    files = next(patiently(lambda _: [within(LIST_S, ask)], source, source["path"]))
    if strange := {ending(path) for path in files} - LINES - {"parquet"}:
        raise Refused(f"only parquet files and JSON lines are read, not .{' .'.join(sorted(strange))}")
    return files


def records(source, path, start):
    """(raw, bytes) of the records of a file from number `start` on. raw: bytes of a line, of the whole file or of a
    text in a parquet column, None for a null there; {field: value} of a parquet column of anything else."""
    if source["path"] == "python:topics":
        from pydoc_data.topics import topics
        yield from [(text.encode(), len(text)) for text in topics.values()][start:]
        return
    if source["hub"]:
        import fsspec
        file = within(LIST_S, lambda: fsspec.filesystem("hf").open(path, block_size=FETCH_BYTES))
    else:
        file = open(path, "rb")
    with file:
        if ending(path) == "parquet":
            import pyarrow.parquet
            rows = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)  # one page after the other
            column = source["text_field"].partition(".")[0]
            if column not in (names := rows.schema_arrow.names):
                raise Refused(f"{path} has no field '{column}', only {', '.join(names)}")
            is_text = column == source["text_field"] and str(rows.schema_arrow.types[names.index(column)]) in (
                "string", "large_string")
            for group in range(rows.num_row_groups):
                if start >= (count := rows.metadata.row_group(group).num_rows):
                    start -= count
                    continue
                for batch in rows.iter_batches(64, [group], [column]):
                    values = batch[0].cast(pyarrow.large_binary()) if is_text else batch  # workers decode
                    yield from ((row, batch.nbytes // len(batch)) for row in values.to_pylist()[start:])
                    start = max(0, start - len(batch))
            return
        if packed := {"gz": "gzip", "zst": "zstd"}.get(path.lower().rpartition(".")[2]):
            import pyarrow
            file = pyarrow.input_stream(file, packed)
        unpacked = io.BufferedReader(file, 1 << 18)
        if ending(path) not in LINES:  # in pieces: read(n) would allocate all n bytes first
            pieces = itertools.takewhile(len, (unpacked.read(1 << 20) for _ in range(-(-MAX_BYTES >> 20))))
            if len(whole := b"".join(pieces)) >= MAX_BYTES:
                raise Refused(f"{path} is one document of over 2 GB: cut it, or write JSON lines, a document a line")
            unpacked = [whole]
        yield from ((raw, len(raw)) for raw in itertools.islice(unpacked, start, None))


def check_hub(source):
    """Pin the commit of today and read one row, before any work. Raises Refused."""
    try:
        path = files_of(source)[0]
        source["commit"] = re.search(r"@([0-9a-f]{40})/", path)[1]
        raw, _ = next(patiently(functools.partial(records, source, path), source, path), (None, 0))
        text_of(f"{path}:1", raw, source["text_field"])
    except Refused as error:
        raise Refused(f"field '{source['text_field']}' of source {source['name']} cannot be read: {error} "
                      "(private or gated: set HF_TOKEN)") from None


def batches(source, files, state=None, most=math.inf, wanted=lambda where: True):
    """([(where, kind, raw), ...], bytes read, state behind them): the same batches however often it is started again.

    state: [file, records read of it], which JSON can hold; None before the first and behind the last record.
    `most`: bytes to read of each file. `wanted`: False for a record that is passed over.
    """
    first, number = state or (0, 0)
    batch, size = [], 0
    for at, path in list(enumerate(files))[first:]:
        kind, left = source["kind"] or ("code" if ending(path) in CODE else "prose"), most
        for raw, cost in patiently(functools.partial(records, source, path), source, path, number):
            number, size, left = number + 1, size + max(cost, 100), left - cost
            if wanted(where := f"{path}:{number}"):
                batch.append((where, kind, raw))
            if size >= BATCH_BYTES:
                yield batch, size, [at, number]
                batch, size = [], 0
            if left < 0:
                break
        number = 0
    yield batch, size, None

# ---- cleaning, by the worker processes -------------------------------------------------------------------------------


def field_of(value, names):
    """The text behind a dotted name; of a list on the way every item's, a blank line between."""
    if isinstance(value, list):
        return "\n\n".join(field_of(item, names) for item in value)
    return field_of(value[names[0]], names[1:]) if names else value


def text_of(where, raw, field):
    """(text, its UTF-8 bytes, share of characters that were none) of a record. Raises Refused when it is malformed."""
    bad = 0
    if isinstance(raw, bytes):
        text = raw.decode("utf-8", "replace")
        if "\ufffd" in text:
            bad = text.count("\ufffd") - raw.count("\ufffd".encode())
        if ending(where.rpartition(":")[0]) not in LINES:
            bad = len(text) if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else bad  # a UTF-16 mark: all is lost
            return text, text.encode() if bad else raw, bad / max(1, len(text))
        if not raw.strip(b"\xef\xbb\xbf \t\r\n"):
            return "", b"", 0.0
        try:
            raw = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise Refused(f"{where}: not one JSON object ({error})") from None
    try:
        text = field_of(raw, field.split("."))
        bad = min(bad, text.count("\ufffd"))  # the others are in another field
        return text, text.encode(), bad / max(1, len(text))
    except UnicodeEncodeError:  # "\ud83d" in JSON
        text, lone = SURROGATE.subn("\ufffd", text)
        return text, text.encode(), (bad + lone) / len(text)
    except (AttributeError, TypeError, LookupError):
        raise Refused(f"{where}: the field '{field}' is missing or holds no text") from None


def shorter(run):
    return b"\n\n" if run[0].count(b"\n") > 1 else b"\n" if b"\n" in run[0] else run[0][:64]


def clean(text, given, kind, tally):
    """(text, its UTF-8 bytes) as it is encoded, from the same as they were `given`. `tally` counts the documents that
    a rule changed.

    Layout and composition are touched in prose only. Rules on bytes are some ten times faster than by regex.
    """
    def apply(rule, new):
        tally[f"cleaned {rule}"] += new != data
        return new
    data = given
    data = apply("bom", data.removeprefix(b"\xef\xbb\xbf"))
    lines = data.replace(b"\r\n", b"\n")
    old_mac = 0 < lines.count(b"\r") > lines.count(b"\n")  # there a carriage return alone ends a line
    data = apply("crlf", lines.replace(b"\r", b"\n") if old_mac else lines)
    flat = data.translate(BLANK, CONTROLS)
    data = apply("control", data if len(flat) == len(data) else data.translate(None, CONTROLS))
    if kind == "prose" and b" " * 65 in flat:  # found ten times as fast as by the expression
        data = apply("white_space", LONG_SPACE.sub(shorter, data))
    text = text if data == given else data.decode()
    if kind == "prose" and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
        data = apply("nfc", text.encode())
    return text, data


def usable(batch, source, skip_bad, tally):
    """(where, text, its bytes, digest, split) of the usable records of a batch; `tally` counts the others by reason.

    The split hangs on nothing but the 128-bit digest of the document without its white space.
    """
    for where, kind, raw in batch:
        try:
            text, data, bad = text_of(where, raw, source["text_field"])
        except Refused as error:
            if not skip_bad:
                raise Refused(f"{error}; --skip_bad=True skips and counts such records") from None
            tally["dropped malformed"] += 1
            continue
        if bad > 0.01:
            tally["dropped not_utf8"] += 1
            if tally["dropped not_utf8"] <= 3:
                tally[f"not_utf8 {where}"] += 1
            continue
        tally["cleaned not_utf8"] += bad > 0
        text, data = clean(text, data, kind, tally)
        words = data.translate(None, b" \t\n")
        if len(words) < MIN_BYTES:
            tally["dropped too_short" if words else "dropped empty"] += 1
            continue
        digest = hashlib.blake2b(words, digest_size=16).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        split = 1 if place < source["held_out"] else 2 if place >= 1 - source["held_out"] else 0
        yield where, text, len(data), digest, split
