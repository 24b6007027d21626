"""A stand-in for vLLM: the modules and names that Ray Serve LLM imports, without an engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

from pydantic import BaseModel, ConfigDict

__version__ = "stand-in"
_MODELS = {
    "entrypoints.openai.chat_completion.protocol": (
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        "ChatCompletionStreamResponse",
    ),
    "entrypoints.openai.completion.protocol": ("CompletionRequest", "CompletionResponse", "CompletionStreamResponse"),
    "entrypoints.pooling.embed.protocol": ("EmbeddingChatRequest", "EmbeddingCompletionRequest", "EmbeddingResponse"),
    "entrypoints.pooling.scoring.protocol": ("ScoreResponse", "ScoreTextRequest"),
    "entrypoints.serve.engine.protocol": ("ErrorInfo", "ErrorResponse"),
    "entrypoints.serve.tokenize.protocol": (
        "DetokenizeRequest",
        "DetokenizeResponse",
        "TokenizeChatRequest",
        "TokenizeCompletionRequest",
        "TokenizeResponse",
    ),
    "entrypoints.speech_to_text.transcription.protocol": (
        "TranscriptionRequest",
        "TranscriptionResponse",
        "TranscriptionStreamResponse",
    ),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow")


@dataclass
class AsyncEngineArgs:
    model: str = ""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None


@dataclass
class FrontendArgs:
    chat_template: str | None = None


def _module(name: str) -> ModuleType:
    """Return a submodule, with its parents."""
    parent, _, last = name.rpartition(".")
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
        if parent:
            setattr(_module(parent), last, sys.modules[name])
    return sys.modules[name]


for _path, _names in _MODELS.items():
    for _name in _names:
        _class = type(_name, (_Model,), {"__module__": f"vllm.{_path}"})
        setattr(_module(f"vllm.{_path}"), _name, _class)
for _path, _class in {"engine.arg_utils": AsyncEngineArgs, "entrypoints.launchers.cli_args": FrontendArgs}.items():
    setattr(_module(f"vllm.{_path}"), _class.__name__, _class)
