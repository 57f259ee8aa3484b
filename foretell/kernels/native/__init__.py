"""C++ kernels for CPUs: in the wheel, or compiled on first use. `foretell.kernels` defines what they compute."""
