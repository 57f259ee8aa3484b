"""Which guesses stand. Pure functions: no model, no cache, no hidden randomness."""
