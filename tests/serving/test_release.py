from typing import Any

import pytest

from infembed_ray.config.serving import RerankSettings, ServeSettings
from infembed_ray.serving.release import ApiArguments, EncoderArguments, IndexArguments

SETTINGS = ServeSettings(index="index")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"port": 9000}, set()),
        ({"writable": False}, set()),
        ({"index": "elsewhere", "model": "a copy"}, set()),
        ({"dtype": "bfloat16"}, {"encoder"}),
        ({"max_encoder_replicas": 4}, {"encoder", "api"}),
        ({"cpus_per_shard": 2}, {"index"}),
        ({"shard_replicas": 2}, {"index", "api"}),
        ({"ingress_replicas": 2}, {"api"}),
        ({"compact_at": 1}, {"api"}),
        ({"rerank": RerankSettings(kind="late_interaction")}, set()),
    ],
)
def test_a_setting_changes_only_the_applications_that_it_affects(change: dict[str, Any], changed: set[str]) -> None:
    def names(settings: ServeSettings) -> dict[str, str]:
        return {
            "encoder": EncoderArguments(model="model", fingerprint="f" * 16, settings=settings).application,
            "index": IndexArguments(index="/index/v1", version="v1", settings=settings).application,
            "api": ApiArguments(locked=False, settings=settings).digest(),
        }

    before, after = names(SETTINGS), names(SETTINGS.model_copy(update=change))
    assert {part for part in before if before[part] != after[part]} == changed
