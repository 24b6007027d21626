"""The functions of the public API: the stages that `infembed` runs, and a reader of records.

A stage accepts its settings as keywords, as a mapping, or as a settings object; keywords replace the values of the other two.
Nested settings are settings objects or mappings. Paths may be `Path` objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infembed_ray.config.verbs import VERBS
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.records.tables import Record
from infembed_ray.storage.releases import resolved
from infembed_ray.storage.steps import Published, find_input

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings
    from infembed_ray.config.evaluation import EvaluateSettings
    from infembed_ray.config.retrieval import IndexSettings
    from infembed_ray.config.synthesis import SynthesizeSettings
    from infembed_ray.config.training import TrainSettings


def load_records(path: str | Path, split: str | None = None) -> list[Record]:
    """Load InF-IR records from a file, a directory, a published synthesis output or an object-store URI.

    ```python
    from infembed_ray import load_records

    for record in load_records("runs/quickstart/records", split="test")[:3]:
        print(record.instruction_positive, record.query_positive, sep=" | ")
    ```

    Args:
        path: path or URI of the file, directory or output.
        split: load only the records of this split; None loads all.

    Returns:
        The records in the order of their files.

    Raises:
        InputError: the file does not exist, or a row is invalid.
    """
    return tables.read(find_input(str(path), "records"), Record, "records", split=split)


def synthesize(settings: SynthesizeSettings | Mapping[str, Any] | None = None, /, **keywords: Any) -> Published:
    """Make InF-IR records from seeds, like `infembed synthesize`; needs Ray.

    ```python
    from infembed_ray import synthesize
    from infembed_ray.quickstart import sample

    model = {"model": "bundled-sample"}  # every answer is in the sample's journal
    made = synthesize(
        seeds=sample.SEEDS, replay=[sample.JOURNAL], generator=model, judge=model, output="runs/sample-records"
    )
    print(made.address, made.manifest["counts"])
    ```

    Args:
        settings, keywords: values of `SynthesizeSettings`; a keyword replaces the value in `settings`.

    Returns:
        The output, with `records.parquet`; `manifest["counts"]` counts seeds by outcome.

    Raises:
        InputError: for what `infembed synthesize` reports with status 2; nothing is published.
    """
    return _run("synthesize", settings, keywords)


def train(settings: TrainSettings | Mapping[str, Any] | None = None, /, **keywords: Any) -> Published:
    """Train an encoder on records, like `infembed train`; needs Ray unless `launcher="process"`.

    ```python
    from infembed_ray import InstructionEncoder, train

    here = {"launcher": "process", "workers": 1}  # without them: Ray Train on a cluster
    data = {"records": "runs/quickstart/records", "split": "train"}
    trained = train(here | data, model="runs/quickstart/checkpoint", epochs=1, output="runs/mine")
    encoder = InstructionEncoder.from_pretrained(trained.address)
    ```

    Args:
        settings, keywords: values of `TrainSettings`; a keyword replaces the value in `settings`.

    Returns:
        The output, with the checkpoint at its `address`.

    Raises:
        InputError: for what `infembed train` reports with status 2; nothing is published.
    """
    return _run("train", settings, keywords)


def evaluate(settings: EvaluateSettings | Mapping[str, Any] | None = None, /, **keywords: Any) -> Published:
    """Evaluate models on tasks, like `infembed evaluate`; needs Ray.

    ```python
    from infembed_ray import evaluate

    models = {"BM25": "bm25", "mine": "runs/quickstart/checkpoint"}
    done = evaluate(records="runs/quickstart/records", split="test", models=models, output="runs/scores")
    print((done.path / "table.md").read_text())
    ```

    Args:
        settings, keywords: values of `EvaluateSettings`; a keyword replaces the value in `settings`.

    Returns:
        The output, with `table.md`, `report.html` and the runs.

    Raises:
        InputError: for what `infembed evaluate` reports with status 2; nothing is published.
    """
    return _run("evaluate", settings, keywords)


def build_index(settings: IndexSettings | Mapping[str, Any] | None = None, /, **keywords: Any) -> Published:
    """Build an index of a corpus on a cluster, like `infembed index`; needs Ray. `Index.build` builds one in this process.

    ```python
    from infembed_ray import Index, build_index

    built = build_index(corpus="runs/quickstart/corpus.jsonl", model="runs/quickstart/checkpoint", output="runs/index")
    print(Index.open(built.address).facts.passages)
    ```

    Args:
        settings, keywords: values of `IndexSettings`; a keyword replaces the value in `settings`.

    Returns:
        The output, with the index that `Index.open` opens.

    Raises:
        InputError: for what `infembed index` reports with status 2; nothing is published.
    """
    return _run("index", settings, keywords)


def _run(verb: str, settings: Settings | Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> Published:
    return VERBS[verb].run(resolved(_settings(verb, settings, keywords)))


def _settings(verb: str, given: Settings | Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> Settings:
    """The settings of a verb from what a caller gave.

    Raises:
        InputError: a value is invalid, or `given` has the settings of another stage.
    """
    expected = VERBS[verb].settings
    if isinstance(given, expected):
        given = {name: getattr(given, name) for name in given.model_fields_set}
    elif given is not None and not isinstance(given, Mapping):
        raise InputError(f"{verb}: settings of type {type(given).__name__}; give {expected.__name__} or a mapping")
    return expected.from_mapping({name: _plain(value) for name, value in {**(given or {}), **keywords}.items()})


def _plain(value: Any) -> Any:
    """The value with `str` in place of `Path`, as settings hold it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
