"""The losslessness check that users run: `foretell certify`."""
