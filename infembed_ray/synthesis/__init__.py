"""InF-IR records from seeds (paper, section 4): LLM calls fanned out, journaled and filtered."""
