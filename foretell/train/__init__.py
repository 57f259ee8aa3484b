"""Training what guesses: from texts a target answers itself to a head or a small model that is served as it is."""
