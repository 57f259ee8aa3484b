"""Ollama's API, translated to chat completions and completions."""
