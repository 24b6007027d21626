"""Request routing: admission control, micro-batching, hedged calls and blue/green releases."""
