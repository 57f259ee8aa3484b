"""Kernels, one operation per file: a torch function defines it, faster implementations must equal it."""
