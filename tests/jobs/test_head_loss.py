"""The head is lost while an API answers and a pipeline runs; the state of its GCS is in Redis.

Each node has a /tmp of its own and worker nodes have proxies of their own, as pods do. The API is deployed by the config file
of the RayService. Needs redis-server (Debian package of that name).
"""

import json
import shutil
import socket
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from infembed_ray.cli.main import main
from infembed_ray.ray_compat import START_LIMITS
from infembed_ray.storage.steps import read_manifest, resolve
from tests.jobs.head import RAY
from tests.jobs.nodes import Nodes, require_private_nodes, running_nodes
from tests.modeling import backbones
from tests.serving.indexes import PASSAGES, publish_index
from tests.support.files import write_jsonl
from tests.support.ports import free_port, free_ports
from tests.support.waiting import wait_until
from tests.training.test_collate import record

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.end_to_end, pytest.mark.timeout(1200)]
REDIS = shutil.which("redis-server")
RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""KubeRay's default for worker pods of a cluster whose GCS has a Redis."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="head-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis that keeps its data in memory."""
    if REDIS is None:
        pytest.skip("no redis-server on this machine")
    port = free_port()
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def proxies() -> list[str]:
    """URLs of the proxies of the two worker nodes."""
    return [f"http://127.0.0.1:{port}" for port in free_ports(2)]


@pytest.fixture(scope="module")
def nodes(redis: str, proxies: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    require_private_nodes()
    directory = tmp_path_factory.mktemp("nodes")
    with running_nodes(0, RECONNECT, directory, head_cpus=0, RAY_REDIS_ADDRESS=redis, **START_LIMITS) as cluster:
        for url in proxies:
            cluster.add(RAY_SERVE_WORKER_PROXY_HTTP_PORT=url.rpartition(":")[2])
        cluster.wait_for(3)
        yield cluster


@contextmanager
def asked(urls: list[str]) -> Iterator[list[str]]:
    """Search on a new connection to each URL ten times a second; gives the outcome of each."""
    answers: list[str] = []
    ended = threading.Event()

    def client(url: str) -> None:
        number = 0
        while not ended.wait(0.1):
            number += 1
            body = json.dumps({"query": f"{list(PASSAGES.values())[number % len(PASSAGES)]} {number}", "top_k": 3})
            request = urllib.request.Request(f"{url}/v1/search", body.encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    outcome = str(response.status)
            except (OSError, urllib.error.HTTPError) as error:
                outcome = str(error)
            answers.append(outcome)

    threads = [threading.Thread(target=client, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_the_api_answers_without_its_head_and_a_new_head_goes_on(
    nodes: Nodes, proxies: list[str], shared: Path, minilm: str
) -> None:
    index = publish_index(shared / "index", minilm, PASSAGES)
    config = shared / "serve.yaml"
    overrides = [f"index={index}", f"port={free_port()}", f"config_file={config}", "dtype=float32"]
    assert main(["serve", *overrides, "ingress_replicas=2"]) == 0
    deploy = [str(RAY.with_name("serve")), "deploy", "--address", nodes.address, str(config)]
    subprocess.run(deploy, env=nodes.environment, check=True, timeout=120)
    wait_until(lambda: applications(nodes) == {"RUNNING"}, seconds=300, poll_s=1)
    wait_until(lambda: any(ready(url) for url in proxies))
    urls = [url for url in proxies if ready(url)]  # nodes without a replica have no proxy

    (shared / "model").mkdir()
    pipeline = shared / "pipeline.yaml"
    train = {
        "model": backbones.write("qwen2", shared / "model"),
        "records": str(write_jsonl(shared / "records.jsonl", (vars(record(n)) for n in range(8)))),
        "records_per_step": 4,
        "epochs": 500,
        "instruction_negatives": 2,
        "workers": 1,
        "cpus_per_worker": 1,
        "checkpoint_every": 20,
    }
    corpus = [{"id": row, "text": text} for row, text in PASSAGES.items()]
    build = {"corpus": str(write_jsonl(shared / "corpus.jsonl", corpus)), "shards": 1}
    pipeline.write_text(yaml.safe_dump({"output": str(shared / "out"), "train": train, "index": build}))
    on_a_worker = ("--entrypoint-num-cpus", "1", "--no-wait")
    nodes.submit("pipeline", "--config", str(pipeline), options=on_a_worker)
    wait_until(lambda: list((shared / "out" / "train").glob(".*.partial/metrics.jsonl")), seconds=240, poll_s=0.5)
    (driver,) = drivers(pipeline)

    with asked(urls) as outcomes:
        wait_until(lambda: len(outcomes) > 20)
        nodes.kill_gcs()
        nodes.restart_head()
        nodes.wait_for(3)
        wait_until(lambda: applications(nodes) == {"RUNNING"}, seconds=240, poll_s=0.5)
        answered = len(outcomes)
        wait_until(lambda: len(outcomes) > answered + 50)
    lost = Counter(outcome for outcome in outcomes if outcome != "200")

    released = shared / "out" / "release" / "latest"
    wait_until(lambda: released.exists() or not driver.is_running(), seconds=240, poll_s=0.5)
    assert released.exists()  # by the same driver, which ran on
    printed = nodes.submit("pipeline", "--config", str(pipeline)).finish()
    assert printed.count("nothing to do") == 2
    assert list(read_manifest(resolve(shared / "out" / "release"), "output")["stages"]) == ["train", "index"]
    assert not lost


def drivers(config: Path) -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if "jobs/pipeline.py" in (p.info["cmdline"] or [])[:2] and str(config) in p.cmdline()]


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def applications(nodes: Nodes) -> set[str]:
    """Return the statuses of Serve's applications."""
    try:
        page = nodes.page(f"{nodes.address}/api/serve/applications/", nodes.environment["RAY_AUTH_TOKEN"])
    except OSError:
        return set()
    return {application["status"] for application in json.loads(page)["applications"].values()}
