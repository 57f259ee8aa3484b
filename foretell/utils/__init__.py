"""Helpers about the operating system."""
