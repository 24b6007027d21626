"""Sources of training data: files of InF-IR records and of training tuples, in any mix."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from infembed_ray.config.training import Source, TrainSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.progress import counted, say
from infembed_ray.records import tables, tuples
from infembed_ray.records.files import BadRows, write_bad_rows
from infembed_ray.records.tables import UNKNOWN, Record
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import find_input
from infembed_ray.training.collate import flatten
from infembed_ray.training.dataset import Dataset
from infembed_ray.training.losses import Objective
from infembed_ray.training.validation import held_out, overlapping


def named(settings: TrainSettings) -> dict[str, Source]:
    """Return the sources by the setting of their path; InputError if the settings do not name them in one way."""
    if bool(settings.records) == bool(settings.sources):
        fault = "set either records, or sources.NAME.path for each of several sources"
        raise InputError.of("records", settings.records or "null", fault)
    if settings.sources and settings.split is not None:
        raise InputError(f"split={settings.split}: applies to records only; set sources.NAME.split")
    for label in settings.sources:
        if "/" in label:
            fault = f"sources.{label}: the name of a source is a part of its records' ids; leave out the slash"
            raise InputError(fault)
    if settings.records:
        return {"records": Source(path=settings.records, split=settings.split)}
    return {f"sources.{label}.path": source for label, source in settings.sources.items()}


def locate(settings: TrainSettings) -> dict[str, Place]:
    """Find the files of all sources, by the setting of their path; InputError if some do not exist."""
    sources = named(settings)
    places = check_all(*(partial(find_input, source.path, name) for name, source in sources.items()))
    return dict(zip(sources, places, strict=True))


@dataclass
class Tally:
    """Numbers of the records that were read from a source, and of their training tuples.

    `instructed` tuples have an instruction, or one under which their passage is wrong; `scored` ones a teacher's scores of
    their hard `negatives`.
    """

    bad: BadRows
    """Rows that cannot be used."""
    records: int = 0
    tuples: int = 0
    instructed: int = 0
    negatives: int = 0
    scored: int = 0

    def add(self, record: TrainingRecord) -> None:
        """Count a record."""
        self.records += 1
        for row in flatten(record):
            self.tuples += 1
            self.instructed += bool(row.instruction or row.poisoned)
            self.negatives += len(row.negatives)
            self.scored += len(row.scores) > 1

    def describe(self, path: Place) -> str:
        """Return the number of records, and what they have and lack besides instructions."""
        parts = [f"{self.records:,} of {path}"]
        if self.instructed < self.tuples:
            parts.append(f"{self.tuples - self.instructed:,} without instructions")
        if self.negatives:
            parts.append(counted(self.negatives, "hard negative"))
        if self.scored:
            parts.append(f"{self.scored:,} with a teacher's scores")
        return ", ".join(parts)


def write(settings: TrainSettings, places: Mapping[str, Place], file: Path, tallies: dict[str, Tally]) -> Dataset:
    """Write the checked records of all sources to the file that the workers open, and compare them with the held-out ones.

    Args:
        settings, places, tallies: See `read`.
        file: Path of the file. If it exists, an interrupted attempt of this run wrote the same records to it.
    """
    file.parent.mkdir(exist_ok=True)
    rows = Dataset(file) if file.exists() else Dataset.write(file, read(settings, places, tallies))
    write_bad_rows(file.parent, *(tally.bad for tally in tallies.values()))
    if settings.validation is not None:
        held, _ = held_out(settings.validation)
        if shared := overlapping(rows, held):
            records = f"{shared} of the {len(held)} records of validation.records"
            say(f"train: warning: {records} share their id, query or positive passage with a training record")
    return rows


def read(settings: TrainSettings, places: Mapping[str, Place], tallies: dict[str, Tally]) -> Iterator[TrainingRecord]:
    """Stream the records of all sources, one source after the other.

    A record of `sources` has the name of its source before its id, and before its own `source` if it has one.

    Args:
        settings: Settings of the run.
        places: Files of the sources; see `locate`.
        tallies: Filled with the numbers of each source, by the setting of its path.

    Raises:
        InputError: a row cannot be used, or after the last one: the settings need what no record has.
    """
    for name, source in named(settings).items():
        tally = tallies[name] = Tally(BadRows(name, settings.on_bad_row == "reject"))
        for record in _stream(source, places[name], tally.bad):
            if settings.sources:
                label = _label(name)
                origin = label if record.source == UNKNOWN else f"{label}/{record.source}"
                record = replace(record, source=origin, id=f"{label}/{record.id}")
            tally.add(record)
            yield record
    _require_trainable(settings, tallies)


def _label(name: str) -> str:
    """Return the name of the source whose path has this setting."""
    return name.removeprefix("sources.").removesuffix(".path")


def _stream(source: Source, path: Place, bad: BadRows) -> Iterator[TrainingRecord]:
    if tuples.found_in(path, bad.name, source.columns, source.split):
        return tuples.stream(path, bad.name, source.columns, source.split, bad)
    return tables.stream(path, Record, bad.name, tuples.single(source.columns), source.split, bad)


def _require_trainable(settings: TrainSettings, tallies: Mapping[str, Tally]) -> None:
    """Check that the records have what the objective and the distillation train on; InputError otherwise."""
    variables = Objective.parse(settings.objective).variables
    tallies = {name: tally for name, tally in tallies.items() if settings.mixture.get(_label(name), 1)}
    plain = [name for name, tally in tallies.items() if not tally.instructed]
    if "I" in variables and len(plain) == len(tallies):
        remedy = "set objective='uni{P}', or name the column of the instructions"
        raise InputError.of("objective", settings.objective, "contrasts instructions, and no record has one", remedy)
    if variables == ("I",) and plain:
        fault = f"nothing of {plain[0]} would train, because its records have no instructions"
        raise InputError.of("objective", settings.objective, fault, "add P to the objective, or leave this source out")
    if settings.hard_negatives == 0 and (settings.distillation is not None or settings.head == "score"):
        raise InputError("hard_negatives=0: distillation and head=score train on hard negatives; set at least 1")
    if settings.head == "score" and not any(t.tuples > t.records or t.negatives for t in tallies.values()):
        raise InputError("head=score: no record has hard negatives; run `infembed mine` first, or set head=embedding")
    if settings.distillation is not None and not any(tally.scored for tally in tallies.values()):
        fault = "no record has positive_scores and negative_scores"
        remedy = "add them with `infembed mine teacher=...`, or leave distillation out"
        raise InputError.of("distillation", None, fault, remedy)
