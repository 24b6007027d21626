"""Milvus as the store of an index, through pymilvus: a Milvus server, Zilliz Cloud or `milvus-lite server`.

A version is the collection ALIAS_IDENTITY: fields id, text, vector, and `m_NAME` for each metadata column. Its manifest is the
collection's property `infembed.manifest`, written last: a collection without one is unfinished, and the next build starts it
over. An alias names the current version. Metadata filters become Milvus expressions; a date is its ordinal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from infembed_ray.config.retrieval import FieldType
from infembed_ray.errors import InputError
from infembed_ray.redaction import holds_credentials, where_they_belong
from infembed_ray.retrieval import filters
from infembed_ray.retrieval.answers import ScoreQuery
from infembed_ray.retrieval.filters import Combination, Filter, Value
from infembed_ray.retrieval.shards import Hit
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeError, Put, require_fitting, typed_metadata
from infembed_ray.retrieval.versions import IndexFacts, IndexVersion

SCHEMES = ("milvus+http://", "milvus+https://")
TOKEN_ENV = "INFEMBED_STORE_TOKEN"
"""Environment variable with the token."""
MANIFEST = "infembed.manifest"
"""Property of a finished collection: its manifest, as JSON."""
PREFIX = "m_"
"""Before the name of a metadata column, which may be a word of Milvus' expressions."""
MAX_BYTES = 65_535
"""UTF-8 bytes of the longest value that Milvus stores."""
BATCH_ROWS = 500
"""Rows of an insert; a server accepts 64 MiB."""
STALE_MS = 5_000
"""Milliseconds by which a search with bounded staleness may lag (Milvus' default); Lite does not lag."""
PATIENCE_S = 5.0
"""Seconds in which to connect: after a lost connection, gRPC refuses calls for a second or two, and the client gives up at once."""
EF, NPROBE = 256, 64
"""Effort of a search: candidates of a graph, at least one a hit, and inverted lists."""
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(microseconds=1)
_OPERATORS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})
_ID, _TEXT, _VECTOR = "id", "text", "vector"


class StoreFault(InputError):
    """The engine cannot be used or does not answer; the message names the setting, the address and the remedy."""


def is_address(value: str) -> bool:
    """Whether the value of a setting is an address of an external engine."""
    return value.startswith(SCHEMES)


@dataclass(frozen=True)
class MilvusAddress:
    """Where an engine is: `milvus+http[s]://HOST:PORT/[DATABASE/]ALIAS`.

    Attributes:
        setting: name of the setting, for error messages.
        url: of the server.
        alias: of the current version, and prefix of the names of all versions.
    """

    setting: str
    url: str
    database: str
    alias: str

    @classmethod
    def parse(cls, value: str, setting: str) -> MilvusAddress:
        """Parse the value of a setting; InputError if it is no address, or it holds credentials."""
        parts = urlsplit(value)
        if holds_credentials(value):
            raise InputError.of(setting, value, where_they_belong(value, f"{TOKEN_ENV} (user:password or an API key)"))
        *database, alias = parts.path.strip("/").split("/")
        if not (is_address(value) and parts.netloc and alias.isidentifier() and alias.isascii()) or len(database) > 1:
            fault = "must be milvus+http://HOST:PORT/ALIAS, or .../DATABASE/ALIAS"
            raise InputError.of(setting, value, fault, "an alias has letters, digits and underscores")
        return cls(setting, f"{parts.scheme.partition('+')[2]}://{parts.netloc}", "".join(database), alias)

    def __str__(self) -> str:
        return f"milvus+{self.url}/{f'{self.database}/' if self.database else ''}{self.alias}"

    def fault(self, fault: str, remedy: str) -> StoreFault:
        """Return the error for a fault of the engine at this address."""
        return StoreFault.of(self.setting, self, fault, remedy)


class Milvus:
    """The versions of an index in Milvus.

    Attributes:
        one_writer: whether the server takes one writer at a time.

    Raises:
        StoreFault: the client is not installed, or the server does not answer, has another version, or refuses the token.
    """

    def __init__(self, address: MilvusAddress, timeout_s: float = 60.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.client, self.one_writer = _connect(address, timeout_s)

    def _name(self, identity: str) -> str:
        return f"{self.address.alias}_{identity}"

    def versions(self) -> list[IndexVersion]:
        """List the finished versions, the oldest first."""
        finished = []
        with _errors(self.address):
            for name in self.client.list_collections():
                if not re.fullmatch(re.escape(self._name("")) + "[0-9a-f]{12}", name):
                    continue
                if text := self.client.describe_collection(name)["properties"].get(MANIFEST):
                    manifest = json.loads(text)
                    facts = IndexFacts.of_manifest(manifest, self.address, self.address.setting)
                    current = self.address.alias in self.client.list_aliases(name)["aliases"]
                    finished.append(IndexVersion(name[-12:], manifest, facts, current))
        return sorted(finished, key=lambda version: (version.created, version.id))

    def begin(self, identity: str, metadata: Mapping[str, FieldType], dimension: int, index_type: str | None) -> None:
        """Create the collection of a version; drop what an interrupted build left of it.

        Raises:
            InputError: the alias is taken, or Milvus refuses the columns, the dimension or the index type.
        """
        alias, name = self.address.alias, self._name(identity)
        for column in metadata:
            if not (column.isidentifier() and column.isascii()):
                fault = "Milvus takes names of letters, digits and underscores"
                remedy = f"choose such a name and set columns.<that name>={column}"
                raise InputError.of(f"metadata.{column}", None, fault, remedy)
        with _errors(self.address):
            if self.client.has_collection(alias) and not any(version.current for version in self.versions()):
                fault = f"{alias} names a collection there that `infembed index` did not build"
                raise self.address.fault(fault, "choose another alias")
            if self.client.has_collection(name):
                self.client.drop_collection(name)
            schema = _schema(self.client, metadata, dimension)
            index = self.client.prepare_index_params()
            index.add_index(_VECTOR, index_type=index_type or "AUTOINDEX", metric_type="IP")
            self.client.create_collection(name, schema=schema, consistency_level="Bounded")
            self.client.create_index(name, index)

    def insert(self, identity: str, passages: pa.Table, vectors: np.ndarray) -> None:
        """Insert passages (`passages.schema`) and their (n, d) float32 unit vectors; InputError if one is too long."""
        metadata = passages.schema.names[2:]
        rows = [
            _entity(row[_ID], row[_TEXT], {name: row[name] for name in metadata}, vector, InputError)
            for row, vector in zip(passages.to_pylist(), vectors, strict=True)
        ]
        with _errors(self.address):
            for start in range(0, len(rows), BATCH_ROWS):
                self.client.insert(self._name(identity), rows[start : start + BATCH_ROWS])

    def finish(self, identity: str, manifest: Mapping[str, Any]) -> None:
        """Wait for the index, verify the number of passages, write the manifest, and let the alias name the version.

        Raises:
            StoreFault: passages are missing or doubled; the alias is unchanged.
        """
        name, wanted = self._name(identity), manifest["index"]["passages"]
        with _errors(self.address):
            self.client.flush(name, timeout=None)
            self.client.load_collection(name, timeout=None)  # waits for the index
            (counted,) = self.client.query(name, output_fields=["count(*)"], consistency_level="Strong")
            if counted["count(*)"] != wanted:
                fault = f"{name} holds {counted['count(*)']} of {wanted} passages, because a write was lost or repeated"
                raise self.address.fault(fault, "run the same command again: it starts the collection over")
            self.client.alter_collection_properties(name, {MANIFEST: json.dumps(manifest)})
        self.use(identity)

    def use(self, identity: str) -> None:
        """Let the alias name a finished version."""
        there = any(version.current for version in self.versions())
        with _errors(self.address):
            set_alias = self.client.alter_alias if there else self.client.create_alias
            set_alias(self._name(identity), self.address.alias)

    def current(self) -> IndexVersion:
        """Return the version that the alias names; StoreFault if there is none."""
        if version := next((version for version in self.versions() if version.current), None):
            return version
        raise self.address.fault("no index there", f"build one with `infembed index output={self.address}`")

    def open(self, identity: str) -> MilvusStore:
        """Open a finished version; StoreFault if there is none."""
        if version := next((version for version in self.versions() if version.id == identity), None):
            return MilvusStore(self, self._name(identity), version.facts)
        raise self.address.fault(f"no version {identity} there", f"`infembed index versions {self.address}` lists them")


class MilvusStore:
    """One version in Milvus, open for searches and changes. Any threads can search while one changes.

    Raises:
        StoreFault: the server does not answer, in any method.
    """

    def __init__(self, engine: Milvus, name: str, facts: IndexFacts) -> None:
        self.facts = facts
        self._engine = engine
        self._name = name
        self._stale_ms = 0 if engine.one_writer else STALE_MS
        self._fields = [_TEXT, *(PREFIX + column for column in facts.metadata)]
        self._type = str(self._call("describe_index", index_name=_VECTOR)["index_type"])
        self.ready()

    def _call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the client on the collection. Without a time-out, the client would try again for minutes."""
        with _errors(self._engine.address):
            return getattr(self._engine.client, method)(self._name, timeout=self._engine.timeout_s, **arguments)

    def search(
        self, vectors: np.ndarray, k: int, filter: Mapping[str, Any] | None = None, fresh: bool = False
    ) -> tuple[list[list[Hit]], int]:
        """Find the passages of each query with the largest inner products, by (score, id), descending.

        Of passages with equal scores at the k-th place, Milvus chooses.

        Args:
            vectors: (n, d) float32 unit vectors.
            filter: metadata filter, as in JSON; see `retrieval.filters`.
            fresh: see all changes until now, also if that takes longer.

        Returns:
            The hits, and the sequence of the changes that they reflect.

        Raises:
            FilterError: the filter does not fit the metadata.
        """
        parsed = filters.parse(filter, self.facts.metadata)
        effort = {"HNSW": {"ef": max(EF, k)}, "IVF": {"nprobe": NPROBE}}.get(self._type.split("_")[0], {})
        sequence = time.time_ns() // 1_000_000 - (0 if fresh else self._stale_ms)
        answers = self._call(
            "search",
            data=np.ascontiguousarray(vectors, np.float32),
            limit=k,
            filter="" if parsed is None else expression(parsed),
            output_fields=self._fields,
            search_params={"metric_type": "IP", "params": effort},
            consistency_level="Strong" if fresh else "Bounded",
        )
        hits = [[self._hit(hit["id"], hit["distance"], hit["entity"]) for hit in of_query] for of_query in answers]
        return [sorted(some, key=lambda hit: (hit.score, hit.id), reverse=True) for some in hits], sequence

    def get(self, id: str) -> Hit | None:
        """Return the passage of an id, with score 0; None if there is none."""
        rows = self._call("query", filter=_any_of([id]), output_fields=self._fields, consistency_level="Strong")
        return self._hit(id, 0.0, rows[0]) if rows else None

    def scores(self, query: ScoreQuery) -> np.ndarray:
        """Score passages: (n, m) float32 inner products with the stored vectors; NaN for ids without a passage."""
        rows = self._call("query", filter=_any_of(query.ids), output_fields=[_ID, _VECTOR], consistency_level="Bounded")
        by_id = {row[_ID]: row[_VECTOR] for row in rows}
        nothing = np.full(self.facts.dimension, np.nan, np.float32)
        stored = np.array([by_id.get(id, nothing) for id in query.ids], np.float32)
        return query.vectors @ stored.reshape(-1, self.facts.dimension).T

    def change(self, changes: Sequence[Change]) -> int:
        """Apply changes, of which the last to an id wins; they are durable on return.

        Returns:
            The sequence from which searches see them: Unix time in milliseconds.

        Raises:
            ChangeError: a change does not fit the index; none is made. After a StoreFault, some may be made.
        """
        rows, deleted = [], []
        for change in changes:
            require_fitting(change, self.facts.dimension)
        for id, change in {change.id: change for change in changes}.items():
            if isinstance(change, Put):
                metadata = typed_metadata(id, change.metadata, self.facts.metadata)
                rows.append(_entity(id, change.text, metadata, change.vector, ChangeError))
            else:
                deleted.append(id)
        for start in range(0, len(rows), BATCH_ROWS):
            self._call("upsert", data=rows[start : start + BATCH_ROWS])
        if deleted:  # the client's own `ids=` does not escape quotes
            self._call("delete", filter=_any_of(deleted))
        return time.time_ns() // 1_000_000

    def ready(self) -> bool:
        """Return whether searches would be answered; load the collection if a restart of the server has released it."""
        if self._call("get_load_state")["state"].name != "Loaded":
            self._call("load_collection")
        return True

    def _hit(self, id: str, score: float, stored: Mapping[str, Any]) -> Hit:
        metadata = {column: _loaded(stored[PREFIX + column], kind) for column, kind in self.facts.metadata.items()}
        return Hit(id, float(score), stored[_TEXT], metadata)


def expression(filter: Filter) -> str:
    """The expression of Milvus that lets through what `Filter.mask` does."""
    if isinstance(filter, Combination):
        return (" or " if filter.any else " and ").join(f"({expression(part)})" for part in filter.parts)
    field, negated = PREFIX + filter.field, filter.operator == "nin"
    literals = [_literal(value) for value in filter.values if value is not None]
    if filter.operator in _OPERATORS:
        return f"{field} {_OPERATORS[filter.operator]} {literals[0]}"
    listed = f"[{', '.join(literals)}]"
    test = f"json_contains_any({field}, {listed})" if filter.kind == "strings" else f"{field} in {listed}"
    tests = [f"not ({test})" if negated else test] if literals else []
    # Versions of Milvus differ in the negation of a comparison with null.
    if (None in filter.values) == negated:
        return " and ".join([f"{field} is not null", *tests])
    return " or ".join([f"{field} is null", *tests])


def _any_of(ids: Sequence[str]) -> str:
    return f"{_ID} in [{', '.join(map(_literal, ids))}]"


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    return repr(_stored(value))


def _stored(value: Value | None) -> Any:
    """A value as Milvus stores it: dates as days, times as microseconds."""
    if isinstance(value, datetime):
        return (value - _EPOCH) // _MICROSECOND
    return value.toordinal() if isinstance(value, date) else value


def _entity(
    id: str, text: str, metadata: Mapping[str, Value | None], vector: np.ndarray, fault: type[ValueError]
) -> dict[str, Any]:
    """A row of a collection; raises `fault` if a value is too long."""
    entity: dict[str, Any] = {_ID: id, _TEXT: text}
    entity |= {PREFIX + c: _stored(v) for c, v in metadata.items()}
    for field, value in entity.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
        if isinstance(text, str) and (size := len(text.encode())) > MAX_BYTES:
            held = f"its {field.removeprefix(PREFIX)} has {size} bytes, Milvus stores {MAX_BYTES}"
            raise fault(f"document {id[:80]!r}: {held}; split the document")
    return {**entity, _VECTOR: np.asarray(vector, np.float32)}


def _loaded(value: Any, kind: FieldType) -> Any:
    if kind == "datetime" and value is not None:
        return (_EPOCH + value * _MICROSECOND).isoformat()
    return date.fromordinal(value).isoformat() if kind == "date" and value is not None else value


def _schema(client: Any, metadata: Mapping[str, FieldType], dimension: int) -> Any:
    from pymilvus import DataType

    types = {"string": DataType.VARCHAR, "integer": DataType.INT64, "number": DataType.DOUBLE}
    types |= {"boolean": DataType.BOOL, "date": DataType.INT64, "datetime": DataType.INT64}
    types |= {"strings": DataType.JSON}
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(_ID, DataType.VARCHAR, is_primary=True, max_length=MAX_BYTES)
    schema.add_field(_TEXT, DataType.VARCHAR, max_length=MAX_BYTES)
    schema.add_field(_VECTOR, DataType.FLOAT_VECTOR, dim=dimension)
    for column, kind in metadata.items():
        length = {"max_length": MAX_BYTES} if kind == "string" else {}
        schema.add_field(PREFIX + column, types[kind], nullable=True, **length)
    return schema


def _connect(address: MilvusAddress, timeout_s: float) -> tuple[Any, bool]:
    """Connect; returns the client, and whether the server is Milvus Lite."""
    try:
        import pymilvus
    except ImportError as error:
        raise address.fault("needs the client of Milvus", "pip install 'pymilvus>=2.6,<4'") from error
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs a traceback for each error that it raises
    token = os.environ.get(TOKEN_ENV, "")
    deadline = time.monotonic() + min(PATIENCE_S, timeout_s)
    while True:
        try:
            with _errors(address):
                client = pymilvus.MilvusClient(address.url, token=token, db_name=address.database, timeout=timeout_s)
                server = str(client.get_server_version())
            break
        except StoreFault:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    lite = "lite" in server
    theirs, ours = (re.findall(r"\d+", text)[:2] for text in (server, pymilvus.__version__))
    if not lite and theirs != ours:
        fault = f"the server is Milvus {server}, the client pymilvus {pymilvus.__version__}"
        raise address.fault(fault, f"pip install 'pymilvus=={'.'.join(theirs)}.*'")
    return client, lite


@contextmanager
def _errors(address: MilvusAddress) -> Iterator[None]:
    """Turn an error of the client in the block into a StoreFault."""
    from grpc import RpcError
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except (MilvusException, RpcError) as error:
        reason = " ".join(str(error.message if isinstance(error, MilvusException) else error.details()).split())
        remedy = "correct the setting, or see the server's log"
        if "connecting to server" in reason or "UNAVAILABLE" in reason:
            reason, remedy = f"no Milvus server answers there ({reason})", "start it, or correct host and port"
        elif re.search(r"\bauth|unauthenticated|password", reason, re.IGNORECASE):
            remedy = f"set {TOKEN_ENV} to user:password or an API key"
        raise address.fault(reason, remedy) from error
