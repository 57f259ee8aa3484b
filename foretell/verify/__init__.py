"""Verification rules: which draft tokens are accepted. Pure functions without model, cache or hidden randomness."""
