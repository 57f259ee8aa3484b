"""Planner: predicts step time, speedup, memory and price of models on devices, without weights or torch."""
