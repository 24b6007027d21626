"""The engines by the scheme of their addresses."""

from __future__ import annotations

from infembed_ray.retrieval.stores.store import Address, Engine


def connect(address: Address, timeout_s: float = 60.0) -> Engine:
    """Connect to the engine at an address.

    Args:
        timeout_s: time-out of a call.

    Raises:
        StoreFault: its client is not installed, it does not answer, it has another version, or it refuses the token.
    """
    from infembed_ray.retrieval.stores.milvus import Milvus  # late: the client is optional

    return Milvus(address, timeout_s)
