"""`python -m sgap_jax doctor`: tests each layer on the way from a driver to a program of JAX."""
