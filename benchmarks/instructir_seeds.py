"""InstructIR's instructions over the MS MARCO passages that its queries come from, as collections for `infembed evaluate`.

    python benchmarks/instructir_seeds.py --data DATA --output DIRECTORY [--queries 400]

InstructIR's own passages, each rewritten for one instruction, are not in DATA. What is there is the passage from which those of
a query were made: it answers the query whatever the instruction, so the collections measure whether retrieval survives ten
users' instructions, not whether an instruction is obeyed. Queries of InF-IR records (train and dev) are left out.

It writes, in mteb's layout with all 1,743 passages as the corpus:
    DIRECTORY/asked    each query under each of its instructions: nDCG@10, and Robustness@10 over the instructions of a query
    DIRECTORY/plain    each query once, without instruction
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(
    directory: Path, passages: Mapping[str, str], queries: Iterable[Mapping[str, str]], relevant: Mapping[str, str]
) -> None:
    """Write a collection.

    Args:
        passages: id -> text.
        queries: rows of `queries`.
        relevant: query id -> id of its passage.
    """
    (directory / "qrels").mkdir(parents=True, exist_ok=True)
    tables = {"corpus": ({"_id": name, "text": text} for name, text in passages.items()), "queries": queries}
    for name, of_table in tables.items():
        lines = [json.dumps(row) + "\n" for row in of_table]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    judged = ["query-id\tcorpus-id\tscore", *(f"{query}\t{passage}\t1" for query, passage in relevant.items())]
    (directory / "qrels" / "test.tsv").write_text("\n".join(judged) + "\n")


def collect(data: Path, output: Path, count: int | None = None) -> None:
    """Write both collections to a directory, with the first `count` queries; None: all."""
    seeds = rows(data / "msmarco_seeds" / "seeds.jsonl")
    records = [row for name in ("train", "dev") for row in rows(data / "infir_mini" / f"{name}.jsonl")]
    known = {row[column] for row in records for column in ("query_positive", "query_negative")}
    passage = {row["id"]: row["pid"] for row in seeds}
    instructir = data / "instructir"
    queries = [row for row in rows(instructir / "queries.jsonl") if row["text"] not in known]
    texts = {row["_id"]: row["text"] for row in queries[:count]}
    asked = [
        {"_id": row["_id"], "text": texts[query], "instruction": row["text"], "group": query}
        for row in rows(instructir / "instructions.jsonl")
        if (query := row["_id"].partition("_")[0]) in texts
    ]
    plain = [{"_id": query, "text": text} for query, text in texts.items()]
    for name, of_collection in (("asked", asked), ("plain", plain)):
        relevant = {row["_id"]: passage[row["_id"].partition("_")[0]] for row in of_collection}
        write(output / name, {row["pid"]: row["passage"] for row in seeds}, of_collection, relevant)
        print(f"{output / name}: {len(of_collection)} queries, {len(seeds)} passages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--queries", type=int, help="number of queries, from the first; default: all 1,045")
    options = parser.parse_args()
    collect(options.data, options.output, options.queries)


if __name__ == "__main__":
    main()
