"""Benchmarks and checks of the training path on one GPU; see `__main__.py`."""
