"""Dataset repositories of the Hugging Face hub in a mirror, `<mirror>/<owner>/<name>`.

The dataset card (`README.md`) lists configurations, splits and files. Files are found by that list alone, as
`datasets.load_dataset(path, config, split)` finds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import yaml

from infembed_ray.errors import InputError
from infembed_ray.records.tables import FORMATS, hidden, raw_rows
from infembed_ray.storage.places import Place, listing, read_text

CARD = "README.md"
MANIFEST = "mirror.json"
"""File at the root of a mirror: the commit of each repository, and the size and SHA-256 of each file."""
FORMAT = 1
"""Version of the manifest."""

Configs = Mapping[str, Mapping[str, Sequence[str]]]
"""Configuration -> split -> patterns of its files."""

NOT_FETCHED: Mapping[str, Any] = {"revision": None, "files": {}}
"""Entry of the manifest for a repository that is not in it."""


class Repository:
    """One repository of a mirror, as a task reads it.

    Args:
        root: directory of the mirror, or its folder in an object store.
        name: `<owner>/<name>`.
        task: name of the task, for error messages.
    """

    def __init__(self, root: Place, name: str, task: str) -> None:
        self.root = root
        self.name = name
        self.task = task
        self.path = root / name
        self.remedy = f"fetch it on a machine with internet: infembed data fetch {root} {task}"

    @cached_property
    def recorded(self) -> Mapping[str, Any]:
        """Its part of the manifest: `revision`, and `files` with `size` and `sha256`."""
        found: Mapping[str, Any] = manifest(self.root).get(self.name, NOT_FETCHED)
        return found

    @cached_property
    def configs(self) -> Configs:
        """The configurations on its card.

        Raises:
            InputError: it is not in the mirror.
        """
        card = read_text(self.path / CARD)
        if card is None:
            raise InputError(f"tasks={self.task}: data={self.root} has no {self.name}/{CARD}; {self.remedy}")
        return configs(card, f"tasks={self.task}: {self.path / CARD}")

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """The files that it has, with their sizes."""
        return listing(self.path)

    def splits(self, config: str) -> Sequence[str]:
        """Return the splits of a configuration.

        Raises:
            InputError: the card has no such configuration.
        """
        if config not in self.configs:
            raise InputError(
                f"tasks={self.task}: {self.path / CARD} lists no configuration {config} "
                f"(found: {', '.join(self.configs)}); is it the card of {self.name}?"
            )
        return list(self.configs[config])

    def files(self, config: str, split: str | None = None) -> list[Place]:
        """Return the files of a split. A configuration's only split need not be named.

        In a mirror with a manifest, the files are those that it lists, so an incomplete corpus is never read.

        Raises:
            InputError: there is no such configuration or split; a file is missing or has another size than when fetched.
        """
        splits = self.splits(config)
        if split is None or split not in splits:
            if len(splits) != 1:
                raise InputError(
                    f"tasks={self.task}: configuration {config} of {self.name} has the splits {', '.join(splits)}, "
                    f"not {split}; is it the published data set?"
                )
            split = splits[0]
        recorded = self.recorded["files"]
        visible = (name for name in self._sizes if not hidden(PurePosixPath(name)))
        names = matching(self.configs[config][split], recorded or visible)
        if not names:
            raise InputError(f"tasks={self.task}: no file of {config}/{split} in {self.path}; {self.remedy}")
        for name in recorded and names:
            size = self._sizes.get(name)
            if size != recorded[name]["size"]:
                fault = "is missing" if size is None else f"has {size} bytes, not {recorded[name]['size']}"
                raise InputError(f"tasks={self.task}: {self.path / name} {fault}; {self.remedy}")
        return [self.path / name for name in names]

    def rows(
        self, config: str, split: str | None, columns: Sequence[str], lists: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a split in bounded memory; see `rows`."""
        return rows(self.files(config, split), self.task, columns, lists)

    def by_query(self, config: str, columns: Sequence[str], lists: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Return the rows of a configuration with at most one row per query: `query-id` -> row.

        Raises:
            InputError: a query has two rows; or as `rows`.
        """
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows(config, None, ("query-id", *columns), lists):
            query = str(row["query-id"])
            if query in found:
                raise InputError(f"tasks={self.task}: query {query} has two rows in `{config}`; keep one")
            found[query] = row
        return found


class Directory(Repository):
    """One's own directory in the layout of mteb or BEIR.

    A dataset card is optional. Without one, names tell configurations and splits: `corpus.jsonl`, `qrels/test.tsv`,
    `queries/queries-00000-of-00001.parquet`.
    """

    def __init__(self, path: Place, task: str) -> None:
        super().__init__(path.parent, path.name, task)
        self.remedy = "add it"

    @cached_property
    def configs(self) -> Configs:
        card = read_text(self.path / CARD)
        if card is not None and "\nconfigs:" in card:
            return configs(card, f"tasks={self.task}: {self.path / CARD}")
        found: dict[str, dict[str, list[str]]] = {}
        for name in map(PurePosixPath, self._sizes):
            if name.suffix in FORMATS and len(name.parts) <= 2 and not hidden(name):
                split = re.sub(r"-\d{5}-of-\d{5}$", "", name.stem)
                found.setdefault(PurePosixPath(name.parts[0]).stem, {}).setdefault(split, []).append(str(name))
        return found

    def splits(self, config: str) -> Sequence[str]:
        if config not in self.configs:
            wanted = "qrels/test.tsv" if config == "default" else f"{config}.jsonl"
            raise InputError(
                f"tasks={self.task}: no {wanted} in {self.path}; give a directory with corpus.jsonl, queries.jsonl and "
                "qrels/test.tsv, or with documents, topics and qrels of TREC"
            )
        return super().splits(config)


def rows(
    files: Iterable[Place], task: str, columns: Sequence[str], lists: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, and check their columns.

    Args:
        files: in a format that `records.raw_rows` reads.
        task: name of the task, for error messages.
        columns: required columns of single values; `_id|id` accepts either name.
        lists: required columns of lists.

    Yields:
        each row, with the value of every required column also under the name that is given here.

    Raises:
        InputError: a file cannot be read, a row lacks a column, or a value is a list where it must not be or vice versa.
    """
    for file in files:
        for number, values in enumerate(raw_rows(file, f"tasks={task}: file"), start=1):
            for column in (*columns, *lists):
                found = next((name for name in column.split("|") if values.get(name) is not None), None)
                if found is None:
                    fault = f"is missing or null (found: {', '.join(values)}); give it, or drop the row"
                elif isinstance(values[found], list) != (column in lists) or isinstance(values[found], dict):
                    wanted = "a list" if column in lists else "a single value"
                    fault = f"holds {repr(values[found])[:60]}; give {wanted}"
                else:
                    values[column] = values[found]
                    continue
                raise InputError(f"tasks={task}: {file}: row {number}: column {column.replace('|', ' or ')} {fault}")
            yield values


def manifest(root: Place) -> dict[str, Any]:
    """Read a mirror's manifest: repository -> `revision` and `files`; empty if there is none.

    Raises:
        InputError: the manifest is damaged or of another format.
    """
    text = read_text(root / MANIFEST)
    if text is None:
        return {}
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise InputError(
                f"data={root}: {MANIFEST} has format {values['format']}, not {FORMAT}; delete it and fetch again"
            )
        repositories: dict[str, Any] = values["repositories"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"data={root}: {MANIFEST} is damaged ({error}); delete it and fetch again") from error
    return repositories


def configs(card: str, where: str) -> Configs:
    """Parse `configs` from the front matter of a dataset card; `where` names the card in errors.

    Raises:
        InputError: the card has no list of configurations.
    """
    front = card.split("---\n", 2)[1] if card.startswith("---\n") and card.count("---\n") > 1 else ""
    try:
        listed = (yaml.safe_load(front) or {})["configs"]
        return {config["config_name"]: _splits(config["data_files"]) for config in listed}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} lists no `configs` with their files; give the data set's own card") from error


def _splits(data_files: Any) -> dict[str, list[str]]:
    """Normalize the forms that `datasets` accepts: a list of splits with paths, or paths alone, which are split `train`."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    found: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, Mapping) else ("train", entry)
        found.setdefault(split, []).extend([paths] if isinstance(paths, str) else paths)
    return found


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the file names that match a glob pattern, sorted. `*` stays within a folder, `**` crosses folders."""
    wanted = [PurePosixPath(pattern).as_posix() for pattern in patterns]
    return sorted({name for name in names if any(_matches(name.split("/"), p.split("/")) for p in wanted)})


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not name:
        return not name and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _matches(name, pattern[1:]) or _matches(name[1:], pattern)
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
