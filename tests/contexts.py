"""Finds whether this process can still use its GPUs: after an illegal address, say, every call of the driver fails."""

import os
import sys
from typing import Any

import pytest


def lost() -> str | None:
    """The first error of a CUDA context of this process that stays, by its device and name."""
    try:
        from cuda.bindings import driver

        error, count = driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):  # without a driver
        return None
    done = driver.CUresult.CUDA_SUCCESS
    if error != done:  # nobody has begun to use the driver
        return None
    for device in range(count):
        error, _, is_active = driver.cuDevicePrimaryCtxGetState(device)
        if error == done and is_active:
            error = _after_all(driver, device)
        if error != done:
            return f"device {device}: {error.name}"
    return None


def _after_all(driver: Any, device: int) -> Any:
    """Waits until all work of a device has ended, and returns what the driver says then."""
    error, context = driver.cuDevicePrimaryCtxRetain(device)
    if error != driver.CUresult.CUDA_SUCCESS:
        return error
    driver.cuCtxPushCurrent(context)
    (error,) = driver.cuCtxSynchronize()
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(device)
    return error


class StopsWhenLost:
    """Ends the process after a test marked gpu that leaves it without a context: all tests after it would fail. With
    xdist it is a worker, which is replaced, and the rest of the tests runs.
    """

    def __init__(self, lost: Any = lost) -> None:
        self.lost = lost

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        done = yield
        if item.get_closest_marker("gpu") and (error := self.lost()):
            says = f"{item.nodeid} left this process without a CUDA context ({error})"
            if hasattr(item.config, "workerinput"):
                print(f"\n{says}", file=sys.__stderr__, flush=True)
                os._exit(1)  # what xdist takes for a crash in this test
            pytest.exit(f"{says}, so no test after it can pass", returncode=pytest.ExitCode.TESTS_FAILED)
        return done
