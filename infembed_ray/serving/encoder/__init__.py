"""Encoding engine of a replica: continuous batching and runtimes."""
