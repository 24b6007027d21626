"""The replicas' own logic without a cluster; `test_distributed` runs them on one."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving.arguments import ApiArguments
from infembed_ray.serving.encoder.batching import Embedded, EmptySequence
from infembed_ray.serving.replicas import Encoder, Ingress
from infembed_ray.serving.routing.blue_green import Inputs
from infembed_ray.serving.service import Query

SETTINGS = ServeSettings(index="index")


class Engine:
    """An engine whose vectors are the lengths of the texts; a blank text has no tokens."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def embed(self, inputs: list[str], input_type: str, instruction: str | None, timeout_s: float) -> Embedded:
        self.calls.append(list(inputs))
        return self._embedded(inputs)

    async def embed_queries(self, queries: list[str], instructions: list[str | None], timeout_s: float) -> Embedded:
        self.calls.append(list(queries))
        return self._embedded(queries)

    def _embedded(self, texts: list[str]) -> Embedded:
        if not all(text.strip() for text in texts):
            raise EmptySequence("no tokens")
        return Embedded(np.array([[len(text)] for text in texts], np.float32), sum(map(len, texts)))


def encoder_replica(engine: Any) -> Any:
    encoder: Any = object.__new__(Encoder)
    encoder._engine = engine
    encoder._metrics = type("Silent", (), {"start": lambda self: None})()
    return encoder


def test_requests_of_one_call_are_embedded_separately() -> None:
    engine = Engine()
    items = [[Query("a"), Query("bb")], Inputs(["ccc", "d"], "passage", None), [Query("eeee", "I")]]
    answers = asyncio.run(encoder_replica(engine).embed_many(items, 1.0))
    assert engine.calls == [["a", "bb"], ["ccc", "d"], ["eeee"]]  # otherwise they would share one place in its queue
    assert [answer.vectors.ravel().tolist() for answer in answers] == [[1, 2], [3, 1], [4]]


def test_a_query_that_cannot_be_embedded_fails_only_its_own_request() -> None:
    items = [[Query("a")], [Query(" ")], Inputs([""], "passage", None), [Query("bb")]]
    first, second, third, fourth = asyncio.run(encoder_replica(Engine()).embed_many(items, 1.0))
    assert (first.vectors.tolist(), fourth.vectors.tolist()) == ([[1]], [[2]])
    assert isinstance(second, EmptySequence)
    assert isinstance(third, EmptySequence)


def test_an_error_that_cannot_be_unpickled_becomes_its_message(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyHere(Exception):
        def __init__(self, one: int, other: int) -> None:  # does not survive pickling
            super().__init__("both")

    class Faulty(Engine):
        async def embed(self, inputs: list[str], *rest: Any) -> Embedded:
            raise OnlyHere(1, 2)

    fault, well = asyncio.run(
        encoder_replica(Faulty()).embed_many([Inputs(["a"], "passage", None), [Query("bb")]], 1.0)
    )
    assert type(fault) is RuntimeError
    assert str(pickle.loads(pickle.dumps(fault))) == "OnlyHere: both"
    assert well.vectors.tolist() == [[2]]
    assert "OnlyHere" in caplog.text  # in full


def test_an_ingress_replica_without_the_configured_keys_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    with pytest.raises(RuntimeError, match="would be open"):
        replica(ApiArguments(locked=True, settings=SETTINGS), None)


def test_a_body_limit_above_the_proxies_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFEMBED_MAX_BODY_MIB", "8")
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    larger = SETTINGS.model_copy(update={"max_body_mib": 64.0})
    with pytest.raises(InputError, match=r"max_body_mib=64: Serve's proxies were started with 8 .* or less"):
        replica(ApiArguments(locked=False, settings=larger), None)
