"""The kernel that sums over devices, interpreted: a launch for each device, and planted faults."""

import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.all_reduce import BF16, judge, result
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Misuse
from jax_dsv4_fmha._host import all_reduce as raw
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


def impatient(ptx):
    """The kernel with three tries for each line."""
    return edits.replace(ptx, r"134217727|134217728", "3")


@pytest.mark.parametrize("half", [0, 1], ids=["first word", "second word"])
def test_it_waits_for_both_words_of_a_line_and_stops_at_last(half):
    """A line of which one word has not come: the device stops itself after a number of tries."""

    def come(inbox):
        inbox[1, 0, 2][("message1", "message2")[half]] = 0
        return inbox

    with pytest.raises(Misuse, match="stops itself"):
        result(KERNEL, arrays(2, 16), 1, come=come, edit=impatient)


def in_ptx(pattern, to, which=slice(None)):
    return lambda ptx: edits.replace(ptx, pattern, lambda m: m.expand(to), which)


SENT, STOPS, SUM = (Wrong, "is sent other lines"), (Misuse, "the kernel stops itself"), (Wrong, "has another sum")
FAULTS = {  # the device that has it, where it is, and what is wrong then
    "one half of the inbox": (0, in_ptx(r"and\.b32(\s+%r\d+, %r\d+), 1;", r"and.b32\1, 0;"), {}, STOPS),
    "the message before": (0, in_ptx(r"add\.s32(\s+%r\d+, %r\d+), 1;", r"add.s32\1, 0;", slice(1)), {}, SENT),
    "another device's place": (1, str, {"outboxes": lambda at: at + 8}, SENT),
    "the last device gets nothing": (0, str, {"devices": lambda n: n - 1}, SENT),
    "the last device is not waited for": (1, str, {"devices": lambda n: n - 1}, STOPS),
    "a line too few": (0, str, {"lines": lambda n: n - 1}, STOPS),
    "a word twice": (0, in_ptx(r"(mov\.b64 x, \{(%r\d+), %r\d+\}; mov\.b64 y, \{)%r\d+", r"\1\2"), {}, SENT),
    "numbers swapped": (0, in_ptx(r"(cvt\.rn\.bf16x2\.f32 %r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"), {}, SUM),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    device, edit, parameters, (raises, says) = FAULTS[fault]
    xs = arrays(2, 16)
    with pytest.raises(raises, match=says):
        judge(xs, {device: result(KERNEL, xs, device, edit=lambda ptx: impatient(edit(ptx)), **parameters)})


def test_refused_by_the_plan():
    """The limits are those that Python knows."""
    good = {"bytes": raw.LINE, "device": 0, "devices": raw.MOST_DEVICES, "tile_n": 256}
    native.plan_all_reduce(good)
    of_devices = [({"devices": n}, f"wanted 2 to {raw.MOST_DEVICES}") for n in (1, raw.MOST_DEVICES + 1)]
    of_bytes = [({"bytes": raw.LINE + 4}, f"a multiple of {raw.LINE}"), ({"bytes": 0}, "n is 0")]
    for changed, says in of_devices + of_bytes:
        with pytest.raises(ValueError, match=says):
            native.plan_all_reduce(good | changed)
