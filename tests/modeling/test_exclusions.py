"""What instructions exclude, and how it moves the vectors of queries in every place that encodes them."""

import asyncio
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.serving import ServeSettings
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.encoders import CheckpointEncoder
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.exclusions import moved, split, with_excluded
from infembed_ray.modeling.formats import Question
from infembed_ray.serving.encoder.engine import EncodingEngine
from tests.modeling import backbones
from tests.retrieval.vectors import unit_vectors


@pytest.mark.parametrize(
    ("instruction", "unwanted"),
    [
        ("Guidelines for clinicians. No vendor pages.", "vendor pages"),
        ("Skip recipes and clinical trials.", "recipes and clinical trials"),
        ("Python, not the snake", "the snake"),
        ("Reviews except for paid ones", "paid ones"),
        ("Show results, excluding vendor pages, for clinicians.", "vendor pages"),
        ("Describe the law without court cases, for students", "court cases"),
        ("Anything other than poetry", "poetry"),
        ("Anything but poetry", "poetry"),
        ("All sports except football", "football"),
        ("Data rather than opinions", "opinions"),
        ("Avoid marketing language", "marketing language"),
        ("Leave out dosage tables and prices.", "dosage tables and prices"),
        ("Leave concrete studies for later chapters.", "concrete studies for later chapters"),
        ("Please do not include forum posts.", "forum posts"),
        ("I don't want vendor pages or ads.", "vendor pages or ads"),
        ("I’m not after a dermatology textbook.", "a dermatology textbook"),
        ("I am not interested in history, only in prices", "history"),
        ("It says nothing about climate averages.", "climate averages"),
        ("Neither recipes nor menus", "recipes; menus"),
        ("Tumors, surgery and location in the head are out.", "Tumors, surgery and location in the head"),
        ("Ticket prices can be ignored.", "Ticket prices"),
        ("Testimonials do not belong in my collection.", "Testimonials"),
        ("Growth charts do not.", "Growth charts"),
        ("Laboratory procedure and lime arithmetic would be too advanced.", "Laboratory procedure and lime arithmetic"),
        ("Petrol prices aren't relevant.", "Petrol prices"),
        ("A verbatim definition does not have to appear.", "A verbatim definition"),
        ("A plain definition, free of legal terms", "legal terms"),
        ("Broad overview, no anecdotes, and no drugs", "anecdotes; drugs"),
        ("A table; product lists are irrelevant.", "product lists"),
        ("For clinicians.\nNo vendor pages", "vendor pages"),
        ("Recent reviews (no blogs)", "blogs"),
        ("- reviews\n- no blogs\n- not vendor pages", "blogs; vendor pages"),
    ],
)
def test_the_unwanted_part_is_found(instruction: str, unwanted: str) -> None:
    parts = split(instruction)
    assert parts.unwanted == unwanted
    for text in unwanted.split("; "):
        assert text in instruction
        assert text not in parts.wanted


@pytest.mark.parametrize(
    "instruction",
    [
        "",
        "Guidelines for clinicians.",
        "Guidelines not only for doctors but also for nurses.",
        "Not just prices but trends, too",
        "Studies published no later than 2020.",
        "Not after 2020",
        "Nothing published before 2015",
        "Papers not older than five years",
        "No more than two sentences",
        "In no fewer than three steps",
        "Nothing but the recipe.",
        "None other than the original text",
        "No sources other than court records",
        "Do not leave out the side effects.",
        "Don't forget the dosage.",
        "Never skip the equations",
        "An account not without humour",
        "No need to exclude reviews",
        "Nothing may be left out.",
        "With or without sugar",
        "Say whether or not it is safe",
        "Foods to avoid in pregnancy",
        "Advice for patients who have no insurance",
        "Explain why Pluto is not a planet",
        "I'm not a doctor, explain simply",
        "Say whether it works or not.",
        "No matter the price, compare features",
        "Article no. 5 of the treaty",
        "A headcount alone is not enough for my profile",
    ],
)
def test_limits_additions_double_negations_and_descriptions_exclude_nothing(instruction: str) -> None:
    assert split(instruction).unwanted == ""
    assert split(instruction).wanted.split() == instruction.split()


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("Guidelines for clinicians. No vendor pages.", "Guidelines for clinicians."),
        ("Show results, excluding vendor pages, for clinicians.", "Show results for clinicians."),
        ("No blogs, and no older than five years", "and no older than five years"),
        ("Skip recipes.", ""),
    ],
)
def test_what_is_left_is_wanted(instruction: str, wanted: str) -> None:
    assert split(instruction).wanted == wanted


WORDS = (
    "no not without except , . ; but only than rather leave out skip nothing other is are can be ignored "
    "I the cats dogs 2020 later don't and or - : ( ) “ é"
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(WORDS.split()), max_size=25).map(" ".join) | st.text(max_size=60))
def test_both_parts_are_parts_of_the_instruction(instruction: str) -> None:
    wanted, unwanted = split(instruction)
    assert all(text in instruction for text in unwanted.split("; "))
    assert not Counter(wanted.split()) - Counter(instruction.split())


def test_an_instruction_that_no_encoder_reads_to_its_end_stays_whole() -> None:
    assert split("no cats, " * 400).unwanted
    assert split("no cats, " * 500) == ("no cats, " * 500, "")


QUESTIONS = [
    Question("heart", "For nurses; no prices."),
    Question("heart"),
    Question("lungs", "Plain words."),
    Question("lungs", "Skip trials. Prices can be ignored."),
    Question("veins", "For nurses; no prices."),
]


def test_scores_are_those_of_the_query_less_those_of_what_it_excludes_up_to_a_factor() -> None:
    assert with_excluded(QUESTIONS, 0.4) == [*QUESTIONS, Question("prices"), Question("trials; Prices")]
    vectors, passages = unit_vectors(7, 8, 1), unit_vectors(20, 8, 2).astype(np.float64)
    exact = vectors.astype(np.float64)
    for row, (vector, excluded) in enumerate(zip(moved(QUESTIONS, vectors, 0.4), (5, None, None, 6, 5), strict=True)):
        query = exact[row] if excluded is None else exact[row] - 0.4 * exact[excluded]
        expected = [float(passage @ query) / math.sqrt(query @ query) for passage in passages]
        np.testing.assert_allclose(passages @ vector, expected, atol=1e-6)


def test_a_weight_of_0_and_instructions_without_exclusions_cost_nothing() -> None:
    vectors = unit_vectors(5, 8, 1)
    assert with_excluded(QUESTIONS, 0.0) == QUESTIONS
    assert (moved(QUESTIONS, vectors, 0.0) == vectors).all()
    assert with_excluded(QUESTIONS[1:3], 0.4) == QUESTIONS[1:3]
    assert (moved(QUESTIONS[1:3], vectors[:2], 0.4) == vectors[:2]).all()
    same = np.stack([vectors[0], vectors[0]])
    assert (moved(QUESTIONS[:1], same, 1.0) == 0).all()  # a query that excludes itself finds nothing


def test_a_checkpoint_keeps_the_weight_and_the_server_applies_it_as_the_encoder_does(tmp_path: Path) -> None:
    encoder = InstructionEncoder.from_pretrained(backbones.write("modernbert", tmp_path / "base"))
    plain = encoder.fingerprint()
    encoder.exclusion_weight = 0.4
    encoder.save_pretrained(tmp_path / "moved")
    again = InstructionEncoder.from_pretrained(tmp_path / "moved")
    queries, instructions = [q.query for q in QUESTIONS], [q.instruction for q in QUESTIONS]
    expected = encoder.embed(encoder.tokenize_queries(queries, instructions)).astype(np.float64)
    for row, unwanted in ((0, "prices"), (3, "trials; Prices"), (4, "prices")):
        expected[row] -= 0.4 * encoder.embed(encoder.tokenize_queries([unwanted], [None]))[0].astype(np.float64)
        expected[row] /= math.sqrt(expected[row] @ expected[row])
    np.testing.assert_allclose(again.encode_queries(queries, instructions), expected, atol=1e-5)
    np.testing.assert_allclose(again.encode_queries(queries[0], instructions[0]), expected[0], atol=1e-5)
    assert again.fingerprint() != plain
    evaluated = CheckpointEncoder(baselines.resolve("m", str(tmp_path / "moved")), "cpu", None)
    asked = [Query(str(row), *question) for row, question in enumerate(QUESTIONS)]
    np.testing.assert_allclose(evaluated.encode_queries(asked), expected, atol=1e-5)

    async def served() -> np.ndarray:
        engine = EncodingEngine.load(str(tmp_path / "moved"), ServeSettings(index="none", dtype="float32"))
        return (await engine.embed(queries, instructions)).vectors

    np.testing.assert_allclose(asyncio.run(served()), expected, atol=1e-5)
