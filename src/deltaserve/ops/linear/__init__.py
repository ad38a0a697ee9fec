"""Dense projections."""
