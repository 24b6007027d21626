"""HTML reports: one self-contained file each, without scripts, fonts or network access."""
