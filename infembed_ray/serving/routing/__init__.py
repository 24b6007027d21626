"""Request routing: admission control, micro-batching, retries and blue/green releases."""
