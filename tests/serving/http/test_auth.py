import hashlib
import json
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infembed_ray.cli.main import main
from infembed_ray.errors import InputError
from infembed_ray.serving.http import auth
from infembed_ray.serving.http.auth import ApiKey, ApiKeys, new_key


@pytest.mark.parametrize("header", [b"Bearer one", b"bearer one", b"BEARER  one ", b"Bearer two"])
def test_every_key_is_accepted(header: bytes) -> None:
    assert ApiKeys(["one", "two"]).find(header)


@pytest.mark.parametrize(
    "header", [None, b"", b"one", b"Bearer", b"Bearer ", b"Basic one", b"Bearer on", b"Bearer one,two", b"Bearer \xff"]
)
def test_other_headers_are_rejected(header: bytes | None) -> None:
    assert not ApiKeys(["one", "two"]).find(header)


@pytest.mark.parametrize("value", ["", " ", "one,", ",one", "one,,two"])
def test_a_variable_with_an_empty_key_is_refused_without_showing_the_others(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KEYS", value)
    with pytest.raises(InputError, match="holds an empty key") as refusal:
        ApiKeys.load("KEYS")
    assert "one," not in str(refusal.value)


# ------------------------------------------------------------------------------------------------------ the file


@pytest.fixture
def always_checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "RECHECK_S", 0.0)


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_new_key_is_accepted_and_only_its_hash_is_written(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = [new_key(name, file) for name in ("alice", "ci@build-1")]
    assert all(key.startswith("ifr-") and len(key) >= 40 for key in keys)
    content = file.read_text()
    assert not any(key in content for key in keys)
    assert [json.loads(line) for line in content.splitlines()] == [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": ["read"]}
        for key, name in zip(keys, ("alice", "ci@build-1"), strict=True)
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    accepting = ApiKeys(["from-the-environment"], file)
    assert all(accepting.find(bearer(key)) for key in [*keys, "from-the-environment"])
    assert not accepting.find(bearer("ifr-other"))


def test_keys_are_added_and_revoked_without_a_restart(tmp_path: Path, always_checking: None) -> None:
    file = tmp_path / "keys"
    first = new_key("first", file)
    keys = ApiKeys(file=file)
    second = new_key("second", file)
    assert keys.find(bearer(second))
    file.write_text("".join(line for line in file.read_text().splitlines(True) if '"first"' not in line))
    assert not keys.find(bearer(first))
    assert keys.find(bearer(second))
    replacement = tmp_path / "new"
    third = new_key("third", replacement)
    os.replace(replacement, file)
    assert keys.find(bearer(third))
    assert not keys.find(bearer(second))
    file.write_text("")
    assert not keys.find(bearer(third))
    assert keys  # still asked for


@pytest.mark.parametrize("broken", [b"nonsense\n", b"\xff\xfe", None])
def test_a_file_that_becomes_unreadable_keeps_the_last_good_keys_and_is_logged_once(
    tmp_path: Path, always_checking: None, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    file = tmp_path / "keys"
    key = new_key("good", file)
    keys = ApiKeys(file=file)
    if broken is None:
        file.unlink()
    else:
        file.write_bytes(broken)
    assert all(keys.find(bearer(key)) for _ in range(3))
    complaints = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(complaints) == 1
    assert "1 keys read before stay valid" in complaints[0]
    assert "nonsense" not in complaints[0]


def line(**values: Any) -> str:
    return json.dumps({"name": "a", "sha256": "0" * 64, **values}) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no key"),
        ("ifr-a-key-in-the-clear alice\n", "line 1: "),
        (line() + line(), "line 2: the name 'a' appears twice"),
        (line(sha256="0" * 63), "line 1: sha256"),
        (line(scopes=["read", "all"]), "line 1: scopes"),
        (line(scopes=[]), "line 1: scopes"),
        (line(rate=0), "line 1: rate"),
        (line(collections=["news"]), "line 1: the scope admin"),  # without scopes it has all
        (line(key="in-the-clear"), "line 1: key"),
        (None, "cannot be read (No such file"),
    ],
)
def test_an_invalid_file_is_rejected_without_showing_its_content(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError) as refusal:
        ApiKeys.load(None, str(file))
    assert message in str(refusal.value)
    assert refusal.value.faults[0].setting == "api_keys_file"
    assert "in-the-clear" not in str(refusal.value)


def test_concurrent_new_keys_are_all_written(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: new_key(f"k{i}", file), range(32)))
    keys = ApiKeys(file=file)
    assert all(keys.find(bearer(key)) for key in made)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a b"},
        {"name": "a\nb"},
        {"name": ""},
        {"scopes": "own"},
        {"scopes": ""},
        {"rate": 0.0},
        {"rate": float("inf")},
        {"rate": float("nan")},
        {"scopes": "read,admin", "collections": "news"},
        {"collections": ""},
        {"collections": "news,"},
        {"collections": "../news"},
    ],
)
def test_impossible_keys_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        new_key(**{"name": "a", "file": tmp_path / "keys", **given})
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(("rate", "replicas"), [(4.0, 1), (4.0, 2), (0.5, 1)])
def test_a_key_gets_its_rate_and_no_more(monkeypatch: pytest.MonkeyPatch, rate: float, replicas: int) -> None:
    now = 0.0
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: now))
    keys, key = ApiKeys(replicas=replicas), ApiKey(name="a", sha256="0" * 64, rate=rate)
    granted = 0
    for tick in range(1001):  # 100 s of ten requests a second
        now = tick / 10
        wait_s = keys.wait_s(key)
        granted += not wait_s
        if wait_s:  # one that waits as told is granted
            assert 0 < wait_s <= replicas / rate
    burst = max(1.0, rate / replicas)
    assert granted == pytest.approx(burst + 100 * rate / replicas, abs=1)


def test_the_command_prints_the_key_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert main(["serve", "key", "alice", str(file)]) == 0
    printed = capsys.readouterr()
    assert ApiKeys(file=file).find(bearer(printed.out.strip()))
    assert "api_keys_file=" in printed.err
    assert main(["serve", "key", "alice", str(file)]) == 2
    assert "infembed serve key: name=alice" in capsys.readouterr().err
    assert main(["serve", "key", "bob", str(tmp_path / "no" / "keys")]) == 2


def test_keys_have_the_scopes_rate_and_collections_of_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    everything, one = new_key("all", file), new_key("one", file, "read,write", 2.5, "news,law-2")
    assert main(["serve", "key", "two", str(file), "--scopes", "read", "--collections", "index"]) == 0
    two = capsys.readouterr().out.strip()
    keys = ApiKeys(["from-the-environment"], file)
    accepted = [keys.find(bearer(key)) for key in (everything, one, two, "from-the-environment")]
    assert [(key.scopes, key.rate, key.collections) for key in accepted if key] == [
        ({"read"}, None, None),
        ({"read", "write"}, 2.5, {"news", "law-2"}),
        ({"read"}, None, {"index"}),
        ({"read", "write", "admin"}, None, None),
    ]
