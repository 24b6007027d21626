"""Dataset repositories of the Hugging Face hub, as `hf download` writes them, and directories in the same layout.

The dataset card (`README.md`) lists configurations, splits and files, as for `datasets.load_dataset(path, config, split)`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.records.files import BadRow, BadRows, format_of, located_rows, stem_of
from infembed_ray.records.tables import text_of
from infembed_ray.storage.places import Place, hidden, listing, matches, read_text

CARD = "README.md"
_METADATA = f".cache/huggingface/download/{CARD}.metadata"
"""File that `hf download --local-dir` writes; its first line is the commit."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.)")

_TEXTS = ("id", "qid", "query-id", "corpus-id", "text", "query")

Configs = Mapping[str, Mapping[str, Sequence[str]]]
"""Configuration -> split -> patterns of its files."""


class Repository:
    """A repository `<owner>/<name>` at a place, or one's own directory in the layout of mteb or BEIR, as a task reads it.

    Without a dataset card, names tell the configurations and splits of one's own directory: `corpus.jsonl`, `qrels/test.tsv`,
    `queries/queries-00000-of-00001.parquet`.

    Args:
        task: name of the task, for error messages.
        name: of the repository; empty: one's own directory.
        revision: the commit that it must have, or its first digits; None: any.
        part: part of the names of the files that the task reads; empty: everything.
        reject: leave out rows that cannot be used.
    """

    def __init__(
        self, path: Place, task: str, name: str = "", revision: str | None = None, part: str = "", reject: bool = False
    ) -> None:
        self.path = path
        self.bad = BadRows("tasks", reject, value=task)
        self.task = task
        self.name = name
        self.revision = revision
        pinned = f" --revision {revision}" if revision else ""
        only = f" --include {CARD} --include '*{part}*'" if part else ""
        command = f"hf download {name} --repo-type dataset{pinned}{only} --local-dir {path}"
        self.remedy = f"run `{command}`" if name else "add it"

    @cached_property
    def commit(self) -> str | None:
        """Its commit, as the hub's client recorded it; None: unknown."""
        if self.path.parent.name == "snapshots":  # in the client's cache
            return self.path.name
        metadata = read_text(self.path / _METADATA)
        return metadata.split("\n")[0] if metadata else None

    @cached_property
    def configs(self) -> Configs:
        """The configurations on its card; InputError if a repository has none, or is at another commit."""
        card = read_text(self.path / CARD)
        if not self.name and "\nconfigs:" not in (card or ""):
            return _by_names(self._names)
        if card is None:
            raise self.fault(f"no {self.path / CARD}", self.remedy)
        if self.revision and not (self.commit or self.revision).startswith(self.revision):
            raise self.fault(f"{self.path} is at commit {self.commit}, not {self.revision}", self.remedy)
        return configs(card, f"tasks={self.task}: {self.path / CARD}")

    @cached_property
    def _names(self) -> list[str]:
        return [name for name in listing(self.path) if not hidden(PurePosixPath(name))]

    def fault(self, fault: str, remedy: str = "") -> InputError:
        """Return the error of a task with this fault."""
        return InputError.of("tasks", self.task, fault, remedy)

    def files(self, config: str, split: str | None = None) -> list[Place]:
        """Return the files of a split. A configuration's only split need not be named.

        Raises:
            InputError: there is no such configuration or split, or files are missing, so that a corpus is never read in part.
        """
        if config not in self.configs:
            file = "qrels/test" if config == "default" else config
            fault = f"no {file} in {self.path}, but {', '.join(self.configs)}"
            raise self.fault(fault, "give corpus, queries and qrels/test, or the card that names them")
        own = self.configs[config]
        if split is None or split not in own:
            if len(own) != 1:
                raise self.fault(f"{config} of {self.name or self.path} has the splits {', '.join(own)}, not {split}")
            (split,) = own
        names = matching(own[split], self._names)
        if not names:
            raise self.fault(f"no file of {config}/{split} in {self.path}", self.remedy)
        if len(formats := sorted({str(format_of(PurePosixPath(name))) for name in names})) > 1:
            raise self.fault(f"{config}/{split} has files of several formats, {' and '.join(formats)}", "keep one")
        shards = [shard for name in names if (shard := _SHARD.search(name))]
        if shards and len(shards) < int(shards[0][2]):
            few = f"{len(shards)} of the {int(shards[0][2])} files of {config}/{split}"
            raise self.fault(f"{self.path} has {few}", self.remedy)
        return [self.path / name for name in names]

    def rows(self, config: str, split: str | None, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a split in bounded memory, each with every required column under the name that is given here.

        Args:
            config, split: as `files` takes them.
            columns: required columns; `id|_id` accepts either name, and gives the value under the first.

        Raises:
            InputError: a file cannot be read; or after the last row, some lack a column.
        """
        for file in self.files(config, split):
            for number, values in located_rows(file, self.bad):
                try:
                    yield values | {column.split("|")[0]: _required(values, column) for column in columns}
                except BadRow as fault:
                    self.bad.add(file, number, fault, values)
        self.bad.check()

    def by_query(self, config: str, column: str) -> dict[str, Any]:
        """Return a column of a configuration with at most one row per query: `query-id` -> value."""
        value_of: dict[str, Any] = {}
        for row in self.rows(config, None, ("query-id", column)):
            query = row["query-id"]
            if query in value_of:
                raise self.fault(f"query {query} has two rows in `{config}`", "keep one")
            value_of[query] = row[column]
        return value_of


def _required(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, whose name may have alternatives; ids and texts become texts."""
    name = next((name for name in column.split("|") if values.get(name) is not None), None)
    value = None if name is None else values[name]
    if column.split("|")[0] in _TEXTS:
        value = text_of(value, column)
    elif column == "corpus-ids" and isinstance(value, (list, tuple)):
        value = [text_of(document, column) for document in value]
    if value is None:
        found = ", ".join(map(str, values))[:200]
        raise BadRow(f"column {column.split('|')[0]} is missing or null; the row has {found}")
    return value


def _by_names(names: Iterable[str]) -> Configs:
    files_of: dict[str, dict[str, list[str]]] = {}
    for name in map(PurePosixPath, names):
        if format_of(name) and len(name.parts) <= 2:
            split = re.sub(r"-\d{5}-of-\d{5}$", "", stem_of(name.name))
            files_of.setdefault(stem_of(name.parts[0]), {}).setdefault(split, []).append(str(name))
    return files_of


def downloaded(task: str, name: str, revision: str | None = None, part: str = "") -> Repository:
    """Return a repository in the cache of the hub's client, which downloads what the task reads and what is missing."""
    from huggingface_hub import snapshot_download  # takes half a second
    from huggingface_hub.errors import HTTPError

    wanted = [CARD, f"*{part}*"] if part else None
    try:
        path = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted))
    except (OSError, HTTPError) as error:
        fault = f"data is not set, and {name} cannot be downloaded ({in_one_line(error)[:300]})"
        copied = Repository(Path("DIR", name), task, name, revision, part)
        remedy = f"on a machine with internet {copied.remedy}, copy DIR, and set data=DIR"
        raise InputError.of("tasks", task, fault, remedy) from error
    return Repository(path, task, name, revision, part)


def configs(card: str, where: str) -> Configs:
    """Parse `configs` from the front matter of a dataset card; `where` names the card in errors."""
    front = card.split("---\n", 2)[1] if card.startswith("---\n") and card.count("---\n") > 1 else ""
    try:
        listed = (yaml.safe_load(front) or {})["configs"]
        return {config["config_name"]: _splits(config["data_files"]) for config in listed}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} lists no `configs` with their files; give the data set's own card") from error


def _splits(data_files: Any) -> dict[str, list[str]]:
    """Normalize the forms that `datasets` accepts: a list of splits with paths, or paths alone, which are split `train`."""
    patterns: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, Mapping) else ("train", entry)
        patterns.setdefault(split, []).extend([paths] if isinstance(paths, str) else paths)
    return patterns


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the file names that match a glob pattern, sorted. `*` stays within a folder, `**` crosses folders."""
    wanted = [PurePosixPath(pattern).as_posix() for pattern in patterns]
    return sorted({name for name in names if any(matches(name, pattern) for pattern in wanted)})
