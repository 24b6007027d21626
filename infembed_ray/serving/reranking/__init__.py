"""The reranker that `infembed serve` starts: its arguments, its engine and its replica."""
