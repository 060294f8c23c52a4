"""Faults planted in the kernel of attention up to d 256: the interpreter must find and name each.

Most are faults of mbarriers, copies and products that any kernel could have.
"""

import dataclasses
import re
from collections.abc import Callable

import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels.verdict import Wrong
from interpreter.machine.copies import TensorMap
from interpreter.machine.hazards import Deadlock, Misuse, OutOfBounds, Race, Undefined
from tests import wrong_answers
from tests.planted import KIB, SEEDS, Subject, run_with, without
from tests.symptoms import EARLY, early, late, unfenced

DENSE_TILE = 160  # keys
DENSE = Subject(
    "mha_fwd_sm_90a_d128_bfloat16",
    {"b": 1, "s_q": 24, "s_kv": 420, "h_q": 8, "width": 1000},  # three tiles of keys, two tiles of rows
    "q_full0 q_full1 q_empty0 q_empty1 k_full0 k_full1 k_empty0 k_empty1 "
    "v_landed0 v_landed1 v_full0 v_full1 v_empty0 v_empty1",
    {"q": 2 * 32 * KIB, "k": 2 * 40 * KIB, "v": 2 * 40 * KIB},
)
FEW_KEYS = {"s_q": 80, "width": 60}  # five tiles of rows that see 75 keys at most, which it takes another way


def fragment_maximum(text: str) -> str:
    """The maximum of the scores that one lane holds, in place of the row's."""
    shuffle = r"shfl\.sync\.bfly\.b32 (?P<to>%r\d+), (?P<from>%r\d+), [12], 31, -1;(?P<max>\s*max\.f32)"
    shuffle = shuffle.replace(" (?P<to>", r"\s+(?P<to>", 1)
    return edits.replace(text, shuffle, lambda m: f"mov.b32 {m['to']}, {m['from']};{m['max']}")


def no_rescaling(text: str) -> str:
    """O keeps the scale of the first tile's maximum."""
    return edits.replace(text, r"vote\.sync\.any\.pred\s+(%p\d+), %p\d+, -1;", lambda m: f"setp.ne.b32 {m[1]}, 0, 0;")


def key_extent_64(text: str) -> str:
    """The scores' products over the first 64 columns of d."""
    chain = re.compile(r"\{\s*\.reg \.pred p;\s*setp[^;]*;\s*wgmma\.mma_async[^;]*n160k16[^;]*;\s*\}")
    found = list(chain.finditer(text))
    assert len(found) % 8 == 0 and found
    for n, m in reversed(list(enumerate(found))):
        if n % 8 >= 4:
            text = text[: m.start()] + text[m.end() :]
    return text


def tile_coordinate(step: int) -> Callable[[str], str]:
    """The producer's step in the coordinate of a key tile."""
    return lambda text: edits.replace(
        text, r"add\.s32\s+(%r\d+), \1, 160;", lambda m: f"add.s32 {m[1]}, {m[1]}, {step};"
    )


def shifted_destination(text: str) -> str:
    """V's second slab lands one swizzle atom too far: its end leaves the stage."""
    return edits.replace(
        text,
        r"(cp\.async\.bulk\.tensor\.4d\S+ \[%r\d+)\+(\d+)",
        lambda m: f"{m[1]}+{int(m[2]) + 1024}",
        slice(-1, None),
    )


def transaction_bytes(factor: float) -> Callable[[str], str]:
    def edit(text: str) -> str:
        return edits.replace(
            text,
            r"mov\.b32\s+(%r\d+), 40960;(\s*mbarrier\.arrive\.expect_tx)",
            lambda m: f"mov.b32 {m[1]}, {int(40960 * factor)};{m[2]}",
        )

    return edit


def count_of(name: str, count: int) -> Callable[[str], str]:
    """Another count for one mbarrier of DENSE."""

    def edit(text: str) -> str:
        offset = DENSE.barrier(text, name)
        base = re.search(r"mov\.b32\s+%r\d+, __dynamic_shmem__0;\s*shfl\.sync\.idx\.b32\s+(%r\d+)", text)
        assert base is not None
        place = rf"mbarrier\.init\.shared\.b64\s+\[(?:{base[1]}\+{offset}|{register_of(text, offset)})\], %r\d+;"
        return edits.replace(text, place, lambda m: re.sub(r", %r\d+;", f", {count};", m[0]))

    return edit


def register_of(text: str, offset: int) -> str:
    m = re.search(rf"add\.s32\s+(%r\d+), %r\d+, {offset};", text)
    return m[1] if m else "none"


def early_release(stages: int) -> Callable[[str], str]:
    """This many stages are given back before the wait for the products that read them."""
    place = rf"(wgmma\.wait_group\.sync\.aligned\s+[01];)((\s*mbarrier\.arrive\.shared\.b64[^;]*;){{{stages}}})"
    return lambda text: edits.replace(text, place, lambda m: m[2] + "\n\t" + m[1], slice(0, 1))


def descriptor_swizzle(text: str) -> str:
    """WGMMA reads 64-byte swizzled rows: the upper two bits of a descriptor's high word are 2 instead of 1."""
    return edits.replace(text, r"1073741888", str(1073741888 + (1 << 30)))


def unswizzled(tensor: TensorMap) -> TensorMap:
    return dataclasses.replace(tensor, swizzle=0)


def short_tensor(tensor: TensorMap) -> TensorMap:
    """The map claims more keys than there are."""
    extents = (tensor.extents[0], tensor.extents[1] + 4096, *tensor.extents[2:])
    return dataclasses.replace(tensor, extents=extents)


FAULTS = [
    PlantedFault(
        "row max over a fragment",
        DENSE,
        Wrong,
        r"lse is wrong",
        fragment_maximum,
        answers=wrong_answers.maximum_of_a_part(4, lambda j: j % 8 // 2),
    ),
    PlantedFault(
        "O not rescaled on the second tile",
        DENSE,
        Wrong,
        r"^o is wrong in \d+ of .*columns 0\.\.127 of o; lse is right",
        no_rescaling,
        answers=wrong_answers.without_rescaling(DENSE_TILE),
    ),
    PlantedFault(
        "scale applied twice",
        DENSE,
        Wrong,
        r"lse is wrong",
        parameters={"scale_log2": lambda x: x * 128**-0.5},
        answers=wrong_answers.at_scale(lambda scale: scale * 128**-0.5),
    ),
    PlantedFault(
        "TMA coordinate stuck at the first tile",
        DENSE,
        Wrong,
        r"lse is wrong",
        tile_coordinate(0),
        answers=wrong_answers.with_keys_at(lambda j: j % DENSE_TILE),
    ),
    PlantedFault(
        "producer indexed by the pipeline's count, K and V interleaved",
        DENSE,
        Wrong,
        r"lse is wrong",
        tile_coordinate(2 * DENSE_TILE),
        answers=wrong_answers.with_keys_at(lambda j: 2 * j - j % DENSE_TILE),
    ),
    PlantedFault(
        "K extent hard-coded to 64",
        DENSE,
        Wrong,
        r"lse is wrong",
        key_extent_64,
        answers=wrong_answers.with_k(wrong_answers.first_64_columns),
    ),
    PlantedFault(
        "wrong swizzle in a tensor map",
        DENSE,
        Wrong,
        r"lse is wrong",
        parameters={"k0.map": unswizzled},
        answers=wrong_answers.with_k(wrong_answers.swizzled_once),
    ),
    PlantedFault(
        "wrong swizzle in an SMEM descriptor",
        DENSE,
        Wrong,
        r"lse is wrong in 161 of 192 rows, first in batch entry 0, query 0, head 1 ",
        descriptor_swizzle,
    ),
    PlantedFault(
        "too many transaction bytes",
        DENSE,
        Deadlock,
        r"1024 transaction bytes outstanding",
        transaction_bytes(1.025),
    ),
    PlantedFault(
        "too few transaction bytes",
        DENSE,
        EARLY,
        early(r"wgmma", "k", r"tma"),
        transaction_bytes(0.5),
    ),
    PlantedFault(
        "a barrier count that restates the number of threads",
        DENSE,
        Deadlock,
        r"128 of 384 arrivals pending",
        count_of("k_empty0", 384),
    ),
    PlantedFault(
        "rows of Q that no query has are left as they are",
        DENSE,
        Undefined,
        r"nanosleep",
        without(r"st\.shared\.v4\.b32\s+\[[^\]]*\], \{0, 0, 0, 0\}", slice(0, 2)),
        case={"b": 2, "s_q": 1, "width": 1000},
    ),
    PlantedFault(
        "a release that never comes",
        DENSE,
        Deadlock,
        r"warp 0 at line \d+ waits for parity 1: mbarrier v_empty0 [^\n]* 256 of 256 arrivals pending",
        without(r"mbarrier\.arrive\.shared\.b64", slice(-4, -3)),
    ),
    PlantedFault(
        "a release that never comes, few keys",
        DENSE,
        Deadlock,
        r"warp 0 at line \d+ waits for parity 0: mbarrier v_empty0 [^\n]* 256 of 256 arrivals pending",
        without(r"mbarrier\.arrive\.shared\.b64", slice(-1, None)),
        case=FEW_KEYS,
    ),
    PlantedFault(
        "a warpgroup that waits for a turn which nobody gives it",
        DENSE,
        Deadlock,
        r"named barrier \d: 128 of 256 threads",
        without(r"bar(rier)?\.(cta\.)?arrive"),
        case=FEW_KEYS,
    ),
    PlantedFault(
        "a barrier count for one warpgroup of two",
        DENSE,
        Race,
        late(r"tma", "k", r"wgmma"),
        count_of("k_empty0", 128),
        case={"s_kv": 900},
    ),
    PlantedFault(
        "K's stage given back before the products are done",
        DENSE,
        Race,
        late(r"tma", "k", r"wgmma"),
        early_release(1),
    ),
    PlantedFault(
        "K's and Q's stages given back before the products are done, few keys",
        DENSE,
        Race,
        late(r"tma", "[qk]", r"wgmma"),
        early_release(2),
        case=FEW_KEYS,
    ),
    PlantedFault(
        "K read before it has come",
        DENSE,
        EARLY,
        early(r"wgmma", "k", r"tma"),
        DENSE.without_wait("k_full0", slice(0, 1)),
    ),
    PlantedFault(
        "V handed on before it has come",
        DENSE,
        EARLY,
        early(r"wgmma", "v", r"tma"),
        DENSE.without_wait("v_landed0", slice(0, 1)),
        case={"s_q": 8, "s_kv": 300},
    ),
    PlantedFault(
        "cleared keys read without a proxy fence",
        DENSE,
        Race,
        unfenced("v", r"st\.shared"),
        without(r"fence\.proxy\.async"),
    ),
    PlantedFault(
        "final O read before the last product",
        DENSE,
        Race,
        r"reads register %r\d+ while the wgmma of line \d+ may still write it",
        without(r"wgmma\.wait_group", slice(-3, -2)),
    ),
    PlantedFault(
        "final O read before the last product, few keys",
        DENSE,
        Race,
        r"reads register %r\d+ while the wgmma of line \d+ may still write it",
        without(r"wgmma\.wait_group", slice(-1, None)),
        case=FEW_KEYS,
    ),
    PlantedFault(
        "products that are never committed",
        DENSE,
        Race,
        r"reads register %r\d+ while the wgmma",
        without(r"wgmma\.commit_group", slice(0, 1)),
    ),
    PlantedFault(
        "no wgmma.fence after the registers",
        DENSE,
        Race,
        r"written with no wgmma\.fence",
        without(r"wgmma\.fence"),
    ),
    PlantedFault(
        "barriers used before they are made",
        DENSE,
        Misuse,
        r"mbarrier\.try_wait[^\n]*\n\s+there is no mbarrier at",
        without(r"bar\.sync\s+0"),
    ),
    PlantedFault(
        "barriers not visible to TMA",
        DENSE,
        Misuse,
        r"no fence\.mbarrier_init",
        without(r"fence\.mbarrier_init"),
    ),
    PlantedFault(
        "a tensor map larger than its array",
        DENSE,
        OutOfBounds,
        r"a tensor map reads past the end of k0",
        parameters={"k0.map": short_tensor},
    ),
    PlantedFault(
        "one tile of rows too many",
        DENSE,
        OutOfBounds,
        r"ld\.global[^\n]*\n\s+loads 4 bytes [^\n]*outside of every allocation",
        parameters={"tiles_inner": lambda x: x + 1},
    ),
    PlantedFault(
        "a destination moved by a swizzle atom",
        DENSE,
        Undefined,
        r"wgmma[^\n]*\n\s+reads SMEM of v, which nobody wrote",
        shifted_destination,
        case={"s_q": 8, "s_kv": 150},
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=SEEDS)


@pytest.mark.faults
@pytest.mark.parametrize("subject", [DENSE], ids=str)
def test_nothing_is_found_without_a_fault(subject):
    subject.judge_as_it_is()
