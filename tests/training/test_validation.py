"""Validation during training: its figures, early stopping, and the exported checkpoint."""

import json
from dataclasses import replace

import pytest

from infembed_ray.config.training import Lora, TrainSettings, ValidationSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.search import exact_search
from infembed_ray.evaluation.tasks.task import means, score
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.checkpoints.checkpoint import Progress
from infembed_ray.training.launch import run
from infembed_ray.training.observability.logs import read_metrics
from infembed_ray.training.validation import Validation, best_exclusion_weight, held_out, overlapping
from tests.modeling import backbones
from tests.support.workers import run_workers
from tests.training.test_collate import record

TOPICS = ("aspirin", "bread", "the moon", "wolves", "trains", "paint", "chess", "rivers")


def about(n, topic):
    return replace(
        record(n),
        query_positive=f"what is there to know of {topic}",
        query_negative=f"what does {topic} cost",
        instruction_positive=f"For children, about {topic}, in plain words.",
        instruction_negative=f"For experts on {topic}: figures only, no stories.",
        document_positive=f"Dear children, this is a story of {topic}, in plain words.",
        hard_negative_document_1=f"Of {topic}, the measured mean is {n}.5 with a deviation of 0.{n}.",
        hard_negative_document_2=f"For children, {topic} can be had for {n} coins, in plain words.",
    )


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of 8 training records and 6 held-out records."""
    path = tmp_path_factory.mktemp("data")
    return {
        "records": jsonl(path / "train.jsonl", [vars(record(n)) for n in range(8)]),
        "held": jsonl(path / "dev.jsonl", [vars(about(n, t)) for n, t in enumerate(TOPICS[:6], start=50)]),
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return backbones.write("modernbert", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def settings(data, tiny, tmp_path_factory):
    """Settings of 8 steps of one worker, with an evaluation after every second."""
    return TrainSettings(
        records=data["records"],
        model=tiny,
        output=str(tmp_path_factory.mktemp("validated")),
        objective="multi{P,I}",
        instruction_negatives=2,
        records_per_step=2,
        learning_rate=3e-2,
        checkpoint_every=3,
        workers=1,
        zero_stage=3,
        lora=Lora(rank=2, dropout=0.3),  # dropout draws random numbers in every pass
        launcher="process",
        validation=ValidationSettings(records=data["held"], every=2),
    )


def with_validation(settings, **changes):
    return settings.model_copy(update={"validation": settings.validation.model_copy(update=changes)})


def all_runs(rank, settings, directory):
    """Train all runs of this module in their own process, because DeepSpeed changes global state."""
    from infembed_ray.training import loop, validation

    results = {}
    results["validated"] = run(settings)
    results["plain"] = run(settings.model_copy(update={"validation": None, "output": f"{directory}/plain"}))
    mixed = settings.model_copy(update={"lora": None, "zero_stage": 2, "interpolation": 0.4})
    results["mixed"] = run(mixed.model_copy(update={"output": f"{directory}/mixed"}))
    results["mixed, plain"] = run(mixed.model_copy(update={"validation": None, "output": f"{directory}/mixed-plain"}))

    figures = iter([0.1, 0.3, 0.3, 0.2, *[0.9] * 99])  # two improvements, two evaluations without, then no more

    def given(self, engine):
        return dict.fromkeys(("validation_p_mrr", "validation_ndcg_at_10"), next(figures))

    def interrupted(*_):
        raise InterruptedError

    validation.Validation.figures = given
    patient = with_validation(settings, every=1, patience=2).model_copy(update={"output": f"{directory}/patient"})
    export, loop.export = loop.export, interrupted
    with pytest.raises(InterruptedError):
        run(patient)
    loop.export = export
    results["patient"] = run(patient)
    return results


@pytest.fixture(scope="module")
def made(settings, tmp_path_factory):
    """Published output of each run, by name."""
    [published] = run_workers(all_runs, 1, settings, str(tmp_path_factory.mktemp("runs")))
    return published


def scores(path):
    return {line["step"]: line["validation_p_mrr"] for line in read_metrics(path) if "validation_p_mrr" in line}


@pytest.mark.integration
@pytest.mark.parametrize("names", [("validated", "plain"), ("mixed", "mixed, plain")])
def test_validation_does_not_change_the_training(made, names):
    ours, theirs = (made[name].path for name in names)
    assert [line["loss"] for line in read_metrics(ours)] == [line["loss"] for line in read_metrics(theirs)]


@pytest.mark.integration
def test_interpolated_weights_are_validated_as_they_are_published(made, settings):
    p_mrr, _ = evaluated(str(made["mixed"].path), settings)
    assert p_mrr == pytest.approx(made["mixed"].manifest["exported"]["score"], abs=1e-6)


@pytest.mark.integration
def test_best_checkpoint_is_exported_and_named_in_the_manifest(made, settings):
    seen = scores(made["validated"].path)
    assert list(seen) == [2, 4, 6, 8]
    best = max(seen, key=seen.get)
    assert best < 8, "the test shows nothing if the last checkpoint is the best"
    manifest = made["validated"].manifest
    assert manifest["exported"]["step"] == manifest["final_metrics"]["step"] == best
    encoder = InstructionEncoder.from_pretrained(made["validated"].path)
    assert encoder.exclusion_weight == manifest["final_metrics"]["exclusion_weight"]
    assert InstructionEncoder.from_pretrained(made["plain"].path).exclusion_weight == 0
    assert manifest["counts"]["steps"] == 8
    assert made["plain"].manifest["exported"] == {"step": 8, "score": None}
    p_mrr, ndcg = evaluated(str(made["validated"].path), settings)
    assert p_mrr == pytest.approx(seen[best], abs=1e-6)
    assert p_mrr != pytest.approx(seen[8], abs=1e-6)
    assert ndcg == pytest.approx(manifest["final_metrics"]["validation_ndcg_at_10"], abs=1e-6)


@pytest.mark.integration
def test_early_stopping_also_when_resumed_at_that_step(made):
    assert list(scores(made["patient"].path).values()) == [0.1, 0.3, 0.3, 0.2]
    assert len(read_metrics(made["patient"].path)) == 4
    assert made["patient"].manifest["counts"]["steps"] == 4
    assert made["patient"].manifest["exported"] == {"step": 3, "score": 0.3}  # the newest of equal scores


def evaluated(path, settings, exclusion_weight=None):
    """Compute p-MRR and mean nDCG@10 of an exported model."""
    _, task = held_out(settings.validation)
    encoder = InstructionEncoder.from_pretrained(path)
    if exclusion_weight is not None:
        encoder.exclusion_weight = exclusion_weight
    queries = encoder.encode_queries([q.query for q in task.queries], [q.instruction for q in task.queries])
    ranked = exact_search(
        queries, encoder.encode_passages(task.corpus["text"].to_pylist()), task.corpus["id"].to_pylist()
    )
    figures = means(score(task, {q.id: r for q, r in zip(task.queries, ranked, strict=True)}))
    ndcg = [value for name, value in figures.items() if name.startswith("nDCG@10")]
    return figures["p-MRR"], sum(ndcg) / len(ndcg)


def test_the_weight_of_exclusions_has_the_best_p_mrr_without_loss_of_ndcg(settings):
    _, task = held_out(settings.validation)
    others = {id: 0.9 - place / 1000 for place, id in enumerate(task.corpus["id"].to_pylist())}

    def run(change):
        """The passage of each query first; those that a change of the instruction makes irrelevant fall by `change`."""
        made = {query: others | dict.fromkeys(judged, 1.0) for query, judged in task.qrels.items()}
        for one in task.changes:
            made[one.changed] |= dict.fromkeys(one.documents, 0.9 - change)
        return made

    runs = {0.0: run(0.0), 0.1: run(0.002), 0.2: run(0.5), 0.3: run(0.5)}
    p_mrr = {weight: means(score(task, of_run))["p-MRR"] for weight, of_run in runs.items()}
    assert p_mrr[0.0] < p_mrr[0.1] < p_mrr[0.2] == p_mrr[0.3]
    assert best_exclusion_weight(task, runs) == 0.2  # the first of equals
    assert best_exclusion_weight(task, {0.0: runs[0.2], 0.1: runs[0.0]}) == 0.0
    unchanged = next(query.id for query in task.queries if query.id.endswith("query"))
    runs[0.2] |= {unchanged: others | dict.fromkeys(task.qrels[unchanged], 0.8)}  # nDCG@10 falls
    assert best_exclusion_weight(task, runs) == 0.3
    assert best_exclusion_weight(task, {0.0: {}}) == 0.0  # embeddings were not finite


def test_held_out_records_in_the_training_set_are_counted():
    trained = [replace(record(n), id="row-1" if n == 1 else f"r{n}") for n in range(8)]
    held = [
        about(1, "aspirin"),  # another record: its id is only a row number
        replace(about(60, "bread"), query_positive="query 5"),
        replace(about(61, "wolves"), document_positive="passage 0"),
        about(7, "chess"),  # same id
        about(62, "paint"),
    ]
    held[0] = replace(held[0], id="row-1")
    assert overlapping(trained, held) == 3


def test_metric_with_nothing_to_measure_is_rejected(settings, tmp_path):
    rows = [
        vars(replace(about(n, t), instruction_negative=f"For children, about {t}, in plain words."))
        for n, t in enumerate(TOPICS)
    ]
    nothing = with_validation(settings, records=jsonl(tmp_path / "dev.jsonl", rows))
    with pytest.raises(InputError, match=r"validation.metric=p_mrr: in these records no passage becomes irrelevant"):
        run(nothing)


def worker(rank, settings):
    from infembed_ray.training.backbone import load_encoder
    from infembed_ray.training.engine import Engine
    from infembed_ray.training.validation import Validation

    engine = Engine(load_encoder(settings), settings)
    figures = Validation(settings).figures(engine)
    engine.close()
    return figures


@pytest.mark.integration
def test_sharded_workers_get_the_figures_of_one_worker(settings):
    shared = settings.model_copy(update={"workers": 2, "share_encoder": False, "lora": None})
    one, other = run_workers(worker, 2, shared)
    assert one == other
    expected, _ = evaluated(settings.model, settings, one["exclusion_weight"])
    assert one["validation_p_mrr"] == pytest.approx(expected, abs=1e-6)


def test_last_step_of_early_stopping_needs_a_checkpoint_even_without_score(settings):
    patient = Validation(with_validation(settings, patience=2))
    assert patient.needs_checkpoint(Progress(step=4, stale=2))
    assert not patient.needs_checkpoint(Progress(step=4, stale=1))
    assert not patient.needs_checkpoint(Progress(step=3))
