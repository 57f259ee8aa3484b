"""Running draft heads: their KV cache, prefill, draft steps and sampling."""
