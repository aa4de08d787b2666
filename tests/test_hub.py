"""Names on the Hub: a small server answers as the Hub does, and its log says what was asked for."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils import validate_repo_id

from gptcli import shipped
from gptcli.checkpoint import hub
from gptcli.errors import GptcliError
from gptcli.source import open_model

NAME, MOVED = "toys/cat", "cat"
BAD_TOKEN = "Invalid credentials in Authorization header"  # noqa: S105 (what the Hub says)
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
INDEX = json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}})
PLAIN = ("config.json", "tokenizer.json", "merges.txt")
SINGLE = (*PLAIN, "model.safetensors")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARDED = (*PLAIN, "model.safetensors.index.json", *SHARDS)
OTHERS = (
    ".gitattributes", "README.md", "flax_model.msgpack", "generation_config.json", "model.gguf", "modeling_cat.py",
    "onnx/model.onnx", "original/consolidated.00.pth", "tf_model.h5",
)  # fmt: skip


class Server(ThreadingHTTPServer):
    """What the Hub has, and what it was asked: `files` of each name, `faults` by the end of a path."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, tuple[str, ...]] = {}
        self.faults: dict[str, str] = {}
        self.log: list[tuple[str, str]] = []
        self.agents: set[str] = set()
        self.commits = dict(COMMITS)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> set[str]:
        """The files whose bytes were asked for since the last time; everything asked for is forgotten."""
        paths = {
            path.split("/resolve/")[1].split("/", 1)[1] for verb, path in self.log if verb == "GET" and "/res" in path
        }
        self.log.clear()
        return paths


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(self.path).partition("?")[0]
        self.server.log.append((self.command, path))
        self.server.agents.add(self.headers["User-Agent"])
        fault = next((fault for end, fault in self.server.faults.items() if path.endswith(end)), "")
        name, _, rest = path.removeprefix("/").removeprefix("api/models/").partition("/resolve/")
        if path.startswith("/api/models/"):
            *name, kind, revision = path.split("/")[3:]
            name = "/".join(name)
        else:
            kind, (revision, _, file) = "resolve", rest.partition("/")
        commit = self.server.commits.get(revision, revision)
        files = self.server.files.get(name)
        if name == MOVED:
            self.answer(307, b"", {"Location": path.replace(f"/{MOVED}/", f"/{NAME}/")})
        elif fault.isdigit():
            self.answer(int(fault), b"")
        elif fault in ("GatedRepo", BAD_TOKEN):
            self.answer(403 if fault == "GatedRepo" else 401, b"", {"X-Error-Code": fault, "X-Error-Message": fault})
        elif fault == "HTML":
            self.answer(200, b"<html>sign in to the airport</html>")
        elif files is None:
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif commit not in self.server.commits.values():
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            listed = [{"rfilename": file} for file in files]
            self.answer(200, json.dumps({"id": name, "sha": commit, "siblings": listed}).encode())
        elif kind == "tree":
            entries = [
                {"type": "file", "path": file, "size": len(body(file, commit)), "oid": "0" * 40} for file in files
            ]
            self.answer(200, json.dumps(entries).encode())
        elif file not in files or fault == "EntryNotFound":
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            content = body(file, commit)
            headers = {"X-Repo-Commit": "c" * 40 if fault == "wrong commit" else commit}
            headers["ETag"] = f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"'
            if file.endswith((".safetensors", ".bin")):
                headers |= {
                    "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                    "X-Linked-Size": str(len(content)),
                }
            if fault == "no ETag":
                headers = {"X-Repo-Commit": commit}
            if fault == "no commit":
                del headers["X-Repo-Commit"]
            if fault == "short" and self.command == "GET":
                content = content[:-5]
            if fault == "cut" and self.command == "GET":
                headers["Content-Length"] = str(len(content))
                content = b"" if "Range" in self.headers else content[:5]
            self.answer(200, content, headers)

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def body(file: str, commit: str) -> bytes:
    return INDEX.encode() if file.endswith("index.json") else f"{file} at {commit}".encode()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with Server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        server.files[NAME] = (*SINGLE, *OTHERS)
        yield server
        server.shutdown()
        close_session()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    def block():
        monkeypatch.setattr(socket, "socket", refuse)
        monkeypatch.setattr(socket, "create_connection", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    return block


def contents(snapshot: Path) -> set[str]:
    for path in snapshot.rglob("*"):
        assert path.is_dir() or path.read_bytes() == body(path.name, snapshot.name)
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "source, expected",
    {
        "gpt2": True, "org/name": True, "Org_1/name-2.5B": True, "a" * 96: True, "v1.0": True,
        "": False, ".": False, "..": False, "./x": False, "../x": False, "/x": False, "~": False, "~/x": False,
        "a/b/c": False, "org/": False, "/name": False, "-x": False, "x-": False, ".x": False, "x.": False,
        "a--b": False, "a..b": False, "a b": False, "é/x": False, "x.git": False, "a" * 97: False, "x\n": False,
        "C:\\x": False,
        "models/lama": False, "lone.safetensors": False, "org/x.gguf": False, "x.yaml": False, "a/b.bin": False,
        "x.PT": False, "a/config.json": False,
    }.items(),
)  # fmt: skip
def test_is_name(source, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    assert hub.is_name(source) is expected
    if expected:
        validate_repo_id(source)


@pytest.mark.parametrize(
    "files, expected",
    [
        (SINGLE, SINGLE),
        ((*SHARDED, "model-00003-of-00003.safetensors"), SHARDED),
        ((*SINGLE, "pytorch_model.bin", "model.safetensors.index.json", *SHARDS), SINGLE),
        ((*SHARDED, "pytorch_model.bin"), SHARDED),
        ((*PLAIN, "pytorch_model.bin"), (*PLAIN, "pytorch_model.bin")),
        ((*PLAIN, "pytorch_model.bin.index.json", *SHARDS), (*PLAIN, "pytorch_model.bin.index.json", *SHARDS)),
        (("config.json", "model.safetensors"), ("config.json", "model.safetensors")),
    ],
)
def test_fetch_takes_what_is_needed_once(server, no_network, capfd, files, expected):
    server.files[NAME] = (*files, *OTHERS)
    snapshot = hub.snapshot(NAME)
    assert snapshot.name == COMMITS["main"] and contents(snapshot) == set(expected)
    assert len([path for verb, path in server.log if verb == "GET" and "/resolve/" in path]) == len(expected)
    assert server.fetched() == set(expected)
    assert not any("torch" in agent or "agent" in agent for agent in server.agents)  # telemetry
    no_network()
    assert hub.snapshot(NAME) == hub.snapshot(NAME, "main") == hub.snapshot(NAME, COMMITS["main"]) == snapshot
    assert hub.snapshot(NAME, config_only=True) == hub.snapshot(NAME, offline=True) == snapshot
    assert not server.log and not capfd.readouterr().out


def test_config_only_then_the_rest(server):
    snapshot = hub.snapshot(NAME, config_only=True)
    resolve = f"/{NAME}/resolve/main/config.json"
    assert server.log == [("GET", f"/api/models/{NAME}/revision/main"), ("HEAD", resolve), ("GET", resolve)]
    assert contents(snapshot) == {"config.json"}
    server.log.clear()
    assert hub.snapshot(NAME, config_only=True) == snapshot and not server.log
    with pytest.raises(GptcliError, match=r"only config\.json of it in the cache"):
        hub.snapshot(NAME, offline=True)
    assert hub.snapshot(NAME) == snapshot and contents(snapshot) == set(SINGLE)
    assert server.fetched() == set(SINGLE) - {"config.json"}


def test_revision(server):
    assert hub.snapshot(NAME, "v1").name == COMMITS["v1"]
    with pytest.raises(GptcliError, match=r"cached: --revision v1"):
        hub.snapshot(NAME, offline=True)
    hub.snapshot(NAME, COMMITS["main"])
    assert hub.snapshot(NAME, COMMITS["main"], offline=True).name == COMMITS["main"]
    server.log.clear()
    assert hub.snapshot(NAME).name == COMMITS["main"] and server.fetched() == set()
    server.commits["main"] = "d" * 40
    assert hub.snapshot(NAME).name == COMMITS["main"] and not server.log  # cached: not asked again
    names = [(NAME, "main"), (NAME, "v1")]
    assert [found[:2] for found in hub.cached_names()] == names
    assert hub.cached_names()[0][2] == sum(len(body(file, COMMITS["main"])) for file in SINGLE)


def test_a_name_that_has_moved(server, no_network):
    """The Hub answers for the first names, which had no organisation, with where they are now."""
    snapshot = hub.snapshot(MOVED)
    assert contents(snapshot) == set(SINGLE) and snapshot.parent.parent.name == "models--cat"
    no_network()
    assert hub.snapshot(MOVED) == snapshot


def test_offline_and_not_cached(server, no_network, monkeypatch):
    hub.snapshot(NAME)
    server.log.clear()
    no_network()
    with pytest.raises(GptcliError) as caught:
        hub.snapshot("toys/cut", offline=True)
    assert "not in the cache" in caught.value.message and "--offline was given" in caught.value.message
    assert f'did you mean "{NAME}"?' in caught.value.hint and "without --offline" in caught.value.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.snapshot(NAME).name == COMMITS["main"]
    with pytest.raises(GptcliError, match=r"HF_HUB_OFFLINE is set.*HF_HUB_OFFLINE=0") as caught:
        hub.snapshot("dog")
    assert caught.value.code == "hub" and not server.log


def test_local_models_open_no_socket(server, no_network, tmp_path):
    sample, config = next(iter(shipped.samples().values())), next(iter(shipped.configs().values()))
    no_network()
    for source in (None, str(sample), sample.name, str(config), "gpt2-small"):
        open_model(source)
    with pytest.raises(GptcliError):
        open_model(str(tmp_path / "none"))
    assert not server.log


FAULTS = {
    "no such model": ({}, "toys/cot", None, r'no such model.*did you mean "toys/cat"\?.*HF_TOKEN'),
    "no such revision": ({}, NAME, "v9", r"no revision 'v9'; give a branch"),
    "gated": ({"config.json": "GatedRepo"}, NAME, None, r"access to it must be granted.*HF_TOKEN"),
    "wrong token": ({"revision/main": BAD_TOKEN}, NAME, None, r"refused access \(401\).*HF_TOKEN"),
    "server error": ({"revision/main": "500"}, NAME, None, r"the Hub failed \(HfHubHTTPError.*500.*try again"),
    "server error at a file": ({"model.safetensors": "503"}, NAME, None, r"the Hub failed.*503"),
    "server error at the tree": ({COMMITS["main"]: "502"}, NAME, None, r"gave less than it lists|the Hub failed.*502"),
    "not a Hub": ({"revision/main": "HTML"}, NAME, None, r"can't be reached.*JSONDecodeError"),
    "cut short": ({"model.safetensors": "cut"}, NAME, None, r"the download broke off.*; try again"),
    "short": ({"model.safetensors": "short"}, NAME, None, r"the download broke off.*should be of size"),
    "no ETag": ({"model.safetensors": "no ETag"}, NAME, None, r"doesn't answer as a Hub does.*ETag"),
    "no commit": ({"config.json": "no commit"}, NAME, None, r"doesn't answer as a Hub does.*X-Repo-Commit"),
    "wrong commit": ({"model.safetensors": "wrong commit"}, NAME, None, r"another commit; try again"),
    "lost since": ({"merges.txt": "EntryNotFound"}, NAME, None, r"the Hub failed.*404"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_and_leave_nothing_believed(server, monkeypatch, fault):
    faults, name, revision, expected = FAULTS[fault]
    if fault == "no such model":
        hub.snapshot(NAME, config_only=True)
    server.faults.update(faults)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between huggingface_hub's tries
    with pytest.raises(GptcliError, match=expected) as caught:
        hub.snapshot(name, revision)
    assert caught.value.code == "hub" and caught.value.hint and "\n" not in str(caught.value)
    assert not constants.HF_HUB_DISABLE_TELEMETRY
    with pytest.raises(GptcliError, match="in the cache"):
        hub.snapshot(name, revision, offline=True)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    server.faults.clear()
    if name == NAME and revision is None:
        assert contents(hub.snapshot(NAME)) == set(SINGLE)


@pytest.mark.parametrize(
    "files, expected",
    [
        (("model.gguf", "README.md"), r"no config\.json in this repository \(it has model\.gguf\)"),
        (
            ("config.json", "model.gguf", "model.onnx"),
            r"no model\.safetensors or pytorch_model\.bin.*\(it has model\.gguf",
        ),
        (SHARDED[:-1], r"no model-00002-of-00002\.safetensors, which model\.safetensors\.index\.json names"),
    ],
)
def test_repositories_that_lack_something(server, files, expected):
    server.files[NAME] = files
    with pytest.raises(GptcliError, match=expected):
        hub.snapshot(NAME)


def test_no_network(server, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    started = time.monotonic()
    with pytest.raises(GptcliError, match=r"the Hub can't be reached \(http.*ConnectError.*--offline"):
        hub.snapshot(NAME)
    assert time.monotonic() - started < 5


def test_interrupted_fetch_is_completed(server):
    server.files[NAME] = SHARDED
    server.faults[SHARDS[1]] = "404"
    with pytest.raises(GptcliError):
        hub.snapshot(NAME)
    server.faults.clear()
    server.log.clear()
    snapshot = hub.snapshot(NAME)
    assert contents(snapshot) == set(SHARDED) and SHARDS[1] in server.fetched()
    (snapshot / SHARDS[0]).resolve().unlink()  # a blob is lost: its link leads nowhere
    with pytest.raises(GptcliError, match=r"only .* of it in the cache"):
        hub.snapshot(NAME, offline=True)
    assert contents(hub.snapshot(NAME)) == set(SHARDED) and server.fetched() == {SHARDS[0]}


def test_snapshots_of_other_tools(server, no_network):
    """Without a listing, weights and a vocabulary will do; offline, weights alone; a shard without its index won't."""
    folder = Path(constants.HF_HUB_CACHE) / "models--toys--cat"
    snapshot = folder / "snapshots" / COMMITS["main"]
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMITS["main"])
    for file in ("config.json", SHARDS[0]):
        (snapshot / file).write_bytes(body(file, snapshot.name))
    with pytest.raises(GptcliError):
        hub.snapshot(NAME, offline=True)
    (snapshot / "model.safetensors").write_bytes(body("model.safetensors", snapshot.name))
    assert hub.snapshot(NAME, offline=True) == snapshot
    hub.snapshot(NAME)
    assert server.fetched() == {"tokenizer.json", "merges.txt"}
    (folder / "trees" / f"{snapshot.name}.json").unlink()
    no_network()
    assert hub.snapshot(NAME) == snapshot


def test_cached_names_of_a_broken_cache(server):
    assert hub.cached_names() == []
    cache = Path(constants.HF_HUB_CACHE)
    hub.snapshot(NAME, config_only=True)
    good = hub.cached_names()
    assert good == [(NAME, "main", len(body("config.json", COMMITS["main"])))]
    (cache / "models--a-file").write_text("")
    (cache / "models--no--snapshots").mkdir()
    (cache / "datasets--x--y" / "snapshots").mkdir(parents=True)
    for file in ("models--lost/snapshots/x/link", "models--loop/snapshots/y/link"):
        (cache / file).parent.mkdir(parents=True)
        (cache / file).symlink_to("link" if "loop" in file else "nowhere")
    (cache / "models--toys--cat" / "refs" / "odd").write_bytes(b"\xff\xfe")
    (cache / "models--toys--cat" / "refs" / "pr").mkdir()
    (cache / "models--toys--cat" / "snapshots" / "stray").write_text("")
    assert hub.cached_names() == good


CHILD = f"""
import json, socket, sys
from gptcli.checkpoint import hub
before = set(sys.modules)
path = hub.snapshot({NAME!r})
print(json.dumps([str(path), sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})]))
"""


def test_environment_and_imports(server, tmp_path):
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are heeded, and a cached snapshot loads no network library."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k.lower() != "http_proxy"}
    environment |= {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def run(**more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", CHILD], env=environment | more, capture_output=True, text=True, timeout=60
        )

    assert "HF_HUB_OFFLINE is set" in run(HF_HUB_OFFLINE="1").stderr and not server.log
    first = json.loads(run().stdout)
    assert Path(first[0]).is_relative_to(tmp_path / "home") and server.fetched() == set(SINGLE)
    server.shutdown()
    second = json.loads(run(HF_ENDPOINT="http://127.0.0.1:9").stdout)
    assert second[0] == first[0]
    assert not {"httpx", "httpx2", "requests", "ssl", "tqdm", "torch", "numpy"}.intersection(second[1])
