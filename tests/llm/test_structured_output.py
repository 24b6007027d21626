import json
from functools import partial

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infembed_ray.llm.chat import AnswerFormat, Malformed, labelled

QUERY = AnswerFormat("Query", "<your new query>")


def test_a_format_is_parsed_from_what_it_shows() -> None:
    assert AnswerFormat.parse("Query: <your new query>") == QUERY
    assert QUERY.shown(structured=False) == "Query: <your new query>"
    assert json.loads(QUERY.shown(structured=True)) == {"query": "<your new query>"}


@given(st.text().map(str.strip))
@example("*args and **kwargs")
def test_json_that_fits_the_schema_is_read_as_labelled_text(value: str) -> None:
    answer = json.dumps({"query": value})
    jsonschema.validate(json.loads(answer), QUERY.response_format()["json_schema"]["schema"])
    assert labelled("query", QUERY.as_text(answer)).strip() == value


@pytest.mark.parametrize(
    "around",
    [
        "```json\n{}\n```",
        "```\n{}\n```\nI hope that helps.",
        "Here is the query, as JSON: {}",
        'First {{"query": "a draft"}}, then better: {} Tell me {{if}} it fits.',
        '{{"result": {}}}',
        '{{"reasoning": "it is short", "other": "x"}}\n{}',
        "[{}]",
    ],
)
def test_the_last_json_object_with_the_value_counts_whatever_surrounds_it(around: str) -> None:
    for query in ("how tall is it", 'a "quoted" {query}', "two\nlines"):
        assert QUERY.as_text(around.format(json.dumps({"query": query}))) == f"Query: {query}"


@pytest.mark.parametrize(
    ("answer", "text"),
    [('{"query": "draft", "query": "two\nlines"}', "two\nlines"), (r'{"query": "bees \ud83d"}', "bees ?")],
)
def test_line_breaks_repeated_keys_and_surrogates_in_json_are_read_as_models_mean_them(answer: str, text: str) -> None:
    assert QUERY.as_text(answer) == f"Query: {text}"


@given(st.text())
def test_any_answer_is_read_or_malformed_in_one_line(answer: str) -> None:
    for read in (QUERY.as_text, partial(labelled, "query")):
        failure = None
        try:
            read(answer)
        except Malformed as malformed:
            failure = malformed
        assert failure is None or (failure.fault in str(failure) and "\n" not in str(failure))


@pytest.mark.parametrize(
    "answer",
    [
        *(json.dumps({"query": "how tall"})[:-cut] for cut in range(1, 20)),
        "[" * 10_000,
        '{"query": %s}' % ("1" * 10_000),
    ],
    ids=[*(f"cut short by {cut}" for cut in range(1, 20)), "too deep", "too long a number"],
)
def test_json_that_python_cannot_parse_is_malformed(answer: str) -> None:
    with pytest.raises(Malformed, match=r"no `\{\"query\": \"...\"\}` in"):
        QUERY.as_text(answer)


def test_choices_are_the_only_values_the_schema_allows() -> None:
    schema = AnswerFormat("Answer", "<1 or none>").response_format(["1", "none"])["json_schema"]["schema"]
    jsonschema.validate({"answer": "none"}, schema)
    for other in ({"answer": "2"}, {"answer": 1}, {"answer": "1", "why": "so"}, {}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(other, schema)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Instruction: for nurses, no vendors", "for nurses, no vendors"),
        ("instruction:for nurses, no vendors", "for nurses, no vendors"),
        ("**Instruction:** for nurses, no vendors", "for nurses, no vendors"),
        ("Key elements: dose, age.\n\n### Instruction: for nurses, no vendors\n", "for nurses, no vendors"),
        ("Instruction: \nfirst\nsecond", "\nfirst\nsecond"),
        ("Sure:\n```\nInstruction: for nurses\n```\nI hope that helps.", "for nurses"),
        ("Instruction: so:\n```python\nx = 1\n```", "so:\n```python\nx = 1\n```"),
    ],
)
def test_an_answer_is_found_behind_its_label(answer: str, text: str) -> None:
    assert labelled("instruction", answer) == text


@pytest.mark.parametrize("text", ["for nurses", "Positive Instruction: x", "My instruction would be: x"])
def test_an_answer_without_its_label_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="malformed answer"):
        labelled("instruction", text)
