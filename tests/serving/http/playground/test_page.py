"""The files of the playground over HTTP."""

import re
from importlib import resources
from pathlib import Path

import pytest

from infembed_ray.serving.http import app
from tests.serving.http.playground.pages import KEY, Search, Server, served

pytestmark = pytest.mark.integration


def test_every_file_of_the_page_is_served_and_none_leads_elsewhere(server: Server) -> None:
    files = {f.name: f.read_bytes() for f in (resources.files("infembed_ray.serving.http") / "playground").iterdir()}
    assert {*app.ASSETS, "index.html"} == set(files)
    paths = {f"playground/{name}" for name in app.ASSETS}
    for path in ("", *paths):
        status, headers, body = server.get(path)
        media_type = app.MEDIA_TYPES[Path(path).suffix] if path else "text/html; charset=utf-8"
        assert (status, headers["Content-Type"]) == (200, media_type)
        assert not path or body == files[Path(path).name]
        assert server.get(path, **{"If-None-Match": headers["ETag"]})[0] == 304
        assert set(re.findall(rb"https?://[^\"'\s]+", body)) <= {b"http://www.w3.org/2000/svg"}
    page = server.get("")[2].decode()
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) <= paths | {"docs"}
    assert not re.search(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=", page)


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline(server: Server) -> None:
    policy = server.get("")[1]["Content-Security-Policy"]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert sources["default-src"] == sources["frame-ancestors"] == "'none'"
    assert sources["script-src"] == sources["style-src"] == sources["connect-src"] == "'self'"


def test_the_page_itself_needs_no_key() -> None:
    with served(Search(), KEY) as locked:
        paths = ["", *(f"playground/{name}" for name in app.ASSETS)]
        assert [locked.get(path)[0] for path in paths] == [200] * len(paths)
        assert locked.get("v1/models")[0] == 401
