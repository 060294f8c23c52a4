"""Faults planted in Hopper's attention kernels: what the files `test_ptx_*_mutations.py` share.

A fault is an edit of a kernel's PTX (interpreter/edits.py) or of its launch. Every fault runs with several seeds, and
must be found whatever the scheduler does.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping

import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention, native
from interpreter.kernels.launch import Kernel, launch
from interpreter.kernels.verdict import judge
from interpreter.machine.copies import TensorMap
from interpreter.machine.hazards import Fault
from interpreter.machine.state import SMEM_BASE
from tests import wrong_answers

SEEDS = (0, 1)
KIB = 1024
# Of kernels for d 512 over keys in 16 bits, once they are in shared memory.
MLA_BARRIERS = (
    "q_full q_empty k_full0 k_full1 k_full2 k_full3 k_empty0 k_empty1 k_empty2 k_empty3 "
    "max_shared0 max_shared1 p_shared0 p_shared1 all_read"
)
MLA_REGIONS = {"q": 64 * KIB, "k": 2 * 64 * KIB, "p": 2 * 8 * KIB, "o": 2 * 8 * KIB, "max": 512}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel, and the launch of it in which faults are planted."""

    key: str  # of its variant
    case: Mapping[str, int]  # extents of the operands
    barriers: str  # the names of its mbarriers, in the order of their addresses
    regions: Mapping[str, int]  # its shared memory before them, in bytes

    def __str__(self) -> str:
        return self.key

    @functools.cached_property
    def kernel(self) -> Kernel:
        if self.key not in native.built_keys():
            pytest.skip(f"{self.key} is not built")
        return Kernel.of(native.variant_of(self.key))

    def barrier(self, text: str, name: str) -> int:
        """The address of an mbarrier, from the start of shared memory."""
        made, names = edits.barriers(text), self.barriers.split()
        assert len(names) == len(made)
        return made[names.index(name)]

    def by_name(self, message: str) -> str:
        """The interpreter's message, with names for places in shared memory and mbarriers."""

        def region(m: re.Match[str]) -> str:
            first, name = int(m[2]) - SMEM_BASE, "the rest"
            for place, size in self.regions.items():
                if 0 <= first < size:
                    name = place
                first -= size
            return f"SMEM of {name}{m[1]}"

        for name, offset in zip(self.barriers.split(), edits.barriers(self.kernel.ptx), strict=False):
            message = re.sub(rf"mbarrier \+{offset}\b", f"mbarrier {name}", message)
        return re.sub(r"SMEM(| of CTA \d) bytes (\d+)\.\.\d+", region, message)

    def without_wait(self, name: str, which: slice = slice(None)) -> Callable[[str], str]:
        return lambda text: edits.drop_waits(text, {self.barrier(text, name)}, which)

    def judge_as_it_is(self) -> None:
        """Runs the kernel unchanged, and raises if its answer is wrong."""
        x = attention.operands(self.kernel.variant, **self.case)
        for seed in SEEDS:
            run = launch(self.kernel, x, seed=seed, processors=1)
            judge(run.run(), x, run.scale)


def run_with(fault: PlantedFault[Subject, Mapping[str, int]], seed: int) -> None:
    """The message names places in shared memory; a fault's very answer is compared before it is judged."""
    subject = fault.kernel
    k = dataclasses.replace(subject.kernel, ptx=fault.planted_in(subject.kernel.ptx))
    x = attention.operands(k.variant, **{**subject.case, **(fault.case or {})})
    run = launch(k, x, seed=seed, processors=1, edits=fault.parameters)
    try:
        got = run.run()
        if fault.answers is not None:
            wrong_answers.assert_given(got, fault.answers(x, run.scale))
        judge(got, x, run.scale)
    except Fault as found:
        raise type(found)(subject.by_name(str(found))) from None


# ---- edits


def without(pattern: str, which: slice = slice(None)) -> Callable[[str], str]:
    return lambda text: edits.drop(text, pattern, which)


def arrive_at_once(text: str) -> str:
    """The gatherer signals its copies as soon as it has issued them."""
    return edits.replace(
        text,
        r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64\s+(\[[^\]]*\]);",
        lambda m: f"mbarrier.arrive.shared.b64 _, {m[1]}, 1;",
    )


def keys_unfenced(text: str) -> str:
    """No fences before products whose operands other threads wrote."""
    return edits.replace(text, r"fence\.proxy\.async\.shared::cta;(\s+wgmma\.fence)", lambda m: m[1])


def longer_tile(tensor: TensorMap) -> TensorMap:
    """A tile of rows that overlap others goes on after its end."""
    d, rows, *others = tensor.extents
    return dataclasses.replace(tensor, extents=(d, rows + 1, *others))


def constants(**changed: int) -> Callable[[str], str]:
    """Other numbers in place of some, which are named by `_` and their digits."""

    def edit(text: str) -> str:
        for name, value in changed.items():
            text = edits.replace(text, rf"(mov\.b32\s+%r\d+, ){name[1:]};", lambda m, value=value: f"{m[1]}{value};")
        return text

    return edit
