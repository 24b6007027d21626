import json

import pytest

from infembed_ray.analysis.report import run
from infembed_ray.config import AnalyzeSettings
from infembed_ray.errors import InputError
from infembed_ray.records import columns_of
from tests.analysis.samples import publish, record


def settings(tmp_path, records):
    return AnalyzeSettings(records=str(records), output=str(tmp_path / "report"))


def test_the_report_of_a_synthesis_output_is_published_and_printed(tmp_path, capsys):
    wanted = settings(tmp_path, publish(tmp_path / "synthesis"))
    published = run(wanted)
    report = json.loads((published.path / "report.json").read_text())
    counts = {"seeds": 7, "kept": 3, "rejected": 3, "dead_letter": 1, "unaccounted": 0}
    assert counts.items() <= report["funnel"].items()
    assert report["cost"]["total"]["prompt_tokens"] == 7000
    assert len(report["lengths"]) == 10
    assert (published.path / "report.html").read_text().startswith("<!doctype html>")
    assert published.manifest["counts"] == {"kept": 3, "rejected": 3, "dead_letter": 1}

    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "analyze: 7 seeds: 3 kept, 3 rejected, 1 dead letters"
    printed = [line.split(maxsplit=1) for line in lines]
    assert ["2", "rejected at judge_positive: the judge picked none"] in printed
    assert ["60.0", "% pass the judge, positive"] in printed
    assert ["7,600", "tokens"] in printed
    assert ["23.33", "USD per 1,000 kept records"] in printed


def test_a_second_run_does_nothing(tmp_path, capsys):
    wanted = settings(tmp_path, publish(tmp_path / "synthesis"))
    first = run(wanted)
    capsys.readouterr()
    again = run(wanted)
    assert (again.fresh, again.path, capsys.readouterr().out) == (False, first.path, "")


def test_records_from_elsewhere_are_reported_without_a_funnel(tmp_path, capsys):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(columns_of(record(name))) + "\n" for name in "ab"))
    published = run(settings(tmp_path, file))
    assert json.loads((published.path / "report.json").read_text())["cost"] is None
    out = capsys.readouterr().out
    assert out.startswith("analyze: 2 records\n")
    assert "seeds" not in out
    assert "USD" not in out


def test_the_real_development_records_have_the_lengths_counted_apart(shared_data, tmp_path):
    file = shared_data / "infir_mini" / "dev.jsonl"
    published = run(settings(tmp_path, file))
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    words = [len(r[f"instruction_{sign}"].split()) for r in rows for sign in ("positive", "negative")]
    report = json.loads((published.path / "report.json").read_text())
    assert report["lengths"][0]["mean"] == pytest.approx(sum(words) / len(words))
    assert report["sources"] == {"msmarco": len(rows)}


def test_missing_records_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"^records=.*nowhere: no such file or directory"):
        run(settings(tmp_path, tmp_path / "nowhere"))
    assert not (tmp_path / "report").exists()
