import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

from jax_dsv4_fmha import _ffi

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; whatever names no device runs on the first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-examples", type=int, default=100, help="of every test marked fuzz")


def pytest_configure(config: pytest.Config) -> None:
    """The profile of the tests marked fuzz: what fails is small as it is, and not made smaller for minutes."""
    settings.register_profile(
        "fuzz",
        max_examples=config.getoption("--fuzz-examples"),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


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
