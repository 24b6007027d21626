"""A data set of the Hugging Face hub as it lies in a mirror: `<mirror>/<owner>/<name>`, laid out as its repository is.

Its card, `README.md`, lists its configurations, their splits and the files that hold them; files are found by that
list and nothing else, as `datasets.load_dataset(path, config, split)` finds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from infembed_ray.errors import InputError
from infembed_ray.records import hidden, raw_rows

CARD = "README.md"
MANIFEST = "mirror.json"
"""At the root of a mirror: the commit of each repository, and the size and SHA-256 of each file."""

FORMAT = 1
"""Of that file."""

Configs = Mapping[str, Mapping[str, Sequence[str]]]
"""Configuration -> split -> patterns of the files that hold it."""


class Repository:
    """What a task reads of one repository.

    Args:
        root: of the mirror.
        name: `<owner>/<name>`.
        task: that reads it, for error messages.
    """

    def __init__(self, root: Path, name: str, task: str) -> None:
        self.root = root
        self.name = name
        self.task = task
        self.path = root / name

    @property
    def fetching(self) -> str:
        """The command that brings the task's data."""
        return f"fetch it where there is internet: infembed data fetch {self.root} {self.task}"

    @cached_property
    def recorded(self) -> Mapping[str, Any]:
        """What the mirror's manifest says of it: `revision`, and `files` with their `size` and `sha256`."""
        found: Mapping[str, Any] = manifest(self.root).get(self.name, {"revision": None, "files": {}})
        return found

    @cached_property
    def configs(self) -> Configs:
        """What its card lists.

        Raises:
            InputError: it is not in the mirror.
        """
        card = self.path / CARD
        if not card.is_file():
            raise InputError(f"tasks={self.task}: data={self.root} has no {self.name}/{CARD}; {self.fetching}")
        return configs(card.read_text(encoding="utf-8"), f"tasks={self.task}: {card}")

    def splits(self, config: str) -> Sequence[str]:
        """The splits of a configuration.

        Raises:
            InputError: there is no such configuration.
        """
        if config not in self.configs:
            raise InputError(
                f"tasks={self.task}: {self.path / CARD} lists no configuration {config} "
                f"(found: {', '.join(self.configs)}); is it the card of {self.name}?"
            )
        return list(self.configs[config])

    def files(self, config: str, split: str | None = None) -> list[Path]:
        """The files of a split; of the only one, where the split is not there or not named.

        In a mirror with a manifest they are those that it names, so that half a corpus is never taken for a whole one.

        Raises:
            InputError: no such configuration or split; a file is missing or not as long as it was when it was fetched.
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
        there = (file.relative_to(self.path) for file in self.path.rglob("*") if file.is_file())
        visible = (file.as_posix() for file in there if not hidden(file))
        names = matching(self.configs[config][split], recorded or visible)
        if not names:
            raise InputError(f"tasks={self.task}: no file of {config}/{split} in {self.path}; {self.fetching}")
        for name in recorded and names:
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size != recorded[name]["size"]:
                fault = "is missing" if size is None else f"has {size} bytes, not {recorded[name]['size']}"
                raise InputError(f"tasks={self.task}: {file} {fault}; {self.fetching}")
        return [self.path / name for name in names]

    def rows(
        self, config: str, split: str | None, columns: Sequence[str], lists: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """The rows of a split, in bounded memory; see `rows`."""
        return rows(self.files(config, split), self.task, columns, lists)

    def by_query(self, config: str, columns: Sequence[str], lists: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """The rows of a configuration that has at most one for each query: `query-id` -> row.

        Raises:
            InputError: a query has two rows; and as `rows`.
        """
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows(config, None, ("query-id", *columns), lists):
            query = str(row["query-id"])
            if query in found:
                raise InputError(f"tasks={self.task}: query {query} has two rows in `{config}`; keep one")
            found[query] = row
        return found


def rows(
    files: Iterable[Path], task: str, columns: Sequence[str], lists: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """The rows of some files, each of which has all the columns and lists.

    Args:
        files: of a format that `records.raw_rows` reads.
        task: that reads them, for error messages.
        columns: names of columns of single values; `_id|id` is either of two.
        lists: names of columns of lists.

    Returns:
        rows as they are, and besides, under the name as it is given here, what each of the columns holds.

    Raises:
        InputError: a file cannot be read; or a row lacks a column, or has a list for a single value or the reverse.
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


def manifest(root: Path) -> dict[str, Any]:
    """Repository -> `revision` and `files`, as a mirror's manifest says; nothing where the mirror has none."""
    file = root / MANIFEST
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise InputError(
                f"data={root}: {MANIFEST} has format {values['format']}, not {FORMAT}; delete it and fetch again"
            )
        repositories: dict[str, Any] = values["repositories"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"data={root}: {MANIFEST} is damaged ({error}); delete it and fetch again") from error
    return repositories


def configs(card: str, where: str) -> Configs:
    """What a data set's card lists under `configs`.

    Args:
        card: text of the file.
        where: it is, for error messages.

    Raises:
        InputError: no list of configurations in it.
    """
    front = card.split("---\n", 2)[1] if card.startswith("---\n") and card.count("---\n") > 1 else ""
    try:
        listed = (yaml.safe_load(front) or {})["configs"]
        return {config["config_name"]: _splits(config["data_files"]) for config in listed}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} lists no `configs` with their files; give the card of the data set") from error


def _splits(data_files: Any) -> dict[str, list[str]]:
    """As `datasets` reads them: a list of splits with a path or paths, or just paths, which are of split `train`."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    found: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, Mapping) else ("train", entry)
        found.setdefault(split, []).extend([paths] if isinstance(paths, str) else paths)
    return found


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those of the file names (with slashes) that match a pattern, sorted. `*` stays within a folder, `**` does not."""
    wanted = [PurePosixPath(pattern).as_posix() for pattern in patterns]
    return sorted({name for name in names if any(_matches(name.split("/"), p.split("/")) for p in wanted)})


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not name:
        return not name and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _matches(name, pattern[1:]) or _matches(name[1:], pattern)
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
