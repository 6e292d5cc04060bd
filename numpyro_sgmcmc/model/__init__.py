"""Turn a NumPyro model into a potential energy on flat unconstrained positions."""
