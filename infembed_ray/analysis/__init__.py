"""What a set of InF-IR records holds: counts, lengths, cost."""
