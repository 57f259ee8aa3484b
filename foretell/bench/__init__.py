"""Measuring: variants take turns in one run, ratios have their uncertainty, and outputs are compared."""
