"""Phrases of instructions, the leave-one-out instructions, and effects by hand."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.serving import explaining
from infembed_ray.serving.explaining import explained_ids, explanation, phrases_of, require_explainable, variants


def texts(instruction: str) -> list[str]:
    return [phrase.text for phrase in phrases_of(instruction)]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("", []),
        (" \n ", []),
        ("clinicians", ["clinicians"]),
        (
            "For clinicians: effect sizes from trials; no eating tips.",
            ["For clinicians:", "effect sizes from trials;", "no eating tips."],
        ),
        ("Only guidelines written for clinicians.", ["Only guidelines written", "for clinicians."]),
        ("Studies of adults and children but not case reports", ["Studies of adults", "and children", "but not case reports"]),
        ("Nothing before 3.5.2020 (e.g. drafts), please.", ["Nothing before 3.5.2020", "(e.g. drafts),", "please."]),
        ("Keep:\n- trials\n- reviews – recent", ["Keep:", "- trials", "- reviews –", "recent"]),
        ("只要指南，面向医生。不要广告", ["只要指南，", "面向医生。", "不要广告"]),
    ],
)  # fmt: skip
def test_clauses_end_at_punctuation_line_breaks_and_conjunctions(instruction: str, expected: list[str]) -> None:
    assert texts(instruction) == expected


def test_long_clauses_are_halved_and_many_clauses_are_joined() -> None:
    words = [f"w{number}" for number in range(64)]
    assert texts(" ".join(words)) == [" ".join(words[start : start + 8]) for start in range(0, 64, 8)]
    clauses = texts(", ".join(f"clause {number:02d}" for number in range(40)))
    assert len(clauses) == explaining.MAX_PHRASES
    assert " ".join(clauses) == ", ".join(f"clause {number:02d}" for number in range(40))


@given(st.text(alphabet=st.one_of(st.sampled_from(" \n,.;:()'and-。"), st.characters()), max_size=300))
def test_phrases_are_few_in_order_and_cover_all_but_white_space(instruction: str) -> None:
    phrases = phrases_of(instruction)
    assert len(phrases) <= explaining.MAX_PHRASES
    assert all(instruction[p.start : p.end] == p.text == p.text.strip() for p in phrases)
    assert all(one.end <= other.start for one, other in pairwise(phrases))
    covered = {offset for p in phrases for offset in range(p.start, p.end)}
    assert all(instruction[o].isspace() for o in range(len(instruction)) if o not in covered)
    whole, none, *left = variants(instruction, phrases)
    assert (whole, none) == (instruction, None)
    for phrase, rest in zip(phrases, left, strict=True):  # the others, in order, and nothing of the phrase
        kept = "".join(p.text for p in phrases if p is not phrase)
        assert "".join((rest or "").split()) == "".join(kept.split())


def test_the_longest_instruction_that_is_explained_takes_no_time() -> None:
    start = time.process_time()
    most = explaining.MAX_EXPLAINED_CHARACTERS
    for worst in (" ", "\n ", "aa.", "and ", "('", "a, ", ". ", "a" + " " * 99):
        phrases_of((worst * most)[:most])
    assert time.process_time() - start < 5  # quadratic backtracking would take minutes


def test_effects_by_hand() -> None:
    phrases = phrases_of("For clinicians: no tips.")
    scores = {
        "a": np.array([0.9, 0.5, 0.7, 0.95], np.float32),
        "b": np.array([0.8, 0.9, 0.8, 0.85], np.float32),
        "d": np.array([0.1, 0.8, 0.3, 0.6], np.float32),
    }
    found = explanation(phrases, ["a", "b", "c"], ["b", "d", "x", "a"], 3, scores)  # c and x changed meanwhile
    assert explained_ids(["a", "b", "c"], ["b", "d", "x", "a"], 3) == ["a", "b", "c", "d", "x"]
    ranks = [(p.id, p.rank, p.rank_without) for p in found.passages]
    assert ranks == [("a", 1, 4), ("b", 2, 1), ("d", None, 2)]
    assert [p.score for p in found.passages] == pytest.approx([0.9, 0.8, 0.1])
    assert [p.score_without for p in found.passages] == pytest.approx([0.5, 0.9, 0.8])
    effects = [effect for p in found.passages for effect in p.effects]
    assert effects == pytest.approx([0.2, -0.05, 0.0, -0.05, -0.2, -0.5], abs=1e-6)


@pytest.mark.parametrize(
    ("instruction", "top_k", "fault"),
    [
        (None, 5, "there is no instruction"),
        ("  ", 5, "there is no instruction"),
        ("i" * 4001, 5, "the instruction has 4001 characters"),
        ("I", 21, "top_k=21"),
    ],
)
def test_a_search_that_cannot_be_explained_is_refused(instruction: str | None, top_k: int, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        require_explainable(instruction, top_k)
    require_explainable("i" * 4000, 20)
