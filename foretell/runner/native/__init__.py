"""The CPU executor over the native library."""
