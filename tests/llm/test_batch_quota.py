import math

from infembed_ray.llm.batch_quota import EnqueuedTokens, prompt_tokens
from tests.support.chat import request

OPENAI = "Enqueued token limit reached for gpt-4o-mini in organization org-1. Limit: 2,000,000 enqueued tokens. Please try again."


def test_the_stated_quota_is_learned_and_a_told_one_only_lowered() -> None:
    quota = EnqueuedTokens(None)
    assert quota.limit == math.inf
    quota.learn(3_000_000, 0, OPENAI)
    assert quota.limit == 2_000_000
    told = EnqueuedTokens(1_000_000)
    told.learn(900_000, 800_000, OPENAI)
    assert told.limit == 800_000


def test_without_a_stated_quota_the_limit_is_what_the_endpoint_has_taken() -> None:
    quota = EnqueuedTokens(None)
    quota.learn(500, 1500, "too many")
    assert quota.limit == 1500
    quota.learn(500, 1500, "too many")  # another batch that was refused beside the same ones
    assert quota.limit == 1500


def test_a_batch_refused_alone_lowers_the_limit_but_not_without_end() -> None:
    quota = EnqueuedTokens(None)
    quota.learn(1000, 0, "too many")
    assert quota.limit == 750
    for _ in range(50):
        quota.learn(int(quota.limit), 0, "too many")
    assert 90 <= quota.limit <= 100


def test_a_request_counts_for_at_least_the_tokens_of_english_and_of_chinese_text() -> None:
    english = "Instruction following retrieval returns what the user asked for, not what is merely similar. " * 20
    assert len(english.split()) * 1.3 < prompt_tokens(request(english))
    assert prompt_tokens(request("\u6307\u4ee4" * 100)) == 200
