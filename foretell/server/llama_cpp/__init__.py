"""Requests and responses in the shapes of llama.cpp's own server, which editors use."""
