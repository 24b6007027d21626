"""`--dry-run`: the plan, all mistakes at once, and nothing left behind. Ray never starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.analysis import analyze
from infembed_ray.cli.main import main
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.evaluation import ReportSettings
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation import results
from infembed_ray.evaluation.paper import results_report as paper_report
from infembed_ray.planning import index as planned_index
from infembed_ray.quickstart import sample
from infembed_ray.retrieval.build import prepare
from infembed_ray.storage.object_store import SCRATCH, Folder, scratch
from infembed_ray.storage.steps import MANIFEST, STATES
from infembed_ray.synthesis import preflight
from infembed_ray.training import launch
from tests.evaluation.paper import made
from tests.modeling import backbones
from tests.serving.indexes import publish_index
from tests.support.files import write_jsonl
from tests.support.object_store import upload
from tests.support.ports import free_port
from tests.synthesis.runs import ROWS
from tests.training.test_collate import record

SAMPLE = [f"seeds={sample.SEEDS}", "generator.model=bundled-sample", "judge.model=bundled-sample"]
BOUNDED = ["generator={model: gpt-4o-mini, max_tokens: 1000}", "judge={model: o4-mini, max_tokens: 4000}"]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a check; return its status, its lines and its errors. It must not start Ray or write anything."""

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        status = main([*arguments, "--dry-run"])
        said = capsys.readouterr()
        assert sorted(tmp_path.rglob("*")) == before
        ray = sys.modules.get("ray")
        assert ray is None or not ray.is_initialized()
        return status, said.out, said.err.splitlines()

    return run


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbones.write("modernbert", tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, backbone: str) -> list[str]:
    rows = write_jsonl(tmp_path_factory.mktemp("records") / "records.jsonl", (vars(record(n)) for n in range(33)))
    return [f"records={rows}", f"model={backbone}", "records_per_step=8", "epochs=3", "workers=1", "launcher=process"]


def test_a_synthesis_that_journals_answer_needs_no_calls(shown, tmp_path: Path) -> None:
    status, out, err = shown("synthesize", *SAMPLE, f"replay=[{sample.JOURNAL}]", f"output={tmp_path}/a/b/out")
    assert (status, err) == (0, [])
    assert "seeds: 144 of" in out
    assert "calls: none" in out
    assert "no mistakes found" in out


def test_a_sample_of_the_seeds_is_said_to_be_one(shown, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "SAMPLE", 50)
    out = shown("synthesize", *SAMPLE, f"replay=[{sample.JOURNAL}]", f"output={tmp_path}/out")[1]
    assert "calls: none, the journals answer all of them (estimated from 48 of the seeds)" in out


def test_all_mistakes_of_a_synthesis_are_printed_with_its_price(shown, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    seeds = write_jsonl(tmp_path / "seeds.jsonl", ROWS)
    wrong = ["distractors=64", "steps.judge_positiv.model=o3"]
    status, out, err = shown("synthesize", f"seeds={seeds}", f"output={tmp_path}/out", "distractors=4", *BOUNDED)
    assert status == 2
    assert "calls: 512 at most" in out
    assert "USD at most" in out
    assert len(err) == 1
    assert "endpoint.api_key_env=OPENAI_API_KEY: not set" in err[0]
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    status, out, err = shown("synthesize", f"seeds={seeds}", f"output={tmp_path}/out", wrong[1], "prices=/nope.yaml")
    assert status == 2
    assert any("prices=/nope.yaml" in line for line in err)
    status, out, err = shown(
        "synthesize", f"seeds={seeds}", f"output={tmp_path}/out", wrong[0], "limits.tokens_per_minute=5"
    )
    assert status == 2
    assert [line.split()[2].split("=")[0] for line in err] == ["limits.tokens_per_minute"] * 2
    assert "distractors=64" in shown("synthesize", f"seeds={seeds}", f"output={tmp_path}/out", wrong[0])[2][0]


def test_a_training_shows_steps_memory_and_disk(shown, training: list[str], tmp_path: Path) -> None:
    status, out, err = shown("train", *training, f"output={tmp_path}/out")
    assert (status, err) == (0, [])
    assert "records: 33 of" in out
    assert "steps: 5 per epoch, 15 in 3 epochs, on 1 worker\n" in out
    assert "memory: about" in out
    assert "disk: about" in out
    _, step = launch.prepare(TrainSettings.load(None, [*training, f"output={tmp_path}/out"]))
    assert f"output {step.path}: new" in out
    step.partial.joinpath(STATES).mkdir(parents=True)
    assert "this run resumes it" in shown("train", *training, f"output={tmp_path}/out")[1]


def test_a_training_in_an_object_store_is_checked_without_its_weights(
    shown, training: list[str], backbone: str, bucket: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path.with_name(f"{tmp_path.name}-scratch")))
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "output")
    upload(backbone, folder / "model")
    upload(training[0].removeprefix("records="), folder / "records.jsonl")
    before = folder.entries()
    given = [*training, f"records={folder}/records.jsonl", f"model={folder}/model", f"output={folder}/out"]
    status, out, err = shown("train", *given)
    assert (status, err) == (0, [])
    assert f"output {folder}/out/" in out
    assert f"records: 33 of {folder}/records.jsonl\n" in out
    assert folder.entries() == before
    copied = [file.name for file in scratch().rglob("*") if file.is_file()]
    assert "config.json" in copied
    assert not [name for name in copied if name.endswith((".safetensors", ".jsonl"))]
    step = next(line for line in out.splitlines() if "output s3" in line).split()[2].removesuffix(":")
    folder.write(f"{step.removeprefix(f'{folder}/')}/states/step-00000001-a/file", "of an interrupted run")
    assert "this run resumes it" in shown("train", *given)[1]
    status, _, err = shown("train", *given, f"model={folder}/nothing", "output=s3://no-such-bucket/x")
    assert status == 2
    assert "no-such-bucket" in err[0] or "nothing" in err[0]


def test_check_and_run_report_the_same_mistakes(shown, training: list[str], tmp_path: Path) -> None:
    """Settings that do not fit each other, records and a model that cannot be read."""
    bad = write_jsonl(tmp_path / "bad.jsonl", [{**vars(record(0)), "query_positive": " "}])
    for wrong in (
        ["objective=multi{X}", "offload=all"],
        [f"records={bad}"],
        ["workers=2"],
        ["matryoshka=[4096]"],
        ["mixture={nowhere: 1}"],
    ):
        given = [*training, f"output={tmp_path}/out", *wrong]
        status, _, err = shown("train", *given)
        assert status == 2
        with pytest.raises(InputError) as error:
            launch.run(TrainSettings.load(None, given))
        assert err == [f"infembed train: {fault}" for fault in error.value.args]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert len(shown("train", *training, f"output={tmp_path}/out", "objective=x", "workers=2", "offload=all")[2]) == 3


def test_missing_files_and_bad_settings_are_reported_together(shown, tmp_path: Path) -> None:
    status, out, err = shown("train", "records=/nope", "model=./nope", f"output={tmp_path}/out", "offload=all")
    assert status == 2
    assert not out
    assert {line.removeprefix("infembed train: ").split(":")[0] for line in err} == {
        "records=/nope", "model=./nope", "offload=all",
    }  # fmt: skip
    assert len(err) == 3


def test_a_full_disk_is_found_before_a_training(shown, training: list[str], tmp_path: Path, monkeypatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    status, _, err = shown("train", *training, f"output={tmp_path}/out")
    assert status == 2
    assert f"output={tmp_path}/out: the run needs about" in err[0]


def test_what_an_interrupted_run_wrote_needs_no_more_disk(shown, training: list[str], tmp_path: Path) -> None:
    given = [*training, f"output={tmp_path}/out"]
    _, step = launch.prepare(TrainSettings.load(None, given))
    step.partial.joinpath(STATES).mkdir(parents=True)
    with step.partial.joinpath("model.safetensors").open("wb") as file:
        file.truncate(2**40)  # more than the run needs, without using the disk
    assert "disk: about 0.00 GiB at most" in shown("train", *given)[1]


def test_a_finished_run_has_nothing_to_do(shown, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "records.jsonl", (vars(record(n)) for n in range(3)))
    given = [f"records={rows}", f"output={tmp_path}/out"]
    status, out, _ = shown("analyze", *given)
    assert status == 0
    assert "records: 3 kept" in out
    published = analyze.run(AnalyzeSettings.load(None, given))
    (tmp_path / "out" / "latest").write_text("another\n")
    status, out, _ = shown("analyze", *given)
    assert f"output {published.path}: finished on" in out
    assert "nothing to do" in out
    assert (tmp_path / "out" / "latest").read_text() == "another\n"


def test_an_evaluation_shows_tasks_and_models(shown, training: list[str], backbone: str, tmp_path: Path) -> None:
    given = [training[0], f"models.base={backbone}", "models.words=bm25", f"output={tmp_path}/out"]
    status, out, err = shown("evaluate", *given)
    assert (status, err) == (0, [])
    assert "1 task x 2 models" in out
    status, _, err = shown("evaluate", *given, "models.none=./nope", "tasks=[folowir]")
    assert status == 2
    assert all(text in "".join(err) for text in ("models.none.model=./nope", "folowir"))


def test_a_sweep_shows_trials_steps_and_tasks(shown, training: list[str], backbone: str, tmp_path: Path) -> None:
    records = training[0].removeprefix("records=")
    given = [f"train.records={records}", "train.records_per_step=8", "train.epochs=3", "train.workers=1"]
    given += [f"evaluate.records={records}", f"models.tiny={backbone}", f"output={tmp_path}/out", "seeds=[1, 2]"]
    status, out, err = shown("sweep", *given, 'objectives=["uni{P}", "multi{P,I}"]')
    assert (status, err) == (0, [])
    assert "trials: 5, of which 4 train (2 seeds per row and model)" in out
    for expected in (
        "uni{P}, tiny, seed 1: steps: 5 per epoch, 15 in 3 epochs",
        "seed 1: memory: about",
        "disk: about",
    ):
        assert expected in out
    assert "task records: 99 queries" in out
    wrong = ["variants.odd={workers: 2, records_per_step: 1}", "variants.wide={matryoshka: [4096]}"]
    status, _, err = shown("sweep", *given, *wrong, f"evaluate.distractors={tmp_path}")
    assert status == 2
    faults = [line.removeprefix("infembed sweep: ").split(": ")[:2] for line in err]
    assert [fault[0] for fault in faults[1:]] == ["row odd, tiny", "row wide, tiny"]
    assert [fault[1].split("=")[0] for fault in faults[1:]] == ["records_per_step", "matryoshka"]
    assert shown("sweep", *given, "objectives=[X]")[0] == 2


def test_a_report_shows_its_models_and_is_finished_after_its_run(shown, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    results.write(tmp_path / "results", made.evaluation(made.records(), {"one": ("a/b", 0), "two": ("c/d", 0.3)}))
    given = [f"results.mine={tmp_path / 'results'}", f"output={tmp_path}/out"]
    status, out, err = shown("report", *given)
    assert (status, err) == (0, [])
    assert "results: models 2, tasks 1; ours in no row" in out
    assert "rows.his: no model has this name" in shown("report", *given, "rows.his=monobert")[2][0]
    paper_report.run(ReportSettings.load(None, given))
    assert "nothing to do" in shown("report", *given)[1]


def test_an_index_shows_passages_and_shards(shown, backbone: str, tmp_path: Path, monkeypatch) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", ({"id": str(n), "text": f"passage {n}"} for n in range(40)))
    given = [f"corpus={corpus}", f"model={backbone}", f"output={tmp_path}/out", "shards=2"]
    status, out, err = shown("index", *given)
    assert (status, err) == (0, [])
    assert "passages: 40 of" in out
    assert "shards: 2 of " in out
    assert "chunks" not in out
    monkeypatch.setattr(planned_index, "gib", lambda size: f"{size:.0f} bytes")
    long = write_jsonl(tmp_path / "long.jsonl", ({"id": str(n), "text": "a short word. " * 99} for n in range(300)))
    cut = shown("index", f"corpus={long}", *given[1:], "chunk_tokens=64")[1]
    chunks = int(re.search(r"chunks: about ([\d,]+), by the first 256 passages", cut)[1].replace(",", ""))
    assert chunks > 4 * 300
    whole = shown("index", f"corpus={long}", *given[1:])[1]
    memory = [float(re.search(r"memory: about (\d+) bytes", some)[1]) for some in (cut, whole)]
    assert "passages: 300 of" in cut
    assert memory[0] > 4 * memory[1]
    assert "metadata.yeer: no row of" in shown("index", *given, "metadata.yeer=integer")[2][0]
    status, _, err = shown("index", *given, "columns.text=body", "factory=Nothing")
    assert status == 2
    assert ["no column body" in err[0], "factory=Nothing" in err[1]] == [True, True]
    _, _, step = prepare(IndexSettings.load(None, given))
    step.path.mkdir(parents=True)
    (step.path / MANIFEST).write_text('{"created": "yesterday"}')
    out = shown("index", *given)[1]
    assert "finished on yesterday, so there is nothing to do" in out
    assert f"infembed index verify {step.path}" in out
    index = {"encoder": "e", "model": "m", "template": "t", "dimension": 4, "passages": 0, "shards": [], "format": 3}
    index |= {"lineage": step.identity, "folded": 1}
    (tmp_path / "out" / "next").mkdir()
    manifest = {"stage": "index", "identity": "next", "created": "today", "index": index}
    (tmp_path / "out" / "next" / MANIFEST).write_text(json.dumps(manifest))
    assert (
        f"output {tmp_path}/out/next: compacted from a build of this corpus, so there is" in shown("index", *given)[1]
    )


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_corpus_of_an_index_in_an_object_store_is_not_copied(
    shown, backbone: str, bucket: str, tmp_path: Path, monkeypatch, suffix: str
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    assert not list(scratch().iterdir())
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "output")
    rows = [{"id": str(n), "text": f"passage {n}"} for n in range(40)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
        corpus = tmp_path / "corpus.parquet"
    upload(corpus, folder / f"corpus{suffix}")
    given = [f"corpus={folder}/corpus{suffix}", f"model={backbone}", f"output={tmp_path}/out", "shards=2"]
    status, out, err = shown("index", *given)
    assert (status, err) == (0, [])
    assert f"passages: 40 of {folder}/corpus{suffix}\n" in out
    given[2] = f"output={folder}/out"
    _, _, step = prepare(IndexSettings.load(None, given))
    step.remote.write(MANIFEST, '{"created": "yesterday"}')
    assert f"infembed index verify {step.remote}`" in shown("index", *given)[1]


def test_an_export_is_checked_without_weights(shown, backbone: str, tmp_path: Path) -> None:
    status, out, _ = shown("export", f"model={backbone}", f"output={tmp_path}/out")
    assert status == 0
    assert "graphs: 1, 32 dimensions" in out


@pytest.mark.integration
def test_serving_shows_the_index_and_checks_the_port(shown, minilm: str, tmp_path: Path) -> None:
    index = publish_index(tmp_path, minilm, {"a": "one", "b": "two", "c": "three"})
    port = free_port()
    status, out, err = shown("serve", f"index={index}", f"port={port}", "api_keys_env=null")
    assert (status, err) == (0, [])
    assert "3 passages in 2 shards" in out
    assert f"API http://127.0.0.1:{port}: new" in out
    assert "collection" not in out
    news = publish_index(tmp_path / "news", minilm, {"a": "one"}, shards=1)
    given = [f"index={index}", f"collections.news={news}", f"port={port}", "api_keys_env=null"]
    status, out, err = shown("serve", *given)
    assert (status, err) == (0, [])
    assert f"collection news: index {news.name}: 1 passages in 1 shard, model " in out
    assert "encoders" not in out


def test_the_check_of_an_analysis_counts_raters_and_calls(shown, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "records.jsonl", (vars(record(n)) for n in range(3)))
    item = {"instruction": "i", "query": "q", "passages": {"1": "p"}, "ann": 1}
    sheet = write_jsonl(tmp_path / "sheet.jsonl", [{"item_id": f"i{n}", **item} for n in range(3)])
    raters = "agreement.raters={a: {model: m}, b: {model: n}}"
    given = [f"records={rows}", f"agreement.files=[{sheet}]", f"output={tmp_path}/a/out", raters]
    status, out, err = shown("analyze", *given)
    assert (status, err) == (0, [])
    assert "agreement: 1 reference rater" in out
    assert "calls: 6 at most" in out
    status, _, err = shown("analyze", *given, "agreement.endpoint.base_url=host")
    assert status == 2
    assert "agreement.endpoint.base_url=" in err[0]
    status, _, err = shown("analyze", *given, "agreement.limits.budget_usd=1")
    assert status == 2
    assert all("limits.budget_usd" in line for line in err)
