"""A stand-in for the Hugging Face hub: as much of its HTTP interface as downloads of data sets and uploads of models need.

It serves the repositories of a directory, `<root>/<owner>/<name>`, the same at every commit. Parquet files are listed with
their SHA-256, as the hub lists large files; other files have none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "beef"
"""The newest commit."""

_INFO = re.compile(r"/api/datasets/(?P<name>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/(datasets|models)/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?")
_PREUPLOAD = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/preupload/main")
_BATCH = re.compile(r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_COMMIT = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/commit/main")
_FILE = re.compile(r"/datasets/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """State of a hub: what was requested, and faults to inject."""

    root: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    """`<owner>/<name>/<file>` of every download, in order."""
    token: str | None = None
    """Token that uploads need."""
    created: list[dict[str, Any]] = field(default_factory=list)
    """Requests to create a repository."""
    commits: list[list[str]] = field(default_factory=list)
    """Files of each commit."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256."""


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := _INFO.fullmatch(path):
            self._info(found["name"], found["revision"])
        elif found := _TREE.fullmatch(path):
            self._tree(found["name"])
        elif found := _FILE.fullmatch(path):
            self._file(found["name"], found["file"], found["revision"], body=True)
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def do_HEAD(self) -> None:
        found = _FILE.fullmatch(unquote(urlsplit(self.path).path))
        assert found is not None, self.path
        self._file(found["name"], found["file"], found["revision"], body=False)

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._answer(200, b"", {})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if self.hub.token and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self._answer(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.hub.created.append(asked)
            self._json({"url": f"{self.hub.url}/{asked['organization']}/{asked['name']}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif _PREUPLOAD.fullmatch(path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {file: "lfs" if file.endswith(".safetensors") else "regular" for file in files}
            self._json({"files": [{"path": f, "uploadMode": mode, "shouldIgnore": False} for f, mode in modes.items()]})
        elif _BATCH.fullmatch(path):
            upload = {"upload": {"href": f"{self.hub.url}/object"}}
            self._json({"objects": [one | {"actions": upload} for one in json.loads(body)["objects"]]})
        elif found := _COMMIT.fullmatch(path):
            self._commit(self.hub.root / found["name"], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _commit(self, repository: Path, operations: list[dict[str, Any]]) -> None:
        changed = [operation["value"] for operation in operations if operation["key"] in ("file", "lfsFile")]
        for file in changed:
            path = repository / file["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.hub.objects[file["oid"]] if "oid" in file else base64.b64decode(file["content"]))
        for operation in operations:
            if operation["key"] == "deletedFile":
                (repository / operation["value"]["path"]).unlink()
        self.hub.commits.append(sorted(file["path"] for file in changed))
        self._json(
            {
                "commitUrl": f"{self.hub.url}/{repository.relative_to(self.hub.root)}/commit/{COMMIT}",
                "commitOid": COMMIT,
            }
        )

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _info(self, name: str, revision: str | None) -> None:
        repository = self.hub.root / name
        if not repository.is_dir():
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        siblings = [
            {"rfilename": file.relative_to(repository).as_posix(), "blobId": _git(file)} | _listed(file)
            for file in _files(repository)
        ]
        self._json({"id": name, "sha": revision or COMMIT, "siblings": siblings})

    def _tree(self, name: str) -> None:
        repository = self.hub.root / name
        entries: list[dict[str, Any]] = []
        for file in _files(repository):
            listed = _listed(file)
            if lfs := listed.get("lfs"):
                listed = listed | {"lfs": lfs | {"oid": lfs["sha256"]}}
            path = file.relative_to(repository).as_posix()
            entries.append({"type": "file", "path": path, "oid": _git(file)} | listed)
        self._json(entries)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, file: str, commit: str, body: bool) -> None:
        path = self.hub.root / name / file
        if not path.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        if body:
            self.hub.downloads.append(f"{name}/{file}")
        etag = _sha256(path) if _large(path) else _git(path)
        self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body)

    def _answer(self, status: int, content: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _files(repository: Path) -> list[Path]:
    return sorted(file for file in repository.rglob("*") if file.is_file())


def _listed(file: Path) -> dict[str, Any]:
    """Size of a file in a listing, and the SHA-256 of a large one."""
    size = file.stat().st_size
    return {"size": size} | (
        {"lfs": {"sha256": _sha256(file), "size": size, "pointerSize": 130}} if _large(file) else {}
    )


def _large(file: Path) -> bool:
    return file.suffix == ".parquet"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
