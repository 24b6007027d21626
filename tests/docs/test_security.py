"""The TLS example of docs/operations/security.md, run for real: HAProxy before an HTTP server."""

import http.client
import os
import re
import shutil
import ssl
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "security.md"


class Api(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())


@pytest.fixture
def proxy(tmp_path):
    """The port of HAProxy with the page's file, before a server that answers every path; and its certificate."""
    for program in ("haproxy", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine: apt-get install {program}")
    api = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    Thread(target=api.serve_forever, daemon=True).start()
    request = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    subprocess.run(["openssl", *request.split(), *files], check=True, capture_output=True)
    (tmp_path / "api.pem").write_text((tmp_path / "certificate").read_text() + (tmp_path / "key").read_text())
    (config,) = re.findall(r"```text\n(global.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    port = free_port()
    config = config.replace(":8443", f"127.0.0.1:{port}").replace("127.0.0.1:8000", f"127.0.0.1:{api.server_port}")
    (tmp_path / "tls.cfg").write_text(config)
    process = subprocess.Popen(["haproxy", "-f", "tls.cfg"], cwd=tmp_path)
    try:
        yield port, tmp_path / "certificate"
    finally:
        process.kill()
        process.wait()
        api.shutdown()


def ask(port, certificate, path):
    """Return status, headers and body of a GET over TLS; the certificate is checked."""
    trust = ssl.create_default_context(cafile=certificate)
    connection = http.client.HTTPSConnection("localhost", port, timeout=5, context=trust)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()


def test_clients_reach_the_api_over_tls_and_metrics_stay_inside(proxy):
    port, certificate = proxy

    def answers():
        try:
            return ask(port, certificate, "/v1/models")[0] == 200
        except OSError:
            return False

    wait_until(answers)
    _, headers, body = ask(port, certificate, "/v1/models")
    assert body == b"/v1/models"
    assert headers["strict-transport-security"].startswith("max-age=")
    assert [ask(port, certificate, path)[0] for path in ("/metrics", "/-/routes")] == [403, 403]
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/v1/models")
        plain.getresponse()


@pytest.mark.parametrize(("page", "token"), [("cluster", ".infembed/cluster/auth_token"), ("jobs", ".ray/auth_token")])
def test_the_commands_that_make_a_token_run_in_an_empty_home(page, token, tmp_path):
    text = (PAGE.parent / f"{page}.md").read_text(encoding="utf-8")
    (block,) = (found for found in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "openssl rand" in found)
    own = "pip() { :; }; ray() { :; }; edit() { printf 'A=b\\n' > $1; }; EDITOR=edit\n"
    done = subprocess.run(
        ["bash", "-ec", own + block], env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, check=True
    )
    assert done.returncode == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", (tmp_path / token).read_text())
    assert (tmp_path / token).stat().st_mode & 0o777 == 0o600
