"""Measuring: arms that take turns in one run, ratios with their uncertainty, and whether the text stayed the same."""
