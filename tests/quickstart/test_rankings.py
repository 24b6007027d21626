import numpy as np
import pytest

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.quickstart.rankings import Ranking, exact_hits, side_by_side
from infembed_ray.records.tables import Passage


def ranking(*ids):
    hits = [{"id": i, "score": 0.9 - n / 10, "text": f"text of {i}"} for n, i in enumerate(ids)]
    return Ranking("q", f"instruction for {ids[0]}", ids[0], hits)


def test_rankings_are_side_by_side_and_the_wanted_passage_is_marked():
    text = side_by_side([ranking("a", "b"), ranking("b", "a", "c")])
    first = next(line for line in text.splitlines() if "0.900" in line)
    assert first.index("> 0.900 a ") < first.index("> 0.900 b ")
    assert text.count("> 0.") == 2
    assert "text of c" in text


def test_obeyed_means_the_wanted_passage_is_first():
    assert ranking("a", "b").obeyed
    assert not Ranking("q", "i", "b", ranking("a", "b").hits).obeyed
    assert not Ranking("q", "i", "b", []).obeyed


@pytest.mark.integration
def test_exact_hits_are_the_best_by_cosine_under_each_instruction(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm)
    texts = {"salt": "Eat less salt.", "sql": "Add an index to the table.", "trial": "A randomised trial of salt."}
    asked = [None, "From a randomised trial."]
    found = exact_hits(encoder, "salt", asked, [Passage(i, text) for i, text in texts.items()], top_k=2)
    for instruction, hits in zip(asked, found, strict=True):
        (query,) = encoder.encode_queries(["salt"], [instruction])
        scores = {i: float(np.dot(query, encoder.encode_passages([text])[0])) for i, text in texts.items()}
        best = sorted(scores, key=scores.get, reverse=True)[:2]
        assert [hit["id"] for hit in hits] == best
        assert [hit["score"] for hit in hits] == pytest.approx([scores[i] for i in best], abs=1e-5)
        assert [hit["text"] for hit in hits] == [texts[i] for i in best]
