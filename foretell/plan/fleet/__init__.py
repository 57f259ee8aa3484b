"""Fleet simulation: request arrivals, routing over replicas, queueing and latency percentiles."""
