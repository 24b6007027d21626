"""Figures, counts and defaults in the prose of the documentation are those of the measurements and of the code."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import infembed_ray
from infembed_ray import client
from infembed_ray.analysis import diversity, overlap, raters, report
from infembed_ray.cli import main as cli
from infembed_ray.config.base import Settings
from infembed_ray.config.llm import Endpoint
from infembed_ray.config.mining import MineSettings
from infembed_ray.config.serving import RerankSettings
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm import journal, journal_store
from infembed_ray.llm.client import DRAIN_S
from infembed_ray.mining import distributed as mining
from infembed_ray.modeling import graphs, pipeline
from infembed_ray.planning import memory
from infembed_ray.quickstart import sample
from infembed_ray.retrieval import corpus, faiss_index, filters, milvus
from infembed_ray.serving import edge, explaining, schema, supervisor
from infembed_ray.serving.encoder import batching, engine
from infembed_ray.serving.http import errors
from infembed_ray.serving.routing import blue_green, encoder_calls, micro_batching
from infembed_ray.storage import leases
from infembed_ray.training import losses, validation
from infembed_ray.training.checkpoints import manager
from scripts import reference
from tests.docs.pages import ROOT, prose, written

# Figures of benchmarks

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
RESULT = re.compile(r"benchmarks/results/[\w.-]+\.md")
WEIGHTS = [f"{weight:g}" for weight in validation.EXCLUSION_WEIGHTS]
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def numbers(text: str) -> set[str]:
    """The numbers of a text, without dates and inline code."""
    text = re.sub(r"\d{4}-\d\d-\d\d|`[^`]*`|\]\([^)]*\)", "", text)
    return {number.replace(",", "").rstrip(".") for number in NUMBER.findall(text)}


def parts(text: str) -> Iterator[str]:
    """The cells and sentences of a page."""
    for block in re.split(r"\n\s*\n|\n(?=[-|] ?)", prose(text)):
        yield from re.split(r"(?<=[.:;!?]) +(?=\S)|\|", block.replace("\n", " "))


def holds(result: str, figure: str) -> bool:
    """Whether a file of results has a figure, perhaps with more digits or as a word."""
    digits = len(figure.partition(".")[2])
    if any(f"{float(number):.{digits}f}" == figure for number in numbers(result)):
        return True
    return figure.isdecimal() and 0 < int(figure) <= len(WORDS) and WORDS[int(figure) - 1] in result.lower().split()


@pytest.mark.parametrize("page", [page for page, text in written().items() if RESULT.search(text)])
def test_a_figure_beside_a_file_of_results_is_in_it(page: str) -> None:
    unknown = []
    for part in parts(written()[page]):
        files = [(ROOT / name).read_text(encoding="utf-8") for name in RESULT.findall(part)]
        if files:
            unknown += [(f, part) for f in numbers(part) if not any(holds(file, f) for file in files)]
    assert not unknown


# Counts and constants


def fact(page: str, sentence: str) -> object:
    return pytest.param(page, sentence, id=f"{page}: {sentence[:40]}")


def default(cls: type[Settings], name: str) -> Any:
    return cls.model_fields[name].default


VERBS = {name.split()[0] for name in cli.COMMANDS}
DECLARED = {
    (cls.__name__, name) for cls in reference.places() for name in cls.model_fields if name in cls.__annotations__
}
OBJECTIVES = {
    str(losses.Objective.parse(f"{how}{{{','.join(v)}}}"))
    for how in ("uni", "multi")
    for v in (["P"], ["I"], ["IQ"], ["P", "I"], ["P", "IQ"], ["I", "IQ"], ["P", "I", "IQ"])
    if how == "uni" or len(v) > 1
}
SEEDS = len(sample.SEEDS.read_text(encoding="utf-8").splitlines())
MIB = 2**20

FACTS = [
    fact("docs/guides/synthesize.md", f"(default {default(SynthesizeSettings, 'max_dead_letters'):g}), the run"),
    fact("docs/guides/synthesize.md", f"`endpoint.patience_s` | {default(Endpoint, 'patience_s'):g} |"),
    fact("docs/guides/mine.md", f"`max_share={default(MineSettings, 'max_share'):g}` of"),
    fact("docs/guides/instructions.md", f"`rerank.depth` ({default(RerankSettings, 'depth')}) hits"),
    fact("docs/guides/instructions.md", f"`rerank.budget_ms` ({default(RerankSettings, 'budget_ms'):g}) is used up"),
    fact("docs/operations/jobs.md", f"the variable, default `{default(Endpoint, 'api_key_env')}`"),
    fact("CHANGELOG.md", f"{len(VERBS)} verbs instead of 36, about {round(len(DECLARED), -1)} settings instead of 517"),
    fact("docs/reproduction.md", f"Table 6 has {'eleven' if len(OBJECTIVES) == 11 else len(OBJECTIVES)} objectives"),
    fact("docs/start/tutorial.md", f"from {SEEDS} seeds"),
    fact("docs/start/tutorial.md", f"of {SEEDS} seeds are kept"),
    fact("docs/concepts/architecture.md", f"recovers within {edge.RECOVERY_S:g} s after"),
    fact("docs/concepts/architecture.md", f"waited for {micro_batching.MAX_WAIT_S:g} s, or"),
    fact("docs/concepts/architecture.md", f"wait for more than {batching.MAX_WAIT_S:g} s"),
    fact("docs/concepts/blue-green.md", f"every {supervisor.LOOK_S:g} s it counts"),
    fact("docs/concepts/blue-green.md", f"tried again after {WORDS[int(supervisor.RETRY_S / 60) - 1]} minutes"),
    fact("docs/concepts/journal.md", f"at most {1000 * journal.SYNC_EVERY_S:g} ms"),
    fact("docs/concepts/journal.md", f"in flight for up to {DRAIN_S:g} s"),
    fact("docs/concepts/journal.md", f"or {journal_store.UPLOAD_BYTES // MIB} MiB"),
    fact("docs/guides/analyze.md", f"at most {report.SHOWN} kept, removed and rejected rows"),
    fact("docs/guides/analyze.md", f"shares {overlap.NGRAM} consecutive words"),
    fact("docs/guides/analyze.md", f"of at least {overlap.THRESHOLD:g}"),
    fact("docs/guides/analyze.md", f"a {diversity.GRID} x {diversity.GRID} grid"),
    fact("docs/guides/analyze.md", f"at most {diversity.SAMPLE:,}"),
    fact("docs/guides/analyze.md", f"If more than {raters.MAX_UNANSWERED:.0%} of".replace("%", " %")),
    fact("docs/guides/clients.md", f"{client.FIRST_BACKOFF_S:g} s doubling to {client.MAX_BACKOFF_S:g} s"),
    fact("docs/guides/index-a-corpus.md", f"Up to {corpus.PARTS} tasks read the corpus"),
    fact("docs/guides/index-a-corpus.md", f"fewer than {faiss_index.EXACT_BELOW:,} passages"),
    fact("docs/guides/index-a-corpus.md", f"a recall@10 of {faiss_index.AIM:g} against"),
    fact("docs/guides/index-a-corpus.md", f"2d + {faiss_index.LINK_BYTES} bytes"),
    fact("docs/guides/index-a-corpus.md", f"{blue_green.FULL} times `compact_at`"),
    fact("docs/guides/index-a-corpus.md", f"at most {filters.MAX_CONDITIONS} conditions"),
    fact("docs/guides/index-a-corpus.md", f"{filters.MAX_VALUES:,} values, and {filters.MAX_DEPTH} levels"),
    fact("docs/guides/instructions.md", f"the best {blue_green.HYBRID_DEPTH} passages of every shard"),
    fact("docs/guides/instructions.md", f"more than {validation.MAX_NDCG_LOSS:g} of nDCG@10"),
    fact("docs/guides/instructions.md", " and ".join([", ".join(WEIGHTS[:-1]), WEIGHTS[-1]])),
    fact("docs/guides/milvus.md", f"{milvus.MAX_BYTES:,} bytes per text"),
    fact("docs/guides/milvus.md", f"the last {milvus.STALE_MS / 1000:g} seconds"),
    fact("docs/guides/milvus.md", f"more than {milvus.BATCH_ROWS} documents"),
    fact("docs/guides/mine.md", f"finished block of {mining.ROWS_PER_BLOCK} tuples"),
    fact("docs/operations/resuming.md", f"finished block of {mining.ROWS_PER_BLOCK} tuples"),
    fact("docs/operations/resuming.md", f"expires after {leases.SECONDS:g} s"),
    fact("docs/operations/resuming.md", f"keeps the newest {WORDS[manager.KEEP_LAST - 1]}"),
    fact("docs/guides/notebook.md", f"{pipeline.CPU_BATCH_TOKENS:,} tokens on a CPU"),
    fact("docs/guides/plan.md", f"{memory.FRAMEWORK_GIB:g} GiB and {100 * memory.FRAGMENTATION:g} %"),
    fact("docs/guides/plan.md", f"of an index {corpus.SAMPLE:,} rows"),
    fact("docs/guides/serve.md", f"up to {schema.MAX_DOCUMENTS:,} documents"),
    fact("docs/guides/serve.md", f"at most {explaining.MAX_EXPLAINED_CHARACTERS:,} characters"),
    fact("docs/guides/serve.md", f"`top_k` is at most {explaining.MAX_EXPLAINED_HITS}."),
    fact("docs/guides/serve.md", f"costs at most {explaining.MAX_PHRASES + 1} more texts"),
    fact("docs/guides/serve.md", f"causal backbones ({engine.PREFIX_CACHE_BYTES // MIB} MiB)"),
    fact("docs/guides/serve.md", f"up to {graphs.TEXTS} texts and {graphs.TOKENS[-1]:,} tokens"),
    fact("docs/guides/serve.md", f"recent searches ({encoder_calls.CACHE_BYTES // MIB} MiB"),
    fact("docs/guides/serve.md", f"A body above {errors.MAX_BODY_BYTES // MIB} MiB gets 413"),
    fact("docs/guides/serve.md", f"longer than {edge.READ_TIMEOUT_S:g} s gets 408"),
    fact(
        "docs/guides/serve.md",
        f"over {edge.SMALL_BYTES // 1024} KiB fill {errors.MAX_BODY_BYTES * edge.MAX_BODIES_IN_MEMORY // MIB} MiB",
    ),
]


@pytest.mark.parametrize(("page", "sentence"), FACTS)
def test_a_count_or_a_constant_in_prose_is_that_of_the_code(page: str, sentence: str) -> None:
    assert sentence in " ".join((ROOT / page).read_text(encoding="utf-8").split())


# Defaults

QUOTED = re.compile(r"`([a-z]\w*(?:\.\w+)*)` \((?:default )?(\d[\d,.]*)(?: s)?\)")
"""A name with a number in brackets."""


def defaults(name: str) -> set[float]:
    """The defaults of a setting that are numbers, in the settings of all verbs and of the client."""
    name = name.rpartition(".")[2]
    fields = [cls.model_fields[name] for cls in reference.places() if name in cls.model_fields]
    given = [field.get_default(call_default_factory=True) for field in fields if not field.is_required()]
    given += [p.default for p in inspect.signature(client.Client).parameters.values() if p.name == name]
    return {float(value) for value in given if isinstance(value, (int, float))}


def quoted(page: str) -> list[tuple[str, float]]:
    """The names of settings in a page, with the numbers that follow them."""
    found = QUOTED.findall(" ".join(prose(written()[page]).split()))
    return [(name, float(number.replace(",", ""))) for name, number in found if defaults(name)]


@pytest.mark.parametrize("page", written())
def test_a_default_in_prose_is_that_of_the_setting(page: str) -> None:
    assert not [(name, value) for name, value in quoted(page) if value not in defaults(name)]


def test_defaults_are_found_in_prose() -> None:
    found = {name for page in written() for name, _ in quoted(page)}
    assert found >= {"recall_floor", "compact_at", "checkpoint_every", "cheap_judge.audit", "timeout_s"}


# Versions


def test_versions_are_that_of_the_first_section_of_the_changelog() -> None:
    first = re.search(r"^## (\S+)( \(unreleased\))?", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert infembed_ray.__version__ == first[1] + (".dev0" if first[2] else "")
    places = [*(ROOT / "jobs").rglob("*.yaml"), *(ROOT / "docs").rglob("*.md"), ROOT / "docker" / "Dockerfile"]
    texts = (file.read_text(encoding="utf-8") for file in [*places, ROOT / "cluster.yaml", ROOT / "README.md"])
    tags = [tag for text in texts for tag in re.findall(r"\binfembed-ray:([\w.]+)-c(?:pu|uda)", text)]
    assert len(tags) > 8
    assert set(tags) == {first[1]}
