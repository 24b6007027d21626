"""From published results to the paper's tables and figures."""
