import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.cli import main as cli
from infembed_ray.config.llm import Limits
from infembed_ray.llm import budget
from infembed_ray.llm.journal import encode, new_segment
from infembed_ray.llm.lease import Lease
from infembed_ray.llm.prices import PriceTable
from infembed_ray.llm.rate_limits import LEASE_S, USD, LeaseReport
from tests.support.chat import completion, request


def test_a_grant_of_a_budget_is_noted_on_disk_before_it_can_be_spent(tmp_path: Path) -> None:
    limits = budget.DurableLedger(Limits(budget_usd=10), 1.0, tmp_path / "journal")
    none, wanted = {"usd": 0.0}, {"usd": 3.0}
    limits.exchange(LeaseReport("a", held=none, wanted=wanted, first=wanted, ahead=none))
    assert 4.0 <= budget.spent_usd(tmp_path / "journal", PriceTable("2026-01-01", {})) <= 4.1


def test_the_time_that_a_note_takes_expires_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = budget.DurableLedger(Limits(budget_usd=10), 1.0, tmp_path / "journal")
    now = 0.0
    monkeypatch.setattr(limits, "_clock", lambda: now)
    none, held = {"usd": 0.0}, {"usd": 3.0}
    limits.exchange(LeaseReport("a", held=held, wanted=none, first=none, ahead=none))

    def slowly(*_: object) -> None:
        nonlocal now
        now += 2 * LEASE_S

    monkeypatch.setattr(budget, "_write_note", slowly)
    limits.exchange(LeaseReport("b", held=held, wanted=none, first=none, ahead=none))
    now += LEASE_S / 2
    used = ((0.0, {"usd": 1.0}),)
    for holder in "ab":
        limits.exchange(LeaseReport(holder, held=none, wanted=none, first=none, ahead=none, used=used))
    assert limits.committed_usd == 1.0 + 2 * 1.0


def test_a_failed_note_is_written_by_the_next_exchange(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    limits = budget.DurableLedger(Limits(budget_usd=10), 1.0, journal)
    none, held = {"usd": 0.0}, {"usd": 3.0}
    report = LeaseReport("a", held=held, wanted=none, first=none, ahead=none)
    journal.write_text("no directory")
    with pytest.raises(FileExistsError):
        limits.exchange(report)
    journal.unlink()
    limits.exchange(report)
    assert budget.spent_usd(journal, PriceTable("2026-01-01", {})) >= 4.0


TABLE = PriceTable("2026-01-01", {"small": (1e6, 0.0)})  # a USD per token of a prompt


def granted(journal: Path, began_usd: float = 1.0) -> tuple[budget.DurableLedger, Lease]:
    """Return a ledger, and the lease of a process that settled 0.25 of its requests and has 0.5 USD in flight."""
    ledger = budget.DurableLedger(Limits(budget_usd=100), began_usd, journal)
    lease = Lease("a", (USD,), 4, record=budget.spend_record(journal, "a"))
    for usd in (2.0, 0.5, 3.0, 1.0, 4.0):  # more than there are slots for
        lease.start({USD: usd}, lambda begun: None)
    lease.accept(ledger.exchange(lease.end_period()))
    for usd, used in ((2.0, 0.25), (3.0, 0.0), (1.0, 0.0), (4.0, 0.0)):
        lease.settle({USD: usd}, {USD: used}, 0.0)
    return ledger, lease


def test_after_a_kill_only_what_was_in_flight_counts_at_its_worst_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, _ = granted(tmp_path)
    assert ledger.committed_usd >= 1.0 + 2.0 + 0.5 + 3.0 + 1.0
    assert budget.spent_usd(tmp_path, TABLE) == pytest.approx(1.0 + 0.25 + 0.5)
    assert budget.resume(tmp_path, TABLE) == pytest.approx(1.75)
    assert "certainly not spent; 1.7500 USD without an answer" in capsys.readouterr().out
    assert not [*tmp_path.glob("*.spend")]
    assert budget.resume(tmp_path, TABLE) == pytest.approx(1.75)
    assert not capsys.readouterr().out


def test_an_answer_that_reached_the_journal_is_not_counted_twice(tmp_path: Path) -> None:
    _, lease = granted(tmp_path)
    lease.settle({USD: 0.5}, {USD: 0.5}, 0.0)
    (tmp_path / "dead.jsonl").write_bytes(encode(request(), completion("x", tokens=(1, 0))))  # 1 USD
    assert budget.resume(tmp_path, TABLE) == pytest.approx(1.0 + 0.25 + 0.5)


@pytest.mark.parametrize("damage", ["missing", "short", "other machine"])
def test_without_a_record_of_this_machine_everything_granted_counts(tmp_path: Path, damage: str) -> None:
    ledger, _ = granted(tmp_path)
    record = tmp_path / "a.spend"
    said = record.read_bytes()
    record.write_bytes({"missing": b"", "short": said[:9], "other machine": said[:-3] + b"no\n"}[damage])
    if damage == "missing":
        record.unlink()
    assert budget.resume(tmp_path, TABLE) >= ledger.committed_usd


def test_a_process_killed_within_a_run_counts_what_it_had_in_flight(tmp_path: Path) -> None:
    ledger, _ = granted(tmp_path)
    budget.note_unjournaled(tmp_path, TABLE, ledger.committed_usd)
    assert budget.spent_usd(tmp_path, TABLE) == pytest.approx(1.75)


def test_a_record_survives_the_kill_of_its_process(tmp_path: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from infembed_ray.llm import budget; "
        f"record = budget.spend_record(Path({str(tmp_path)!r}), 'a'); record[0], record[1] = 0.125, 2.5; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
    note = {"at_most_usd": 50.0, "began_usd": 1.0, "holders": ["a"]}
    (tmp_path / budget.UNJOURNALED).write_text(json.dumps(note))
    assert budget.spent_usd(tmp_path, TABLE) == 1.0 + 0.125 + 2.5


def test_reconciling_counts_only_answers_and_waits_for_the_end_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    granted(tmp_path)
    (tmp_path / "dead.jsonl").write_bytes(encode(request(), completion("x", tokens=(1, 0))))
    writer, _ = new_segment(tmp_path)
    assert cli.main(["journal", "reconcile", str(tmp_path)]) == 2
    assert "a run writes to it" in capsys.readouterr().err
    writer.close()
    assert cli.main(["journal", "reconcile", str(tmp_path)]) == 0
    assert "counted as spent until now: at most 8.5" in capsys.readouterr().out
    assert budget.spent_usd(tmp_path, TABLE) == 1.0
