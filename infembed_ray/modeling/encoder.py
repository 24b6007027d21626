"""The instruction-aware encoder: one Hugging Face backbone, a template, pooling, unit vectors.

A checkpoint is a sentence-transformers directory: `SentenceTransformer(path)` loads it and embeds the same texts to
the same vectors. `infembed.json` beside it holds what that format has no place for: template and lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file

from infembed_ray.config import Pooling, Template
from infembed_ray.errors import InputError
from infembed_ray.modeling.pooling import PoolingMode, pool
from infembed_ray.modeling.template import render
from infembed_ray.storage import MANIFEST, fingerprint_files, resolve, write_json

OWN_CONFIG = "infembed.json"
_POOLING_KEYS: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_POOLING_NAMES: dict[str, PoolingMode] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_MODEL_FILES = (".json", ".txt", ".model", ".safetensors")
"""Weights, configuration and tokenizer of a model directory, in whatever form they come."""


@dataclass(frozen=True)
class TextFormat:
    """How raw texts become token sequences. Part of the checkpoint, so that no two stages can disagree."""

    template: Template = "instruction_first"
    query_prefix: str = ""
    passage_prefix: str = ""
    query_length: int = 256
    """Most tokens of instruction + query, special tokens included."""
    passage_length: int = 512
    """Most tokens of a passage, special tokens included."""


class InstructionEncoder(nn.Module):
    """Encodes (instruction, query) texts and passages into one space of unit vectors (paper, Eq. 2-3).

    Build it with `from_pretrained`.

    Args:
        backbone: a Hugging Face encoder or decoder without head; called with `input_ids`, `attention_mask`.
        tokenizer: the backbone's.
        pooling: from token states to one vector.
        text: template, prefixes and lengths.
    """

    def __init__(self, backbone: nn.Module, tokenizer: Any, pooling: PoolingMode, text: TextFormat) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.text = text
        self.source: str | None = None
        self._pad_id = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        template: Template | None = None,
        pooling: Pooling = "auto",
        query_length: int | None = None,
        passage_length: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> InstructionEncoder:
        """Load a checkpoint of ours, a sentence-transformers directory, or a plain Hugging Face model.

        Args:
            path: directory (an output's `latest` is followed) or hub name.
            template, pooling, query_length, passage_length: what the directory does not say; None or `auto` keeps what
                it says, else the defaults of `TextFormat`, and mean pooling for encoders, last for decoders.
            device, dtype: where the parameters go.

        Raises:
            InputError: no such model, or a directory without weights.
        """
        path = str(resolve(Path(path)))
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            backbone = AutoModel.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise InputError(
                f"model={path}: cannot be loaded ({' '.join(str(error).split())[:200]}); "
                "give a directory with config.json, tokenizer and safetensors, or a reachable hub name"
            ) from error
        saved = _read_json(path, OWN_CONFIG)
        prompts = _read_json(path, "config_sentence_transformers.json").get("prompts", {})
        positions = getattr(config, "max_position_embeddings", None) or 1 << 30
        text = TextFormat(
            template=template or saved.get("template", "instruction_first"),
            query_prefix=prompts.get("query") or "",
            passage_prefix=prompts.get("document") or prompts.get("passage") or "",
            query_length=min(query_length or saved.get("query_length", 256), positions),
            passage_length=min(passage_length or saved.get("passage_length", 512), positions),
        )
        mode = _saved_pooling(path) if pooling == "auto" else pooling
        encoder = cls(backbone, tokenizer, mode or ("last" if _is_causal(backbone) else "mean"), text)
        encoder.source = path
        return encoder.to(device)

    @property
    def dimension(self) -> int:
        """Components of an embedding."""
        return int(self.backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed a padded batch: (batch, tokens) ids and mask -> (batch, d) unit vectors in fp32."""
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return nn.functional.normalize(pool(states, attention_mask, self.pooling).float(), dim=-1)

    def tokenize_queries(self, queries: Sequence[str], instructions: Sequence[str | None]) -> list[list[int]]:
        """Token ids of (instruction, query) texts, special tokens in, cut at `query_length`, not padded."""
        texts = [
            self.text.query_prefix + render(self.text.template, i, q)
            for q, i in zip(queries, instructions, strict=True)
        ]
        return self._tokenize(texts, self.text.query_length)

    def tokenize_passages(self, passages: Sequence[str]) -> list[list[int]]:
        """Token ids of passages, special tokens in, cut at `passage_length`, not padded."""
        return self._tokenize([self.text.passage_prefix + p for p in passages], self.text.passage_length)

    def _tokenize(self, texts: list[str], max_length: int) -> list[list[int]]:
        if not texts:
            return []
        return cast("list[list[int]]", self.tokenizer(texts, truncation=True, max_length=max_length)["input_ids"])

    def pad(self, sequences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Right-pad token lists to one batch: ids and mask, both (batch, longest), on the encoder's device."""
        longest = max(len(s) for s in sequences)
        ids = torch.full((len(sequences), longest), self._pad_id, dtype=torch.long)
        mask = torch.zeros((len(sequences), longest), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
            mask[row, : len(sequence)] = 1
        return ids.to(self.device), mask.to(self.device)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[list[int]], batch_tokens: int = 4096) -> np.ndarray:
        """Embed token lists, longest first in batches of at most `batch_tokens` padded tokens.

        Returns:
            (len(sequences), d) float32 unit vectors, in the order given.
        """
        embeddings = np.zeros((len(sequences), self.dimension), dtype=np.float32)
        was_training = self.training
        self.eval()
        for rows in length_sorted_batches([len(s) for s in sequences], batch_tokens):
            embeddings[rows] = self(*self.pad([sequences[r] for r in rows])).cpu().numpy()
        self.train(was_training)
        return embeddings

    def encode_queries(
        self, queries: Sequence[str], instructions: Sequence[str | None] | None = None, batch_tokens: int = 4096
    ) -> np.ndarray:
        """(n, d) float32 unit vectors of queries under their instructions (None: no instruction at all)."""
        return self.embed(self.tokenize_queries(queries, instructions or [None] * len(queries)), batch_tokens)

    def encode_passages(self, passages: Sequence[str], batch_tokens: int = 4096) -> np.ndarray:
        """(n, d) float32 unit vectors of passages."""
        return self.embed(self.tokenize_passages(passages), batch_tokens)

    def save_pretrained(self, path: Path) -> None:
        """Write the sentence-transformers directory of this encoder."""
        path.mkdir(parents=True, exist_ok=True)
        backbone: Any = self.backbone
        backbone.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        write_json(
            path / "modules.json",
            [
                {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
                for i, (folder, kind) in enumerate(modules)
            ],
        )
        for folder, _ in modules[1:]:
            (path / folder).mkdir(exist_ok=True)
        write_json(
            path / "1_Pooling" / "config.json",
            {
                "word_embedding_dimension": self.dimension,
                **{key: mode == self.pooling for key, mode in _POOLING_KEYS.items()},
                "include_prompt": True,
            },
        )
        longest = max(self.text.query_length, self.text.passage_length)
        write_json(path / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
        prompts = {"query": self.text.query_prefix, "document": self.text.passage_prefix}
        write_json(
            path / "config_sentence_transformers.json",
            {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
        )
        write_json(
            path / OWN_CONFIG,
            {
                "template": self.text.template,
                "query_length": self.text.query_length,
                "passage_length": self.text.passage_length,
            },
        )

    def fingerprint(self) -> str:
        """16 hex digits that change with anything that changes an embedding; needs a local directory.

        Two copies of one checkpoint have the same fingerprint, wherever they lie.
        """
        if self.source is None or not Path(self.source).is_dir():
            return f"hub:{self.source}"
        root = Path(self.source)
        files = sorted(f for f in root.iterdir() if f.suffix in _MODEL_FILES and f.name != MANIFEST)
        files += sorted(root.glob("*_Pooling/config.json"))
        asked = f"{self.text}{self.pooling}"  # may differ from what the files say
        return hashlib.sha256(f"{fingerprint_files(files, relative_to=root)}{asked}".encode()).hexdigest()[:16]


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows grouped longest first, so that a group's padded size (rows x longest) stays within `batch_tokens`.

    A row longer than `batch_tokens` makes a group of its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    group: list[int] = []
    for row in order:
        if group and (len(group) + 1) * lengths[group[0]] > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _read_json(path: str, name: str) -> Any:
    """A JSON file of a model, from its directory or from the hub; an empty object where the model has none."""
    file = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def _saved_pooling(path: str) -> PoolingMode | None:
    """The pooling a sentence-transformers model says it has; None for a plain Hugging Face model.

    Raises:
        InputError: it has a part or a pooling that this encoder does not: its embeddings would silently be others.
    """
    kinds = [module["type"].rsplit(".", 1)[-1] for module in _read_json(path, "modules.json") or []]
    foreign = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if foreign:
        raise InputError(f"model={path}: has a {foreign[0]} module, which is not supported; give a model without it")
    saved = _read_json(path, "1_Pooling/config.json")
    modes = [saved["pooling_mode"]] if "pooling_mode" in saved else [k for k, on in saved.items() if on is True]
    modes = [mode for mode in modes if mode.startswith("pooling_mode_") or "pooling_mode" in saved]
    if not modes:
        return None
    known = {**_POOLING_KEYS, **_POOLING_NAMES}
    if len(modes) > 1 or modes[0] not in known:
        raise InputError(f"model={path}: pools by {' and '.join(modes)}; set pooling=mean, last or cls to override it")
    return known[modes[0]]


def _is_causal(backbone: nn.Module) -> bool:
    """Is this a decoder? Its attention layers say so; the saved `architectures` name only the class last saved."""
    return any(getattr(module, "is_causal", False) for module in backbone.modules())


def model_identity(model: str, name: str) -> tuple[dict[str, Path], dict[str, str]]:
    """What a model contributes to a step's identity: its directory's contents, or a hub name as it is.

    Args:
        model: directory (`latest` is followed) or hub name.
        name: the setting it came from.

    Returns:
        `inputs` and `names` for `storage.Step`, one of them empty.

    Raises:
        InputError: it looks like a directory but there is none, or the directory holds no model, or the hub does not
            know the name.
    """
    path = resolve(Path(model).expanduser().absolute())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name}={model}: no config.json in this directory; give a model directory")
        if not any(path.glob("*.safetensors")):
            raise InputError(f"{name}={model}: no *.safetensors in this directory; convert the weights to safetensors")
        _require_loadable(str(path), f"{name}={model}")
        return {name: path}, {}
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise InputError(f"{name}={model}: no such model directory; give an existing one, or a hub name like org/model")
    _require_loadable(model, f"{name}={model}")
    return {}, {name: model}


def _require_loadable(model: str, setting: str) -> None:
    """Read configuration and tokenizer here and now; the weights are first read by the workers."""
    try:
        AutoConfig.from_pretrained(model)
        AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{setting}: neither a model directory here nor a model the hub gives "
            f"({' '.join(str(error).split())[:160]}); check the spelling, the tokenizer's files and the network"
        ) from error
