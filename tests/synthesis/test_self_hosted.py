import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.llm import Endpoint, SelfHosted
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError, StartError
from infembed_ray.llm import prices
from infembed_ray.quickstart import sample
from infembed_ray.synthesis.preflight import check_settings, resolve
from infembed_ray.synthesis.sources import Source
from tests.synthesis.batches import SEEDS
from tests.synthesis.runs import settings

PACKAGE = Path(__file__).parents[1] / "support" / "stand_in_vllm"
MODEL = "Qwen/Qwen2.5-7B-Instruct"


def endpoint(**serve: Any) -> Endpoint:
    return Endpoint.from_mapping({"serve": {"model": MODEL, **serve}})


def test_ray_serve_llm_accepts_the_configuration() -> None:
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig  # `ray.serve.llm` needs vLLM to be imported

    from infembed_ray.synthesis.self_hosted import configuration

    served = endpoint(replicas=2, tensor_parallel=4, accelerator="H100", engine={"max_model_len": 8192}).serve
    assert served is not None
    assert served.gpus == 8
    config = LLMConfig(**configuration(served))
    assert config.model_id == MODEL
    assert config.engine_kwargs == {"tensor_parallel_size": 4, "max_model_len": 8192}
    assert (config.deployment_config, config.accelerator_type) == ({"num_replicas": 2}, "H100")
    with pytest.raises(ValueError, match="Unsupported accelerator type: H1000"):
        LLMConfig(**configuration(served.model_copy(update={"accelerator": "H1000"})))


def test_the_settings_must_name_the_model_that_is_started() -> None:
    table = prices.load()
    given = {"seeds": "", "output": "", "endpoint": {"serve": {"model": MODEL}}, "generator": {"model": MODEL}}
    fitting = SynthesizeSettings.from_mapping({**given, "judge": {"model": MODEL}})
    check_settings(fitting, table)
    with pytest.raises(InputError, match=f"judge.model=o4-mini: endpoint.serve.model={MODEL} starts only that model"):
        check_settings(SynthesizeSettings.from_mapping(given), table)
    with pytest.raises(InputError, match="has no Batch API"):
        check_settings(SynthesizeSettings.from_mapping({**given, "judge": {"model": MODEL}, "batches": {}}), table)


def test_without_vllm_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from infembed_ray.synthesis import self_hosted

    monkeypatch.setattr(self_hosted, "connect", lambda: None)  # the check needs no cluster
    monkeypatch.setattr(self_hosted, "_require_gpus", lambda served: None)
    with pytest.raises(InputError, match=r"needs vLLM .* pip install 'ray\[llm\]=="):
        self_hosted.hosting(endpoint(), "run").__enter__()


def test_nothing_is_started_if_the_journal_answers_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infembed_ray.synthesis import distributed, self_hosted

    served = {
        "generator": {"model": sample.MODEL.model},
        "judge": {"model": sample.MODEL.model},
        "replay": [str(sample.JOURNAL)],
    }
    given = settings(sample.SEEDS, tmp_path, endpoint={"serve": {"model": sample.MODEL.model}}, **served)
    job = resolve(given, Source(given), prices.load())
    with distributed._hosting(job, "run", None) as hosted:  # type: ignore[arg-type]
        assert hosted is job
    monkeypatch.setattr(self_hosted, "connect", lambda: pytest.fail("it starts"))
    unanswered = replace(job, replay=[])
    with pytest.raises(pytest.fail.Exception), distributed._hosting(unanswered, "run", None):  # type: ignore[arg-type]
        pass


@pytest.fixture(scope="module")
def stand_in_vllm() -> Iterator[None]:
    """Give this process and the cluster that it starts a package `vllm` and an engine that answers by rule."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.environ["RAYLLM_VLLM_ENGINE_CLS"] = "tests.support.stand_in_engine.StandInEngine"
    sys.path.insert(0, str(PACKAGE))
    yield
    sys.path.remove(str(PACKAGE))
    os.environ.clear()
    os.environ.update(before)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name.startswith("ray.serve.llm")]:
        del sys.modules[name]


@pytest.mark.usefixtures("stand_in_vllm")
def test_a_fastapi_that_ray_serve_llm_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from infembed_ray.synthesis import self_hosted

    monkeypatch.setattr(self_hosted, "version", lambda _: "0.137.1")
    with pytest.raises(InputError, match=r"cannot answer with fastapi 0\.137\.1; .* pip install 'fastapi<0\.137'"):
        self_hosted._application(SelfHosted(model=MODEL))


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_vllm", "ray_cluster")
class TestOnACluster:
    """One cluster with the real Ray Serve LLM, whose engine is the stand-in's."""

    def test_a_run_starts_the_model_asks_it_and_stops_it(self, tmp_path: Path) -> None:
        from ray import serve

        from infembed_ray.synthesis.distributed import run

        file = tmp_path / "seeds.jsonl"
        file.write_text("".join(json.dumps(vars(seed)) + "\n" for seed in SEEDS), encoding="utf-8")
        hosted = {"model": MODEL, "accelerator": "cpu", "port": 8765, "usd_per_gpu_hour": 2.0, "start_timeout_s": 120}
        structured = {"model": MODEL, "structured": True, "max_tokens": 400}
        done = run(
            SynthesizeSettings.from_mapping(
                {
                    "seeds": str(file),
                    "output": str(tmp_path / "out"),
                    "endpoint": {"serve": hosted},
                    "generator": structured,
                    "judge": structured,
                    "limit": 6,
                    "in_flight": 4,
                }
            )
        )
        assert done.manifest["counts"]["kept"] == 6
        figures = done.manifest["self_hosted"]
        assert (figures["model"], figures["gpus"], figures["gpu_hours"], figures["usd"]) == (MODEL, 0, 0, 0)
        assert not serve.status().applications

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_the_model_stops_after_a_failure_and_after_ctrl_c(self, error: type[BaseException]) -> None:
        from ray import serve

        from infembed_ray.llm.endpoint import list_models
        from infembed_ray.synthesis.self_hosted import hosting

        with (
            pytest.raises(error),
            hosting(endpoint(accelerator="cpu", port=8765, start_timeout_s=120), "run") as hosted,
        ):
            assert list_models(hosted.endpoint) == {MODEL}
            raise error
        assert not serve.status().applications

    @pytest.mark.parametrize(
        ("model", "said"),
        [("broken", "no weights here"), ("never", "endpoint.serve.start_timeout_s=15: never did not")],
    )
    def test_a_model_that_does_not_start_is_stopped_and_named(self, model: str, said: str) -> None:
        from ray import serve

        from infembed_ray.synthesis.self_hosted import hosting

        given = endpoint(model=model, accelerator="cpu", port=8765, start_timeout_s=15)
        with pytest.raises(StartError, match=said), hosting(given, "run"):
            pass
        assert not serve.status().applications

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"accelerator": "cpu", "engine": {"max_modl_len": 9}}, "Unknown engine argument: max_modl_len"),
            ({"replicas": 2, "tensor_parallel": 4}, "it needs 8 GPUs .* and this machine has 0"),
        ],
    )
    def test_settings_that_cannot_work_are_refused_before_anything_starts(
        self, given: dict[str, Any], said: str
    ) -> None:
        from infembed_ray.synthesis.self_hosted import hosting

        with pytest.raises(InputError, match=said), hosting(endpoint(**given), "run"):
            pass
