"""A small synthesis output, written as synthesis writes it."""

from dataclasses import dataclass, replace
from pathlib import Path

from infembed_ray.analysis.figures import read
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.records import tables
from infembed_ray.records.tables import SCENARIOS
from infembed_ray.storage.steps import Step, resolve
from tests.evaluation.tasks import test_infir

JUDGED = dict(zip(SCENARIOS, SCENARIOS, strict=True))


def record(name, **changes):
    return replace(test_infir.record(name), **{"source": "sample", **changes})


def provenance(usd=0.01, prompt_tokens=1000, completion_tokens=100, **verdicts):
    return {
        "generator": "a-model",
        "judge": "another-model",
        "prompt_version": "1",
        "request_hashes": ["0123"],
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "usd": usd,
        "verdicts": {scenario: verdicts.get(scenario) for scenario in SCENARIOS},
    }


def kept(name, usd=0.01, **changes):
    return vars(record(name, **changes)) | {"provenance": provenance(usd, **JUDGED)}


def rejected(name, step, reason, **verdicts):
    return vars(record(name)) | {"step": step, "reason": reason, "provenance": provenance(**verdicts)}


def dead(name, step, error):
    row = {"id": name, "source": "sample", "step": step, "error": error, "request_hash": "4567"}
    return row | {"provenance": provenance(completion_tokens=0)}


@dataclass(frozen=True)
class Rows:
    kept: list
    rejected: list
    dead_letter: list
    complements: tuple = ()


ROWS = Rows(
    kept=[kept("a", topic="tea"), kept("b", topic="tea"), kept("c", topic="bread")],
    rejected=[
        rejected("d", "judge_positive", "the judge picked none", negative_query="negative_query", positive="none"),
        rejected("e", "judge_positive", "the judge picked none", negative_query="negative_query", positive="none"),
        rejected("f", "query_negative", "equal to the positive it should poison"),
    ],
    dead_letter=[dead("g", "instruction_positive", "refused: <b>no</b>")],
)


def publish(output: Path, rows: Rows = ROWS, seeds: int | None = None) -> Path:
    """Publish rows as a synthesis output; returns the directory that `records=` takes."""
    output.mkdir(parents=True)
    source = output / "seeds.jsonl"
    source.write_text("{}")
    settings = SynthesizeSettings(seeds=str(source), output=str(output))
    step = Step("synthesize", settings, str(output), {"seeds": source})
    with step.publish() as staging:
        tables.write(staging.path / tables.KEPT_FILE, tables.RECORD, rows.kept)
        tables.write(staging.path / tables.REJECTED_FILE, tables.REJECTED, rows.rejected)
        tables.write(staging.path / tables.DEAD_LETTER_FILE, tables.DEAD_LETTER, rows.dead_letter)
        if rows.complements:
            tables.write(staging.path / tables.COMPLEMENTS_FILE, tables.COMPLEMENT, rows.complements)
        sizes = {"kept": len(rows.kept), "rejected": len(rows.rejected), "dead_letter": len(rows.dead_letter)}
        staging.counts = {"seeds": sum(sizes.values()) if seeds is None else seeds, **sizes}
    return output


def output(directory, rows=ROWS, **changes):
    """Publish rows, and read them back for a report."""
    return read(resolve(publish(directory / "out", rows, **changes)), "records")
