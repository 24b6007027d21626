"""Retrieval tasks, with one reader per published layout."""
