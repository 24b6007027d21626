import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.serving import schema
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import Probe
from infembed_ray.serving.supervisor import ProbeFigures, probe, worse_rankings


class Rankings:
    """Answers each (query, instruction) with a list of ids."""

    def __init__(self, rankings: dict[tuple[str, str | None], list[str]]) -> None:
        self.rankings = rankings
        self.calls = 0

    async def search(self, search: schema.SearchRequest) -> schema.SearchResponse:
        self.calls += 1
        hits = [
            schema.SearchHit(id=id, score=-rank, text="", metadata={})
            for rank, id in enumerate(self.rankings[search.query, search.instruction])
        ]
        timings = schema.Timings(encode_ms=0, search_ms=0)
        return schema.SearchResponse(hits=hits, model="m", index_version="v", sequence=0, timings=timings)


def dcg(ranks: Sequence[int]) -> float:
    return sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10)


async def test_figures_equal_those_by_hand() -> None:
    searcher = Rankings(
        {
            ("a", "for doctors"): ["x", "1", "y", "2"],
            ("a", "for history"): ["2", *"bcdefgh", "1"],
            ("b", None): [f"n{n}" for n in range(10)] + ["3"],
        }
    )
    probes = [
        Probe(
            query="a",
            instruction="for doctors",
            relevant=["1", "2"],
            changed_instruction="for history",
            changed_relevant=["2"],
        ),
        Probe(query="b", relevant=["3"]),
    ]
    figures = await probe(searcher.search, probes)
    ndcg = [dcg([2, 4]) / dcg([1, 2]), 1.0, 0.0]
    assert figures.ndcg == pytest.approx(100 * sum(ndcg) / 3)
    assert figures.p_mrr == pytest.approx(100 * (1 - 2 / 9))  # passage 1 fell from rank 2 to 9


async def test_without_changed_instructions_there_is_no_p_mrr() -> None:
    searcher = Rankings({(f"q{n}", None): ["1"] for n in range(70)})
    figures = await probe(searcher.search, [Probe(query=f"q{n}", relevant=["1"]) for n in range(70)])
    assert figures == (pytest.approx(100), None)
    assert searcher.calls == 70
    nothing_found = await probe(Rankings({("a", None): []}).search, [Probe(query="a", relevant=["1"])])
    assert nothing_found == (0.0, None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([{"query": "a"}], "row 1: relevant: Field required"),
        ([{"query": "a", "relevant": []}], "row 1: relevant: "),
        ([{"query": "a", "relevant": ["1"]}, {"query": "", "relevant": ["1"]}], "row 2: query: "),
        (
            [{"query": "a", "relevant": ["1"], "changed_instruction": "b"}],
            "row 1: changed_instruction and changed_relevant: give both or neither",
        ),
    ],
)
def test_a_file_that_is_no_probe_set_is_refused(
    settings: ServeSettings, tmp_path: Path, rows: list[Any], message: str
) -> None:
    file = tmp_path / "probes.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(InputError) as refusal:
        Plan.resolve(settings.model_copy(update={"probes": str(file)}))
    assert str(refusal.value).startswith(f"probes={file}: ")
    assert message in str(refusal.value)


def test_a_release_that_ranks_the_probes_worse_is_refused() -> None:
    limits = ServeSettings(index="", max_ndcg_drop=1, max_p_mrr_drop=2)
    before = ProbeFigures(80.0, 30.0)
    assert worse_rankings(before, ProbeFigures(79.0, 28.0), limits) is None
    assert worse_rankings(before, ProbeFigures(90.0, None), limits) is None
    for new, setting in (
        (ProbeFigures(78.9, 30.0), "max_ndcg_drop=1"),
        (ProbeFigures(80.0, 27.9), "max_p_mrr_drop=2"),
    ):
        assert setting in str(worse_rankings(before, new, limits))
    nothing = ProbeFigures(0.0, None)
    assert "give the ids of indexed passages" in str(worse_rankings(nothing, nothing, limits))
