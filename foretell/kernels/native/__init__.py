"""C++ kernels for CPUs, compiled on first use. `foretell.kernels` defines what they compute."""
