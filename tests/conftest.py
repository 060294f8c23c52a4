import jax
import pytest

from jax_dsv4_fmha import _ffi

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; whatever names no device runs on the first


@pytest.fixture
def cuda() -> jax.Device:
    """A CUDA device; the test is skipped without one."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError as e:
        pytest.skip(f"needs a CUDA device: {str(e).splitlines()[0]}")


@pytest.fixture
def built(monkeypatch):
    """As if every kernel were built, for an architecture that is not here."""
    monkeypatch.setattr(_ffi, "built_for", lambda op, **_: ("sm_90a",))
    monkeypatch.setattr(_ffi, "local_architectures", lambda: ())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
