"""Potential energies of NumPyro models on flat unconstrained positions, from minibatches."""
