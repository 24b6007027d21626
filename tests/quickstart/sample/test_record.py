import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.journal import Journal, replaying
from infembed_ray.quickstart import sample
from infembed_ray.records import tables
from infembed_ray.synthesis.judge import Pool
from infembed_ray.synthesis.pipeline import Outcome, synthesize
from scripts.record_sample import TEST_TOPICS, record

AUTHORED = [json.loads(line) for line in sample.AUTHORED.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The sample through the pipeline, from its journal alone."""
    seeds = tables.read(sample.SEEDS, tables.Seed, "seeds")
    settings = SynthesizeSettings(seeds="", output="", generator=sample.MODEL, judge=sample.MODEL)
    complete = replaying(Journal(tmp_path_factory.mktemp("journal"), [sample.JOURNAL]))
    pool = Pool.of({seed.passage: [seed.query] for seed in seeds})

    async def replay() -> list[Outcome]:
        return [await synthesize(seed, pool, settings, complete) for seed in seeds]

    return asyncio.run(replay())


def test_seeds_and_journal_are_what_the_authored_lines_and_todays_prompts_make() -> None:
    seeds, journal = record()
    remedy = "run python -m scripts.record_sample"
    assert seeds == sample.SEEDS.read_bytes(), remedy
    assert journal == sample.JOURNAL.read_bytes(), remedy


def test_the_journal_answers_everything_and_what_is_kept_is_what_was_written_without_a_flaw(
    outcomes: list[Outcome],
) -> None:
    kept = {outcome.row["id"] for outcome in outcomes if outcome.kind == "kept"}
    assert kept == {row["id"] for row in AUTHORED if row["flaw"] is None}
    assert Counter(outcome.kind for outcome in outcomes)["dead_letter"] == 0
    assert sum(outcome.paid.calls for outcome in outcomes) == 0


def test_kept_records_hold_the_authored_texts(outcomes: list[Outcome]) -> None:
    authored = {row["id"]: row for row in AUTHORED}
    for outcome in outcomes:
        if outcome.kind == "kept":
            wanted = authored[outcome.row["id"]]
            for column in ("instruction_positive", "instruction_negative", "query_negative"):
                assert outcome.row[column] == wanted[column]
            for column in ("hard_negative_document_1", "hard_negative_document_2"):
                assert outcome.row[column] == wanted[column].strip()


def test_both_filters_have_something_to_catch(outcomes: list[Outcome]) -> None:
    rejected = [outcome.row for outcome in outcomes if outcome.kind == "rejected"]
    steps = {row["step"] for row in rejected}
    assert {"judge_positive", "judge_negative_instruction", "judge_negative_query"} <= steps
    assert {"instruction_negative", "query_negative"} <= steps


def test_the_sample_is_large_enough_with_hard_siblings_and_whole_topics_held_out(outcomes: list[Outcome]) -> None:
    assert len(AUTHORED) >= 120
    topics = Counter(row["topic"] for row in AUTHORED)
    assert len(topics) >= 12
    splits = {(outcome.row["topic"], outcome.row["split"]) for outcome in outcomes if outcome.kind == "kept"}
    assert splits == {(topic, "test" if topic in TEST_TOPICS else "train") for topic in topics}
    queries = Counter((row["topic"], row["query"]) for row in AUTHORED)
    assert {topic for (topic, _), times in queries.items() if times > 1} == set(topics)


def test_the_journal_claims_no_model_and_no_tokens() -> None:
    entries = [json.loads(line) for line in Path(sample.JOURNAL).read_text(encoding="utf-8").splitlines()]
    assert {entry["model"] for entry in entries} == {entry["snapshot"] for entry in entries} == {"bundled-sample"}
    assert {entry["prompt_tokens"] + entry["completion_tokens"] for entry in entries} == {0}
