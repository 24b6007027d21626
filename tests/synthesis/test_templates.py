import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config import ChatModel
from infembed_ray.synthesis import templates
from infembed_ray.synthesis.chat import RowFailure

FIELDS = {
    "instruction_generation": {"document", "query"},
    "instruction_poisoning": {"document", "query_positive", "instruction_positive"},
    "query_poisoning": {"document", "query_positive", "instruction_positive"},
    "passage_writing": {"query", "instruction", "reference"},
    "judge": {"query", "instruction", "candidates"},
}


def test_the_prompts_are_those_of_the_pipeline() -> None:
    assert {file.stem for file in templates.DIRECTORY.iterdir()} == set(FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_prompt_asks_for_what_the_steps_give_it(name: str) -> None:
    assert templates.load(name).fields == FIELDS[name]


@pytest.mark.parametrize("name", ["instruction_poisoning", "query_poisoning"])
def test_the_poisoning_prompts_are_the_papers(name: str) -> None:
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
def test_values_are_filled_in_as_they_are(query: str, document: str) -> None:
    template = templates.load("instruction_generation")
    request = template.request(ChatModel(model="m"), "s", "r", {"query": query, "document": document})
    content = request.messages[0]["content"]
    assert f"Document: {document}\n\nQuery: {query}\n" in content


def test_a_request_carries_the_models_settings_and_the_prompts_version() -> None:
    template = templates.Template("greeting", 3, "Say {word}.")
    request = template.request(ChatModel(model="m", temperature=0.5, max_tokens=9), "s", "r", {"word": "hi"})
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Say hi."}],
        "temperature": 0.5,
        "max_completion_tokens": 9,
    }
    assert request.prompt == "greeting=3"
    plain = template.request(ChatModel(model="m"), "s", "r", {"word": "hi"})
    assert set(plain.body) == {"model", "messages"}


def test_the_versions_of_all_prompts_are_named_for_the_provenance() -> None:
    assert [entry.split("=")[0] for entry in templates.versions().split()] == sorted(FIELDS)


@pytest.mark.parametrize(
    "text",
    [
        "Instruction: for nurses, no vendors",
        "instruction:for nurses, no vendors",
        "**Instruction:** for nurses, no vendors",
        "Key elements: dose, age.\n\n### Instruction: for nurses, no vendors\n",
    ],
)
def test_an_answer_is_found_behind_its_label(text: str) -> None:
    assert templates.labelled("instruction", text) == "for nurses, no vendors"


def test_line_breaks_after_the_label_are_kept() -> None:
    assert templates.labelled("query", "Query: \nfirst\nsecond") == "\nfirst\nsecond"


@pytest.mark.parametrize("text", ["for nurses", "Positive Instruction: x", "My instruction would be: x"])
def test_an_answer_without_its_label_is_malformed(text: str) -> None:
    with pytest.raises(RowFailure, match="malformed answer"):
        templates.labelled("instruction", text)
