"""Sparse mixture of experts: routing and the experts themselves."""
