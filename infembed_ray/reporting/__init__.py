"""HTML reports: one self-contained file each, without fonts or network access."""
