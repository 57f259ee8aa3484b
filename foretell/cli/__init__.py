"""The command `foretell`."""
