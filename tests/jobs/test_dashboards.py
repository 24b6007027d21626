"""The dashboards of the stages on a real cluster: jobs run, a real Prometheus scrapes Ray, and every query returns data."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infembed_ray.quickstart import sample
from tests.jobs.head import RAY, ROOT, Head, running_head
from tests.jobs.test_monitoring import DASHBOARDS
from tests.support.files import write_jsonl
from tests.support.ports import free_port
from tests.support.stand_in_llm import stand_in

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.end_to_end]

STAGES = ("synthesis", "training", "index")
LLM_KEY = "key-of-the-llm"
OTHER_STAGES = "stage!~"
"""In queries for stages that this test leaves out."""


class Prometheus:
    """A Prometheus that scrapes every node of a head's cluster."""

    def __init__(self, directory: Path, nodes: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._directory = directory
        scrape = {"job_name": "ray", "scrape_interval": "1s", "file_sd_configs": [{"files": [str(nodes)]}]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))

    def start(self) -> subprocess.Popen[bytes]:
        address = self.url.removeprefix("http://")
        command = [
            "prometheus",
            "--config.file=prometheus.yml",
            f"--web.listen-address={address}",
            "--storage.tsdb.path=tsdb",
        ]
        return subprocess.Popen(
            command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=(self._directory / "log").open("w")
        )

    def query(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Return the series of an expression over the last seconds."""
        now = time.time()
        values = {"query": expression, "start": now - seconds, "end": now, "step": 2}
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(values)}") as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    secrets = {"OPENAI_API_KEY": LLM_KEY, "RAY_metrics_report_interval_ms": "1000"}
    with running_head(secrets) as head:
        yield head


@pytest.fixture(scope="module")
def prometheus(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus on this machine: apt-get install prometheus")
    nodes = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).with_name("prom_metrics_service_discovery.json")
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), nodes)
    process = server.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def began(head: Head, prometheus: Prometheus, minilm: str, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Run the stages; returns when they began."""
    began, directory = time.monotonic(), tmp_path_factory.mktemp("shared")
    # The judge is often wrong, so some seeds are rejected.
    with stand_in(key=LLM_KEY, latency_s=0.5, mistaken=0.3) as llm:
        limits = {"limits__budget_usd": 5, "generator__max_tokens": 500, "judge__max_tokens": 500}
        limits |= {"actors": 1, "in_flight": 8, "endpoint__base_url": llm.url}
        run(head, "synthesize", seeds=sample.SEEDS, limit=60, output=directory / "records", **limits)
    training = {"records_per_step": 4, "epochs": 2, "instruction_negatives": 2, "checkpoint_every": 3}
    run(head, "train", records=directory / "records", model=minilm, output=directory / "model", **training)
    texts = ({"id": str(number), "text": f"Passage {number}. " * 9} for number in range(1500))
    corpus = write_jsonl(directory / "corpus.jsonl", texts)
    run(head, "index", corpus=corpus, model=directory / "model", output=directory / "index")
    return began


def run(head: Head, verb: str, **settings: Any) -> None:
    done = head.submit(verb, *(f"{name.replace('__', '.')}={value}" for name, value in settings.items()))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("stage", STAGES)
def test_every_query_of_the_dashboard_returns_data(prometheus, began, stage):
    seconds = time.monotonic() - began
    for panel in DASHBOARDS[stage]["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s")
            if OTHER_STAGES not in expression:
                assert prometheus.query(expression, seconds), (panel["title"], expression)


FAILING = """
import logging, sys, time, traceback
import ray
from infembed_ray.progress import say
from infembed_ray.ray_cluster import connect
from infembed_ray import telemetry

@ray.remote(max_retries=0)
def encode():
    logging.getLogger("infembed_ray.of_a_worker").error("damaged", extra={"request_id": "r1"})
    try:
        1 / 0
    except ZeroDivisionError:
        traceback.print_exc()
    time.sleep(3)  # Ray forwards what workers print with a delay, and nothing after the driver's end
    raise ValueError("the worker fails")

telemetry.set_up_logs()
connect()
say("it begins")
ray.get(encode.remote())
"""


def test_the_log_of_a_job_is_json_and_has_the_tracebacks_of_workers(head, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    variables = {"INFEMBED_LOG_FORMAT": "json", "PYTHONPATH": str(ROOT)}
    command = [
        RAY,
        "job",
        "submit",
        "--address",
        head.address,
        f"--runtime-env-json={json.dumps({'env_vars': variables})}",
    ]
    done = subprocess.run(
        [*command, "--", "python", str(script)], env=head.environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    objects = [json.loads(line[line.index("{") :]) for line in lines if '{"asctime"' in line]
    assert next(line["message"] for line in objects if "job_id" not in line) == "it begins"
    assert "ValueError: the worker fails" in objects[-1]["message"]
    assert "in encode" in objects[-1]["exc_text"]
    # `ray job submit` prints the log of a failed job once more at its end.
    of_a_worker = next(line for line in objects if line["message"] == "damaged")
    assert of_a_worker.keys() >= {"job_id", "worker_id", "task_id"}
    assert of_a_worker["request_id"] == "r1"
    assert [line for line in lines if line.startswith("(encode pid=") and "ZeroDivisionError: division by zero" in line]
