import asyncio
import base64
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.serving.encoder.batching import Embedded
from infembed_ray.serving.http.routes import _embeddings_json
from infembed_ray.serving.schema import EmbeddingsRequest, EmbeddingsResponse


def request(**fields: Any) -> EmbeddingsRequest:
    return EmbeddingsRequest.model_validate({"input": "x", "model": "m", **fields})


def answer(vectors: np.ndarray, asked: EmbeddingsRequest) -> EmbeddingsResponse:
    """What a client reads, by the model that describes it."""
    body = asyncio.run(_embeddings_json(Embedded(vectors, 3), 'a "model"', asked))
    read = EmbeddingsResponse.model_validate_json(body, strict=True)
    assert read.model == 'a "model"'
    return read


@given(st.integers(1, 5), st.integers(1, 32), st.integers(1, 32), st.integers(0, 2**32 - 1))
def test_both_encodings_are_the_same_float32_unit_vectors(n: int, d: int, dimensions: int, seed: int) -> None:
    vectors = np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    answers = [
        answer(vectors, request(dimensions=min(d, dimensions), encoding_format=encoding))
        for encoding in ("float", "base64")
    ]
    assert answers[0].usage.total_tokens == 3
    assert [item.index for item in answers[0].data] == list(range(n))
    numbers = np.array([item.embedding for item in answers[0].data], dtype=np.float32)
    decoded = np.stack([np.frombuffer(base64.b64decode(str(item.embedding)), "<f4") for item in answers[1].data])
    np.testing.assert_array_equal(numbers, decoded)
    assert numbers.shape == (n, min(d, dimensions))
    np.testing.assert_allclose(np.linalg.norm(numbers, axis=1), 1, rtol=1e-5)
    kept = vectors[:, : numbers.shape[1]]
    np.testing.assert_allclose(numbers * np.linalg.norm(kept, axis=1, keepdims=True), kept, atol=1e-6)


def test_a_vector_whose_kept_components_are_zero_stays_finite() -> None:
    vanished = answer(np.array([[0, 1]], dtype=np.float32), request(dimensions=1))
    assert vanished.data[0].embedding == [0.0]
