"""The files of the playground over HTTP."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from infembed_ray.serving.http import playground_routes
from tests.serving.http.playground.pages import KEY, Search, Server, served

pytestmark = pytest.mark.integration


def test_every_file_of_the_page_is_served_and_none_leads_elsewhere(server: Server) -> None:
    files = {f.name: f.read_bytes() for f in (resources.files("infembed_ray.serving.http") / "playground").iterdir()}
    assert {name for name, _ in playground_routes.ASSETS.values()} == set(files)
    for path, (name, media_type) in playground_routes.ASSETS.items():
        status, headers, body = server.get(path[1:])
        assert (status, headers["Content-Type"], body) == (200, media_type, files[name])
        assert server.get(path[1:], **{"If-None-Match": headers["ETag"]})[0] == 304
        assert set(re.findall(rb"https?://[^\"'\s]+", body)) <= {b"http://www.w3.org/2000/svg"}
    page = files["index.html"].decode()
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) <= {p[1:] for p in playground_routes.ASSETS} | {"docs"}
    assert not re.search(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=", page)


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline(server: Server) -> None:
    policy = server.get("")[1]["Content-Security-Policy"]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert sources["default-src"] == sources["frame-ancestors"] == "'none'"
    assert sources["script-src"] == sources["style-src"] == sources["connect-src"] == "'self'"


def test_the_page_itself_needs_no_key() -> None:
    with served(Search(), KEY) as locked:
        assert [locked.get(path[1:])[0] for path in playground_routes.ASSETS] == [200] * len(playground_routes.ASSETS)
        assert locked.get("v1/models")[0] == 401
