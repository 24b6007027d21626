"""The instruction-aware encoder: a Hugging Face backbone, a text format, pooling and unit vectors."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from typing_extensions import Unpack

from infembed_ray import progress
from infembed_ray.config.training import PoolingMode
from infembed_ray.errors import InputError
from infembed_ray.modeling import adapters, checkpoint, checkpoint_writer, exclusions, pipeline, pretrained
from infembed_ray.modeling.attention import prefix_tree
from infembed_ray.modeling.attention.flex import compile_layers, flex_pays
from infembed_ray.modeling.attention.packing import enable_packing, first_position, packed, packing_pays
from infembed_ray.modeling.checkpoint import Overrides
from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.interaction import CrossAttention, pair_batches, paired
from infembed_ray.modeling.layout import Layout, length_sorted_batches, padded, pool, truncate
from infembed_ray.modeling.linear import enable_onednn, fuse_norms
from infembed_ray.modeling.tokenizer import Side, TextFormat, TextTokenizer, Tokens, end_texts
from infembed_ray.storage.object_store import is_uri


class InstructionEncoder(nn.Module):
    """Encodes (instruction, query) texts and passages into one space of unit vectors (paper, Eq. 2-3).

    Build it with `from_pretrained`.

    ```python
    from infembed_ray import InstructionEncoder

    encoder = InstructionEncoder.from_pretrained("runs/quickstart/checkpoint")
    passages = encoder.encode_passages(["Adults: 500 mg twice a day.", "Metformin lowers blood sugar."])
    print(encoder.similarity(encoder.encode_queries("metformin", "Only doses."), passages))
    ```

    Args:
        backbone, tokenizer: a Hugging Face encoder or decoder without head, and its fast tokenizer.
        pooling, text: how token states become one vector; template, prefixes, and lengths in tokens.
        passage_backbone: backbone of passages; None: the one of queries.
        interaction: cross-attention of instruction and query; None: they are one text.
        dimensions: number of leading components that make the embedding (Matryoshka); None: all.

    Attributes:
        exclusion_weight: weight of the excluded part's vector, which is subtracted from the query's; 0: nothing is subtracted.
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
        self.exclusion_weight = 0.0
        self.source: str | None = None
        self._loaded = 0
        self._seconds = 0.0
        self._pad_id = int(tokenizer.pad_token_id)
        self._packs = all(enable_packing(b) for b in self.backbones)
        enable_onednn(*self.backbones)
        fuse_norms(*self.backbones)
        self._first_position = first_position(backbone)
        self._obstacle_logged = False
        config: Any = backbone.config
        names = ("attention_probs_dropout_prob", "attention_dropout")  # of families of backbones
        self._attention_dropout = next((float(getattr(config, name)) for name in names if hasattr(config, name)), 0.0)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        quantized: bool = False,
        **overrides: Unpack[Overrides],
    ) -> InstructionEncoder:
        """Load a checkpoint of `infembed train`, a sentence-transformers directory, or a plain Hugging Face model.

        Args:
            path: directory (of an output, its `latest`), URI of a folder in an object store, or hub name.
            device, dtype: device and precision of the parameters; on `meta` no weights are read.
            quantized: load the backbone's linear layers in 4 bits (QLoRA's NF4), on a GPU.
            overrides: values that replace the model's, such as `query_length=512` or `dimensions=256`.

        Raises:
            InputError: no such model, a directory without weights, or a model that does not allow an override.
        """
        source, with_weights = str(path), torch.device(device).type != "meta"
        path = checkpoint.local(source, with_weights=with_weights)
        pooling = overrides.get("pooling", "auto")
        saved = checkpoint.describe(path, with_pooling=pooling == "auto")
        share = overrides.get("share_encoder")
        if share and len(saved.towers) > 1:
            raise InputError(f"share_encoder=true: {path} has separate encoders; drop share_encoder")
        bidirectional = overrides.get("bidirectional")
        options = {"dtype": dtype} | (adapters.four_bits(device) if quantized else {})
        backbones, tokenizer = checkpoint.load(path, saved.towers, with_weights, bidirectional is not None, **options)
        if bidirectional is not None:
            for backbone in backbones:
                backbone.config.is_causal = not bidirectional
        mode = (saved.pooling if pooling == "auto" else pooling) or ("last" if _is_causal(backbones[0]) else "mean")
        end_texts(tokenizer, overrides.get("append_eos"), mode == "last" and not saved.finished)
        dimensions, hidden = overrides.get("dimensions") or saved.dimensions, int(backbones[0].config.hidden_size)
        if dimensions is not None and not 0 < dimensions <= hidden:
            fault = f"embeddings of {path} have {hidden}"
            raise InputError.of("dimensions", dimensions, fault, f"set 1 to {hidden}")
        text = checkpoint.text_format(saved, overrides, backbones[0], tokenizer)
        if share is False and len(backbones) == 1:
            backbones.append(copy.deepcopy(backbones[0]))
        cross_attention = None
        if (overrides.get("interaction") or saved.interaction) == "cross_attention":
            cross_attention = CrossAttention(hidden).to(dtype)
            if saved.interaction == "cross_attention":
                cross_attention.read(path)
        second = backbones[1] if len(backbones) > 1 else None
        encoder = cls(backbones[0], tokenizer, mode, text, second, cross_attention, dimensions)
        encoder.exclusion_weight = saved.exclusion_weight
        encoder.source = source if is_uri(source) else path
        encoder.to(device)
        encoder._loaded = encoder._count_writes()
        return encoder

    @property
    def dimension(self) -> int:
        """Number of components of an embedding."""
        return self.dimensions or int(self.backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]

    @property
    def changed(self) -> bool:
        """Whether parameters were changed in place since they were loaded from `source`, for example by an optimizer."""
        return self._count_writes() != self._loaded

    def _count_writes(self) -> int:
        return sum(parameter._version for parameter in self.parameters() if not parameter.is_inference())

    @property
    def causal(self) -> bool:
        """Whether tokens attend only to earlier tokens, so that texts can share a prefix."""
        return _is_causal(self.backbone)

    @property
    def backbones(self) -> list[Any]:
        """The Hugging Face models: one, or the two of queries and passages."""
        return [self.backbone, *([self.passage_backbone] if self.passage_backbone is not None else [])]

    def backbone_of(self, side: Side) -> nn.Module:
        """Return the backbone of a side."""
        return self.passage_backbone if side == "passage" and self.passage_backbone is not None else self.backbone

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the backbone."""
        return self.backbone.dtype  # type: ignore[return-value]

    @property
    def packs(self) -> bool:
        """Whether texts are packed in the encoder's present state; else a batch is padded to its longest text."""
        return self._packs_on(self.device, self.dtype)

    def _packs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self._packs and packing_pays(device, dtype, self._drops)

    @property
    def _drops(self) -> bool:
        return self.training and self._attention_dropout > 0

    def forward(self, layout: Layout) -> Tensor:
        """Embed the texts of a layout as (texts, d) unit vectors, in fp32 at least."""
        states = self.states(layout)
        if self.interaction is not None and layout.pairs is not None:
            pooled = self.interaction(states, layout, self.pooling)
        else:
            pooled = pool(states, layout, self.pooling)
        return truncate(pooled, self.dimension)

    def states(self, layout: Layout) -> Tensor:
        """Return the last hidden states of a layout: (rows, width, d)."""
        backbone = self.backbone_of(layout.side)
        inputs = layout.backbone_inputs(backbone)
        if self.causal:
            inputs["use_cache"] = False  # nothing follows these tokens, so their keys and values are not needed
        return backbone(**inputs).last_hidden_state

    @property
    def texts(self) -> TextTokenizer:
        """From texts to token ids."""
        backend, splits = self.tokenizer.backend_tokenizer, self.tokenizer.split_special_tokens
        if backend.encode_special_tokens != splits:
            backend.encode_special_tokens = splits
        separate = self.interaction is not None
        return TextTokenizer(backend, self.text, self._pad_id, separate, self.tokenizer.truncation_side)

    def tokenize_queries(self, queries: Sequence[str], instructions: Sequence[str | None]) -> list[Tokens]:
        """As `TextTokenizer.tokenize_queries`."""
        return self.texts.tokenize_queries(queries, instructions)

    def tokenize_passages(self, passages: Sequence[str]) -> list[Tokens]:
        """As `TextTokenizer.tokenize_passages`."""
        return self.texts.tokenize_passages(passages)

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass instead of keeping them (gradient checkpointing)."""
        # Early versions of transformers 5 have only the second name, which later ones deprecate.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        for backbone in self.backbones:
            enable = next(getattr(backbone, name) for name in names if hasattr(backbone, name))
            # Re-entrant checkpointing needs inputs with gradients; under adapters the embeddings have none.
            enable({"use_reentrant": False})

    def layouts(self, sequences: Sequence[Tokens], batch_tokens: int) -> Iterator[tuple[list[int], Layout]]:
        """Divide texts of both sides into forward passes of `batch_tokens` tokens with padding, or one longer text.

        Yields:
            Rows of `sequences`, and the layout of these texts on the encoder's device. Every row comes once.
        """
        for rows, layout in self.lay_out(sequences, batch_tokens, self.device, self.dtype):
            yield rows, layout.to(self.device)

    def lay_out(
        self, sequences: Sequence[Tokens], batch_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[list[int], Layout]]:
        """Divide texts as for a backbone of this device and precision; the layouts are on the CPU."""
        pack = self._packs_on(device, dtype)
        if self.training and flex_pays(device) and self._reads_trees:
            # A query would wait for the compiler, so only training compiles.
            yield from prefix_tree.forests(sequences, batch_tokens, flex=True)
            return
        lay = partial(packed, first_position=self._first_position) if pack else partial(padded, pad_id=self._pad_id)
        for side in get_args(Side):
            of_side = [row for row, s in enumerate(sequences) if s.side == side]
            texts = [sequences[row] for row in of_side]
            if side == "query" and self.interaction is not None:
                for group in pair_batches(texts, batch_tokens, pack):
                    rows = [of_side[i] for i in group]
                    yield rows, paired([sequences[row] for row in rows], lay)
                continue
            if self._shares_prefixes(side, texts):
                for group, layout in prefix_tree.forests(texts, batch_tokens):
                    yield [of_side[i] for i in group], layout
                continue
            for group in length_sorted_batches(list(map(len, texts)), batch_tokens, padded=not pack):
                rows = [of_side[i] for i in group]
                yield rows, lay([sequences[row] for row in rows])

    @property
    def one_backbone(self) -> bool:
        """Whether texts of both sides can share a forward pass: one backbone reads both, and nothing else does."""
        return self.passage_backbone is None and self.interaction is None

    @property
    def _reads_trees(self) -> bool:
        """Whether texts of both sides can lie in one row of trees, whatever the texts: every worker must do the same."""
        longest = max(self.text.query_length, self.text.passage_length)
        able = self.causal and self.one_backbone and not self._drops
        return able and prefix_tree.obstacle(self.backbone, longest) is None

    @property
    def _quantized(self) -> bool:
        return getattr(self.backbone.config, "quantization_config", None) is not None

    def compiles_on(self, device: torch.device) -> bool:
        """Return whether the layers of the backbone are compiled for a training on a device: on prefix trees on a GPU."""
        return flex_pays(device) and self._reads_trees and not self._quantized

    def compile_layers(self) -> None:
        """Compile the layers of the backbone if that pays on its device."""
        if self.compiles_on(self.device):
            compile_layers(*self.backbones)

    def _shares_prefixes(self, side: Side, sequences: Sequence[Tokens]) -> bool:
        """Return whether to encode shared prefixes once; log once if the backbone does not support it."""
        if not sequences or not self.causal or not prefix_tree.saves(sequences):
            return False
        obstacle = prefix_tree.obstacle(self.backbone_of(side), max(map(len, sequences)))
        if obstacle and not self._obstacle_logged:
            progress.say(f"{side}: shared prefixes are not reused, because {obstacle}")
            self._obstacle_logged = True
        return obstacle is None

    def embed(
        self, sequences: Sequence[Tokens], batch_tokens: int | None = None, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed tokenized texts; `batch_tokens` as of `encode_passages`.

        Returns:
            (len(sequences), d) float32 unit vectors, in the order of `sequences`.
        """
        return self._encode(sequences, lambda texts: texts, batch_tokens, show_progress_bar)

    @torch.inference_mode()
    def _encode(
        self, texts: Any, tokenize: Callable[[Any], Sequence[Tokens]], batch_tokens: int | None, show_progress_bar: bool
    ) -> np.ndarray:
        """Embed texts, or a single str."""
        if isinstance(texts, str):
            return self._encode([texts], tokenize, batch_tokens, show_progress_bar)[0]
        embeddings = np.zeros((len(texts), self.dimension), dtype=np.float32)
        was_training = self.training
        self.eval()
        silent: AbstractContextManager[progress.Advance] = nullcontext(lambda *_: None)
        overlap = len(texts) > pipeline.SLICE and self.device.type in pipeline.OVERLAPPING
        passes = self._passes(texts, tokenize, batch_tokens or pipeline.batch_tokens_of(self.backbone), overlap)
        began = time.monotonic()
        with closing(passes), progress.track("encode", len(texts)) if show_progress_bar else silent as advance:
            computed = ((rows, self(layout.to(self.device))) for rows, layout in passes)
            for rows, vectors in pipeline.fetched(computed):
                embeddings[rows] = vectors
                advance(len(rows))
                if overlap:
                    before, began = began, time.monotonic()
                    self._compile_after(began - before)
        self.train(was_training)
        return embeddings

    def _compile_after(self, seconds: float) -> None:
        """Compile the layers once many texts have been encoded for `pipeline.COMPILE_AFTER_S` seconds in all."""
        due = self._seconds <= pipeline.COMPILE_AFTER_S < self._seconds + seconds
        self._seconds += seconds
        if due and self.packs and not self._quantized:
            compile_layers(*self.backbones)

    def _passes(
        self, texts: Sequence[Any], tokenize: Callable[[Any], Sequence[Tokens]], batch_tokens: int, overlap: bool
    ) -> Generator[tuple[list[int], Layout], None, None]:
        """Divide texts into passes. With `overlap`, one thread tokenizes the next texts, and another lays out passes."""
        size = pipeline.SLICE if overlap else max(1, len(texts))
        tokenized = ((start, tokenize(texts[start : start + size])) for start in range(0, len(texts), size))
        passes = (
            ([start + row for row in rows], layout)
            for start, sequences in (pipeline.ahead(tokenized) if overlap else tokenized)
            for rows, layout in self.lay_out(sequences, batch_tokens, self.device, self.dtype)
        )
        return pipeline.ahead(passes) if overlap else passes

    def encode(
        self, inputs: str | Sequence[str], batch_tokens: int | None = None, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts without prefix or template, for tasks other than search.

        Texts are truncated to `passage_length`. If the encoder has two backbones, the passage backbone embeds them.
        Arguments and result are those of `encode_passages`.
        """
        tokenize = partial(self.texts.tokenize, side="passage", length=self.text.passage_length)
        return self._encode(inputs, tokenize, batch_tokens, show_progress_bar)

    def encode_queries(
        self,
        queries: str | Sequence[str],
        instructions: str | Sequence[str | None] | None = None,
        batch_tokens: int | None = None,
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Embed queries under their instructions. `exclusion_weight` moves a vector away from what its instruction excludes.

        Args:
            queries: n queries, or a single str.
            instructions: one per query (None or "" for none), or a single str for all queries.
            batch_tokens, show_progress_bar: as of `encode_passages`.

        Returns:
            float32 unit vectors: (n, d), or (d,) for a single str.

        Raises:
            InputError: the number of instructions differs from the number of queries.
        """
        count = 1 if isinstance(queries, str) else len(queries)
        each = [instructions] * count if instructions is None or isinstance(instructions, str) else instructions
        if len(each) != count:
            remedy = "give one for each query, or one str for all"
            raise InputError.of("instructions", None, f"{len(each)} for {count} queries", remedy)
        asked = list(map(Question, [queries] if isinstance(queries, str) else queries, each))
        texts = exclusions.with_excluded(asked, self.exclusion_weight)
        encoded = self._encode(texts, self._tokenize_questions, batch_tokens, show_progress_bar)
        vectors = exclusions.moved(asked, encoded, self.exclusion_weight)
        return vectors[0] if isinstance(queries, str) else vectors

    def _tokenize_questions(self, questions: Sequence[Question]) -> list[Tokens]:
        return self.tokenize_queries([q.query for q in questions], [q.instruction for q in questions])

    def encode_passages(
        self, passages: str | Sequence[str], batch_tokens: int | None = None, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed passages.

        Args:
            passages: n passages, or a single str.
            batch_tokens: tokens per pass, with padding; None: 4,096 on a CPU, by width and free memory on a GPU.
            show_progress_bar: show the number of encoded passages.

        Returns:
            float32 unit vectors: (n, d), or (d,) for a single str.
        """
        return self._encode(passages, self.tokenize_passages, batch_tokens, show_progress_bar)

    @staticmethod
    def similarity(embeddings1: np.ndarray, embeddings2: np.ndarray) -> np.ndarray:
        """Compute the (n, m) float32 cosines of (n, d) and (m, d) embeddings; (d,) counts as one embedding.

        Raises:
            InputError: the two have different dimensions.
        """
        first, second = (np.atleast_2d(np.asarray(side, dtype=np.float32)) for side in (embeddings1, embeddings2))
        if first.shape[1] != second.shape[1]:
            fault = f"{second.shape[1]} dimensions, and embeddings1 have {first.shape[1]}"
            raise InputError.of("embeddings2", None, fault, "encode both with one encoder and the same `dimensions`")
        lengths = np.outer(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
        return (first @ second.T) / np.maximum(lengths, np.finfo(np.float32).tiny)

    def save_pretrained(
        self, path: str | Path, weights: Sequence[Mapping[str, checkpoint_writer.Stored]] | None = None
    ) -> None:
        """Write this encoder as a sentence-transformers directory.

        Adapters are merged into the weights of this encoder, and also written by themselves.

        Args:
            path: directory to write, created if missing.
            weights: name -> fp32 parameter of each backbone, for an encoder on the meta device without adapters.

        Raises:
            InputError: parameters are not finite.
        """
        path = Path(path)
        pretrained.require_finite(f"path={path}", self.named_parameters())
        path.mkdir(parents=True, exist_ok=True)
        if adapters.has(self.backbones):
            adapters.save(self.backbones, path / checkpoint.ADAPTERS)
            adapters.merge(self.backbones)
        checkpoint_writer.write(
            path,
            checkpoint.Description(
                **vars(self.text),
                pooling=self.pooling,
                dimensions=self.dimensions,
                interaction="joint" if self.interaction is None else "cross_attention",
                exclusion_weight=self.exclusion_weight,
            ),
            self.backbones,
            self.tokenizer,
            weights,
        )
        if self.interaction is not None:
            self.interaction.write(path)

    def fingerprint(self) -> str:
        """Return 16 hex digits that change whenever an embedding may change; see `checkpoint.fingerprint`."""
        ending = self.tokenizer("")["input_ids"]
        asked = (*astuple(self.text), self.pooling, self.causal, self.dimension, len(self.backbones), ending)
        asked += (self.interaction is not None,)
        return checkpoint.fingerprint(str(self.source), str(asked))


_GENERATORS = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys() - {"xlnet"}
"""Types of models that generate text and fill no masks."""


def _is_causal(backbone: nn.Module) -> bool:
    """Return whether attention is causal: by the layers, or as generators of text are, unless the config says otherwise.

    `architectures` in the config is no evidence: it names the class that was saved last.
    """
    said = [module.is_causal for module in backbone.modules() if hasattr(module, "is_causal")]
    config: Any = backbone.config
    layers = any(said) if said else config.model_type in _GENERATORS
    return layers and getattr(config, "is_causal", True)
