"""A draft model whose tokenizer differs from that of the target."""
