"""Many copies of one model behind one address, on Ray Serve."""
