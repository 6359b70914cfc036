"""prepare.py against a local endpoint that speaks as much of the Hub's protocol as reading a data set takes, and that
refuses, stalls, breaks off and recovers on request."""
import gzip
import hashlib
import io
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest
from test_prepare import documents_of, everything, meta_of, prose, recipe, run, sums

CARD = b"""---
configs:
- config_name: all
  data_files: [{split: train, path: "all/*.parquet"}]
- config_name: sample
  data_files: [{split: train, path: "sample/*.parquet"}]
---
"""
ROWS = [60, 900, 60]  # of the files of o/rows: the second is too large to come with its footer in one answer
NO_WAIT = "import time; time.sleep = lambda s: None\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path = self.server, urllib.parse.unquote(urllib.parse.urlparse(self.path).path).strip("/")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.asked.append((path, self.headers.get("Range")))
        commit = (re.findall(r"/([0-9a-f]{40})(?:/|$)", path) or [server.commit])[0]
        answer = server.rule(path) if server.rule else None
        if answer == "silence":
            return server.over.wait(60)
        if isinstance(answer, int):
            return self.answer({}, answer, Retry_After=7)
        repo = server.repos.get("/".join(path.removeprefix("api/").split("/")[1:3]))
        if repo is None:
            return self.answer(dict(error="Repository not found"), 404, X_Error_Code="RepoNotFound")
        if part := re.fullmatch(r"api/datasets/[^/]+/[^/]+/tree/[^/]+/?(.*)", path):
            top = part[1] + "/" * bool(part[1])
            names = {top + name.removeprefix(top).split("/")[0] for name in repo if name.startswith(top)}
            rows = [dict(type="file" if name in repo else "directory", oid="0" * 40, size=len(repo.get(name, "")),
                         path=name) for name in sorted(names)]
            return self.answer(rows) if rows else self.answer({}, 404, X_Error_Code="EntryNotFound")
        if path.startswith("api/"):
            return self.answer(dict(id="", sha=commit, tags=[], siblings=[dict(rfilename=f) for f in repo]))
        data = repo.get(path.split("/", 5)[5])
        if data is None:
            return self.answer({}, 404, X_Error_Code="EntryNotFound")
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-").groups()
        part = data[int(first):int(last or len(data)) + 1]
        self.answer(part, 206 if self.headers.get("Range") else 200, answer == "cut", X_Repo_Commit=commit,
                    ETag=f'"{hashlib.sha1(data).hexdigest()}"',
                    Content_Range=f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")

    do_HEAD = do_POST = do_GET

    def answer(self, data, status=200, cut=False, **headers):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in dict(headers, Content_Length=len(data)).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:len(data) // 2] if cut else data)
        self.close_connection = cut

    def log_message(self, *_):
        pass


def parquet(column, values):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(len(values))), column: values}), file, row_group_size=20)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.over = True, threading.Event()
    server.commit, server.rule, server.asked = "a" * 40, None, []
    nested = [[dict(path="a.py", content=a), dict(path="b.py", content=b)]
              for a, b in zip(prose(60, 3), prose(60, 4), strict=True)]
    lines = [json.dumps(dict(body=text, meta=dict(n=i))).encode() + b"\n" for i, text in enumerate(prose(90, 5))]
    server.repos = {
        "o/rows": {"README.md": CARD, "all/0.parquet": parquet("text", prose(9, 9)),
                   **{f"sample/{i}.parquet": parquet("text", prose(ROWS[i], 10 + i)) for i in range(3)}},
        "o/nested": {"data/train-0.parquet": parquet("files", nested)},
        "o/lines": {"x.json.gz": gzip.compress(b"".join(lines[:50])), "y.jsonl": b"".join(lines[50:])}}
    server.env = dict(HF_HUB_OFFLINE="0", HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
                      HF_HOME=f"{tmp_path}/cache", HF_TOKEN="")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def sources():
    return [dict(name="en", path="o/rows", config="sample"), dict(name="lines", path="o/lines", text_field="body"),
            dict(name="repo", path="o/nested", text_field="files.content", kind="code")]


def path_of(tmp_path, name, records=None, **settings):
    return recipe(str(tmp_path), sources=records or sources(), data_dir=f"{tmp_path}/{name}", **settings)


@pytest.fixture
def whole(tmp_path, hub):
    """The sums of an undisturbed run."""
    run(path_of(tmp_path, "whole"), env=hub.env)
    hub.asked.clear()
    return sums(f"{tmp_path}/whole")


def test_rows_nested_lists_and_packed_lines_become_documents_and_todays_commit_is_pinned(tmp_path, hub):
    out = run(path_of(tmp_path, "d"), env=hub.env)
    found = documents_of(f"{tmp_path}/d", "train")
    texts = dict(en=[text for i in range(3) for text in prose(ROWS[i], 10 + i)], lines=prose(90, 5),
                 repo=[f"{a}\n\n{b}" for a, b in zip(prose(60, 3), prose(60, 4), strict=True)])
    for name, expected in texts.items():
        assert found[name] == [text for text in expected if text in set(found[name])] and len(found[name]) > 50
        assert f"NOTICE: source {name} has only" in out  # far less than its share: nothing is repeated
    assert sum(everything(f"{tmp_path}/d").values()) == 1020 + 90 + 60
    assert [source["commit"] for source in meta_of(f"{tmp_path}/d")["recipe"]["sources"]] == ["a" * 40] * 3
    assert not any(path.endswith("all/0.parquet") for path, _ in hub.asked)
    hub.commit = "b" * 40
    assert "nothing to do" in run(path_of(tmp_path, "d"), env=hub.env)


def test_a_hub_that_breaks_off_and_stays_away_for_a_while_gives_the_same_bytes(tmp_path, hub, whole):
    config = path_of(tmp_path, "d")
    run(config, env=hub.env, code=9, patch="prepare.encode_source = lambda *_: os._exit(9)")  # the tokenizer is made
    asked, troubles = [0], ["cut", "cut"] + [503] * 9  # the client itself asks six times: this ends one try of ours

    def rule(path):
        asked[0] += path.endswith("sample/1.parquet")
        return troubles.pop(0) if troubles and path.endswith("sample/1.parquet") and asked[0] > 2 else None
    hub.rule = rule
    several = "prepare.documents.FETCH_BYTES = 100"  # requests for one file
    out = run(config, env=hub.env, patch=NO_WAIT + several)
    assert not troubles and "503" in out and "trying again in 2 s" in out
    assert sums(f"{tmp_path}/d") == whole


def test_a_hub_that_does_not_come_back_ends_the_run_and_the_same_command_goes_on_at_the_pinned_commit(tmp_path, hub,
                                                                                                      whole):
    config = path_of(tmp_path, "d")
    run(config, env=hub.env, code=9, patch="prepare.encode_source = lambda *_: os._exit(9)")  # the tokenizer is made
    hub.rule = lambda path: 503 if path.endswith("sample/2.parquet") else None
    small = NO_WAIT + "prepare.SHARD_BYTES = prepare.documents.BATCH_BYTES = 10_000"
    out = run(config, env=hub.env, code=2, patch=small)
    assert out.count("trying again") == 5 and "source en, hf:" in out and "503" in out
    hub.rule, hub.commit = None, "b" * 40
    hub.asked.clear()
    run(config, env=hub.env)
    assert sums(f"{tmp_path}/d") == whole
    assert not [path for path, _ in hub.asked if "sample/0.parquet" in path or "b" * 40 in path]


@pytest.mark.parametrize("why, record, trouble", [
    ("401", {}, ("nested/resolve/main/README.md", 401)),
    ("403", {}, ("resolve/" + "a" * 40 + "/data/train-0.parquet", 403)),
    ("o/none", dict(path="o/none"), ()), ("404", {}, ("resolve/" + "a" * 40 + "/data/train-0.parquet", 404)),
    ("no field 'content', only n, files", dict(text_field="content"), ()),
    ("holds no text", dict(text_field="files.text"), ()), ("only for train", dict(split="all"), ()),
    ("'all', 'sample'", dict(path="o/rows"), ()), ("'sample'", dict(path="o/rows", config="samples"), ()),
    ("only parquet files and JSON lines are read, not .csv", dict(path="o/table"), ())])
def test_what_cannot_be_read_is_refused_by_name_before_any_work(tmp_path, hub, why, record, trouble):
    hub.repos["o/table"] = {"x.csv": b"text\nhello\n"}
    hub.rule = lambda path: trouble[1] if trouble and path.endswith(trouble[0]) else None
    record = dict(sources()[2], name="mine") | record
    out = run(path_of(tmp_path, "d", [sources()[1], record]), env=hub.env, code=2)
    assert why in out and f"field '{record['text_field']}' of source mine" in out and "HF_TOKEN" in out
    assert "trying again" not in out and not (tmp_path / "d" / "parts").exists()


def test_a_hub_that_asks_for_patience_is_asked_again_with_the_wait_shown_but_not_for_ever(tmp_path, hub, whole):
    left = [2]

    def rule(path):
        left[0] -= path.endswith("x.json.gz")
        return 429 if path.endswith("x.json.gz") and left[0] >= 0 else None
    hub.rule = rule
    assert "Waiting 8.0s" in run(path_of(tmp_path, "d"), env=hub.env, patch=NO_WAIT)  # Retry-After was 7
    assert sums(f"{tmp_path}/d") == whole
    left[0] = 10**6
    out = run(path_of(tmp_path, "e"), env=hub.env, patch=NO_WAIT, code=2)
    assert "field 'body' of source lines" in out and "429" in out and 10**6 - left[0] == 36  # six by six


def test_a_hub_that_answers_first_and_then_falls_silent_is_given_up(tmp_path, hub):
    hub.rule = lambda path: "silence" if "/tree/" in path else None
    out = run(path_of(tmp_path, "d"), env=hub.env, patch=NO_WAIT + "prepare.documents.LIST_S = 1", code=2)
    assert "field 'text' of source en" in out and "no answer within 1 s" in out


def test_the_tokenizer_sample_of_a_hub_source_takes_the_beginnings_of_files_from_end_to_end(tmp_path, hub):
    hub.repos["o/many"] = {f"train-{i:02d}.parquet": parquet("text", prose(20, 100 + i)) for i in range(48)}
    sample = path_of(tmp_path, "d", [dict(name="many", path="o/many")])
    run(sample, env=hub.env, code=9, patch="prepare.encode_source = lambda *_: os._exit(9)")
    assert {path[-10:-8] for path, _ in hub.asked if path.endswith("parquet")} == {f"{i:02d}" for i in range(0, 48, 3)}
