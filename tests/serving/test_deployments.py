"""The deployments' own logic, without a cluster; `test_distributed` has them on one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from infembed_ray.config import ServeSettings
from infembed_ray.serving.deployments import (
    ApiArguments,
    Encoder,
    EncoderArguments,
    IndexArguments,
    Ingress,
    Remote,
)
from infembed_ray.serving.engine import Embedded, EmptySequence, QueueFull
from infembed_ray.serving.generations import Inputs
from infembed_ray.serving.service import Query, ReplicaLost

SETTINGS = ServeSettings(index="index")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"port": 9000}, set()),
        ({"model_name": "other"}, set()),
        ({"writable": False}, set()),
        ({"index": "elsewhere"}, set()),
        ({"batch_tokens": 512}, {"encoder"}),
        ({"dtype": "bfloat16"}, {"encoder"}),
        ({"max_encoder_replicas": 4}, {"encoder", "api"}),
        ({"cpus_per_shard": 2}, {"index"}),
        ({"shard_replicas": 2}, {"index", "api"}),
        ({"ingress_replicas": 2}, {"api"}),
        ({"max_body_mib": 1}, {"api"}),
    ],
)
def test_only_what_a_setting_concerns_is_started_anew(change: dict[str, Any], changed: set[str]) -> None:
    def names(settings: ServeSettings) -> dict[str, str]:
        return {
            "encoder": EncoderArguments.of("model", "f" * 16, settings).application,
            "index": IndexArguments.of("/index/v1", "v1", settings).application,
            "api": ApiArguments.of(settings, locked=False).digest(),
        }

    before, after = names(SETTINGS), names(SETTINGS.model_copy(update=change))
    assert {part for part in before if before[part] != after[part]} == changed


def test_arguments_survive_the_config_file() -> None:
    for arguments in (
        EncoderArguments.of("model", "f" * 16, SETTINGS.model_copy(update={"gpus_per_encoder": 0.5})),
        IndexArguments.of("/index/v1", "v1", SETTINGS),
        ApiArguments.of(SETTINGS, locked=True),
    ):
        written = arguments.model_dump(mode="json", exclude_defaults=True)
        assert type(arguments).model_validate(written) == arguments


class Engine:
    """An engine whose vectors are lengths of texts; a blank text has no tokens."""

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


def an_encoder(engine: Any) -> Any:
    encoder: Any = object.__new__(Encoder)
    encoder._engine = engine
    encoder._metrics = type("Silent", (), {"start": lambda self: None})()
    return encoder


def test_queries_of_several_requests_are_embedded_in_one_call_and_told_apart() -> None:
    engine = Engine()
    items = [[Query("a"), Query("bb")], Inputs(["ccc", "d"], "passage", None), [Query("eeee", "I")]]
    answers = asyncio.run(an_encoder(engine).embed_many(items, 1.0))
    assert sorted(engine.calls) == [["a", "bb", "eeee"], ["ccc", "d"]]
    assert [answer.vectors.ravel().tolist() for answer in answers] == [[1, 2], [3, 1], [4]]


def test_a_query_that_cannot_be_embedded_is_its_own_requests_affair() -> None:
    items = [[Query("a")], [Query(" ")], Inputs([""], "passage", None), [Query("bb")]]
    first, second, third, fourth = asyncio.run(an_encoder(Engine()).embed_many(items, 1.0))
    assert (first.vectors.tolist(), fourth.vectors.tolist()) == ([[1]], [[2]])
    assert isinstance(second, EmptySequence)
    assert isinstance(third, EmptySequence)


def test_what_happens_to_a_replica_comes_as_what_the_service_may_raise() -> None:
    class Handle:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def options(self, method_name: str) -> Handle:
            return self

        async def remote(self, *arguments: Any) -> None:
            raise self.error

    def raised(error: Exception) -> BaseException:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (any: it is looked at)
            asyncio.run(Remote(Handle(error))("method"))
        return caught.value

    assert isinstance(raised(ActorDiedError()), ReplicaLost)
    assert isinstance(raised(BackPressureError(9, 8)), QueueFull)
    full = raised(RayTaskError("embed", "traceback", QueueFull(3.0)))
    assert isinstance(full, QueueFull)
    assert full.retry_after_s == 3.0


def test_a_replica_without_the_keys_it_should_have_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    replica: Any = Ingress.__mro__[1]  # as written, without Serve's wrapper
    with pytest.raises(RuntimeError, match="would be open"):
        replica(ApiArguments.of(SETTINGS, locked=True), None)
