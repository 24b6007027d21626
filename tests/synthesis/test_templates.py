import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.llm import ChatModel
from infembed_ray.llm.chat import Malformed
from infembed_ray.llm.structured_output import AnswerFormat
from infembed_ray.synthesis import templates

FIELDS = {
    "instruction_generation": {"document", "query"},
    "instruction_poisoning": {"document", "query_positive", "instruction_positive"},
    "query_poisoning": {"document", "query_positive", "instruction_positive"},
    "passage_writing": {"query", "instruction", "reference"},
    "judge": {"query", "instruction", "candidates"},
    "complement": {"query", "instruction", "wanted", "unwanted"},
}
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
    assert special.fields - plain.fields <= {"language"}


@pytest.mark.parametrize("source", ["", "msmarco", "..", "sources", "leetcode/../metamath"])
def test_other_sources_are_asked_the_plain_prompt(source: str) -> None:
    assert templates.load("query_poisoning", source) == templates.load("query_poisoning")


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_prompt_has_the_fields_that_its_steps_fill(name: str) -> None:
    assert templates.load(name).fields == FIELDS[name]


SHARED_PREFIX = sorted(file.stem for file in (templates.DIRECTORY / "shared_prefix").glob("*.md"))


@pytest.mark.parametrize("name", SHARED_PREFIX)
def test_a_prompt_of_shared_prefix_has_the_words_of_the_other_in_another_order(name: str) -> None:
    plain, ordered = templates.load(name), templates.load(name, shared_prefix=True)
    assert ordered.version == f"shared_prefix/{plain.version}"
    assert (ordered.answer, ordered.fields) == (plain.answer, plain.fields)
    moved = {"Reference:", "below"} if name == "passage_writing" else set()
    assert set(plain.text.split()) - set(ordered.text.split()) == moved
    assert ordered.text.startswith("Candidates:" if name == "judge" else "Document: ")


def test_a_prompt_without_another_order_is_the_same_with_shared_prefix() -> None:
    assert templates.load("complement", shared_prefix=True) == templates.load("complement")


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


@given(st.text(), st.text())
def test_values_are_inserted_unchanged(query: str, document: str) -> None:
    template = templates.load("instruction_generation")
    request = template.request(ChatModel(model="m"), "s", "r", {"query": query, "document": document})
    content = request.messages[0]["content"]
    assert f"Document: {document}\n\nQuery: {query}\n" in content


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
