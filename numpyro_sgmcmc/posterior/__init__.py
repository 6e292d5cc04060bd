"""From a NumPyro model to functions of a flat unconstrained position."""
