"""Triton implementations of the kernels for CUDA devices. The torch functions in `foretell.kernels` define them."""
