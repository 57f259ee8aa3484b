"""The same operations on a CUDA device, in Triton. The torch functions beside this folder define them."""
