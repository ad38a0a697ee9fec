"""The gated delta rule: a linear-attention recurrence with a matrix state per head."""
