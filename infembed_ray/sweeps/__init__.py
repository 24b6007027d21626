"""Many trainings and their evaluations as one run, ending in one table."""
