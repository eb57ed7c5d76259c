import jax
import pytest


@pytest.fixture(autouse=True)
def users_settings():
    """JAX's default promotion settings: the peers are not written for the strict settings of our
    tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
