"""Embeddings and search over HTTP."""
