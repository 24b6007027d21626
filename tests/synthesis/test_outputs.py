import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.llm.prices import PriceTable
from infembed_ray.records import tables, tuples
from infembed_ray.synthesis import outputs
from infembed_ray.synthesis.outputs import Outputs
from infembed_ray.synthesis.pipeline import Kind, Outcome, Spend

TABLE = PriceTable("2026-01-01", {})
FILES = (tables.KEPT_FILE, tables.REJECTED_FILE, tables.DEAD_LETTER_FILE)


def outcome(index: int, kind: Kind, paid: Spend | None = None, replayed: Spend | None = None) -> Outcome:
    why: dict[Kind, dict[str, Any]] = {
        "kept": {},
        "rejected": {"step": "judge_positive", "reason": f"the judge picked {'none' if index % 2 else 'distractor'}"},
        "dead_letter": {"step": "query_negative", "error": "HTTP 500", "request_hash": f"hash {index}"},
    }
    row = {"id": f"seed-{index}", "source": "s", **why[kind], "provenance": None}
    return Outcome(kind, row, paid or Spend(3, 30, 6, 0.1), replayed or Spend(2, 20, 4, 0.2))


@settings(max_examples=15)
@given(st.data())
def test_any_order_of_arrival_gives_the_same_files_in_seed_order(data: st.DataObject) -> None:
    kinds: list[Kind] = data.draw(st.lists(st.sampled_from(["kept", "rejected", "dead_letter"]), max_size=12))
    order = data.draw(st.permutations(range(len(kinds))))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "_ROW_GROUP", 3)
        directories = [Path(name) / "in order", Path(name) / "as they come"]
        for directory, arrivals in zip(directories, (range(len(kinds)), order), strict=True):
            directory.mkdir()
            with Outputs(directory, TABLE) as files:
                for index in arrivals:
                    files.add(index, outcome(index, kinds[index]))
        for file in FILES:
            assert (directories[0] / file).read_bytes() == (directories[1] / file).read_bytes()
        for file, kind in zip(FILES, ("kept", "rejected", "dead_letter"), strict=True):
            ids = pq.read_table(directories[1] / file)["id"].to_pylist()
            assert ids == [f"seed-{index}" for index, each in enumerate(kinds) if each == kind]


def test_figures_separate_paid_from_replayed_calls(tmp_path: Path) -> None:
    with Outputs(tmp_path, TABLE) as files:
        for index, kind in enumerate(("kept", "rejected", "kept", "dead_letter", "rejected", "rejected")):
            files.add(index, outcome(index, kind))
    assert files.counts() == {"seeds": 6, "kept": 2, "rejected": 3, "dead_letter": 1, "calls": 18, "replayed": 12}
    facts = files.facts()
    assert facts["usd"] == pytest.approx(0.6)
    assert facts["usd_replayed"] == pytest.approx(1.2)
    assert facts["usd_per_1000_kept"] == pytest.approx(1000 * 1.8 / 2)
    assert facts["tokens"] == {"prompt": 180, "completion": 36}
    assert facts["tokens_replayed"] == {"prompt": 120, "completion": 24}
    assert facts["rejected_by"] == {
        "judge_positive: the judge picked none": 2,
        "judge_positive: the judge picked distractor": 1,
    }


def test_one_unknown_price_makes_the_runs_price_unknown(tmp_path: Path) -> None:
    with Outputs(tmp_path, TABLE) as files:
        files.add(0, outcome(0, "kept"))
        files.add(1, outcome(1, "kept", paid=Spend(1, 5, 5, None)))
    assert files.facts()["usd"] is None
    assert files.facts()["usd_per_1000_kept"] is None
    assert files.facts()["usd_replayed"] == pytest.approx(0.4)


def test_files_without_rows_have_their_columns(tmp_path: Path) -> None:
    with Outputs(tmp_path, TABLE):
        pass
    schemas = [pq.read_schema(tmp_path / file).names for file in FILES]
    assert schemas == [tables.RECORD.names, tables.REJECTED.names, tables.DEAD_LETTER.names]


def test_complements_are_written_in_seed_order_only_if_there_are_any(tmp_path: Path) -> None:
    with Outputs(tmp_path, TABLE) as files:
        files.add(0, outcome(0, "kept"))
    assert not (tmp_path / tables.COMPLEMENTS_FILE).exists()
    with Outputs(tmp_path, TABLE) as files:
        for index in (2, 0, 1, 3):
            made = {
                "id": f"seed-{index}",
                "query": "Q",
                "instruction": "I",
                "positives": "P1-",
                "negatives": "P+",
                "source": "s",
            }
            complement = None if index == 1 else {**made, "fault": "the judge picked none" if index == 2 else None}
            files.add(index, replace(outcome(index, "kept"), complement=complement))
    assert [row["id"] for row in tables.read_raw(tmp_path / tables.REJECTED_COMPLEMENTS_FILE)] == ["seed-2"]
    usable = tmp_path / tables.COMPLEMENTS_FILE
    assert tuples.found_in(usable, "records", {})
    made = [
        (each.id, each.query, each.instruction, each.positives, each.negatives)
        for each in tuples.stream(usable, "records")
    ]
    assert made == [(f"seed-{index}", "Q", "I", ("P1-",), ("P+",)) for index in (0, 3)]


def test_the_note_forecasts_the_cost_of_all_seeds(tmp_path: Path) -> None:
    with Outputs(tmp_path, TABLE) as files:
        assert files.note(40) == ""
        for index, kind in enumerate(("kept", "kept", "kept", "dead_letter")):
            files.add(index, outcome(index, kind))
        assert files.note(40) == "75% kept, 1 dead letter, 1.20 of about 12.00 USD, 12 calls"
        files.add(4, outcome(4, "kept", Spend(1, 5, 5, None)))
        assert files.note(40) == "80% kept, 1 dead letter, 13 calls"
