"""Figures, never gates: what runs here prints ratios measured in one run on one machine."""
