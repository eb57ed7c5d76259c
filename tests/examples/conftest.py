import jax
import pytest


@pytest.fixture(autouse=True)
def jax_as_it_comes():
    """The examples are written for JAX's default settings, not for the strict ones of our tests."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        yield
