import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.retrieval.instruction_parts import away, split
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
        ("Rather than opinions, give data.", "opinions"),
        ("Data rather than opinions", "opinions"),
        ("Avoid marketing language", "marketing language"),
        ("Leave out dosage tables and prices.", "dosage tables and prices"),
        ("Leave dosage tables and prices out.", "dosage tables and prices"),
        ("Leave concrete studies for later chapters.", "concrete studies"),
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
        ("Petrol prices aren't what I mean.", "Petrol prices"),
        ("A verbatim definition does not have to appear.", "A verbatim definition"),
        ("A plain definition, free of legal terms", "legal terms"),
        ("Broad overview, not one single disease, and no drugs", "one single disease; drugs"),
        ("A table; product lists are irrelevant.", "product lists"),
        ("For clinicians.\nNo vendor pages", "vendor pages"),
        ("Recent reviews (no blogs)", "blogs"),
        ("- reviews\n- no blogs\n- not vendor pages", "blogs; vendor pages"),
    ],
)
def test_the_unwanted_part_is_found(instruction: str, unwanted: str) -> None:
    parts = split(instruction)
    assert parts.unwanted == unwanted
    assert "; ".join(instruction[a:b] for a, b in parts.spans) == unwanted
    for text in unwanted.split("; "):
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
    assert split(instruction) == (instruction.strip(), "", ())


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("Guidelines for clinicians. No vendor pages.", "Guidelines for clinicians."),
        ("Show results, excluding vendor pages, for clinicians.", "Show results for clinicians."),
        ("No blogs, and no older than five years", "no older than five years"),
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
def test_spans_are_ordered_parts_of_the_instruction(instruction: str) -> None:
    parts = split(instruction)
    last = 0
    for start, end in parts.spans:
        assert last <= start < end <= len(instruction)
        last = end
    assert parts.unwanted == "; ".join(instruction[a:b] for a, b in parts.spans)
    assert len(parts.wanted) <= len(instruction)


def test_an_instruction_that_no_encoder_reads_to_its_end_stays_whole() -> None:
    assert split("no cats, " * 400).unwanted
    assert split("no cats, " * 500) == (("no cats, " * 500).strip(), "", ())


def test_scores_are_lowered_by_the_unwanted_part_up_to_a_factor_per_query() -> None:
    wanted, unwanted, passages = unit_vectors(3, 8, 1), unit_vectors(3, 8, 2), unit_vectors(20, 8, 3)
    moved = away(wanted, unwanted, 0.6)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, atol=1e-6)
    expected = wanted @ passages.T - 0.6 * unwanted @ passages.T
    ratio = (moved @ passages.T) / expected
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-3)
    assert (ratio > 0).all()
    np.testing.assert_allclose(away(wanted, wanted, 1.0), wanted)  # a query that excludes itself stays
