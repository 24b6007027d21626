from dataclasses import replace

import pytest

from infembed_ray.llm.chat import Completion, RowFailure, usable_text
from tests.support.chat import completion, request


def test_the_key_depends_on_everything_that_decides_the_answer() -> None:
    base = replace(request(), parameters={"temperature": 1.0})
    others = [
        replace(base, model="large"),
        replace(base, messages=({"role": "user", "content": "hello "},)),
        replace(base, parameters={"temperature": 0.5}),
        replace(base, parameters={}),
        replace(base, prompt="test=2"),
    ]
    assert len({each.key for each in [base, *others]}) == len(others) + 1


def test_the_key_ignores_row_step_and_the_order_of_parameters() -> None:
    base = replace(request(), parameters={"temperature": 1.0, "max_completion_tokens": 9})
    same = replace(base, parameters={"max_completion_tokens": 9, "temperature": 1.0}, row="other", step="other")
    assert same.key == base.key


def test_the_key_of_a_known_request_never_changes() -> None:
    assert request("héllo").key == "66354a24737ea465c40f1681e22b43974e5ae4e0400f62281ede211fed83281c"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Completion("", "stop", "m", 1, 0, refusal="I will not"), "refused: I will not"),
        (Completion("half", "content_filter", "m", 1, 1), "content filter"),
        (Completion("half an ans", "length", "m", 1, 5), r"token limit \(5 tokens\)"),
        (Completion(" \n", "stop", "m", 1, 1), "empty answer"),
    ],
)
def test_an_answer_that_did_not_end_normally_fails_the_row(bad: Completion, said: str) -> None:
    with pytest.raises(RowFailure, match=said):
        usable_text(bad)


def test_a_good_answer_is_its_text() -> None:
    assert usable_text(completion("Query: x")) == "Query: x"
