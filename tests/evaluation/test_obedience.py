"""Obedience controls."""

import random
from dataclasses import replace

import pyarrow as pa
import pytest

from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.obedience import (
    AS_GIVEN,
    CONDITIONS,
    GENERIC,
    INVERTED,
    PARAPHRASED,
    QUERY_ONLY,
    SHUFFLED,
    Controls,
    pairs_of,
)
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import CORPUS, Figure, Query, Task, means, score
from tests.evaluation.tasks.test_infir import passages, record

NAMES = ("tides", "bread", "comets", "tax law", "the violin", "rivers")
TASK = instruction_following([record(name) for name in NAMES], passages("noise", "more noise", "rain"))
CONTROLS = Controls.from_task(TASK)
ASKED = CONTROLS.ask(TASK)
IDS = TASK.corpus["id"].to_pylist()


def run_of(score_of, task=ASKED):
    """Rank all documents of the corpus by a function of the query and the document's id."""
    return {query.id: {document: score_of(query, document) for document in IDS} for query in task.queries}


def noise(seed=0, ignores_instruction=False):
    def draw(query, document):
        text = query.query if ignores_instruction else f"{query.query} {query.instruction}"
        return random.Random(f"{seed} {text} {document}").random()

    return draw


def obedient(query, document):
    """Score the document that the instruction names by its words: `(I-,Q+)` asks for the poisoned answer."""
    name = next(n for n in NAMES if n in query.query)
    if not document.startswith(f"record/{name}/"):
        return 0.0
    if query.instruction is None or name not in query.instruction:
        return 1.0
    wanted = "negative_instruction" if "poisoned" in query.instruction else "positive"
    return 2.0 if document.endswith(f"/{wanted}") else 1.0


def figures(measured):
    return {condition: means(scores) for condition, scores in measured.items()}


# ------------------------------------------------------------------------------------------------------ conditions


def test_every_condition_asks_what_its_name_says():
    asked = {query.id: (query.query, query.instruction) for query in ASKED.queries}
    pairs = pairs_of(TASK.changes)
    assert len(pairs) == len(NAMES)  # the two directions of a change are one pair
    own = {pair: [asked[query] for query in pair] for pair in pairs}
    for pair, ((query, one), (_, other)) in own.items():
        given_ = {c: [asked[CONTROLS.asked[c][0][slot]] for slot in pair] for c in CONDITIONS}
        assert {q for texts in given_.values() for q, _ in texts} == {query}
        told = {condition: [instruction for _, instruction in texts] for condition, texts in given_.items()}
        assert told[AS_GIVEN] == [one, other]
        assert told[INVERTED] == [other, one]
        assert told[QUERY_ONLY] == [None, None]
        assert len(set(told[GENERIC])) == 2
        assert all(i in paraphrase != i for i, paraphrase in zip((one, other), told[PARAPHRASED], strict=True))
        assert told[SHUFFLED] in [[i for _, i in texts] for p, texts in own.items() if p != pair]
    assert len(CONTROLS.asked[SHUFFLED]) == 4
    foreign = [asked[several[pairs[0][0]]] for several in CONTROLS.asked[SHUFFLED]]
    assert len(set(foreign)) == 4


def test_further_queries_have_the_candidates_and_exclusions_of_their_twins():
    own = {query.id: [query.id, "distractor/0"] for query in TASK.queries if query.id in TASK.corpus["id"].to_pylist()}
    own |= {query.id: ["distractor/1"] for query in TASK.queries if query.id not in own}
    first = TASK.queries[0].id
    asked = CONTROLS.ask(replace(TASK, candidates=own, excluded={first: frozenset({"distractor/0"})}))
    for query in CONTROLS.queries:
        twin = CONTROLS.twins[query.id]
        assert asked.candidates[query.id] == own[twin]
        assert asked.excluded.get(query.id, frozenset()) == asked.excluded.get(twin, frozenset())
    assert len({query.id for query in asked.queries}) == len(asked.queries)


def test_a_single_pair_has_no_foreign_instructions_and_a_task_without_changes_no_controls():
    alone = Controls.from_task(instruction_following([record("r")]))
    assert set(CONDITIONS) - alone.asked.keys() == {SHUFFLED}
    assert Controls.from_task(replace(TASK, changes=())) is None


# ------------------------------------------------------------------------------------------------------ invariants


@pytest.mark.parametrize("seed", range(3))
def test_a_retriever_of_the_query_alone_has_p_mrr_exactly_0_under_every_condition(seed):
    measured = figures(CONTROLS.measure(TASK, run_of(noise(seed, ignores_instruction=True))))
    for condition in CONDITIONS:
        assert measured[condition]["p-MRR"] == 0, condition
        assert measured[condition]["pairs reversed"] == 0
        assert measured[condition]["nDCG@10 original"] == measured[AS_GIVEN]["nDCG@10 original"]


@pytest.mark.parametrize("seed", range(3))
def test_query_only_is_exactly_0_and_inverted_exactly_the_negative_for_any_model(seed):
    measured = CONTROLS.measure(TASK, run_of(noise(seed)))
    assert set(measured[QUERY_ONLY]["p-MRR"].values()) == {0.0}
    as_given, inverted = measured[AS_GIVEN]["p-MRR"], measured[INVERTED]["p-MRR"]
    assert inverted == pytest.approx({query: -value for query, value in as_given.items()}, abs=1e-15)
    assert any(as_given.values())


def test_as_given_equals_the_figures_of_the_task():
    run = run_of(noise())
    own, measured = score(TASK, run), CONTROLS.measure(TASK, run)[AS_GIVEN]
    assert measured["p-MRR"] == own["p-MRR"]
    assert measured["nDCG@10 original"] == own["nDCG@10 (I+,Q+)"]
    assert measured["nDCG@10 changed"] == own["nDCG@10 (I-,Q+)"]


def test_an_obedient_retriever_follows_its_own_instructions_and_no_others():
    measured = figures(CONTROLS.measure(TASK, run_of(obedient)))
    assert measured[AS_GIVEN]["pairs reversed"] == 1
    assert measured[AS_GIVEN]["nDCG@10 original"] == measured[AS_GIVEN]["nDCG@10 changed"] == 1
    assert measured[AS_GIVEN]["p-MRR"] > 0.5
    assert measured[AS_GIVEN] == measured[PARAPHRASED]
    assert measured[INVERTED]["p-MRR"] == pytest.approx(-measured[AS_GIVEN]["p-MRR"])
    assert measured[INVERTED]["pairs reversed"] == 0
    assert measured[INVERTED]["nDCG@10 original"] < 0.7
    for condition in (GENERIC, SHUFFLED):
        assert measured[condition]["p-MRR"] == 0, condition


def test_violations_count_the_excluded_documents_among_the_first_two():
    def wrong_first(query, document):
        return 5.0 - 2 * obedient(query, document) if obedient(query, document) else 0.0

    # An obedient retriever still has the excluded passage of the same record among its first two or three.
    best = CONTROLS.measure(TASK, run_of(wrong_first))[AS_GIVEN]["violation@2"]
    assert best == dict.fromkeys(best, 1.0)
    only = run_of(lambda query, document: float(document == query.id.partition("~")[0]))
    measured = CONTROLS.measure(TASK, {q: {d: s for d, s in r.items() if s} for q, r in only.items()})[AS_GIVEN]
    assert measured["violation@2"] == dict.fromkeys(best, 0.0)


def test_followir_has_no_labelled_pairs_because_its_changes_go_one_way():
    task = Task(
        "f",
        pa.table({"id": ["a", "b", "c"], "text": ["one", "two", "three"]}, schema=CORPUS),
        tuple(Query(f"{n}-{kind}", "q", f"{kind} {n}", kind) for n in (1, 2) for kind in ("og", "changed")),
        {f"{n}-{kind}": {"a": 1, **({"b": 1} if kind == "og" else {})} for n in (1, 2) for kind in ("og", "changed")},
        (Figure("p-MRR", "p-MRR"), Figure("MAP@1000", "MAP@1000", "og")),
        tuple(Change(f"{n}-og", f"{n}-changed", ("b",)) for n in (1, 2)),
    )
    controls = Controls.from_task(task)
    measured = controls.measure(task, {q.id: {"a": 3.0, "b": 2.0, "c": 1.0} for q in controls.ask(task).queries})
    assert list(measured[AS_GIVEN]) == ["p-MRR", "MAP@1000 original", "MAP@1000 changed", "violation@2"]
    assert measured[AS_GIVEN]["violation@2"] == {"1-changed": 1.0, "2-changed": 1.0}
    assert means(measured[AS_GIVEN])["MAP@1000 original"] == means(measured[AS_GIVEN])["MAP@1000 changed"] == 1.0
