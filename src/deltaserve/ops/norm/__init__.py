"""Root-mean-square norms: the Gemma kind, fused with the residual, and gated."""
