"""A pipeline on three nodes that share no directory, killed twice: its driver once, a node once, at random moments.

It ends with the figures of an undisturbed run, its lineage goes back to the seeds, and no secret is written anywhere.

What is paid again is counted at the LLM's server; an answer counts as paid as soon as it is sent, also to a dead process.
With `Idempotency-Key` no request is paid twice. Without it, a killed driver costs what was in flight, and a lost node its
answers since the last upload of its journal.
"""

import contextlib
import io
import json
import random
import re
import secrets
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import pytest

from infembed_ray.cli.main import main
from infembed_ray.quickstart import sample
from tests.jobs.nodes import Job, Nodes, require_private_nodes, running_nodes
from tests.modeling import backbones
from tests.support.files import read_jsonl, write_jsonl
from tests.support.object_store import BUCKET, files_in, published, server_process, system
from tests.support.ports import free_port
from tests.support.stand_in_llm import StandIn
from tests.support.stand_in_llm import stand_in_process as stand_in

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.end_to_end, pytest.mark.timeout(1800)]

NAMES = ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "INFEMBED_API_KEYS", "RAY_AUTH_TOKEN")
SECRETS = {name: f"canary-{secrets.token_hex(16)}" for name in NAMES}
"""Random, because this file itself is in the working directory that a submission uploads."""
STORE = {"AWS_ACCESS_KEY_ID": "testing", "AWS_REGION": "us-east-1"}
STAGES = ("synthesize", "analyze", "train", "evaluate", "index")
DATA = {"synthesize": "*.parquet", "train": "*.safetensors", "evaluate": "*.parquet", "index": "shard-*/*"}
"""Stage -> its files that do not name where inputs are."""
SEEDS = 40
CALLS = 8
"""Calls of a seed that is kept."""
ACTORS, IN_FLIGHT = 2, 6
UPLOAD_S = 2.0
LATENCY_S = 0.3
WINDOW = ACTORS * IN_FLIGHT * (UPLOAD_S / LATENCY_S + 2)
"""Answers between two uploads of the journals, and those in flight at both ends."""
PS_EVERY_S = 0.3
SYNTHESIZER = "(_Synthesizer)"
"""Part of the name of the actors that ask the LLM; a node is lost with one of them."""


# ------------------------------------------------------------------------------------------------ the cluster


@dataclass
class Arguments:
    """The arguments of all processes of this machine over some time, as `ps` shows them to any user."""

    seen: set[str]

    def watch(self, ended: threading.Event) -> None:
        while not ended.wait(PS_EVERY_S):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    self.seen.add(" ".join(process.cmdline()))


@pytest.fixture(scope="module")
def arguments() -> Iterator[Arguments]:
    found, ended = Arguments(set()), threading.Event()
    thread = threading.Thread(target=found.watch, args=(ended,), daemon=True)
    thread.start()
    yield found
    ended.set()
    thread.join()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of what the store and the nodes print, and of the submissions."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def store(logs: Path) -> Iterator[dict[str, str]]:
    credentials = {name: value for name, value in SECRETS.items() if name.startswith("AWS_")} | STORE
    with server_process(logs, credentials) as environment:
        yield environment


@pytest.fixture(scope="module")
def nodes(store: dict[str, str], logs: Path, arguments: Arguments) -> Iterator[Nodes]:
    require_private_nodes()
    with running_nodes(2, store | SECRETS, logs) as cluster:
        yield cluster


# ------------------------------------------------------------------------------------------------ the pipeline


@dataclass(frozen=True)
class Pipeline:
    """Submits one pipeline, any number of times, into a folder of the store."""

    nodes: Nodes
    settings: dict[str, Any]
    name: str
    server: StandIn

    @property
    def output(self) -> str:
        return f"s3://{BUCKET}/{self.name}"

    def submit(self) -> Job:
        endpoint = {"base_url": self.server.url}
        own = {f"synthesize.endpoint.{name}": value for name, value in endpoint.items()} | {"output": self.output}
        return self.nodes.submit("pipeline", *(f"{name}={value}" for name, value in (self.settings | own).items()))

    def kill_driver(self, job: Job) -> None:
        """Kill the process that runs the stages, and wait for the end of the submission."""
        (driver,) = (
            process
            for process in psutil.process_iter(["cmdline"])
            if (process.info["cmdline"] or [])[1:2] == ["jobs/pipeline.py"]
            and f"output={self.output}" in process.info["cmdline"]
        )
        driver.kill()
        assert job.process.wait(timeout=120) != 0

    def outputs(self) -> dict[str, dict[str, bytes]]:
        """Return stage -> files of the output that the release names."""
        store = system({"AWS_ENDPOINT_URL": self.nodes.environment["AWS_ENDPOINT_URL"]})
        released = json.loads(published(store, f"{BUCKET}/{self.name}/release")["manifest.json"])["stages"]
        found = {stage: published(store, f"{BUCKET}/{self.name}/{stage}") for stage in STAGES}
        assert {stage: json.loads(found[stage]["manifest.json"])["identity"] for stage in STAGES} == {
            stage: made["identity"] for stage, made in released.items()
        }
        return found


@pytest.fixture(scope="module")
def settings(store: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory, seeds = tmp_path_factory.mktemp("inputs"), read_jsonl(sample.SEEDS)
    model = directory / "model"
    model.mkdir()
    backbones.write("qwen2", model)
    rows = [row | {"split": "test" if n % 4 == 0 else "train"} for n, row in enumerate(seeds[:SEEDS])]
    corpus = [{"id": row["id"], "text": row["passage"]} for row in seeds]

    def upload(path: Path) -> str:
        """Copy a file, or the files of a directory, to the store; return its URI."""
        for file in [path] if path.is_file() else path.iterdir():
            with system(store).open_output_stream(f"{BUCKET}/inputs/{file.relative_to(directory)}") as stream:
                stream.write(file.read_bytes())
        return f"s3://{BUCKET}/inputs/{path.name}"

    stages: dict[str, dict[str, Any]] = {
        "synthesize": {
            "seeds": upload(write_jsonl(directory / "seeds.jsonl", rows)),
            "generator.model": "stand-in",
            "judge.model": "stand-in",
            "actors": ACTORS,
            "in_flight": IN_FLIGHT,
            "journal_upload_s": UPLOAD_S,
        },
        "analyze": {"gates.min_kept": 0.5},
        "train": {
            "model": upload(model),
            "split": "train",
            "records_per_step": 4,
            "epochs": 2,
            "instruction_negatives": 2,
            "cpus_per_worker": 1,
            "workers": 2,
            "checkpoint_every": 3,
        },
        "evaluate": {"split": "test", "gate": "null"},
        "index": {"corpus": upload(write_jsonl(directory / "corpus.jsonl", corpus)), "shards": 2},
    }
    return {f"{stage}.{name}": value for stage, own in stages.items() for name, value in own.items()}


@dataclass(frozen=True)
class Undisturbed:
    """Outputs of the run without a kill, and the seconds of the stages after synthesis."""

    outputs: dict[str, dict[str, bytes]]
    later_s: float


@pytest.fixture(scope="module")
def undisturbed(nodes: Nodes, settings: dict[str, Any]) -> Undisturbed:
    with stand_in(latency_s=LATENCY_S, key=SECRETS["OPENAI_API_KEY"]) as server:
        pipeline = Pipeline(nodes, settings, "undisturbed", server)
        job = pipeline.submit()
        job.wait_for(lambda: "pipeline: analyze" in job.printed)
        start = time.monotonic()
        job.finish()
        later_s = time.monotonic() - start
        assert len(server.usable()) == SEEDS * CALLS
        assert {entry["authorization"] for entry in server.log()} == {f"Bearer {SECRETS['OPENAI_API_KEY']}"}
    return Undisturbed(pipeline.outputs(), later_s)


# ----------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("first", ["driver", "node"])
def test_a_pipeline_whose_driver_and_a_node_are_killed_ends_as_an_undisturbed_one(
    nodes: Nodes,
    settings: dict[str, Any],
    undisturbed: Undisturbed,
    logs: Path,
    first: str,
) -> None:
    rng = random.Random(first)
    share, later_s = rng.uniform(0.1, 0.9), rng.uniform(0, 0.8) * undisturbed.later_s
    kills = []

    def kill(what: str) -> Job:
        """Kill the driver or a node; return the job that then runs."""
        stage = re.findall(r"^pipeline: (\w+) \(", job.printed, re.MULTILINE)[-1]
        kills.append((what, stage))
        if what == "node":
            nodes.kill_busiest(SYNTHESIZER if stage == "synthesize" else "")
            return job
        pipeline.kill_driver(job)
        (logs / f"killed-{pipeline.name}.log").write_text(job.printed)
        return pipeline.submit()

    with stand_in(latency_s=LATENCY_S, key=SECRETS["OPENAI_API_KEY"]) as server:
        pipeline = Pipeline(nodes, settings, first, server)
        start = time.monotonic()
        job = pipeline.submit()
        job.wait_for(lambda: server.answers() > share * SEEDS * CALLS)
        job = kill(first)
        job.wait_for(lambda: "pipeline: analyze" in job.printed)
        time.sleep(later_s)
        job = kill("node" if first == "driver" else "driver")
        job.finish()
        paid = Counter(entry["request"] for entry in server.log() if entry["ended"] in ("answered", "undelivered"))
    again = sum(paid.values()) - len(paid)
    print(
        f"\nkilled {kills}, the first after {share:.0%} of the calls, the second {later_s:.0f} s after "
        f"synthesis: {len(paid)} requests, {again} paid again, "
        f"{time.monotonic() - start:.0f} s in all"
    )
    assert len(paid) == SEEDS * CALLS
    assert again <= WINDOW
    assert_equal(pipeline.outputs(), undisturbed.outputs)
    assert lineage_of(f"{pipeline.output}/release") == [*STAGES, "seeds"]


def assert_equal(got: dict[str, dict[str, bytes]], wanted: dict[str, dict[str, bytes]]) -> None:
    """Figures are equal, and the data byte by byte. In a store, identities depend on the times of the inputs' objects."""
    for stage, pattern in DATA.items():
        mine, other = (json.loads(outputs[stage]["manifest.json"]) for outputs in (got, wanted))
        assert mine.get("figures") == other.get("figures"), stage
        compared = [name for name in wanted[stage] if PurePosixPath(name).match(pattern)]
        assert compared
        assert [name for name in compared if got[stage][name] != wanted[stage][name]] == [], stage


def lineage_of(release: str) -> list[str]:
    """Return the stages of a release's lineage in order, and the inputs of the first one."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["runs", "show", release]) == 0
    assert "no longer there" not in printed.getvalue()
    stages = re.findall(r"^  (\w+): \1 [0-9a-f]+  ", printed.getvalue(), re.MULTILINE)
    seeds = re.findall(
        rf"records: synthesize .*\n +(seeds): s3://{BUCKET}/inputs/seeds.jsonl  [0-9a-f]+", printed.getvalue()
    )
    return [*stages, *sorted(set(seeds))]


def test_no_secret_is_in_outputs_logs_pages_or_arguments(
    nodes: Nodes, undisturbed: Undisturbed, store: dict[str, str], logs: Path, arguments: Arguments
) -> None:
    alias, port = f"s3://{BUCKET}/production.release", free_port()
    assert main(["runs", "promote", f"s3://{BUCKET}/undisturbed/release", alias]) == 0
    printed = nodes.submit("serve", f"index={alias}", f"port={port}", "wait=false").finish()
    api, key = f"http://127.0.0.1:{port}", SECRETS["INFEMBED_API_KEYS"]
    body = json.dumps({"query": "aspirin", "instruction": "For nurses.", "top_k": 1}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{api}/v1/search", body, headers), timeout=60) as answer:
        assert len(json.load(answer)["hits"]) == 1

    places: dict[str, Iterable[tuple[str, bytes]]] = {
        "outputs": files_in(system(store), BUCKET),
        "files of the nodes": _contents(nodes.files()),
        "printed": [("serve", printed.encode()), *_contents(logs.iterdir())],
        "arguments": [(line, line.encode()) for line in arguments.seen],
        "pages": [*_pages(nodes, api, key)],
    }
    for kind, found in places.items():
        files, known = 0, False
        for name, content in found:
            files, known = files + 1, known or f"{BUCKET}/undisturbed".encode() in content
            assert not [secret for secret, value in SECRETS.items() if value.encode() in content], (kind, name)
        print(f"{kind}: {files}")
        assert known, kind  # what is no secret is there, so the search can find


def _contents(files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        with contextlib.suppress(OSError):  # a socket, or deleted meanwhile
            if file.is_file() and not file.is_symlink():
                yield str(file), file.read_bytes()


def _pages(nodes: Nodes, api: str, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the pages of the head, the metrics of every node, and the metrics of the HTTP API."""
    token = SECRETS["RAY_AUTH_TOKEN"]

    def page(url: str, key: str) -> tuple[str, bytes]:
        for _ in range(20):  # the pages about states fail while a node does not answer
            with contextlib.suppress(OSError):
                return url, nodes.page(url, key).encode()
            time.sleep(3)
        raise AssertionError(f"{url} does not answer")

    states = [f"/api/v0/{kind}?detail=1" for kind in ("jobs", "actors", "tasks", "runtime_envs", "nodes", "workers")]
    for path in ("/api/jobs/", "/api/serve/applications/", "/nodes?view=summary", "/logical/actors", *states):
        yield page(nodes.address + path, token)
    listed = next(
        file for file in nodes.files() if file.name == "prom_metrics_service_discovery.json" and not file.is_symlink()
    )
    for group in json.loads(listed.read_text()):
        for target in group["targets"]:
            yield page(f"http://{target}/metrics", token)
    yield page(f"{api}/metrics", key)
