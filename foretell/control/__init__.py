"""Controller: chooses the drafter and draft length of every sequence, from learned acceptance and latency models."""
