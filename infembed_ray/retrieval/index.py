"""An index: a published directory of shards that this process builds, opens and searches."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from infembed_ray.config.retrieval import FieldType, IndexSettings, Precision
from infembed_ray.errors import InputError
from infembed_ray.records.tables import Passage
from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery, merge
from infembed_ray.retrieval.corpus import corpus_file
from infembed_ray.retrieval.shards import Hit, Shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.versions import CHANGES, IndexFacts, change_log
from infembed_ray.storage.places import Place
from infembed_ray.storage.steps import find_input, read_manifest

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder


class Index:
    """A published index of passages. `Index.build` makes one, and `Index.open` opens one.

    ```python
    from infembed_ray import Index, InstructionEncoder

    encoder = InstructionEncoder.from_pretrained("runs/quickstart/checkpoint")
    index = Index.build(["Adults: 500 mg twice a day.", "Metformin lowers blood sugar."], encoder)
    for hit in index.search(encoder.encode_queries("metformin", "Only doses, for clinicians."), k=1)[0]:
        print(hit.score, hit.text)
    ```

    Attributes:
        path: directory of the version; in an object store, its folder.
        version: hash; the same corpus, encoder and settings give the same version.
        facts: the model, the dimension, and the numbers of passages and shards.
        shards: in the order of `facts.shards`; empty after `Index.describe`.
    """

    def __init__(self, path: Place, version: str, facts: IndexFacts, shards: Sequence[Shard]) -> None:
        self.path = path
        self.version = version
        self.facts = facts
        self.shards = shards

    @classmethod
    def build(
        cls,
        corpus: str | Path | Iterable[str | Passage | Mapping[str, Any]],
        encoder: InstructionEncoder,
        path: str | Path | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        metadata: Mapping[str, FieldType] | None = None,
        on_bad_row: Literal["error", "reject"] = "error",
        shards: int = 1,
        factory: str | None = None,
        memory_gib: float | None = None,
        recall_floor: float = 0.95,
        batch_tokens: int | None = None,
        vectors: Precision = "float16",
        lexical: bool = False,
        chunk_tokens: int | None = None,
        chunk_overlap: int = 0,
    ) -> Index:
        """Build an index in this process, on the encoder's device and without Ray, and open it.

        The files are those of `infembed index`: `infembed serve` serves them, with the encoder at `encoder.source`. The
        same corpus, encoder and settings are not indexed again, and an interrupted build resumes.

        Args:
            corpus: texts, whose ids are "0", "1", ...; `Passage`s; mappings with id, text and perhaps title and metadata; or
                the path of a file, directory or glob of such rows.
            encoder: as `InstructionEncoder.from_pretrained` loaded it. Save an encoder that you changed, and load it again.
            path: directory or object-store URI for the published index; None: a temporary directory, which is deleted
                with the `Index`.
            columns, metadata, on_bad_row, shards, factory, memory_gib, recall_floor, batch_tokens, vectors, lexical,
                chunk_tokens, chunk_overlap: see `IndexSettings`.

        Raises:
            InputError: the corpus, the settings or the directory cannot be used, or recall is below the floor. Nothing is
                published then.
        """
        from infembed_ray.retrieval.build import build_here  # late: opening an index needs no torch

        if encoder.source is None or encoder.changed:
            remedy = "save it with save_pretrained, and load that directory with InstructionEncoder.from_pretrained"
            raise InputError.of("encoder", None, "its weights are in no file", remedy)
        model = str(Path(encoder.source).resolve()) if Path(encoder.source).is_dir() else encoder.source
        given = {"columns": dict(columns or {}), "metadata": dict(metadata or {}), "on_bad_row": on_bad_row}
        given |= {"shards": shards, "factory": factory, "memory_gib": memory_gib}
        given |= {"recall_floor": recall_floor, "batch_tokens": batch_tokens, "dimensions": encoder.dimensions}
        given |= {"vectors": vectors, "lexical": lexical, "chunk_tokens": chunk_tokens, "chunk_overlap": chunk_overlap}
        with corpus_file(corpus) as file, contextlib.ExitStack() as scratch:
            root = path or scratch.enter_context(tempfile.TemporaryDirectory(prefix="infembed-index-"))
            given |= {"corpus": str(file), "model": model, "output": str(root)}
            index = cls.open(build_here(encoder, file, IndexSettings.from_mapping(given)))
            weakref.finalize(index, scratch.pop_all().close)
        return index

    @classmethod
    def open(cls, path: str | Path, encoder_fingerprint: str | None = None) -> Index:
        """Open a published index; in an object store, copy its shards to this machine and verify them.

        Args:
            path: a version, or an output directory whose `latest` names one; a path or an object-store URI.
            encoder_fingerprint: of the encoder that will query it; None skips the check.

        Raises:
            InputError: there is no index, another encoder built it, its format is not supported, or a file is missing
                or has another size.
        """
        index = cls.describe(path)
        index.shards = [Shard.open(index.path, shard) for shard in index.facts.shards]
        if encoder_fingerprint is not None:
            index.facts.require_encoder(encoder_fingerprint, index.path)
        return index

    @classmethod
    def describe(cls, path: str | Path) -> Index:
        """Read the facts of a published index, without opening or copying its shards. The result cannot be searched.

        Args:
            path: as of `open`.

        Raises:
            InputError: there is no index, or its format is not supported.
        """
        root = find_input(str(path), "index")
        manifest = read_manifest(root, "index")
        return cls(root, manifest["identity"], IndexFacts.of_manifest(manifest, root), [])

    @property
    def changes(self) -> Place:
        """Directory of the write-ahead log of its lineage."""
        return self.path.parent / CHANGES / self.facts.lineage

    def search(self, vectors: np.ndarray, k: int = 10, filter: Mapping[str, Any] | None = None) -> list[list[Hit]]:
        """Search all shards, with all live changes up to now.

        Args:
            vectors: (queries, dimension) unit vectors from `encode_queries`; (dimension,) is one query.
            k: maximum number of hits per query.
            filter: conditions on metadata columns, such as `{"year": {"gte": 2020}}`.

        Returns:
            The best `k` passages per query by (score, id), descending.

        Raises:
            InputError: the vectors have another dimension.
            FilterError: the filter does not fit the metadata.
        """
        vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float32))
        if vectors.ndim != 2 or vectors.shape[1] != self.facts.dimension:
            fault = f"shape {vectors.shape}, and the index has {self.facts.dimension} dimensions"
            remedy = f"encode the queries with {self.facts.model}, the encoder of the index"
            raise InputError.of("vectors", None, fault, remedy)
        answers: list[ShardAnswer] = []
        for shard in self._live:
            shard.refresh()
            (answer,) = shard.search_many([ShardQuery(vectors, k, filter)])
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
        return [merge(answers, number, k) for number in range(len(vectors))]

    @cached_property
    def _live(self) -> list[LiveShard]:
        log = change_log(self.path, self.facts)
        return [LiveShard(shard, log, number, self.facts.folded) for number, shard in enumerate(self.shards)]
