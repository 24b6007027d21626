"""`infembed export`: write a checkpoint as an ONNX graph, from token ids to unit vectors.

Backbone, pooling and normalisation are in the graph. torch's TorchScript exporter needs no onnxscript.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infembed_ray.config.training import ExportSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import checkpoint
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import truncate
from infembed_ray.modeling.tokenizer import Side
from infembed_ray.progress import say
from infembed_ray.storage.steps import Published, Step, output_state, require_space

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_embedding"
OPSET = 18


def run(settings: ExportSettings) -> Published:
    """Publish `model.onnx`, or `query.onnx` and `passage.onnx`, and the tokenizer's files; InputError as `describe`."""
    located, step = prepare(settings)
    if done := step.finished():
        return done
    encoder = InstructionEncoder.from_pretrained(located.path)
    require_exportable(encoder, settings.model)
    with step.publish() as staging:
        sides: dict[str, Side] = {"model": "query"}
        if len(encoder.backbones) > 1:
            sides = {"query": "query", "passage": "passage"}
        for name, side in sides.items():
            export(encoder, side, staging.path / f"{name}.onnx")
        encoder.tokenizer.save_pretrained(staging.path)
        staging.counts = {"graphs": len(sides), "dimension": encoder.dimension}
        staging.facts = {"encoder": encoder.fingerprint(), "text": vars(encoder.text)}
        say(f"export: {', '.join(f'{name}.onnx' for name in sides)}, {encoder.dimension} dimensions")
    return step.published()


def prepare(settings: ExportSettings) -> tuple[checkpoint.Located, Step]:
    """Locate the model, and identify the run; InputError without a model or if the output cannot be written."""
    located = checkpoint.locate(settings.model, "model")
    return located, Step("export", settings, settings.output, located.inputs, located.names)


def require_exportable(encoder: InstructionEncoder, model: str) -> None:
    """Check that onnx is installed and the model is a joint bidirectional encoder; InputError otherwise."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise InputError("onnx is not installed; pip install onnx onnxruntime") from error
    if encoder.causal:
        raise InputError(f"model={model}: is a causal decoder, which cannot be exported; serve it without ONNX")
    if encoder.interaction is not None:
        fault = "uses interaction=cross_attention, which cannot be exported"
        raise InputError.of("model", model, fault, "give a joint model")


def export(encoder: InstructionEncoder, side: Side, path: Path) -> None:
    """Write the graph of one side: `INPUTS`, (n, width) int64 padded on the right, to `OUTPUT`, (n, d) float32."""
    ids = torch.full((2, 16), int(encoder.tokenizer.pad_token_id))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0  # without padding in this example, the tracer would drop the mask
    graph = _Graph(encoder, side).eval()
    implementation = graph.backbone.config._attn_implementation
    graph.backbone.set_attn_implementation("eager")  # the packed one cannot be traced; SDPA is NaN in torch 2.8
    axes = {name: {0: "texts", 1: "tokens"} for name in INPUTS} | {OUTPUT: {0: "texts"}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its deprecation for each module
        torch.onnx.export(
            graph,
            (ids, mask),
            str(path),
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )
    graph.backbone.set_attn_implementation(implementation)


class _Graph(nn.Module):
    """The encoder on padded rows only, because the indices of a layout would become loops in the graph."""

    def __init__(self, encoder: InstructionEncoder, side: Side) -> None:
        super().__init__()
        self.backbone: Any = encoder.backbone_of(side)
        self.pooling = encoder.pooling
        self.dimension = encoder.dimension

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pooling == "mean":
            real = attention_mask.unsqueeze(2).to(states.dtype)
            pooled = (states * real).sum(dim=1) / real.sum(dim=1)
        elif self.pooling == "cls":
            pooled = states[:, 0]
        else:
            last = (attention_mask.sum(dim=1) - 1).view(-1, 1, 1).expand(-1, 1, states.shape[2])
            pooled = states.gather(1, last).squeeze(1)
        return truncate(pooled, self.dimension)


def describe(settings: ExportSettings) -> Iterator[str]:
    """Yield what a run would do, line by line; InputError as `prepare`."""
    located, step = prepare(settings)
    if (yield from output_state(step)):
        return
    encoder = InstructionEncoder.from_pretrained(located.path, device="meta")
    require_exportable(encoder, settings.model)
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    yield f"graphs: {len(encoder.backbones)}, {encoder.dimension} dimensions"
    yield require_space(step, 4 * parameters)  # float32
