"""LLM raters on the annotators' items: who could be the judge of a synthesis."""
