"""One operation a file: the torch function that defines it, and faster ones that must equal it."""
