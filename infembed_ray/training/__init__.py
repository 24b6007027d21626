"""InF-Embed training (paper, section 5): marginal contrastive objectives over InF-IR tuples."""
