"""Settings of models resolve, and every baseline is as its source documents it."""

import re

import pytest
import yaml

from infembed_ray.errors import InputError
from infembed_ray.evaluation.paper.sheets import TABLES, plain
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.formats import fill, passage_text, query_text
from tests.modeling import backbones

QUERY, PLAIN = Query("1", "Q", "I"), Query("2", "Q")
WEB = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
DOCUMENTED = {  # name -> query under an instruction, query, passage
    "bm25": ("Q I", "Q", "P"),
    "bm25-query-only": ("Q", "Q", "P"),
    "e5-large-v2": ("query: Q I", "query: Q", "passage: P"),
    "e5-mistral": ("Instruct: I\nQuery: Q", f"{WEB} Q", "P"),
    "gritlm-7b": ("<|user|>\nI\n<|embed|>\nQ", "<|embed|>\nQ", "<|embed|>\nP"),
    "promptriever-llama3.1-8b": ("query:  Q I", "query:  Q", "passage:  P"),
    "qwen3-embedding-8b": ("Instruct: I\nQuery:Q", f"{WEB}Q", "P"),
}
PAIRS = {  # name -> its input for query, instruction and passage, and its answers
    "monot5-3b": ("Query: Q I Document: P Relevant:", ("▁true", "▁false")),
    "flan-t5-base": ("Is the following passage relevant to the query?\nQuery: Q I\nPassage: P", ("▁yes", "▁no")),
    "followir-7b": (
        "<s> [INST] You are an expert Google searcher, whose job is to determine if the following document is relevant to "
        "the query (true/false). Answer using only one word, one of those two choices.\n\nQuery: Q I\nDocument: P\n"
        'Relevant (only output one word, either "true" or "false"): [/INST] ',
        ("true", "false"),
    ),
}


SOURCES = yaml.safe_load(baselines.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_prompts_render_as_documented(name):
    settings = baselines.resolve("x", name)
    asked = query_text(settings, QUERY), query_text(settings, PLAIN), passage_text(settings.passage, "P")
    assert asked == DOCUMENTED[name]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_render_as_documented(name):
    settings = baselines.resolve("x", name)
    pair = fill(settings.pair, query=query_text(settings, QUERY), passage=passage_text(settings.passage, "P"))
    assert (pair, settings.answers) == PAIRS[name]


def test_tables_2_and_5_are_complete():
    rows = {row.name for number in ("2", "5") for row in TABLES[number].rows}
    trained = {row for row in rows if row.startswith("InF-Embed (")}
    unloadable = {
        "tart-contriever",
        "tart-flan-t5-xl",
        "instructor-base",
        "instructor-xl",
        "NV-Embed-v1",
        "google-gecko",
    }
    unloadable |= {"cohere-embed-english-v3.0"}
    assert {plain(row) for row in rows - trained - unloadable} <= set(map(plain, baselines.entries()))


@pytest.mark.parametrize("name", baselines.entries())
def test_revisions_are_commits_or_marked_as_unknown(name):
    settings = baselines.resolve("x", name)
    if settings.revision is not None:
        assert re.fullmatch("[0-9a-f]{40}", settings.revision)
    elif settings.model:
        assert re.search("revision not known|nor the revision|no revision", SOURCES[name]["source"])


def test_a_nearby_name_is_suggested():
    with pytest.raises(InputError, match=r"^models\.x=e5-base: no such baseline, did you mean e5-base-v2\?; or give"):
        baselines.resolve("x", "e5-base")
    with pytest.raises(InputError, match=r"models\.x=monot5: no such baseline"):
        baselines.resolve("x", {"baseline": "monot5"})


def test_settings_override_a_baseline_down_to_its_nested_values():
    mine = baselines.resolve("x", {"baseline": "openai-v3-large", "dimensions": 256, "endpoint": {"timeout_s": 9}})
    assert (mine.dimensions, mine.endpoint.timeout_s, mine.plain_query) == (256, 9, "{query}")
    assert baselines.resolve("x", mine) == mine


def test_another_model_does_not_inherit_a_baselines_revision():
    assert baselines.resolve("x", {"baseline": "e5-base-v2"}).revision is not None
    assert baselines.resolve("x", {"baseline": "e5-base-v2", "model": "someone/copy"}).revision is None
    assert (
        baselines.resolve("x", {"baseline": "e5-base-v2", "model": "someone/copy", "revision": "abc"}).revision == "abc"
    )


@pytest.mark.integration
def test_a_directory_is_a_checkpoint_whose_latest_is_followed(tmp_path, monkeypatch):
    backbones.write("llama", tmp_path / "out" / "1234")
    (tmp_path / "out" / "latest").write_text("1234\n")
    monkeypatch.chdir(tmp_path)
    for given in ("out", "./out", str(tmp_path / "out"), {"model": "out"}):
        settings = baselines.resolve("x", given)
        assert settings.model == str(tmp_path / "out" / "1234")
        paths, names = baselines.inputs(settings)
        assert paths == {"model": tmp_path / "out" / "1234"}
        assert names.keys() == {"retriever"}


def test_missing_adapters_are_reported_before_work_starts(minilm, tmp_path):
    settings = baselines.resolve("x", {"model": minilm, "adapter": str(tmp_path)})
    with pytest.raises(InputError, match=r"models\.x\.adapter=.*no adapter_config"):
        baselines.inputs(settings, "models.x")
    (tmp_path / "adapter_config.json").touch()
    assert baselines.inputs(settings)[0].keys() == {"model", "adapter"}


def test_a_hub_name_and_revision_stay_as_they_are():
    settings = baselines.resolve("x", {"model": "org/model", "revision": "abc"})
    with pytest.raises(
        InputError, match=r"models\.x\.model=org/model: cannot be loaded from a directory or from the hub"
    ):
        baselines.inputs(settings, "models.x")


@pytest.mark.integration
def test_the_identity_of_a_hub_model_includes_its_current_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    commits = ["a" * 40, "b" * 40]
    seen = []
    for commit in commits:
        backbones.write("llama", cached / "snapshots" / commit)
        (cached / "refs" / "main").write_text(commit)
        seen.append(baselines.inputs(baselines.resolve("x", "org/tiny"))[1]["model"])
    assert seen == [f"org/tiny@{commit}" for commit in commits]
    pinned = baselines.resolve("x", {"model": "org/tiny", "revision": commits[0]})
    assert baselines.inputs(pinned)[1]["model"] == seen[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "/nowhere"}, r"models\.x\.model=/nowhere: no such model directory"),
        ("./nowhere", r"models\.x\.model=\./nowhere: no such model directory"),
        ({}, r"models\.x: model is missing"),
        ({"kind": "seq2seq", "model": "a/b"}, r"models\.x: instructed_query is missing"),
        ({"kind": "monot5"}, r"models\.x\.kind=monot5"),
        ({"model": "a/b", "prompt": "x"}, r"models\.x\.prompt: unknown key"),
        (
            {"model": "a/b", "pair": "{query} {passage}"},
            r"models\.x: pair is a setting of kind seq2seq or causal, not of encoder; drop it",
        ),
        ({"baseline": "bm25", "dtype": "float16"}, r"models\.x: dtype is a setting of kind encoder or"),
        ({"model": "a/b", "plain_query": "{query}"}, "give instructed_query and plain_query both, or neither"),
        ({"baseline": "bm25", "plain_query": "{query} {instruction}"}, r"plain_query=.*: write it with \{query\}"),
        ({"baseline": "e5-base-v2", "passage": "passage: "}, r"passage=passage: : write it with \{passage\}"),
        ({"baseline": "bm25", "instructed_query": "{query} {query}"}, r"each once"),
        ({"baseline": "monot5-base", "pair": "{query} {text}"}, r"pair=.*write it with \{query\} and \{passage\}"),
    ],
)
def test_settings_that_do_not_fit_are_rejected_in_one_line(given, said):
    with pytest.raises(InputError, match=said) as refused:
        baselines.resolve("x", given)
    assert "\n" not in str(refused.value)
