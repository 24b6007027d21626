from __future__ import annotations

import pytest

from infembed_ray.errors import InputError
from infembed_ray.serving.auth import ApiKeys, is_loopback


@pytest.mark.parametrize("header", ["Bearer one", "bearer one", "BEARER  one ", "Bearer two"])
def test_any_of_the_keys_opens(header: str) -> None:
    assert ApiKeys(["one", "two"]).accept(header)


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer ", "Basic one", "Bearer on", "Bearer one,two"])
def test_anything_else_does_not(header: str | None) -> None:
    assert not ApiKeys(["one", "two"]).accept(header)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "one, two")
    assert ApiKeys.from_environment("KEYS").accept("Bearer two")
    monkeypatch.delenv("KEYS")
    assert not ApiKeys.from_environment("KEYS")
    assert not ApiKeys.from_environment(None)


@pytest.mark.parametrize("value", ["", " ", "one,", ",one", "one,,two"])
def test_a_variable_with_an_empty_key_is_refused_without_showing_the_others(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KEYS", value)
    with pytest.raises(InputError, match=r"api_keys_env=KEYS: .* holds an empty key") as refusal:
        ApiKeys.from_environment("KEYS")
    assert "one," not in str(refusal.value)


def test_keys_are_not_kept_in_the_clear() -> None:
    assert "secret" not in repr(vars(ApiKeys(["secret"])))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
