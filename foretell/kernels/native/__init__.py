"""Kernels in C++ for CPUs, compiled when first wanted. What they compute is defined in `kernels.quantized_copy`."""
