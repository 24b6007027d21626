import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis import sources
from infembed_ray.synthesis.sources import Source
from tests.support.memory import peak_bytes

Rows = list[dict[str, Any]]


def source(path: Path, **values: Any) -> Source:
    return Source(SynthesizeSettings.from_mapping({"seeds": str(path), "output": "", **values}))


def jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refusal(path: Path, **values: Any) -> str:
    with pytest.raises(InputError) as error:
        source(path, **values).survey()
    assert "\n" not in str(error.value)
    return str(error.value)


def table(count: int) -> Rows:
    return [{"id": f"s{n}", "query": f"query {n}", "passage": f"passage {n}"} for n in range(count)]


# ------------------------------------------------------------------------------------------------------ tables


def test_rows_of_json_may_have_columns_that_the_first_row_lacks(tmp_path: Path) -> None:
    rows = table(2)
    rows[1] |= {"topic": "tides", "split": "test"}
    assert [(seed.topic, seed.split) for seed in source(jsonl(tmp_path / "s.jsonl", rows))] == [
        (None, None),
        ("tides", "test"),
    ]


def written(rows: Rows, suffix: str, directory: Path) -> Path:
    path = directory / f"seeds{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".jsonl":
        jsonl(path, rows)
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1, max_size=20)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv", ".tsv"])
@settings(deadline=None, max_examples=10)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_equal_rows_give_equal_seeds_in_every_format(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, pairs: list[tuple[str, str]]
) -> None:
    rows = [{"key": f"0{n}", "question": q, "passage": p, "other": "x"} for n, (q, p) in enumerate(pairs)]
    path = written(rows, suffix, tmp_path_factory.mktemp("seeds"))
    got = list(source(path, columns={"id": "key", "query": "question"}))
    assert got == [Seed(f"0{n}", q, p) for n, (q, p) in enumerate(pairs)]


def test_optional_columns_are_read_if_present(tmp_path: Path) -> None:
    row = {"id": 7, "query": "q", "passage": "p", "source": "s", "topic": "t", "split": "dev", "language": "Java"}
    assert list(source(jsonl(tmp_path / "a.jsonl", [row]))) == [Seed("7", "q", "p", "s", "t", "dev", "Java")]


def test_a_directory_is_read_whole_and_shards_name_their_split(tmp_path: Path) -> None:
    rows = table(6)
    (tmp_path / "data").mkdir()
    for name, part in (("train-00001-of-00002", rows[2:4]), ("train-00000-of-00002", rows[:2]), ("dev", rows[4:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "hidden.parquet").write_bytes(b"no Parquet")
    seeds = list(source(tmp_path))
    assert [seed.id for seed in seeds] == ["s4", "s5", "s0", "s1", "s2", "s3"]
    assert [seed.split for seed in seeds] == [None, None, "train", "train", "train", "train"]
    assert [seed.id for seed in source(tmp_path, split="train")] == ["s0", "s1", "s2", "s3"]
    assert source(tmp_path, split="train").survey().seeds == 4


def test_the_limit_takes_the_first_seeds_but_the_pool_has_all_passages(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", table(9))
    few = source(path, limit=4)
    assert [seed.id for seed in few] == ["s0", "s1", "s2", "s3"]
    assert few.survey().seeds == 4
    assert few.survey().pool == source(path).survey().pool == tuple(f"passage {n}" for n in range(9))
    assert source(path, limit=40).survey().seeds == 9


def test_a_source_can_be_iterated_again(tmp_path: Path) -> None:
    seeds = source(jsonl(tmp_path / "a.jsonl", table(5)))
    assert list(seeds) == list(seeds)
    assert len(list(seeds)) == 5


def test_passages_are_cut_after_passage_words(tmp_path: Path) -> None:
    rows = [{"id": "1", "query": "a b c", "passage": " one  two\nthree four "}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert [seed.passage for seed in source(path, passage_words=3)] == [" one  two\nthree"]
    assert [seed.passage for seed in source(path, passage_words=9)] == [" one  two\nthree four "]


def test_an_empty_passage_is_a_seed_but_no_distractor(tmp_path: Path) -> None:
    rows = [*table(2), {"id": "x", "query": None, "passage": "p"}, {"id": "y", "query": "q", "passage": " "}]
    surveyed = source(jsonl(tmp_path / "a.jsonl", rows)).survey()
    assert surveyed.seeds == 4
    assert surveyed.pool == ("passage 0", "passage 1", "p")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "1", "query": "q"}\n', r"no column passage (found: id, query)"),
        (
            '{"id": "1"}\n',
            r"no column query, passage (found: id); set columns.query=<its name>, columns.passage=",
        ),
        ("", "no seeds in it as format=table (it has no rows)"),
        ('{"id": "1", "query": "q", "passage": "p"}\n{"id"', "line 2 is not JSON"),
        ('{"id": "1", "query": "q", "passage": "p"}\n' * 2, "id 1 occurs twice"),
        ('{"id": "1", "query": "q", "passage": "p"}\n{"query": "q", "passage": "p"}\n', "seed 2 has no id"),
    ],
)
def test_unreadable_seeds_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    assert message in refusal(path)


def test_lone_surrogates_in_seeds_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"id": "1\\ud83d", "query": "q \\ud83d!", "passage": "\\ud83d\\ude00 \\ude00", "topic": "\\ud83d"}\n'
    )
    assert list(source(path)) == [Seed("1?", "q ?!", "\U0001f600 ?", topic="?")]
    assert source(path).survey().seeds == 1


def test_a_missing_column_is_found_before_the_survey(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", table(3))
    jsonl(tmp_path / "b.jsonl", [{"id": "1", "query": "q"}])
    with pytest.raises(InputError, match=r"b.jsonl: no column passage"):
        source(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,query,passage\n1,q\n", "line 2 has another number of fields"),
        ("a.csv", "id,query,passage\n1,q,p,more\n", "line 2 has another number of fields"),
        ("a.csv", 'id,query,passage\n1,q,"p\n', "not CSV after line 1"),
        ("a.json", '[{"id": "1", "query": "q", "passage": "p"}, {"id"', "row 2 is not JSON"),
        ("a.json", '[{"id": "1", "query": "q", "passage": "p"}, 5]', "row 2 is not a JSON object"),
        ("a.txt", "text", "unknown format .txt; give .parquet, .jsonl"),
        ("a.parquet", "PAR1", "not readable as Parquet"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    assert message in refusal(tmp_path / name)


def test_bad_source_settings_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(table(2)), tmp_path / "train-00000-of-00001.parquet")
    assert "split=test: " in refusal(tmp_path, split="test")
    assert "column query_id is missing" in refusal(tmp_path, format="msmarco")
    assert "leave columns out" in refusal(tmp_path, format="msmarco", columns={"id": "x"})
    assert "no such file" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no data files in this directory" in refusal(tmp_path / "empty")


# ----------------------------------------------------------------------------------------------- bounded memory


def read_all(path: Path) -> None:
    sources.POOL_SIZE = 50  # in a process of its own
    seeds = source(path)
    assert seeds.survey().seeds == 6000 == sum(1 for _ in seeds)


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_memory_does_not_grow_with_the_length_of_the_seeds(tmp_path: Path, suffix: str) -> None:
    peaks = []
    for words in (1000, 1):
        rows = [{**row, "passage": f"{row['passage']} " + "x" * words} for row in table(6000)]
        peaks.append(peak_bytes(read_all, written(rows, suffix, tmp_path)))
    # 6 MB more passages; the pool and one block of 1,024 rows may grow.
    assert peaks[0] < peaks[1] + 3_500_000


@settings(deadline=None)
@given(st.lists(st.text(max_size=3), max_size=40), st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_pool_does_not_depend_on_the_order_of_the_passages(
    passages: list[str], size: int, rng: random.Random
) -> None:
    def pool(texts: Iterable[str]) -> tuple[str, ...]:
        filling = sources._PassageSample(size)
        for text in texts:
            filling.add(text)
        return filling.passages()

    shuffled = passages[:]
    rng.shuffle(shuffled)
    assert set(pool(passages)) == set(pool(shuffled))
    assert len(pool(passages)) == min(size, len(set(passages)))
    places = [passages.index(passage) for passage in pool(passages)]
    assert places == sorted(places)
    if len(set(passages)) <= size:
        assert pool(passages) == tuple(dict.fromkeys(passages))


def test_the_pool_is_a_fair_sample() -> None:
    filling = sources._PassageSample(500)
    for number in range(5000):
        filling.add(f"passage {number}")
    early = sum(int(passage.split()[1]) < 2500 for passage in filling.passages())
    assert 200 < early < 300  # 250 expected, standard deviation 10.6


# ------------------------------------------------------------------------------------------- data sets as published


def msmarco(rows: Iterable[tuple[int, str, list[tuple[int, str]]]]) -> Iterator[dict[str, Any]]:
    """Rows in the layout of v2.1 on the hub."""
    for query_id, query, passages in rows:
        yield {
            "answers": ["No Answer Present."],
            "passages": {
                "is_selected": [selected for selected, _ in passages],
                "passage_text": [text for _, text in passages],
                "url": ["http://example.org" for _ in passages],
            },
            "query": query,
            "query_id": query_id,
            "query_type": "DESCRIPTION",
            "wellFormedAnswers": [],
        }


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_msmarco_gives_a_seed_per_selected_passage(tmp_path: Path, suffix: str) -> None:
    rows = msmarco(
        [
            (1102432, ". what is a corporation?", [(0, "no"), (1, "A company is..."), (1, "A corporation is...")]),
            (1102431, "why did rachel carson write", [(0, "no"), (0, "neither")]),
            (1090282, "symptoms of a dying mouse", [(1, "The symptoms are...")]),
        ]
    )
    seeds = source(written(list(rows), suffix, tmp_path), format="msmarco")
    assert list(seeds) == [
        Seed("1102432-1", ". what is a corporation?", "A company is...", "msmarco", "DESCRIPTION"),
        Seed("1102432-2", ". what is a corporation?", "A corporation is...", "msmarco", "DESCRIPTION"),
        Seed("1090282-0", "symptoms of a dying mouse", "The symptoms are...", "msmarco", "DESCRIPTION"),
    ]
    assert dict(seeds.survey().left_out) == {"a query without a selected passage": 1}


def test_a_row_with_another_layout_is_named(tmp_path: Path) -> None:
    rows = [*msmarco([(1, "q", [(1, "p")])]), {"query_id": 2, "query": "q", "passages": None}]
    assert "row 2 does not have the layout of msmarco" in refusal(jsonl(tmp_path / "a.jsonl", rows), format="msmarco")


def test_leetcode_gives_a_seed_per_language(tmp_path: Path) -> None:
    common = {"title": "Two Sum", "slug": "two-sum", "difficulty": "Easy", "content": "Given an array..."}
    solutions = {"java": "```java\nclass", "c++": "```cpp\n", "python": "```python\ndef", "javascript": ""}
    seeds = source(jsonl(tmp_path / "leetcode-train.jsonl", [{"id": 1, **common, **solutions}]), format="leetcode")
    assert list(seeds) == [
        Seed("1-java", "Given an array...", "```java\nclass", "leetcode", "Easy", language="Java"),
        Seed("1-c++", "Given an array...", "```cpp\n", "leetcode", "Easy", language="C++"),
        Seed("1-python", "Given an array...", "```python\ndef", "leetcode", "Easy", language="Python"),
    ]
    assert dict(seeds.survey().left_out) == {"a problem without a JavaScript solution": 1}


def test_metamath_is_an_array_of_problems_and_solutions_without_ids(tmp_path: Path) -> None:
    rows = [
        {
            "type": "MATH_AnsAug",
            "query": "Gracie and Joe are choosing numbers...",
            "original_question": "Gracie and Joe are choosing numbers...",
            "response": f"The distance between two points... The answer is: {n}",
        }
        for n in (10, 50)
    ]
    path = tmp_path / "MetaMathQA-395K.json"
    path.write_text(json.dumps(rows, indent=4))
    seeds = list(source(path, format="metamath"))
    assert [seed.id for seed in seeds] == ["MetaMathQA-395K-1", "MetaMathQA-395K-2"]
    assert seeds[0] == Seed("MetaMathQA-395K-1", rows[0]["query"], rows[0]["response"], "metamath", "MATH_AnsAug")


TOPICS = """
<top>

<num> Number: 301
<title> International Organized Crime

<desc> Description:
Identify organizations that participate in international criminal
activity.

<narr> Narrative:
A relevant document must as a minimum identify the organization.

</top>

<top>
<num> Number: 302
<title> Poliomyelitis
 and Post-Polio
<desc> Description:
Is the disease of Poliomyelitis (polio) under control in the world?
</top>
"""
FBIS = """<DOC>
<DOCNO> FBIS3-10082 </DOCNO>
<HT>  "cr00000011094001" </HT>
<HEADER>
<H2>   March Reports </H2>
<H3> <TI>   Crime &amp; borders </TI></H3>
</HEADER>
<TEXT>
<F P=102> Article Type:BFN </F>
Gangs cross   borders &blank; at night.
<!-- PJG 0012 frnewline -->
</TEXT>
</DOC>
<DOC>
<DOCNO> FBIS3-1 </DOCNO>
<TEXT>
Judged, and not relevant.
</TEXT>
</DOC>
"""
LATIMES = """<DOC>
<DOCNO> LA010189-0018 </DOCNO>
<DOCID> 20 </DOCID>
<HEADLINE>
<P>
POLIO RETURNS
</P>
</HEADLINE>
<TEXT>
<P>
Polio, once beaten, is back. Gangs sell vaccine.
</P>
</TEXT>
</DOC>
"""
QRELS = "301 0 FBIS3-10082 1\n301 0 FBIS3-1 0\n302 0 LA010189-0018 2\n301 0 LA010189-0018 1\n302 0 FT911-3 1\n"


@pytest.fixture
def robust(tmp_path: Path) -> Path:
    (tmp_path / "04.testset").write_text(TOPICS, encoding="latin-1")
    (tmp_path / "qrels.robust2004.txt").write_text(QRELS, encoding="latin-1")
    (tmp_path / "disk5" / "fbis").mkdir(parents=True)
    (tmp_path / "disk5" / "latimes").mkdir()
    (tmp_path / "disk5" / "fbis" / "fb396001").write_text(FBIS, encoding="latin-1")
    with gzip.open(tmp_path / "disk5" / "latimes" / "la010189.gz", "wt", encoding="latin-1") as stream:
        stream.write(LATIMES)
    return tmp_path


def test_robust04_gives_a_seed_per_topic_and_relevant_document(robust: Path) -> None:
    seeds = source(robust, format="robust04")
    crime, polio = "International Organized Crime", "Poliomyelitis and Post-Polio"
    fbis = "Crime & borders\nArticle Type:BFN Gangs cross borders at night."
    latimes = "POLIO RETURNS\nPolio, once beaten, is back. Gangs sell vaccine."
    assert list(seeds) == [
        Seed("301-FBIS3-10082", crime, fbis, "robust04", "301"),
        Seed("302-LA010189-0018", polio, latimes, "robust04", "302"),
        Seed("301-LA010189-0018", crime, latimes, "robust04", "301"),
    ]
    assert dict(seeds.survey().left_out) == {"a relevant document that is not in the directory": 1}


def test_errors_name_what_robust04_lacks(robust: Path) -> None:
    (robust / "qrels.robust2004.txt").write_text("301 0 FBIS3-10082\n")
    assert "line 1 is no judgement" in refusal(robust, format="robust04")
    (robust / "qrels.robust2004.txt").write_text("999 0 FBIS3-10082 1\n")
    assert "topic 999 is not in 04.testset" in refusal(robust, format="robust04")
    (robust / "qrels.robust2004.txt").write_text(QRELS)
    (robust / "disk5" / "ft911.0z").write_bytes(b"\x1f\x9d")
    assert "uncompress it" in refusal(robust, format="robust04")
    (robust / "topics.301-450").write_text(TOPICS)
    assert "has 2 files with topics or testset in their name" in refusal(robust, format="robust04")
    (robust / "qrels.robust2004.txt").unlink()
    (robust / "topics.301-450").unlink()
    assert "has 0 files with qrels" in refusal(robust, format="robust04")
    assert "is a directory of topics" in refusal(robust / "04.testset", format="robust04")


def test_the_development_msmarco_seeds_are_read(shared_data: Path) -> None:
    path = shared_data / "msmarco_seeds" / "seeds.jsonl"
    seeds = list(source(path))
    assert len(seeds) == 1743 == source(path).survey().seeds
    assert seeds[0].query == "how much is a cost to run disneyland"
