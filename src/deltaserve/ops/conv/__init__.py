"""Causal depthwise convolution over a short window kept per sequence."""
