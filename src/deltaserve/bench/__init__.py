"""Measurements: steps of an engine, single ops, a server under load. Each figure stands beside its floor."""
