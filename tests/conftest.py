import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; whatever names no device runs on the first


@pytest.fixture
def cuda() -> jax.Device:
    """A CUDA device; the test is skipped without one."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError as e:
        pytest.skip(f"needs a CUDA device: {str(e).splitlines()[0]}")
