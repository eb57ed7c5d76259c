import jax
import pytest


@pytest.fixture(autouse=True)
def users_settings():
    """JAX as it comes: the peers are other people's code, and not as strict as our own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
