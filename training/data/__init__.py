"""Seeded generators of the training text; every text is written by this project, none is taken from elsewhere."""
