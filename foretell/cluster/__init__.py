"""Data-parallel serving: replicas of one model behind a gateway, on Ray Serve."""
