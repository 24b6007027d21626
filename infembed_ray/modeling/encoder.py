"""The instruction-aware encoder: a Hugging Face backbone, a text format, pooling, unit vectors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from infembed_ray import progress
from infembed_ray.config import Interaction, Pooling, Template
from infembed_ray.errors import InputError
from infembed_ray.modeling import adapters, checkpoint, prefix_tree
from infembed_ray.modeling.interaction import CrossAttention, pair_batches, paired
from infembed_ray.modeling.layout import Layout, Side, Tokens, length_sorted_batches, padded
from infembed_ray.modeling.packing import (
    boundaries,
    enable_packing,
    first_position,
    packed,
    packing_pays,
)
from infembed_ray.modeling.pooling import PoolingMode, pool, truncate
from infembed_ray.modeling.precision import warn_of_slow_bf16
from infembed_ray.modeling.template import TextFormat, render
from infembed_ray.modeling.tokenizer import add_eos, marks_the_end, tokens_before
from infembed_ray.storage import resolve


class InstructionEncoder(nn.Module):
    """Encodes (instruction, query) texts and passages into one space of unit vectors (paper, Eq. 2-3).

    Build it with `from_pretrained`.

    Args:
        backbone: a Hugging Face encoder or decoder without head; called with `input_ids`, `attention_mask` and `position_ids`.
        tokenizer: the backbone's, a fast one.
        pooling: from token states to one vector.
        text: template, prefixes and lengths.
        passage_backbone: that of passages; None: they share the queries'.
        interaction: the cross-attention of instruction and query; None: they are one text.
        dimensions: so many leading components are the embedding (Matryoshka); None: all.
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokenizer: Any,
        pooling: PoolingMode,
        text: TextFormat,
        passage_backbone: nn.Module | None = None,
        interaction: CrossAttention | None = None,
        dimensions: int | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.passage_backbone = passage_backbone
        self.interaction = interaction
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.text = text
        self.dimensions = dimensions
        self.source: str | None = None
        self._pad_id = int(tokenizer.pad_token_id)
        self._packs = all(enable_packing(b) for b in self.backbones)
        self._first_position = first_position(backbone)
        self._told_obstacle = False
        config: Any = backbone.config
        self._attention_dropout = getattr(
            config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0.0)
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        template: Template | None = None,
        interaction: Interaction | None = None,
        pooling: Pooling = "auto",
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        query_length: int | None = None,
        passage_length: int | None = None,
        append_eos: bool | None = None,
        bidirectional: bool | None = None,
        share_encoder: bool | None = None,
        dimensions: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        quantized: bool = False,
    ) -> InstructionEncoder:
        """Load a checkpoint of ours, a sentence-transformers directory, or a plain Hugging Face model.

        Args:
            path: directory (an output's `latest` is followed) or hub name.
            template, pooling, query_prefix, passage_prefix: None or `auto` keeps what the directory says, else the
                defaults of `TextFormat`; else mean pooling for encoders and bidirectional decoders, last for decoders.
            interaction: how instruction and query meet; None keeps what the directory says, else `joint`.
            query_length, passage_length: None keeps what the directory says, else the defaults of `TextFormat` or the
                directory's `max_seq_length` if that is less. Never more than the backbone has positions.
            append_eos: end every text with EOS. None: only where the last token is pooled, the tokenizer has an EOS
                and marks the end of a text by no token yet, and the directory is not made for embedding.
            bidirectional: let the tokens of a decoder attend in both directions; None keeps what its config says.
            share_encoder: one backbone for queries and passages, or two that start equal; None keeps what there is.
            dimensions: of the embeddings, the leading ones of a model trained for it; None keeps what is saved.
            device, dtype: where the parameters go; on `meta` no weights are read.
            quantized: the backbone's linear layers in 4 bits (QLoRA's NF4), on a GPU.

        Raises:
            InputError: no such model, a directory without weights, or one that does not allow what is asked for.
        """
        path = str(resolve(Path(path)))
        saved = checkpoint.describe(path, with_pooling=pooling == "auto")
        if share_encoder and len(saved.towers) > 1:
            raise InputError(f"share_encoder=true: {path} has separate encoders; drop share_encoder")
        if dtype == torch.bfloat16:
            warn_of_slow_bf16(device, "dtype=bfloat16", "dtype=float32")
        options: dict[str, Any] = adapters.four_bits(device) if quantized else {}
        with_weights = torch.device(device).type != "meta"
        backbones, tokenizer = checkpoint.load(path, saved.towers, with_weights, dtype=dtype, **options)
        if bidirectional is not None:
            for backbone in backbones:
                backbone.config.is_causal = not bidirectional
        mode = saved.pooling if pooling == "auto" else pooling
        mode = mode or ("last" if _is_causal(backbones[0]) else "mean")
        if append_eos is None:
            append_eos = mode == "last" and tokenizer.eos_token is not None and not saved.finished
        if append_eos and not marks_the_end(tokenizer):
            add_eos(tokenizer)
        hidden = int(backbones[0].config.hidden_size)
        dimensions = dimensions or saved.dimensions
        if dimensions is not None and not 0 < dimensions <= hidden:
            raise InputError(f"dimensions={dimensions}: embeddings of {path} have {hidden}; set 1 to {hidden}")
        default = TextFormat()
        positions = min(getattr(backbones[0].config, "max_position_embeddings", 1 << 30), tokenizer.model_max_length)
        most = saved.max_length or positions
        text = TextFormat(
            template=template or saved.template or default.template,
            query_prefix=_first(query_prefix, saved.query_prefix, default.query_prefix),
            passage_prefix=_first(passage_prefix, saved.passage_prefix, default.passage_prefix),
            query_length=min(query_length or saved.query_length or min(default.query_length, most), positions),
            passage_length=min(passage_length or saved.passage_length or min(default.passage_length, most), positions),
        )
        if share_encoder is False and len(backbones) == 1:
            backbones.append(copy.deepcopy(backbones[0]))
        cross_attention = None
        if (interaction or saved.interaction) == "cross_attention":
            cross_attention = CrossAttention(hidden).to(dtype)
            if saved.interaction == "cross_attention":
                cross_attention.read(path)
        second = backbones[1] if len(backbones) > 1 else None
        encoder = cls(backbones[0], tokenizer, mode, text, second, cross_attention, dimensions)
        encoder.source = path
        return encoder.to(device)

    @property
    def dimension(self) -> int:
        """Components of an embedding."""
        return self.dimensions or int(self.backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]

    @property
    def causal(self) -> bool:
        """Does a token attend to those before it only? Then texts with the same beginning can share it."""
        return _is_causal(self.backbone)

    @property
    def backbones(self) -> list[Any]:
        """The Hugging Face models: one, or that of queries and that of passages."""
        return [self.backbone, *([self.passage_backbone] if self.passage_backbone is not None else [])]

    def backbone_of(self, side: Side) -> nn.Module:
        """The backbone that embeds queries, or passages."""
        return self.passage_backbone if side == "passage" and self.passage_backbone is not None else self.backbone

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which the backbone computes."""
        return self.backbone.dtype  # type: ignore[return-value]

    @property
    def packs(self) -> bool:
        """Are texts packed when they are embedded, as the encoder is now? Else a batch is padded to its longest."""
        return self._packs and packing_pays(self.device, self.dtype, self.training and self._attention_dropout > 0)

    def forward(self, layout: Layout) -> Tensor:
        """Embed the texts of a layout: (texts, d) unit vectors, in fp32 whatever the backbone's precision."""
        where: dict[str, Any] = {} if layout.position_ids is None else {"position_ids": layout.position_ids}
        where["attention_mask"] = layout.attention_mask
        backbone = self.backbone_of(layout.side)
        if layout.ends is not None:
            where |= prefix_tree.attention_inputs(backbone, layout.ends)
        elif layout.attention_mask is None:
            where |= boundaries(layout.lengths)
        if self.causal:
            where["use_cache"] = False  # keys and values of tokens that nothing will follow
        states = backbone(input_ids=layout.input_ids, **where).last_hidden_state
        if self.interaction is not None and layout.pairs is not None:
            pooled = self.interaction(states, layout, self.pooling)
        else:
            pooled = pool(states, layout, self.pooling)
        return truncate(pooled, self.dimension)

    def tokenize_queries(self, queries: Sequence[str], instructions: Sequence[str | None]) -> list[Tokens]:
        """(instruction, query) texts, cut at `query_length`. The instruction's part is marked where it comes first."""
        if self.interaction is not None:
            return self._tokenize_apart(queries, instructions)
        firsts = [
            len(self.text.query_prefix + i) if i and self.text.template == "instruction_first" else 0
            for i in instructions
        ]
        texts = [
            self.text.query_prefix + render(self.text.template, i, q)
            for q, i in zip(queries, instructions, strict=True)
        ]
        return self._tokenize(texts, "query", self.text.query_length, firsts)

    def _tokenize_apart(self, queries: Sequence[str], instructions: Sequence[str | None]) -> list[Tokens]:
        """Each query after its instruction, as two sequences that are both cut at `query_length`."""
        texts = list(dict.fromkeys([*queries, *filter(None, instructions)]))
        tokens = self._tokenize([self.text.query_prefix + t for t in texts], "query", self.text.query_length)
        ids: dict[str | None, list[int]] = {None: []}
        ids |= {text: t.ids for text, t in zip(texts, tokens, strict=True)}
        return [
            Tokens(ids[i or None] + ids[q], "query", len(ids[i or None]))
            for q, i in zip(queries, instructions, strict=True)
        ]

    def tokenize_passages(self, passages: Sequence[str]) -> list[Tokens]:
        """Passages, cut at `passage_length`."""
        return self._tokenize([self.text.passage_prefix + p for p in passages], "passage", self.text.passage_length)

    def _tokenize(self, texts: list[str], side: Side, max_length: int, firsts: Sequence[int] = ()) -> list[Tokens]:
        """Token ids of texts, of which the first so many characters are the instruction."""
        if not texts:
            return []
        encoded = self.tokenizer(texts, truncation=True, max_length=max_length)
        return [
            # A text without any token has the pad token: nothing else would be pooled but another text.
            Tokens(
                ids or [self._pad_id], side, tokens_before(encoded, row, firsts[row]) if firsts and firsts[row] else 0
            )
            for row, ids in enumerate(encoded["input_ids"])
        ]

    def checkpoint_activations(self) -> None:
        """Let the backbones compute activations anew in the backward pass rather than keep them."""
        # The second name is the only one in early versions of transformers 5, and deprecated in later ones.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        for backbone in self.backbones:
            enable = next(getattr(backbone, name) for name in names if hasattr(backbone, name))
            # Not the re-entrant kind: it wants inputs with gradient, and under adapters the embeddings have none.
            enable({"use_reentrant": False})

    def layouts(self, sequences: Sequence[Tokens], batch_tokens: int) -> Iterator[tuple[list[int], Layout]]:
        """Divide texts into forward passes.

        Args:
            sequences: the texts, of either side, in any order.
            batch_tokens: most tokens of one pass, padding included. A text longer than that is a pass of its own.

        Yields:
            rows of `sequences`, and the layout of those texts in that order, on the encoder's device. Every row once.
        """
        for rows, layout in self.lay_out(sequences, batch_tokens, self.device, self.dtype):
            yield rows, layout.to(self.device)

    def lay_out(
        self, sequences: Sequence[Tokens], batch_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[list[int], Layout]]:
        """The same for a backbone on some other device and in some other precision; the layouts are on the CPU."""
        pack = self._packs and packing_pays(device, dtype, self.training and self._attention_dropout > 0)
        lay = partial(packed, first_position=self._first_position) if pack else partial(padded, pad_id=self._pad_id)
        for side in get_args(Side):
            of_side = [row for row, s in enumerate(sequences) if s.side == side]
            if side == "query" and self.interaction is not None:
                for group in pair_batches([sequences[row] for row in of_side], batch_tokens, pack):
                    rows = [of_side[i] for i in group]
                    yield rows, paired([sequences[row] for row in rows], lay)
                continue
            if self._shares_prefixes(side, [sequences[row] for row in of_side]):
                for group, layout in prefix_tree.forests([sequences[row] for row in of_side], batch_tokens):
                    yield [of_side[i] for i in group], layout
                continue
            for group in length_sorted_batches([len(sequences[row]) for row in of_side], batch_tokens, padded=not pack):
                rows = [of_side[i] for i in group]
                yield rows, lay([sequences[row] for row in rows])

    def _shares_prefixes(self, side: Side, sequences: Sequence[Tokens]) -> bool:
        """Do these texts begin alike, and does the backbone allow to encode that once? Says so, once, if it does not."""
        if not sequences or not self.causal or not prefix_tree.saves(sequences):
            return False
        obstacle = prefix_tree.obstacle(self.backbone_of(side), max(map(len, sequences)))
        if obstacle and not self._told_obstacle:
            progress.say(f"{side}: texts that begin alike are encoded one by one: {obstacle}")
            self._told_obstacle = True
        return obstacle is None

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Tokens], batch_tokens: int = 4096) -> np.ndarray:
        """Embed texts in passes of at most `batch_tokens` tokens, padding included.

        Returns:
            (len(sequences), d) float32 unit vectors, in the order given.
        """
        embeddings = np.zeros((len(sequences), self.dimension), dtype=np.float32)
        was_training = self.training
        self.eval()
        for rows, layout in self.layouts(sequences, batch_tokens):
            embeddings[rows] = self(layout).cpu().numpy()
        self.train(was_training)
        return embeddings

    def encode_queries(
        self,
        queries: str | Sequence[str],
        instructions: str | Sequence[str | None] | None = None,
        batch_tokens: int = 4096,
    ) -> np.ndarray:
        """Embed queries under their instructions.

        Args:
            queries: n queries, or a single one as a str.
            instructions: one for each query (None or "" for a query without), or a single str for all of them.
            batch_tokens: as of `embed`.

        Returns:
            float32 unit vectors: (n, d), or (d,) for a single str.

        Raises:
            InputError: as many instructions as queries were expected.
        """
        several = [queries] if isinstance(queries, str) else queries
        each = [instructions] * len(several) if instructions is None or isinstance(instructions, str) else instructions
        if len(each) != len(several):
            raise InputError(
                f"instructions: {len(each)} for {len(several)} queries; give one for each query, or one str for all"
            )
        vectors = self.embed(self.tokenize_queries(several, each), batch_tokens)
        return vectors[0] if isinstance(queries, str) else vectors

    def encode_passages(self, passages: str | Sequence[str], batch_tokens: int = 4096) -> np.ndarray:
        """Embed passages.

        Args:
            passages: n passages, or a single one as a str.
            batch_tokens: as of `embed`.

        Returns:
            float32 unit vectors: (n, d), or (d,) for a single str.
        """
        several = [passages] if isinstance(passages, str) else passages
        vectors = self.embed(self.tokenize_passages(several), batch_tokens)
        return vectors[0] if isinstance(passages, str) else vectors

    def save_pretrained(self, path: Path) -> None:
        """Write the sentence-transformers directory of this encoder.

        Adapters are merged into the weights, for good, and written by themselves beside them.
        """
        path.mkdir(parents=True, exist_ok=True)
        if adapters.has(self):
            adapters.save(self, path / checkpoint.ADAPTERS)
            adapters.merge(self)
        checkpoint.write(
            path,
            checkpoint.Description(
                pooling=self.pooling,
                template=self.text.template,
                query_prefix=self.text.query_prefix,
                passage_prefix=self.text.passage_prefix,
                query_length=self.text.query_length,
                passage_length=self.text.passage_length,
                dimensions=self.dimensions,
                interaction="joint" if self.interaction is None else "cross_attention",
            ),
            self.backbones,
            self.tokenizer,
        )
        if self.interaction is not None:
            self.interaction.write(path)

    def fingerprint(self) -> str:
        """16 hex digits that change with anything that changes an embedding; see `checkpoint.fingerprint`."""
        ending = self.tokenizer("")["input_ids"]
        asked = (*astuple(self.text), self.pooling, self.causal, self.dimension, len(self.backbones), ending)
        asked += (self.interaction is not None,)
        return checkpoint.fingerprint(str(self.source), str(asked))


def _first(*values: str | None) -> str:
    """The first that is not None; an empty prefix is a prefix."""
    return next(value for value in values if value is not None)


def _is_causal(backbone: nn.Module) -> bool:
    """Does it attend backwards only? Its attention layers say so, unless its config says otherwise.

    The saved `architectures` name only the class last saved.
    """
    layers = any(getattr(module, "is_causal", False) for module in backbone.modules())
    return layers and getattr(backbone.config, "is_causal", True)
