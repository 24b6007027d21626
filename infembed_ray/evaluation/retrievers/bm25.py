"""BM25 by bm25s: one process indexes and ranks a whole task."""

import numpy as np

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.tasks.task import Task
from infembed_ray.modeling.formats import query_text
from infembed_ray.modeling.terms import bm25s, tokenizer


def rank(settings: RetrieverSettings, task: Task, depth: int) -> Run:
    """Return the top `depth` documents of each query: query id -> document id -> score; ties as in `metrics`.

    Ranked are documents that share a term with the query, or all candidates where a task has them. The formats of the
    settings decide whether the instruction is part of the query.
    """
    terms_of = tokenizer(settings.bm25)
    batches = task.corpus.select(["text"]).to_batches(max_chunksize=1024)  # the corpus may be larger than memory
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    corpus = list(terms_of.streaming_tokenize(texts, allow_empty=False))
    index = bm25s.BM25(k1=settings.bm25.k1, b=settings.bm25.b)
    if vocabulary := terms_of.get_vocab_dict():  # bm25s cannot index texts without terms
        index.index((corpus, vocabulary), show_progress=False)
    ids = task.corpus["id"].to_pylist()
    row_of = {document: row for row, document in enumerate(ids)}
    run = {}
    for query in task.queries:
        text = query_text(settings, query)
        (terms,) = terms_of.streaming_tokenize([text], update_vocab=False, allow_empty=False)
        scores = index.get_scores_from_ids(terms) if terms else np.zeros(len(ids), dtype=np.float32)
        rows = np.flatnonzero(scores)
        if task.candidates is not None:
            rows = np.array([row_of[c] for c in dict.fromkeys(task.candidates[query.id]) if c in row_of], dtype=int)
        excluded = task.excluded.get(query.id, frozenset())
        rows = rows[[ids[row] not in excluded for row in rows]] if excluded else rows
        if len(rows) > depth:
            rows = rows[scores[rows] >= np.partition(scores[rows], -depth)[-depth]]
        score_of = {ids[row]: float(scores[row]) for row in rows}
        run[query.id] = {document: score_of[document] for document in list(ranks(score_of))[:depth]}
    return run
