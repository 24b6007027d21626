from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from infembed_ray.cli import main as cli
from infembed_ray.config.llm import Limits
from infembed_ray.errors import InputError
from infembed_ray.llm import budget
from infembed_ray.llm.journal import encode, new_segment
from infembed_ray.llm.ledger import LeaseReport, Ledger
from infembed_ray.llm.prices import PriceTable
from tests.support.chat import completion, request

TABLE = PriceTable("2026-01-01", {"small": (1e6, 0.0)})  # a USD per token of a prompt


def killed(journal: Path) -> None:
    """Write what a run leaves that was granted 3 of 10 USD after 1 USD, and was killed after an answer for 1 USD."""
    nothing, wanted = {"usd": 0.0}, {"usd": 3.0}
    report = LeaseReport("a", held=nothing, wanted=wanted, first=wanted, ahead=nothing)
    Ledger(Limits(budget_usd=10), 1.0, note=partial(budget.note_at_most, journal)).exchange(report)
    (journal / "dead.jsonl").write_bytes(encode(request(), completion("x", tokens=(1, 0))))


def test_after_a_kill_all_that_was_granted_counts_until_it_is_reconciled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(tmp_path)
    assert budget.resume(tmp_path, TABLE) == budget.spent_usd(tmp_path, TABLE) == pytest.approx(4.1)
    assert (
        f"3.1000 USD that it may have spent without an answer count as spent; `infembed journal reconcile {tmp_path}`"
        in (capsys.readouterr().out)
    )
    assert budget.resume(tmp_path, TABLE) == pytest.approx(4.1)
    assert not capsys.readouterr().out
    budget.reconcile(tmp_path)
    assert budget.spent_usd(tmp_path, TABLE) == 1.0


def test_the_end_of_a_run_notes_what_was_spent_without_an_answer(tmp_path: Path) -> None:
    killed(tmp_path)
    budget.note_unjournaled(tmp_path, TABLE, 1.75)
    assert budget.spent_usd(tmp_path, TABLE) == pytest.approx(1.75)


def test_reconciling_waits_for_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(tmp_path)
    writer, _ = new_segment(tmp_path)
    assert cli.main(["journal", "reconcile", str(tmp_path)]) == 2
    assert "a run writes to it" in capsys.readouterr().err
    writer.close()
    assert cli.main(["journal", "reconcile", str(tmp_path)]) == 0
    assert "counted as spent until now: at most 4.1000 USD" in capsys.readouterr().out
    assert budget.spent_usd(tmp_path, TABLE) == 1.0


def test_one_run_at_a_time_spends_a_budget_on_a_journal(tmp_path: Path) -> None:
    limits, said = Limits(budget_usd=1), f"journal={tmp_path}: process .* wait for it"
    with budget.held(limits, tmp_path), budget.held(Limits(), tmp_path), pytest.raises(InputError, match=said):
        budget.held(limits, tmp_path).__enter__()
    with budget.held(Limits(budget_usd=1), tmp_path):
        pass


def test_notes_of_several_processes_do_not_collide_and_those_of_killed_ones_go(tmp_path: Path) -> None:
    (tmp_path / f"{budget.UNJOURNALED}.0a1b2c3d.partial").write_text("{")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda usd: budget.note_at_most(tmp_path, usd), [1.0] * 64))
    assert budget.resume(tmp_path, TABLE) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == [budget.UNJOURNALED]


def test_answers_without_token_counts_cost_what_the_note_says(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(encode(request(), completion("x", tokens=(0, 0))))
    budget.note_unjournaled(tmp_path, TABLE, 1.75)
    assert budget.spent_usd(tmp_path, TABLE) == 1.75
    (tmp_path / "b.jsonl").write_bytes(encode(request("b"), replace(completion("y"), usd=0.5)))
    assert budget.spent_usd(tmp_path, TABLE) == 2.25
