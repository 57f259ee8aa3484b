"""Parsers that find reasoning and tool calls in generated text."""
