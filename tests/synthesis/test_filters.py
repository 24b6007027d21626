import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.synthesis.filters import fault, first_line, names

words = st.lists(st.from_regex(r"[a-z]{2,8}", fullmatch=True), min_size=3, max_size=12).map(" ".join)


@given(words, st.text())
def test_text_after_the_first_newline_is_removed(line: str, rest: str) -> None:
    assert first_line(f" {line} \n{rest}") == line


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("instruction", "", "empty"),
        ("instruction", "``", "fewer"),
        ("instruction", "Find passages that:\n- help campers", "lead-in"),
        ("query", "Here is the poisoned query:\nhow to land on venus", "lead-in"),
        ("instruction", "For campers.\nNothing else", "fewer than 3 words"),
        ("query", " \n", "empty"),
    ],
)
def test_a_useless_first_line_is_named(kind, text: str, reason: str) -> None:
    assert reason in (fault(kind, first_line(text)) or "")


AROUND = '\n\n{}|"{}"|\'{}\'|“{}”|‘{}’|«{}»|<{}>|[{}]|"{}".|`{}`|**{}**|_{}_|<b>{}</b>|```\n{}\n```|```text\n{}```| "**{}**" |\r\n{}\r\nmore'


@given(words, st.sampled_from(AROUND.split("|")))
def test_what_stands_around_a_line_is_no_part_of_it(line: str, around: str) -> None:
    assert first_line(around.format(line)) == line


@pytest.mark.parametrize("line", ['"a" or "b"', "<b> not <i>", "it's 5 o'clock", "*.py or *.md", "[1] to [3]"])
def test_marks_within_a_line_stay(line: str) -> None:
    assert first_line(line) == line


@given(words)
def test_a_plain_request_is_usable(line: str) -> None:
    assert fault("instruction", line) is None
    assert fault("query", line, poisons=f"another {line}") is None


def test_one_word_is_a_usable_query() -> None:
    assert fault("query", "espresso") is None


@given(words)
def test_a_poison_that_changes_nothing_is_useless(line: str) -> None:
    assert fault("query", f"{line.upper()}  ?".replace("  ", ""), poisons=f"  {line}") is not None


@pytest.mark.parametrize(
    ("language", "named", "not_named"),
    [
        ("Python", ["In python, please", "a Python3 one", "(Python)"], ["pythonic code", "cpython"]),
        ("python3", ["in Python 3", "Python."], ["in Java"]),
        ("Java", ["plain Java 17"], ["JavaScript", "java_style"]),
        ("C", ["in C, not more", "C99"], ["C++ or C#", "clever"]),
        ("cpp", ["in C++17", "modern cpp"], ["in C"]),
        ("C#", ["a C# method"], ["a C++ method"]),
    ],
)
def test_a_language_is_named_only_as_a_separate_word(language: str, named: list[str], not_named: list[str]) -> None:
    assert [text for text in named if not names(text, language)] == []
    assert [text for text in not_named if names(text, language)] == []


@given(words)
def test_an_instruction_for_code_must_name_the_language_but_a_query_need_not(line: str) -> None:
    assert fault("instruction", line, language="C++") == "does not name the programming language C++"
    assert fault("instruction", f"{line} in c++", language="C++") is None
    assert fault("query", line, language="C++") is None
