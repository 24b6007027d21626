"""The routes over HTTP, and the command itself."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from infembed_ray.cli.main import main
from infembed_ray.view.records import RecordsQuery
from infembed_ray.view.server import create_app, open_view
from tests.support.ports import free_port
from tests.view.outputs import synthesis_rows, write_synthesis

pytestmark = pytest.mark.integration


class Server:
    """A view of a directory at a free port of this machine."""

    def __init__(self, directory: Path) -> None:
        self.view = open_view(directory)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._server = uvicorn.Server(uvicorn.Config(create_app(self.view), log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def get(self, path: str, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of a path."""
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers)) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def rows(self, **asked: object) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a page of rows."""
        status, _, body = self.get(f"rows?{urlencode(asked)}")
        return status, json.loads(body)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "records": write_synthesis(tmp_path_factory.mktemp("records"), synthesis_rows()),
    }


@pytest.fixture(scope="module", params=["records"])
def server(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Server]:
    with Server(directories[request.param]) as running:
        yield running


def test_every_file_of_the_page_is_served_and_none_leads_elsewhere(server: Server) -> None:
    page = server.get("")[2].decode()
    linked = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert len(linked) == 4
    scripts = {"pages/shared.js", "playground/page.js"}
    for path in linked | scripts:
        status, headers, body = server.get(path)
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        assert server.get(path, **{"If-None-Match": headers["ETag"]})[0] == 304
        assert set(re.findall(rb"https?://[^\"'\s]+", body)) <= {b"http://www.w3.org/2000/svg"}
    assert not re.search(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=", page)


def test_the_policy_allows_only_the_pages_own_files_and_no_markup_from_strings(server: Server) -> None:
    sources = dict(part.strip().split(" ", 1) for part in server.get("")[1]["Content-Security-Policy"].split(";"))
    assert sources["default-src"] == sources["frame-ancestors"] == sources["trusted-types"] == "'none'"
    assert sources["script-src"] == sources["style-src"] == sources["connect-src"] == "'self'"


def test_a_foreign_host_is_refused_against_dns_rebinding(server: Server) -> None:
    for path in ("", "rows", "pages/shared.js"):
        status, _, body = server.get(path, Host="evil.example")
        assert (status, json.loads(body)["error"]["code"]) == (403, "foreign_host")


def test_a_page_of_rows_is_that_of_the_data(directories: dict[str, Path]) -> None:
    with Server(directories["records"]) as server:
        asked = {"kind": "rejected", "q": "aspirin", "page": 2}
        assert server.rows(**asked) == (200, json.loads(json.dumps(server.view.page(RecordsQuery(**asked)))))
        assert server.get("rows")[1]["Cache-Control"] == "no-store"


@pytest.mark.parametrize("wrong", [{"page": "x"}, {"page": 0}, {"nothing": 1}])
def test_an_invalid_query_is_a_400_that_names_the_field(server: Server, wrong: dict[str, object]) -> None:
    status, answer = server.rows(**wrong)
    assert (status, answer["error"]["param"]) == (400, next(iter(wrong)))


def test_other_paths_and_methods_have_the_apis_errors(server: Server) -> None:
    status, _, body = server.get("nowhere")
    assert (status, json.loads(body)["error"]["type"]) == (404, "invalid_request_error")
    request = urllib.request.Request(server.url + "rows", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 405


def test_the_pages_are_in_the_package() -> None:
    names = {file.name for file in (resources.files("infembed_ray.view") / "pages").iterdir()}
    scripts = {"records.js", "shared.js"}
    assert names == {"view.html", "records.html", "view.css"} | scripts


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_the_url_imports_no_ray_or_torch_and_ends_at_once_with_ctrl_c(
    directories: dict[str, Path],
) -> None:
    program = (
        "import sys; from infembed_ray.cli.main import main; status = main(sys.argv[1:]); "
        "assert not {'ray', 'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    port = free_port()
    for directory in directories.values():
        command = [sys.executable, "-c", program, "view", str(directory), f"port={port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"http://127.0.0.1:{port}/" in line
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/rows") as answer:  # its connection stays open
            assert json.load(answer)["rows"]
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        assert (process.returncode, output, errors) == (0, "", "")


def test_a_port_in_use_is_named(directories: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(directories["records"]), f"port={port}"]) == 2
    assert f"port={port}: cannot be bound" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nope"], "DIR=/nope: no such file"),
        ([str(Path(__file__).parent)], "holds no records.parquet"),
        ([".", "port=x"], "port='x'"),
        ([".", "prot=1"], "did you mean port?"),
    ],
)
def test_what_is_no_output_or_no_setting_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", *arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
