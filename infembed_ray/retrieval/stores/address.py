"""Which values of the settings `output` and `index` are addresses of an external engine."""

SCHEMES = ("milvus+http", "milvus+https")


def is_address(value: str) -> bool:
    """Whether a value is an address of an external engine (`store.Address`)."""
    scheme, separator, _ = value.partition("://")
    return bool(separator) and scheme in SCHEMES
