"""Tuning: find the drafter and draft length for a machine, a model and a workload by successive halving."""
