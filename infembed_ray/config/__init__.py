"""Typed settings: one module for each stage."""
