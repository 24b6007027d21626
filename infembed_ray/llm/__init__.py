"""The LLM client: requests, limits, budget and the journal of answers."""
