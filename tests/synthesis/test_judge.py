import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.llm.chat import RowFailure
from infembed_ray.records.tables import SCENARIOS
from infembed_ray.synthesis import judge

DOCUMENTS = {scenario: f"text of {scenario}" for scenario in SCENARIOS}
POOL = [*(f"other {number}" for number in range(20)), DOCUMENTS["positive"]]

counts = st.integers(0, 20)
seeds = st.tuples(st.integers(0, 99), st.text(max_size=4), st.sampled_from(SCENARIOS))


def test_all_three_scenarios_are_asked() -> None:
    assert sorted(judge.ORDER) == sorted(SCENARIOS)


@given(counts, seeds)
def test_a_lineup_is_the_rows_passages_and_distinct_distractors(count: int, seed: tuple[int, str, str]) -> None:
    shown = judge.lineup(DOCUMENTS, POOL, count, *seed)
    pairs = list(zip(shown.names, shown.passages, strict=True))
    assert [pair for pair in sorted(pairs) if pair[0] != judge.DISTRACTOR] == sorted(DOCUMENTS.items())
    drawn = [passage for name, passage in pairs if name == judge.DISTRACTOR]
    assert len(drawn) == len(set(drawn)) == count
    assert set(drawn) <= set(POOL) - {DOCUMENTS["positive"]}


@given(counts, seeds)
def test_a_lineup_depends_on_its_seed_alone(count: int, seed: tuple[int, str, str]) -> None:
    again = dict(reversed(DOCUMENTS.items()))
    assert judge.lineup(DOCUMENTS, POOL, count, *seed) == judge.lineup(again, POOL, count, *seed)


def test_every_candidate_occurs_at_every_position() -> None:
    places = {
        (name, place) for row in range(300) for place, name in enumerate(judge.lineup(DOCUMENTS, POOL, 2, row).names)
    }
    assert places == {(name, place) for name in (*SCENARIOS, judge.DISTRACTOR) for place in range(5)}


@given(counts, seeds, st.data())
def test_the_number_before_a_passage_picks_it(count: int, seed: tuple[int, str, str], data: st.DataObject) -> None:
    shown = judge.lineup(DOCUMENTS, POOL, count, *seed)
    numbered = dict(re.findall(r"^\[(\d+)\] (.*)$", str(shown), re.MULTILINE))
    number = data.draw(st.sampled_from(sorted(numbered)))
    wanted = {text: name for name, text in DOCUMENTS.items()}.get(numbered[number], judge.DISTRACTOR)
    form = data.draw(
        st.sampled_from(["Answer: {}", "**Answer:** {}", "answer: [{}].", "It may be 1.\nAnswer: 1? No.\nAnswer: {}"])
    )
    assert judge.verdict(form.format(number), shown) == wanted


@given(counts, seeds)
def test_every_choice_is_a_verdict(count: int, seed: tuple[int, str, str]) -> None:
    shown = judge.lineup(DOCUMENTS, POOL, count, *seed)
    assert [judge.verdict(f"Answer: {choice}", shown) for choice in shown.choices] == [*shown.names, judge.NONE]


@pytest.mark.parametrize(
    "text", ["Answer: none", "Answer: None.", "Answer: none of the 7 passages", "3?\nAnswer: **none**"]
)
def test_none_is_a_verdict(text: str) -> None:
    assert judge.verdict(text, judge.lineup(DOCUMENTS, POOL, 2, 0)) == judge.NONE


CLEAR = r'{}|{}.|({})|[{}]|#{}|**{}**|_{}_|`{}`|"{}"|<{}>|{})|{}:|{}!|Passage {}|passage #{}|**Passage {}**|No. {}|Candidate [{}].'
CLEAR += r"|number {}|the answer is {}|\boxed{{{}}}|$\boxed{{\text{{{}}}}}$|{} (it covers bees and honey)|{}. The 90 others miss it."
UNCLEAR = (
    "{}, {}|{} or {}|{}.{}|{}-{}|{}/{}|{} and {}|between {} and {}|{} & {}|{},{}|[{}][{}]|{} (not {})|{} to {}|{} vs {}"
)
UNCLEAR += r"|passages {} and {}|{}; {}|{} {}|{}. {}|either {} or none, {}|none or {} or {}|not {} {}|\boxed{{{}, {}}}|{}+{}|{} {}th"
JUNK = "|-|not {}|{}?|maybe {}|{} is wrong|{} or five|{}b|{}%|x{}|{}e2|-{}|~{}|none or {}|the second|0|8|111111111111"
SHOWN = judge.lineup(DOCUMENTS, POOL, 4, 0)
NUMBERS = st.integers(1, len(SHOWN.names))


@given(
    st.sampled_from([*CLEAR.split("|"), "\n{}", "\n\n- {}", "{}\nAs 3, 4 miss."]),
    NUMBERS,
    st.sampled_from(["Answer:", "**Answer**:", "Answer：", "1 or 2?\n\nFinal answer:"]),
)
def test_every_clear_form_of_a_number_is_a_verdict(form: str, number: int, label: str) -> None:
    assert judge.verdict(f"{label} {form.format(number)}", SHOWN) == SHOWN.names[number - 1]


@given(
    st.sampled_from([*UNCLEAR.split("|"), "{}|{}", "{}\n{}"]), st.lists(NUMBERS, min_size=2, max_size=2, unique=True)
)
def test_two_numbers_are_asked_again(form: str, numbers: list[int]) -> None:
    with pytest.raises(RowFailure, match="malformed"):
        judge.verdict(f"Answer: {form.format(*numbers)}", SHOWN)


@pytest.mark.parametrize("text", ["2", "The second.", *(f"Answer: {each.format(3)}" for each in JUNK.split("|"))])
def test_an_answer_that_picks_no_candidate_is_malformed(text: str) -> None:
    with pytest.raises(RowFailure, match="malformed"):
        judge.verdict(text, SHOWN)


def test_other_relevant_passages_of_an_equal_query_are_no_distractors() -> None:
    texts = [f"passage {number}" for number in range(12)]
    pool = judge.Pool.of({text: ["How?"] if number < 8 else ["who", "what"] for number, text in enumerate(texts)})
    documents = {"positive": texts[0], "negative_instruction": "a", "negative_query": "b"}
    for row in range(100):
        assert set(judge.lineup(documents, pool, 4, row, query=" how").passages) == {*texts[8:], texts[0], "a", "b"}
        assert len(judge.lineup(documents, pool, 4, row, query="when").passages) == 7
