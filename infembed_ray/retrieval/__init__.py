"""FAISS shards with their passages."""
