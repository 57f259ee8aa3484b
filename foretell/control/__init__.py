"""How much to guess for whom, nothing included."""
