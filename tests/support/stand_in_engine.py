"""An engine for Ray Serve LLM that answers like the stand-in LLM, without GPUs and weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray.serve.llm.openai_api_models import ChatCompletionRequest, ChatCompletionResponse

from tests.support import stand_in_answers

PACKAGE = Path(__file__).with_name("stand_in_vllm")
"""Directory of a package `vllm` that has the names which Ray Serve LLM imports."""
BROKEN = "broken"
NEVER = "never"
"""Models that fail to start, and that never have started."""


class StandInEngine:
    """The methods of an engine that Ray Serve LLM calls for chat completions."""

    def __init__(self, llm_config: Any) -> None:
        self._model = llm_config.model_id
        self._known = llm_config.get_engine_config().engine_kwargs

    async def start(self) -> None:
        if self._model == BROKEN:
            raise RuntimeError("no weights here")
        if self._model == NEVER:
            await asyncio.Event().wait()

    async def check_health(self) -> None:
        pass

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def chat(self, request: ChatCompletionRequest, _: Any = None) -> AsyncIterator[ChatCompletionResponse]:
        body = request.model_dump(exclude_none=True)
        yield ChatCompletionResponse(**stand_in_answers.completion(body))
