"""How well an encoder retrieves, and how well it obeys."""
