"""Results as an HTML page: one file that needs no network."""
