"""The deployments' own logic, without a cluster; `test_distributed` has them on one."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from infembed_ray.config import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving import deployments
from infembed_ray.serving.deployments import (
    ApiArguments,
    Encoder,
    EncoderArguments,
    IndexArguments,
    Ingress,
    Remote,
    spread,
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


def test_requests_that_travelled_together_take_their_turns_apart() -> None:
    engine = Engine()
    items = [[Query("a"), Query("bb")], Inputs(["ccc", "d"], "passage", None), [Query("eeee", "I")]]
    answers = asyncio.run(an_encoder(engine).embed_many(items, 1.0))
    assert engine.calls == [["a", "bb"], ["ccc", "d"], ["eeee"]]  # else they would share one place in its queue
    assert [answer.vectors.ravel().tolist() for answer in answers] == [[1, 2], [3, 1], [4]]


def test_a_query_that_cannot_be_embedded_is_its_own_requests_affair() -> None:
    items = [[Query("a")], [Query(" ")], Inputs([""], "passage", None), [Query("bb")]]
    first, second, third, fourth = asyncio.run(an_encoder(Engine()).embed_many(items, 1.0))
    assert (first.vectors.tolist(), fourth.vectors.tolist()) == ([[1]], [[2]])
    assert isinstance(second, EmptySequence)
    assert isinstance(third, EmptySequence)


def test_a_fault_that_the_ingress_could_not_read_is_told_in_words(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyHere(Exception):
        def __init__(self, one: int, other: int) -> None:  # does not survive pickling
            super().__init__("both")

    class Faulty(Engine):
        async def embed(self, inputs: list[str], *rest: Any) -> Embedded:
            raise OnlyHere(1, 2)

    fault, well = asyncio.run(an_encoder(Faulty()).embed_many([Inputs(["a"], "passage", None), [Query("bb")]], 1.0))
    assert type(fault) is RuntimeError
    assert str(pickle.loads(pickle.dumps(fault))) == "OnlyHere: both"
    assert well.vectors.tolist() == [[2]]
    assert "OnlyHere" in caplog.text  # in full


def test_a_call_that_nobody_waits_for_is_cancelled_at_its_replica() -> None:
    class Response:
        def __init__(self) -> None:
            self.cancelled = 0

        def __await__(self) -> Any:
            return asyncio.sleep(60).__await__()

        def cancel(self) -> None:
            self.cancelled += 1

    class Handle:
        def __init__(self) -> None:
            self.response = Response()

        def options(self, method_name: str) -> Handle:
            return self

        def remote(self, *arguments: Any) -> Response:
            return self.response

    async def scenario() -> None:
        handle = Handle()
        call = asyncio.ensure_future(Remote(handle)("method"))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0)
        assert call.cancelled()
        assert handle.response.cancelled == 1

    asyncio.run(scenario())


def test_a_call_that_the_other_side_cancels_is_a_lost_one() -> None:
    class Handle:
        def options(self, method_name: str) -> Handle:
            return self

        def remote(self, *arguments: Any) -> Any:
            response = asyncio.get_running_loop().create_future()
            response.cancel()
            return response

    async def scenario() -> None:
        with pytest.raises(ReplicaLost):
            await Remote(Handle())("method")

    asyncio.run(scenario())


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


def test_a_larger_body_than_the_proxies_take_is_refused_when_the_api_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFEMBED_MAX_BODY_MIB", "8")
    replica: Any = Ingress.__mro__[1]  # as written, without Serve's wrapper
    larger = SETTINGS.model_copy(update={"max_body_mib": 64.0})
    with pytest.raises(InputError, match=r"max_body_mib=64: Serve's proxies were started with 8 .* or less"):
        replica(ApiArguments.of(larger, locked=False), None)


def test_a_call_to_a_deployment_without_replicas_is_lost_and_does_not_wait_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployments, "LOOK_S", 0.01)

    class Router:
        def __init__(self) -> None:
            self.curr_replicas = {"replica": object()}
            self._asyncio_router = self
            self._request_router = self

    class Handle:
        def __init__(self) -> None:
            self._router = Router()
            self.asked = 0

        def options(self, method_name: str) -> Handle:
            return self

        def running_replicas_populated(self) -> bool:
            return True

        async def remote(self, *arguments: Any) -> None:
            self.asked += 1
            await asyncio.sleep(60)  # as Serve's own does while there is nobody

    async def scenario() -> None:
        handle = Handle()
        call = asyncio.ensure_future(Remote(handle)("method"))
        await asyncio.sleep(0.05)
        assert not call.done()  # somebody is at work
        handle._router.curr_replicas.clear()
        with pytest.raises(ReplicaLost):
            await call
        remote, asked = Remote(handle), handle.asked
        for _ in range(2):
            with pytest.raises(ReplicaLost):
                await remote("method")
        assert handle.asked == asked + 1  # it is known the second time

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cpus", "replicas", "most"),
    [
        ([4], 3, None),  # a laptop
        ([4, 4, 4], 1, None),
        ([4, 4, 4], 2, 1),
        ([4, 4, 4], 3, 1),
        ([4, 4, 4], 4, 2),
        ([0, 4, 4], 2, 1),  # a head without room
        ([0, 4], 2, None),
        ([3, 1], 4, 3),
        ([3, 1, 1], 4, 2),
        ([2, 2], 8, None),  # too few for all: Serve starts what it can
    ],
)
def test_replicas_are_spread_as_far_as_there_is_room(
    cpus: list[float], replicas: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(n)} if n else {}} for n in cpus]
    )
    assert spread(replicas, CPU=1.0, GPU=0.0) == most


def test_where_new_replicas_start_before_the_old_ones_end_there_is_room_for_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}] * 2)
    assert spread(2, room=3, CPU=0.1) is None
    assert spread(3, room=4, CPU=0.1) == 2
