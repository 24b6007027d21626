"""What a run needs and costs, before anyone pays for it: memory, time, money."""
