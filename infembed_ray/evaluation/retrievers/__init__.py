"""What ranks documents: encoders, BM25, rerankers and remote embedders."""
