"""Rotary position embedding on the first dimensions of each head."""
