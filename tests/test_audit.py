"""`.ci/audit` before a server that answers as osv.dev: what fails, what is accepted, and what it says without a database."""

import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]


class Database(BaseHTTPRequestHandler):
    """Knows one vulnerability, of pip."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        finding = {"id": "GHSA-aaaa-bbbb-cccc", "summary": "made up", "aliases": [], "affected": []}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"vulns": [finding]} if asked["package"]["name"] == "pip" else {}).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def checkout(tmp_path):
    """A directory with the script and its list, so that the test may change the list."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def audit(checkout, port, **environment):
    return subprocess.run(
        [checkout / ".ci" / "audit", sys.executable],
        env=os.environ | {"OSV_URL": f"http://127.0.0.1:{port}/v1/query"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_database_it_says_that_nothing_was_checked(checkout):
    done = audit(checkout, free_port())
    assert done.returncode == 3
    assert "NOTHING WAS CHECKED: http://127.0.0.1:" in done.stderr
    assert audit(checkout, free_port(), UNCHECKED="0").returncode == 0


@pytest.mark.slow
def test_a_known_vulnerability_fails_unless_it_is_accepted_with_a_reason(checkout):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Database)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = audit(checkout, server.server_port)
        assert found.returncode == 1
        assert "GHSA-aaaa-bbbb-cccc" in found.stdout
        allowed = checkout / ".ci" / "audit-allowed.txt"
        allowed.write_text("GHSA-aaaa-bbbb-cccc\n")
        assert audit(checkout, server.server_port).returncode == 2
        allowed.write_text("GHSA-aaaa-bbbb-cccc only while packages are installed, until pip 27\n")
        assert audit(checkout, server.server_port).returncode == 0
    finally:
        server.shutdown()
