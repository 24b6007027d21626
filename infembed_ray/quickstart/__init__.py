"""The whole product, once, on a bundled sample."""
