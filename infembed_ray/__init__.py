"""Retrieval that obeys instructions, at cluster scale: InF-IR synthesis, InF-Embed training and serving on Ray."""

__version__ = "0.1.0"
