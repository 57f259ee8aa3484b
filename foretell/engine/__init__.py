"""The engine loop, and all that runs around it: requests, scheduling, verification, streams, warm-up."""
