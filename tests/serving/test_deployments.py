from __future__ import annotations

import pytest
import ray

from infembed_ray.serving.deployments import spread


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
def test_replicas_are_spread_as_far_as_the_nodes_have_room(
    cpus: list[float], replicas: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(n)} if n else {}} for n in cpus]
    )
    assert spread(replicas, CPU=1.0, GPU=0.0) == most


def test_a_surge_replica_needs_room_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}] * 2)
    assert spread(2, room=3, CPU=0.1) is None
    assert spread(3, room=4, CPU=0.1) == 2
