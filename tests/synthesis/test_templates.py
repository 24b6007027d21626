from pathlib import Path
from string import Formatter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.llm import ChatModel
from infembed_ray.errors import InputError
from infembed_ray.llm.chat import AnswerFormat, Malformed
from infembed_ray.synthesis import templates

FIELDS = {
    "instruction_generation": {"document", "query"},
    "instruction_poisoning": {"document", "query_positive", "instruction_positive"},
    "query_poisoning": {"document", "query_positive", "instruction_positive"},
    "passage_writing": {"query", "instruction", "reference"},
    "judge": {"query", "instruction", "candidates"},
    "complement": {"query", "instruction", "wanted", "unwanted"},
}


def fields(template: templates.Template) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(template.text) if field is not None} - {"answer"}


ADDITIONS = [(file.parent.name, file.stem) for file in sorted(templates.DIRECTORY.glob("sources/*/*.md"))]


def test_every_prompt_file_is_used() -> None:
    assert {file.stem for file in templates.DIRECTORY.glob("*.md")} == {*FIELDS, "repair"}


@pytest.mark.parametrize(("source", "name"), ADDITIONS)
def test_a_sources_addition_is_part_of_the_text_and_the_version(source: str, name: str) -> None:
    plain, special = templates.load(name), templates.load(name, source.upper())
    added = special.text.replace(plain.text.partition("\n\nPlease provide")[0], "")
    assert len(added) > 100
    assert added.endswith("\n\nPlease provide" + plain.text.partition("\n\nPlease provide")[2])
    assert special.version == f"{plain.version} {source}/{name}=1"
    assert fields(special) - fields(plain) <= {"language"}


@pytest.mark.parametrize("source", ["", "msmarco", "..", "sources", "leetcode/../metamath"])
def test_other_sources_are_asked_the_plain_prompt(source: str) -> None:
    assert templates.load("query_poisoning", source) == templates.load("query_poisoning")


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_prompt_has_the_fields_that_its_steps_fill(name: str) -> None:
    assert fields(templates.load(name)) == FIELDS[name]


SHARED_PREFIX = sorted(file.stem for file in (templates.DIRECTORY / "shared_prefix").glob("*.md"))


@pytest.mark.parametrize("name", SHARED_PREFIX)
def test_a_prompt_of_shared_prefix_has_the_words_of_the_other_in_another_order(name: str) -> None:
    plain, ordered = templates.load(name), templates.load(name, shared_prefix=True)
    assert ordered.version == plain.version.replace("=", "=shared-prefix-")
    assert (ordered.answer, fields(ordered)) == (plain.answer, fields(plain))
    moved = {"Reference:", "below"} if name == "passage_writing" else set()
    assert set(plain.text.split()) - set(ordered.text.split()) == moved
    assert ordered.text.startswith("Candidates:" if name == "judge" else "Document: ")


@pytest.mark.parametrize("name", ["instruction_poisoning", "query_poisoning"])
def test_the_poisoning_prompts_contain_the_papers_sentences(name: str) -> None:
    """Sentences of appendix H that both prompts share."""
    text = templates.load(name).text
    for sentence in (
        "You are given a document along with a search query and an instruction that retrieves this document.",
        "will lead to the creation of DISTINCTLY DIFFERENT documents.",
        "IDENTIFY KEY ELEMENTS: First, identify 2-3 core aspects/facts/claims of the original document.",
        "should target information that contradicts or significantly diverges from these core aspects",
        "Change time periods, locations, entities, or outcomes",
        "Reverse cause-effect relationships",
        "Switch perspective (e.g., benefits vs. drawbacks, support vs. opposition)",
        "Modify the granularity or specificity level",
        "ENSURE CLEAR DISTINCTION: A human evaluator should be able to easily determine which document is",
        "clearly distinguishable from the original document (at least 3 significant differences).",
        "Be concise but specific enough to ensure clear differentiation.",
    ):
        assert sentence in text


GREETING = templates.Template("greeting=3", "Say {word} like this: {answer}", AnswerFormat("Greeting", "<it>"))


def test_a_request_has_the_models_parameters_and_the_prompt_version() -> None:
    request = GREETING.request(
        ChatModel(model="m", temperature=0.5, max_tokens=9, reasoning_effort="low"), "s", "r", {"word": "hi"}
    )
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Say hi like this: Greeting: <it>"}],
        "temperature": 0.5,
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
    }
    assert request.prompt == "greeting=3"
    plain = GREETING.request(ChatModel(model="m"), "s", "r", {"word": "hi"})
    assert set(plain.body) == {"model", "messages"}


def test_a_structured_request_shows_json_and_has_a_schema() -> None:
    request = GREETING.request(ChatModel(model="m", structured=True), "s", "r", {"word": "hi"}, ["hi", "hello"])
    assert request.messages[0]["content"] == 'Say hi like this: {"greeting": "<it>"}'
    assert request.parameters == {"response_format": GREETING.answer.response_format(["hi", "hello"])}


@given(st.text(), st.text())
def test_a_repair_continues_the_conversation_under_its_own_key(answer: str, wanted: str) -> None:
    request = GREETING.request(ChatModel(model="m", temperature=0.5), "s", "r", {"word": "hi"})
    fault = Malformed(wanted, answer)
    again = templates.repair(request, answer, fault)
    assert again.body["messages"][:2] == [*request.messages, {"role": "assistant", "content": answer}]
    assert fault.fault in again.body["messages"][2]["content"]
    assert {**again.body, "messages": None} == {**request.body, "messages": None}
    assert (again.step, again.row, again.prompt) == ("s", "r", "greeting=3 repair=1")
    assert again.key != request.key


JUDGE = """---
version: mine-2
answer: "Answer: <number, or none>"
---
Query: {query} Instruction: {instruction} Candidates: {candidates}
{answer}"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's directory of prompts, with another judge."""
    (tmp_path / "judge.md").write_text(JUDGE)
    return tmp_path


def test_own_files_replace_the_bundled_ones_of_the_same_name(own: Path) -> None:
    templates.check(str(own))
    judge = templates.load("judge", own=str(own))
    assert (judge.version, fields(judge), judge.answer.label) == ("judge=mine-2", FIELDS["judge"], "Answer")
    assert judge.text.startswith("Query: {query} Instruction:")
    assert templates.load("complement", "leetcode", str(own)) == templates.load("complement", "leetcode")


def test_own_sources_and_an_own_repair_are_used(own: Path) -> None:
    (own / "sources" / "news").mkdir(parents=True)
    (own / "sources" / "news" / "passage_writing.md").write_text("---\nversion: 7\n---\nWrite like a newspaper.")
    (own / "repair.md").write_text("---\nversion: r2\n---\nWrong: {fault}")
    templates.check(str(own))
    passage = templates.load("passage_writing", "News", str(own))
    assert passage.version == "passage_writing=1 news/passage_writing=7"
    assert "\n\nWrite like a newspaper.\n\nReference: " in passage.text
    request = GREETING.request(ChatModel(model="m"), "s", "r", {"word": "hi"})
    again = templates.repair(request, "x", Malformed("y", "x"), str(own))
    assert again.prompt == "greeting=3 repair=r2"
    assert again.messages[-1]["content"] == "Wrong: no `y` in 'x'"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("jugde.md", JUDGE, "no such prompt; remove it, or name it NAME.md (complement, "),
        ("judge.txt", JUDGE, "no such prompt"),
        ("sources/news/judge.md", JUDGE, "no such prompt"),
        ("judge.md", "Which one fits {query}?", "judge.md has no front matter"),
        ("judge.md", JUDGE.replace("version", "versions"), "'version'"),
        ("judge.md", JUDGE.replace("answer:", "answers:"), "'answer'"),
        ("judge.md", JUDGE.replace("mine-2", "mine 2"), "version=mine 2: write it with letters"),
        ("judge.md", JUDGE.replace("mine-2", "1"), "version=1: that is the bundled prompt's"),
        ("judge.md", JUDGE.replace("{query}", ""), "correct {query}"),
        ("judge.md", JUDGE.replace("{query}", "{query} {question}"), "correct {question}"),
        ("judge.md", JUDGE.replace("{query}", "{query} {"), "not like the bundled file"),
        ("judge.md", JUDGE.replace("{query}", '{query} {"a": 1}'), "(write {{ and }} for braces of the text)"),
        ("judge.md", JUDGE.replace("Answer:", "Choice:"), "the label must be `Answer:`"),
    ],
)
def test_a_faulty_prompt_is_refused_with_its_remedy(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    with pytest.raises(InputError) as error:
        templates.check(str(tmp_path))
    assert f"prompts={tmp_path}: {name}: " in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
