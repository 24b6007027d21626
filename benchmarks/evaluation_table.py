"""One table with intervals and tests on real text: BM25, an encoder before and after training.

    python benchmarks/evaluation_table.py --data DIRECTORY [--trained CHECKPOINT] [--output DIRECTORY]

`DIRECTORY` holds `cranfield/` (1,398 abstracts, 225 queries), `infir_mini/` (InF-IR records) and
`msmarco_seeds/` (distractors). Without `--trained`, MiniLM is trained first, on infir_mini/train.jsonl with multi{P,I}.

The last line is one JSON object:
    figures     label -> task -> figure -> mean
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import material

from infembed_ray.storage.steps import resolve

TRAINING = {"objective": "multi{P,I}", "instruction_negatives": 1, "records_per_step": 4, "workers": 1, "zero_stage": 0}


def cranfield(data: Path, directory: Path) -> Path:
    """Write Cranfield as a BEIR directory, without the empty documents 471 and 995 and their judgements.

    Queries are numbered by position, as in the judgements.
    """
    (directory / "qrels").mkdir(parents=True, exist_ok=True)
    documents = re.findall(
        r"<docno>\s*(\d+)\s*</docno>.*?<title>(.*?)</title>.*?<text>(.*?)</text>",
        (data / "cran.all.1400.xml").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    # An abstract begins with its title; drop the repetition.
    texts = {number: " ".join((text or title).split()) for number, title, text in documents}
    texts = {number: text for number, text in texts.items() if text}
    with (directory / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for number, text in texts.items():
            out.write(json.dumps({"_id": number, "text": text}) + "\n")
    queries = re.findall(r"<title>(.*?)</title>", (data / "cran.qry.xml").read_text(encoding="utf-8"), re.DOTALL)
    with (directory / "queries.jsonl").open("w", encoding="utf-8") as out:
        for number, query in enumerate(queries, start=1):
            out.write(json.dumps({"_id": str(number), "text": " ".join(query.split())}) + "\n")
    judged = (line.split() for line in (data / "cranqrel.trec.txt").read_text().splitlines())
    lines = [f"{query}\t{document}\t{grade}" for query, _, document, grade in judged if document in texts]
    (directory / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    return directory


def infembed(verb: str, **settings: object) -> None:
    """Run a verb of the product."""
    plain = [f"{name}={json.dumps(value) if isinstance(value, dict) else value}" for name, value in settings.items()]
    subprocess.run([sys.executable, "-m", "infembed_ray.cli", verb, *plain], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=material.REAL.parents[1])
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/evaluation_table"))
    options = parser.parse_args()
    data, output = options.data.absolute(), options.output.absolute()
    base = str(material.minilm())
    trained = options.trained
    if trained is None:
        trained = output / "trained"
        infembed("train", records=data / "infir_mini" / "train.jsonl", model=base, output=trained, **TRAINING)
    infembed(
        "evaluate",
        tasks=f"[{cranfield(data / 'cranfield', output / 'cranfield')}]",
        records=data / "infir_mini" / "dev.jsonl",
        distractors=data / "msmarco_seeds" / "seeds.jsonl",
        models={"BM25": "bm25", "MiniLM": base, "MiniLM trained": str(trained.absolute())},
        output=output / "results",
    )
    published = resolve(output / "results")
    print((published / "table.md").read_text(encoding="utf-8"))
    figures = json.loads((published / "manifest.json").read_text())["figures"]
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
