"""The `foretell` command line: one module per command."""
