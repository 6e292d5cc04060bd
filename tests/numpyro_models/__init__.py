"""Models of the kinds in NumPyro's documentation, beside NUTS."""
