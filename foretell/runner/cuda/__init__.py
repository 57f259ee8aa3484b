"""The CUDA executor: CUDA graphs, warm-up and draft chains on the device."""
