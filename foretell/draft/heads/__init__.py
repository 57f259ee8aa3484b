"""Drafters that run a trained head on the hidden states of the target."""
