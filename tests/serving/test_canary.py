from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ray import serve

from infembed_ray.config.serving import CanarySettings, ServeSettings
from infembed_ray.errors import StartError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.serving import canary, distributed
from infembed_ray.serving.canary import Rejected, require_good_probes, require_good_traffic, watch
from infembed_ray.serving.distributed import run, serving
from infembed_ray.serving.probes import ProbeFigures
from infembed_ray.serving.routing.outcomes import LATENCY_BUCKETS, Window
from tests.serving.http_client import Answered, ask, under_load
from tests.serving.indexes import AGAIN, PASSAGES, YEARS, publish_index
from tests.support.waiting import wait_until

SETTINGS = CanarySettings()


def window(answered: int, failed: int = 0, seconds: float = 0.01) -> Window:
    """A window whose answers all took as long."""
    return Window(answered, failed, tuple(answered if bound < seconds else 0 for bound in LATENCY_BUCKETS))


@pytest.mark.parametrize(
    ("current", "new"),
    [
        (window(1000), window(100)),
        (window(1000), window(10, failed=2)),  # too few to judge by
        (window(900, failed=100), window(90, failed=10)),  # both fail as often
        (window(1000), window(990, failed=10)),  # within max_failures
        (window(1000), window(49, seconds=1.0)),  # too few to compare latencies
        (window(0), window(1000, seconds=1.0)),
        (window(1000, seconds=0.01), window(100, seconds=0.012)),
    ],
)
def test_a_release_that_is_no_worse_passes(current: Window, new: Window) -> None:
    require_good_traffic(current, new, SETTINGS)


@pytest.mark.parametrize(
    ("current", "new", "message"),
    [
        (window(1000), window(0, failed=3), "it failed 3 of 3 searches (100.0%, the current release 0.0%)"),
        (window(1000, failed=10), window(95, failed=5), "canary.max_failures=0.01 more are allowed"),
        (window(1000), window(50, seconds=0.02), "canary.max_slowdown=1.5 times that is allowed"),
    ],
)
def test_a_release_that_fails_or_is_slow_is_rejected(current: Window, new: Window, message: str) -> None:
    with pytest.raises(Rejected) as rejection:
        require_good_traffic(current, new, SETTINGS)
    assert message in str(rejection.value)


def test_a_release_that_ranks_probes_worse_is_rejected() -> None:
    before = ProbeFigures(80.0, 30.0)
    require_good_probes(before, ProbeFigures(79.0, 28.0), SETTINGS)
    require_good_probes(before, ProbeFigures(90.0, None), SETTINGS)
    with pytest.raises(Rejected, match=r"its nDCG@10 on the probes is 78.9, the current release's 80.0"):
        require_good_probes(before, ProbeFigures(78.9, 30.0), SETTINGS)
    with pytest.raises(Rejected, match=r"p-MRR .* canary.max_p_mrr_drop=2 less is allowed"):
        require_good_probes(before, ProbeFigures(80.0, 27.9), SETTINGS)
    with pytest.raises(Rejected, match=r"canary\.probes .*give the ids of indexed passages"):
        require_good_probes(ProbeFigures(0.0, None), ProbeFigures(0.0, None), SETTINGS)


def test_a_watch_ends_with_the_first_fault_or_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "POLL_S", 0.01)
    settings = CanarySettings(seconds=0.2)
    failed = iter(range(100))

    def pages(failing: bool) -> Iterator[str]:
        while True:
            yield (
                'infembed_release_requests_total{release="old",outcome="answered"} 1000\n'
                f'infembed_release_requests_total{{release="new",outcome="failed"}} {next(failed) if failing else 7}\n'
            )

    watch(pages(False).__next__, "old", "new", settings)  # those 7 failed before the watch
    with pytest.raises(Rejected, match="it failed 3 of 3"):
        watch(pages(True).__next__, "old", "new", CanarySettings(seconds=60))


# ------------------------------------------------------------------------------------------- on a real Ray Serve


@pytest.fixture(scope="module")
def api(settings: ServeSettings, ray_cluster: None) -> Iterator[str]:
    with serving(settings) as url:
        yield url
    distributed.stop()


@pytest.mark.ray
@pytest.mark.slow
def test_a_worse_encoder_rolls_back_by_itself(
    api: str, settings: ServeSettings, root: Path, tmp_path: Path, minilm: str
) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in encoder.backbone.parameters():
            weight.add_(weight.std() * torch.randn_like(weight))
    encoder.save_pretrained(root / "worse")
    worse = publish_index(root / "of-worse", str(root / "worse"), PASSAGES, metadata=YEARS, types={"year": "integer"})
    probes = tmp_path / "probes.jsonl"
    doctors, history = "Only guidelines for clinicians.", "Only texts about the nineteenth century."
    rows: list[dict[str, object]] = [
        {"query": topic, "instruction": doctors, "relevant": [f"{topic}-doctors"]}
        | {"changed_instruction": history, "changed_relevant": [f"{topic}-history"]}
        for topic in ("diabetes", "asthma")
    ]
    probes.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    before, applications = ask(f"{api}/v1/models")[1], set(serve.status().applications)
    new = settings.model_copy(update={"index": str(worse), "canary": CanarySettings(probes=str(probes))})
    fault = r"rolled back.* its nDCG@10 on the probes is .* canary\.max_ndcg_drop=1"
    with under_load(api) as answers, pytest.raises(StartError, match=fault):
        run(new)
    assert {(answer.status, answer.body["index_version"]) for answer in answers} == {(200, Path(settings.index).name)}
    assert ask(f"{api}/v1/models")[1] == before
    wait_until(lambda: set(serve.status().applications) == applications)


@pytest.mark.ray
@pytest.mark.slow
def test_a_canary_that_fails_is_rolled_back_and_one_that_answers_is_switched_to(
    api: str, settings: ServeSettings, root: Path, minilm: str
) -> None:
    other = publish_index(root / "next", minilm, AGAIN, metadata=None, types={"year": "integer"})
    old = Path(settings.index).name
    new = settings.model_copy(update={"index": str(other), "canary": CanarySettings(share=0.3, seconds=60)})

    def versions(answers: list[Answered]) -> set[str]:
        return {answer.body["index_version"] for answer in answers if answer.status == 200}

    with under_load(api) as answers, ThreadPoolExecutor(1) as thread:
        refused = thread.submit(run, new)
        wait_until(lambda: versions(answers) == {old, other.name}, seconds=120)
        (index,) = (name for name in serve.status().applications if f"-index-{other.name[:8]}" in name)
        serve.delete(index)  # its queries fail from now on
        with pytest.raises(StartError, match=r"rolled back.* it failed \d+ of \d+ searches"):
            refused.result(timeout=120)
        seen = len(answers)
        wait_until(lambda: len(answers) > seen + 40)
        assert versions(answers[seen + 20 :]) == {old}
        assert {answer.status for answer in answers[seen + 20 :]} == {200}
        brief = new.canary.model_copy(update={"seconds": 5.0, "max_slowdown": 100.0})
        run(new.model_copy(update={"canary": brief}))
        seen = len(answers)
        wait_until(lambda: len(answers) > seen + 20)
        assert versions(answers[seen + 10 :]) == {other.name}
