import json

import pytest

from infembed_ray.analysis.analyze import failures, run
from infembed_ray.config.analysis import AgreementSettings, AnalyzeGates, AnalyzeSettings
from infembed_ray.errors import GateError, InputError
from infembed_ray.storage.object_store import SCRATCH, Folder
from tests.analysis.samples import publish, record
from tests.support.files import write_jsonl
from tests.support.object_store import upload

REPORTED = ("report.json", "annotate.jsonl", "annotate_key.jsonl")


def settings(tmp_path, records):
    return AnalyzeSettings(records=str(records), output=str(tmp_path / "report"))


def test_the_report_of_a_synthesis_output_is_published_and_printed(tmp_path, capsys):
    wanted = settings(tmp_path, publish(tmp_path / "synthesis"))
    published = run(wanted)
    report = json.loads((published.path / "report.json").read_text())
    counts = {"seeds": 7, "kept": 3, "rejected": 3, "dead_letter": 1, "unaccounted": 0}
    assert counts.items() <= report["funnel"].items()
    assert report["cost"]["total"]["prompt_tokens"] == 7000
    assert len(report["lengths"]) == 3
    assert (published.path / "report.html").read_text().startswith("<!doctype html>")
    assert published.manifest["counts"] == {"kept": 3, "rejected": 3, "dead_letter": 1}

    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "analyze: 7 seeds: 3 kept, 3 rejected, 1 dead letters"
    printed = [line.split(maxsplit=1) for line in lines]
    assert ["2", "rejected at judge_positive: the judge picked none"] in printed
    assert ["60.0", "% pass the judge, positive"] in printed
    assert ["7,600", "tokens"] in printed
    assert ["23.33", "USD per 1,000 kept records"] in printed


def test_records_from_elsewhere_are_reported_without_a_funnel(tmp_path, capsys):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(vars(record(name))) + "\n" for name in "ab"))
    published = run(settings(tmp_path, file))
    assert json.loads((published.path / "report.json").read_text())["cost"] is None
    out = capsys.readouterr().out
    assert out.startswith("analyze: 2 records\n")
    assert "seeds" not in out
    assert "USD" not in out


@pytest.mark.integration
def test_an_encoder_adds_similarity_and_coverage(tmp_path, minilm, shared_data):
    mini = shared_data / "infir_mini"
    wanted = AnalyzeSettings(
        records=str(mini / "rejected_by_judge.jsonl"),
        output=str(tmp_path / "report"),
        compare={"kept": str(mini / "dev.jsonl")},
        encoder=minilm,
    )
    report = json.loads((run(wanted).path / "report.json").read_text())
    assert all(-1 <= d["aps"] <= 1 for d in report["diversities"])
    assert [c["kind"] for c in report["coverages"]] == ["instruction", "query", "passage"]
    assert all("points" not in one for c in report["coverages"] for one in c["sets"])


@pytest.mark.parametrize("name", ["compare", "evaluations"])
def test_a_set_that_cannot_be_read_is_refused_before_anything_is_published(tmp_path, name):
    (tmp_path / "bad.jsonl").write_text("{}\nno JSON")
    base = settings(tmp_path, publish(tmp_path / "synthesis"))
    with pytest.raises(InputError, match=rf"^{name}.b=.*bad.jsonl: row 2: is not JSON"):
        run(base.model_copy(update={name: {"b": str(tmp_path / "bad.jsonl")}}))
    assert list((tmp_path / "report").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"compare": {"records": "x"}}, "compare.records"),
        ({"compare": {"b": "nowhere"}}, "compare.b"),
        ({"evaluations": {"e": "nowhere"}}, "evaluations.e"),
        ({"agreement": AgreementSettings(files=("nowhere",))}, "agreement.files.0"),
        ({"encoder": "/nowhere"}, "encoder"),
        ({"records": "nowhere"}, "records"),
    ],
)
def test_missing_inputs_are_rejected_before_anything_is_written(tmp_path, change, setting):
    base = settings(tmp_path, publish(tmp_path / "synthesis"))
    with pytest.raises(InputError) as error:
        run(base.model_copy(update=change))
    assert str(error.value).startswith(setting)
    assert not (tmp_path / "report").exists()


REPORT = {
    "funnel": {"seeds": 10, "kept": 4},
    "verdicts": [
        {"scenario": "positive", "judged": 8, "right": 6},
        {"scenario": "negative_query", "judged": 5, "right": 5},
    ],
}


@pytest.mark.parametrize(("setting", "kept", "broken"), [("min_kept", 0.4, 0.41), ("min_judged_right", 0.75, 0.8)])
def test_a_limit_that_is_not_kept_or_of_an_unknown_figure_fails(setting, kept, broken):
    assert list(failures(AnalyzeGates(**{setting: kept}), REPORT)) == []
    (line,) = failures(AnalyzeGates(**{setting: broken}), REPORT)
    assert line.startswith(f"gates.{setting}={broken:g}: ")
    (line,) = failures(AnalyzeGates(**{setting: kept}), {"funnel": {"seeds": None, "kept": 4}, "verdicts": []})
    assert "is unknown" in line


def test_a_broken_gate_fails_again_when_the_report_is_there_already(tmp_path):
    wanted = settings(tmp_path, publish(tmp_path / "synthesis"))
    wanted = wanted.model_copy(update={"gates": AnalyzeGates(min_kept=0.9)})
    for _ in range(2):
        with pytest.raises(GateError, match=r"gates\.min_kept=0\.9: the share of seeds kept is 0\.4286, "):
            run(wanted)
    assert not run(wanted.model_copy(update={"gates": AnalyzeGates(min_kept=0.4)})).fresh


def test_a_report_with_other_sets_has_all_comparisons_also_from_an_object_store(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "records")
    answers = [{"item_id": n, "ann": n % 2, "ben": n // 2} for n in (1, 2, 3)]
    upload(publish(tmp_path / "synthesis"), folder / "synthesis")
    upload(
        write_jsonl(tmp_path / "other.jsonl", [{"instruction": f"only for {who}"} for who in ("cooks", "all")]),
        folder / "other.jsonl",
    )
    upload(write_jsonl(tmp_path / "bench" / "b.jsonl", [{"q": "QUERY of a!"}]), folder / "bench/b.jsonl")
    upload(write_jsonl(tmp_path / "answers.jsonl", answers), folder / "answers.jsonl")

    def reported(place):
        wanted = AnalyzeSettings(
            records=f"{place}/synthesis",
            output=str(tmp_path / "reports"),
            compare={"other": f"{place}/other.jsonl"},
            agreement={"files": (f"{place}/answers.jsonl",)},
            evaluations={"bench": f"{place}/bench"},
            annotate=2,
        )
        path = run(wanted).path
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name in REPORTED}

    local = reported(tmp_path)
    assert set(local) == set(REPORTED)
    report = json.loads(local["report.json"])
    assert [(d["kind"], d["label"], d["sampled"]) for d in report["diversities"]] == [
        ("instruction", "records", 2),
        ("instruction", "other", 2),
        ("query", "records", 6),
        ("passage", "records", 9),
    ]
    assert report["coverages"] == []
    assert [(a["one"], a["other"], a["items"]) for a in report["agreement"]["pairs"]] == [("ann", "ben", 3)]
    assert {c["kind"]: c["matching"] for c in report["contaminations"]} == {"instruction": 0, "query": 1, "passage": 0}
    assert [len(local[name].splitlines()) for name in ("annotate.jsonl", "annotate_key.jsonl")] == [2, 2]
    assert reported(folder) == local
    assert not (tmp_path / "scratch").exists()
