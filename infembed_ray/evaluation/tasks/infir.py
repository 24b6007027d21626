"""The retrieval task of a set of InF-IR records."""

from collections import defaultdict
from collections.abc import Sequence

import pyarrow as pa

from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.tasks.task import CORPUS, Figure, Query, Task
from infembed_ray.records.tables import SCENARIOS, Passage, Record

TASK = "records"
"""Name of the task."""

POSITIVE, NEGATIVE_INSTRUCTION, NEGATIVE_QUERY = SCENARIOS

NOTATION = {POSITIVE: "(I+,Q+)", NEGATIVE_INSTRUCTION: "(I-,Q+)", NEGATIVE_QUERY: "(I+,Q-)"}
"""Kind of query -> the paper's notation."""

MEANINGS = {
    "(I+,Q+)": "the query under its own instruction",
    "(I-,Q+)": "the query under the poisoned instruction",
    "(I+,Q-)": "the poisoned query under the instruction",
}
"""The paper's notation -> the request in words."""

FIGURES = (
    Figure("p-MRR", "p-MRR"),
    *(Figure(f"nDCG@10 {notation}", "nDCG@10", kind) for kind, notation in NOTATION.items()),
    Figure("MAP@1000", "MAP@1000"),
)


def instruction_following(
    records: Sequence[Record], distractors: Sequence[Passage] = (), max_distractors: int | None = None
) -> Task:
    """Make the retrieval task of records, over all their passages and the distractors.

    - Corpus: `document_positive`, `hard_negative_document_1` and `hard_negative_document_2` of all records, then the
      first `max_distractors` distractors, without duplicate texts.
    - Queries, three per record, each with one relevant passage: (I+,Q+) -> P+, (I-,Q+) -> P1-, (I+,Q-) -> P2-. All other
      passages count as irrelevant. Queries with the same instruction and text share their relevant passages.
    - Changes for p-MRR, two per record, both with the query Q+: from I+ to I-, which makes P+ irrelevant, and from I- to
      I+, which makes P1- irrelevant.

    Ids are `record/<record id>/<scenario>` for queries and their relevant passages, and `distractor/<id>`.
    """
    ids: dict[str, str] = {}  # text -> id
    queries: list[Query] = []
    relevant: dict[tuple[str | None, str], dict[str, int]] = defaultdict(dict)
    changes: list[tuple[Query, Query]] = []
    for record in records:
        good, bad = record.instruction_positive, record.instruction_negative
        scenarios = {
            POSITIVE: (good, record.query_positive, record.document_positive),
            NEGATIVE_INSTRUCTION: (bad, record.query_positive, record.hard_negative_document_1),
            NEGATIVE_QUERY: (good, record.query_negative, record.hard_negative_document_2),
        }
        of_record = {}
        for kind, (instruction, query, answer) in scenarios.items():
            own = f"record/{record.id}/{kind}"
            relevant[instruction, query][ids.setdefault(answer, own)] = 1
            of_record[kind] = Query(own, query, instruction, kind, group=record.id)
        queries += of_record.values()
        original, changed = of_record[POSITIVE], of_record[NEGATIVE_INSTRUCTION]
        changes += [(original, changed), (changed, original)]

    of_records = len(ids)
    for passage in distractors:
        if len(ids) - of_records == max_distractors:
            break
        ids.setdefault(passage.text, f"distractor/{passage.id}")

    qrels = {q.id: relevant[q.instruction, q.query] for q in queries}
    return Task(
        name=TASK,
        corpus=pa.table({"id": list(ids.values()), "text": list(ids)}, schema=CORPUS),
        queries=tuple(queries),
        qrels=qrels,
        figures=FIGURES,
        changes=tuple(Change(a.id, b.id, tuple(d for d in qrels[a.id] if d not in qrels[b.id])) for a, b in changes),
        about={"records": len(records), "distractors": len(ids) - of_records},
    )
