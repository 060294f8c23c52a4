"""A test that loses the CUDA context of its process is named, and no other test fails for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contexts import lost

PLUGIN = """
from pathlib import Path
from tests.contexts import StopsWhenLost

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu")
    config.pluginmanager.register(StopsWhenLost(lambda: "device 0: CUDA_ERROR_ILLEGAL_ADDRESS" if LOST else None))

LOST = []
"""
TESTS = """
import pytest
import conftest

@pytest.mark.parametrize("i", range(4))
@pytest.mark.gpu
def test_launch(i):
    assert not conftest.LOST, "the driver answers with an error"
    if i == 1:
        conftest.LOST.append(i)
    assert i != 1, "an illegal address"

def test_without_a_gpu():
    pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_its_process_ends(workers, tmp_path):
    """Alone there are no tests after it; a worker of xdist is replaced, and all others pass."""
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *workers, "test_it.py"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    out = run.stdout + run.stderr
    says = "test_it.py::test_launch[1] left this process without a CUDA context (device 0: CUDA_ERROR_ILLEGAL_ADDRESS)"
    assert run.returncode == 1 and says in out, out
    assert "FAILED test_it.py::test_launch[1] - AssertionError: an illegal address" in out
    passed = ["0", "2", "3"] if workers else ["0"]
    assert [i for i in "0123" if f"PASSED test_it.py::test_launch[{i}]" in out] == passed
    assert "AssertionError: the driver answers with an error" not in out
    assert ("PASSED test_it.py::test_without_a_gpu" in out) == bool(workers)


def test_nothing_is_lost_here():
    assert lost() is None


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_an_illegal_address_is_seen():
    """In a process of its own, in which a kernel reads where nothing is."""
    program = """
import jax, jax.numpy as jnp
from cuda.bindings import driver
from tests.contexts import lost
jax.block_until_ready(jnp.ones(3) + 1)
assert lost() is None
driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
ptx = (
    b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry f() { .reg .b64 %a; .reg .b32 %x; "
    b"mov.b64 %a, 64; ld.global.b32 %x, [%a]; st.global.b32 [%a], %x; ret; }\\0"
)
_, module = driver.cuModuleLoadData(ptx)
_, function = driver.cuModuleGetFunction(module, b"f")
driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
assert "CUDA_ERROR_ILLEGAL_ADDRESS" in lost(), lost()
import os
os._exit(7)
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 7, run.stderr
