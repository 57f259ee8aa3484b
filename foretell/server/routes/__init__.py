"""HTTP routes: generation, tokenizer, status and the web page."""
