"""Data-parallel serving: replicas of one model with a gateway, on Ray Serve."""
