"""Causal attention over keys and values kept in blocks."""
