"""Sweeps: many trainings and their evaluations as one run that ends in one table."""
