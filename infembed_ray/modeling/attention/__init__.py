"""Attention over packed sequences and prefix trees."""
