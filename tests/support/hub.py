"""A stand-in for the Hugging Face hub: as much of its HTTP interface as downloads of data sets need.

It serves the repositories of a directory, `<root>/<owner>/<name>`, the same at every commit. Parquet files are listed with
their SHA-256, as the hub lists large files; other files have none.
"""

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
_TREE = re.compile(r"/api/datasets/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?")
_FILE = re.compile(r"/datasets/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """State of a hub: what was requested."""

    root: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    """`<owner>/<name>/<file>` of every download, in order."""


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
