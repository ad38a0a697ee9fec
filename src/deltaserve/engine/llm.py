"""Use without a server: everything in the caller's process. Knows no protocol."""
