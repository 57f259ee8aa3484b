"""Construction of an engine from a configuration."""
