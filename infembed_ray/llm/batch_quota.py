"""The quota of enqueued prompt tokens: how much of one model an endpoint takes in batches that have not ended."""

from __future__ import annotations

import math
import re

from infembed_ray.llm.chat import Request

EXCEEDED = "token_limit_exceeded"
"""Error code of a batch, or of its submission, that exceeds the quota."""
BYTES_PER_TOKEN = 3
"""UTF-8 bytes that count as a token: fewer than a token has in most languages, so a batch counts for more than it is."""

_STATED = re.compile(r"limit:?\s+(?:of\s+)?(\d[\d,]*)", re.IGNORECASE)
_LEAST_SHARE = 8
"""The quota is never taken for less than what the first refusal taught divided by this: other jobs may have used it."""


class QuotaExceeded(Exception):
    """The endpoint refused a batch because of its quota of enqueued tokens. The batch costs nothing and may come again."""


def prompt_tokens(request: Request) -> int:
    """Return about how many tokens of the quota a request takes."""
    size = sum(len(message["content"].encode()) for message in request.messages)
    size += len(str(request.parameters.get("response_format", "")).encode())
    return -(-size // BYTES_PER_TOKEN)


class EnqueuedTokens:
    """The quota of one model, as far as it is known.

    Args:
        limit: tokens; None: learned from refusals.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit: float = math.inf if limit is None else limit
        """Most prompt tokens in batches that have not ended."""
        self._least = 0.0

    def learn(self, tokens: int, others: int, message: str) -> None:
        """Lower the limit after a refusal.

        Args:
            tokens: of the refused batch.
            others: tokens of our other batches that had not ended.
            message: of the endpoint; OpenAI's states the quota.
        """
        stated = _STATED.search(message)
        quota = int(stated[1].replace(",", "")) if stated else math.inf
        if quota < self.limit:
            self.limit = quota
        else:  # what the endpoint has taken; if that is nothing, other jobs have the quota or our count is too low
            self.limit = min(self.limit, max(others or tokens * 3 / 4, self._least))
        self._least = self._least or self.limit / _LEAST_SHARE
