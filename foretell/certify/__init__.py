"""The losslessness check a user can run."""
