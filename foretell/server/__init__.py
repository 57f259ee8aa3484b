"""The HTTP server: OpenAI's API over an engine. Nothing here imports torch until a model is loaded."""
