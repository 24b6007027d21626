from typing import Any

import pytest
import ray

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving.deployments import require_room, spread
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import ReleaseSpec


@pytest.mark.parametrize(
    ("cpus", "replicas", "room", "most"),
    [
        ([4], 3, None, None),  # a laptop
        ([4, 4, 4], 1, None, None),
        ([4, 4, 4], 2, None, 1),
        ([4, 4, 4], 3, None, 1),
        ([4, 4, 4], 4, None, 2),
        ([0, 4, 4], 2, None, 1),  # a head without room
        ([0, 4], 2, None, None),
        ([3, 1], 4, None, 3),
        ([3, 1, 1], 4, None, 2),
        ([2, 2], 8, None, None),  # too few for all: Serve starts what it can
        ([4, 4], 2, 3, None),  # a surge replica needs room as well
        ([4, 4], 3, 4, 2),
    ],
)
def test_replicas_are_spread_as_far_as_the_nodes_have_room(
    cpus: list[float], replicas: int, room: int | None, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(n)} if n else {}} for n in cpus]
    )
    assert spread(replicas, room, CPU=1.0, GPU=0.0) == most


@pytest.mark.parametrize(
    ("cpus", "changes", "refusal"),
    [
        ([2], {}, None),
        ([2], {"cpus_per_encoder": 2}, "cpus_per_encoder"),
        ([8], {"encoder_replicas": 8}, "cpus_per_encoder"),
        ([2, 2], {"cpus_per_encoder": 3}, "cpus_per_encoder"),
        ([2], {"shard_replicas": 20}, "cpus_per_shard"),
        ([8], {"gpus_per_encoder": 1}, "gpus_per_encoder"),
    ],
)
def test_replicas_that_the_cluster_can_never_hold_are_rejected_at_once(
    cpus: list[float], changes: dict[str, Any], refusal: str | None, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Labels": {}, "Resources": {"CPU": float(n)}} for n in cpus]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    release = Plan.resolve(ServeSettings(index=index, dtype="float32")).release
    release = with_settings(release, changes)
    if refusal is None:
        require_room(release)
        return
    with pytest.raises(InputError) as caught:
        require_room(release)
    assert caught.value.faults[0].setting == refusal
    for node in nodes:
        node["Labels"] = {"ray.io/node-group": "workers"}  # a cluster that may grow
    require_room(release)


def with_settings(release: ReleaseSpec, changes: dict[str, Any]) -> ReleaseSpec:
    """Return a release with other settings, none of which is checked."""
    (default,) = release.collections.values()
    settings = release.settings.model_copy(update=changes)
    parts = {part: getattr(default, part).model_copy(update={"settings": settings}) for part in ("encoder", "index")}
    return release.model_copy(update={"settings": settings, "collections": {"index": default.model_copy(update=parts)}})


def test_an_upgrade_needs_room_for_both_releases(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Labels": {}, "Resources": {"CPU": 2.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    current = Plan.resolve(ServeSettings(index=index, dtype="float32")).release
    require_room(current)
    require_room(current.model_copy(update={"api": "other"}), current)  # with the same parts
    other = with_settings(current, {"dtype": "bfloat16"})
    with pytest.raises(InputError) as caught:
        require_room(other, current)
    (fault,) = caught.value.faults
    # Two encoders of 1, two shards of 0.1 and an ingress replica of 0.1.
    assert (fault.setting, fault.value) == ("cpus_per_encoder", 1.0)
    assert "of the current release together need 2.3 CPU, the cluster has 2, its largest node 2" in fault.fault
    assert "both releases run until the switch" in fault.remedy
    nodes.append(nodes[0])
    require_room(other, current)
