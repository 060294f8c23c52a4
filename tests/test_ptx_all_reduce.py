"""The kernel that sums over devices, interpreted: a launch for each device, and planted faults."""

import re

import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.all_reduce import BF16, judge, result
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Fault, Misuse
from kernels.abi import AllReduce

BUILT = {v.key: v for v in native.built(AllReduce)}
KERNEL = next(iter(BUILT.values()), None)

pytestmark = pytest.mark.skipif(not BUILT, reason="without kernels")


def arrays(devices, n, seed=0):
    return np.random.default_rng(seed).standard_normal((devices, n)).astype(BF16)


@pytest.mark.parametrize("sent", [0, 1, 2, 2**31 - 1, 2**32 - 2], ids=lambda sent: f"after {sent}")
@pytest.mark.parametrize(("devices", "n"), [(2, 4), (2, 4 * 300), (3, 4 * 33000), (8, 4 * 5)])
def test_every_device_has_the_sum(devices, n, sent):
    """Lines of one thread, of two CTAs, and more than the CTAs take at a time; the number of a message runs over."""
    xs = arrays(devices, n)
    judge(xs, {device: result(KERNEL, xs, device, sent=sent) for device in range(devices)})


def test_numbers_that_are_not_finite():
    xs = arrays(2, 16)
    xs[0, :3], xs[1, :3] = (np.inf, np.nan, np.inf), (1, 1, -np.inf)
    got = result(KERNEL, xs, 1)
    assert np.isposinf(got[0]) and np.isnan(got[1:3]).all() and np.isfinite(got[3:]).all()


@pytest.mark.parametrize("half", [0, 1], ids=["first word", "second word"])
def test_it_waits_for_both_words_of_a_line_and_stops_at_last(half):
    """A line of which one word has not come: the device stops itself after a number of tries."""

    def come(inbox):
        inbox[1, 0, 2][("message1", "message2")[half]] = 0
        return inbox

    def soon(ptx):
        return edits.replace(ptx, r"134217727|134217728", lambda m: "3")

    with pytest.raises(Misuse, match="stops itself"):
        result(KERNEL, arrays(2, 16), 1, come=come, edit=soon)


FAULTS = {  # what is wrong, in the PTX or in a parameter
    "one half of the inbox": (lambda p: edits.replace(p, r"and\.b32 (\s*%r\d+, %r\d+), 1;", r"and.b32 \1, 0;"), {}),
    "the message before": (
        lambda p: edits.replace(p, r"add\.s32 (\s*%r\d+, %r\d+), 1;", r"add.s32 \1, 0;", slice(1)),
        {},
    ),
    "another device's place": (str, {"outboxes": lambda at: at + 8}),
    "fewer devices": (str, {"devices": lambda n: n - 1}),
    "fewer lines": (str, {"lines": lambda n: n - 1}),
    "a word twice": (
        lambda p: re.sub(r"(mov\.b64 x, \{)(%r\d+)(, %r\d+\}; mov\.b64 y, \{)(%r\d+)", r"\1\2\3\2", p),
        {},
    ),
    "numbers swapped": (lambda p: re.sub(r"(cvt\.rn\.bf16x2\.f32 %r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2", p), {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    edit, parameters = FAULTS[fault]
    xs = arrays(2, 16)

    def soon(ptx):
        return edits.replace(edit(ptx), r"134217727|134217728", lambda m: "3")

    with pytest.raises((Wrong, Fault)):
        judge(xs, {device: result(KERNEL, xs, device, edit=soon, **parameters) for device in range(2)})


def test_refused_by_the_plan():
    good = {"bytes": 64, "device": 0, "devices": 2, "tile_n": 256}
    native.plan_all_reduce(good)
    for changed, says in (
        ({"devices": 1}, "wanted 2 to 8"),
        ({"devices": 9}, "wanted 2 to 8"),
        ({"bytes": 12}, "of 8"),
    ):
        with pytest.raises(ValueError, match=says):
            native.plan_all_reduce(good | changed)
