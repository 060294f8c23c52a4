"""Planted faults that this project has lived through, or could have: the interpreter must find and name each.

A fault is an edit of a kernel's PTX (interpreter/edits.py) or of its launch. Every fault runs with several seeds, and
must be found whatever the scheduler does. Faults of Blackwell's kernels are in test_ptx_*_sm100.py, faults in programs
written by hand, for everything else about clusters, in test_ptx_clusters.py and test_ptx_pairs.py.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention, native
from interpreter.kernels.launch import Kernel, launch
from interpreter.kernels.verdict import Wrong, judge
from interpreter.machine.copies import TensorMap
from interpreter.machine.hazards import Deadlock, Fault, Leak, Misuse, OutOfBounds, Race, Undefined
from interpreter.machine.state import SMEM_BASE
from tests import wrong_answers
from tests.symptoms import EARLY, early, late, unfenced, unordered

SEEDS = (0, 1)
DENSE, LATENT = "mha_fwd_sm_90a_d128_bfloat16", "mla_span_fwd_sm_90a_d512_bfloat16"
TURNED = "mla_span_fwd_turned_sm_90a_d512_bfloat16"
LONG_ODD = LATENT + "_h63"  # whose odd tiles have 16 keys more
GATHERED = "mla_sparse_fwd_sm_90a_d512_bfloat16"
FEW_HEADS = "csa_fwd_sm_90a_d512_bfloat16_h16"
PAIRED = "dsv4_decode_sm_90a_d512_bfloat16_v4_fp8"  # two CTAs, each of which unpacks for both
PACKED = PAIRED + "_h64"
NIBBLES = "dsv4_decode_sm_90a_d512_bfloat16_v41_fp4_h64"
E4M3 = "csa_fwd_e4m3_sm_90a_d512_bfloat16"
MXFP4 = "dsv4_decode_sm_90a_d512_bfloat16_v4_fp4_h64"
SHAPES: dict[str, dict[str, int]] = {
    DENSE: {"b": 1, "s_q": 24, "s_kv": 420, "h_q": 8, "width": 1000},  # three tiles of 160 keys, two tiles of rows
    LATENT: {"b": 1, "s_q": 12, "s_kv": 230, "h_q": 8, "width": 1000},  # four tiles of 64 keys
    TURNED: {"b": 1, "s_q": 9, "s_kv": 70, "h_q": 8, "width": 1000},  # two tiles of rows, two of keys
    LONG_ODD: {"b": 1, "s_q": 24, "s_kv": 150, "h_q": 8, "width": 128},  # 64 keys and 71
    GATHERED: {"b": 1, "s_q": 3, "s_kv": 300, "h_q": 8, "topk": 200},
    FEW_HEADS: {"b": 1, "s_q": 4, "s_kv": 300, "h_q": 16, "s_kv1": 300, "topk": 200},
    E4M3: {"b": 1, "s_q": 3, "s_kv": 90, "h_q": 8, "s_kv1": 300, "topk": 200},  # two tiles and four, after two of q
    PACKED: {"b": 1, "s_q": 2, "s_kv": 70, "h_q": 8, "s_kv1": 300, "topk": 200},
    NIBBLES: {"b": 1, "s_q": 2, "s_kv": 9, "h_q": 8, "s_kv1": 90, "topk": 80},
    MXFP4: {"b": 1, "s_q": 2, "s_kv": 9, "h_q": 8, "s_kv1": 90, "topk": 80},
    PAIRED: {"b": 1, "s_q": 2, "s_kv": 70, "h_q": 66, "s_kv1": 300, "topk": 200},
}
DENSE_TILE = 160  # keys
FEW_KEYS = {"s_q": 80, "width": 60}  # five tiles of rows that see 75 keys at most, which DENSE takes another way
BARRIERS = {  # the mbarriers of a kernel, in the order of their addresses
    DENSE: "q_full0 q_full1 q_empty0 q_empty1 k_full0 k_full1 k_empty0 k_empty1 "
    "v_landed0 v_landed1 v_full0 v_full1 v_empty0 v_empty1",
    LATENT: "q_full q_empty k_full0 k_full1 k_full2 k_full3 k_empty0 k_empty1 k_empty2 k_empty3 "
    "max_shared0 max_shared1 p_shared0 p_shared1 all_read",
}
BARRIERS[E4M3] = " ".join(
    f"{ring}_{state}{stage}"
    for ring, stages in (("info", 2), ("k", 5), ("p", 4), ("sums", 2))
    for state in ("full", "empty")
    for stage in range(stages)
)
BARRIERS |= dict.fromkeys((TURNED, LONG_ODD, GATHERED, PACKED, NIBBLES, MXFP4, PAIRED), BARRIERS[LATENT])
KIB = 1024
REGIONS = {  # its shared memory before them, in bytes
    DENSE: {"q": 2 * 32 * KIB, "k": 2 * 40 * KIB, "v": 2 * 40 * KIB},
    LATENT: {"q": 64 * KIB, "k": 2 * 64 * KIB, "p": 2 * 8 * KIB, "o": 2 * 8 * KIB, "max": 512},
    LONG_ODD: {"q": 64 * KIB, "k": 144 * KIB, "p": 18 * KIB, "max": 512},
    FEW_HEADS: {"q": 16 * KIB, "k": 80 * KIB, "p": 16 * KIB, "found": 512},
    E4M3: {"q": 32 * KIB, "k": 5 * 32 * KIB, "p": 4 * 4 * KIB, "factor": KIB, "rose": 64, "sums": 512},
}
REGIONS[TURNED] = {**REGIONS[LATENT], "squares": 512}
REGIONS |= dict.fromkeys((GATHERED, PACKED, NIBBLES, MXFP4, PAIRED), REGIONS[LATENT])


@functools.cache
def kernel(key: str) -> Kernel:
    variant = native.variant_of(key)
    if key not in {v.key for v in native.host_library.variants()}:
        pytest.skip(f"{key} is not built")
    return Kernel.of(variant)


def barrier(text: str, key: str, name: str) -> int:
    """The address of an mbarrier, from the start of shared memory."""
    made = edits.barriers(text)
    names = BARRIERS[key].split()
    assert len(names) == len(made)
    return made[names.index(name)]


def by_name(message: str, key: str) -> str:
    """The interpreter's message, with names for places in shared memory and mbarriers."""

    def region(m: re.Match[str]) -> str:
        first, name = int(m[2]) - SMEM_BASE, "the rest"
        for place, size in REGIONS[key].items():
            if 0 <= first < size:
                name = place
            first -= size
        return f"SMEM of {name}{m[1]}"

    names = BARRIERS.get(key, "").split()
    for name, offset in zip(names, edits.barriers(kernel(key).ptx), strict=False):
        message = re.sub(rf"mbarrier \+{offset}\b", f"mbarrier {name}", message)
    return re.sub(r"SMEM(| of CTA \d) bytes (\d+)\.\.\d+", region, message)


# ---- edits


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
        offset = barrier(text, DENSE, name)
        base = re.search(r"mov\.b32\s+%r\d+, __dynamic_shmem__0;\s*shfl\.sync\.idx\.b32\s+(%r\d+)", text)
        assert base is not None
        place = rf"mbarrier\.init\.shared\.b64\s+\[(?:{base[1]}\+{offset}|{register_of(text, offset)})\], %r\d+;"
        return edits.replace(text, place, lambda m: re.sub(r", %r\d+;", f", {count};", m[0]))

    return edit


def register_of(text: str, offset: int) -> str:
    m = re.search(rf"add\.s32\s+(%r\d+), %r\d+, {offset};", text)
    return m[1] if m else "none"


def without_wait(key: str, name: str, which: slice = slice(None)) -> Callable[[str], str]:
    return lambda text: edits.drop_waits(text, {barrier(text, key, name)}, which)


def without(pattern: str, which: slice = slice(None)) -> Callable[[str], str]:
    return lambda text: edits.drop(text, pattern, which)


def early_release(stages: int) -> Callable[[str], str]:
    """This many stages are given back before the wait for the products that read them."""
    place = rf"(wgmma\.wait_group\.sync\.aligned\s+[01];)((\s*mbarrier\.arrive\.shared\.b64[^;]*;){{{stages}}})"
    return lambda text: edits.replace(text, place, lambda m: m[2] + "\n\t" + m[1], slice(0, 1))


def odd_handed_back_early(text: str) -> str:
    """Right does not wait for the products of its own tile before its half of that tile is given back."""
    arrival = rf"\s*mbarrier\.arrive\.shared\.b64[^;]*\+{barrier(text, PACKED, 'k_empty3')}\][^;]*;"
    return edits.replace(text, rf"wgmma\.wait_group\.sync\.aligned\s+0;({arrival})", lambda m: m[1])


def arrive_at_once(text: str) -> str:
    """The gatherer signals its copies as soon as it has issued them."""
    return edits.replace(
        text,
        r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64\s+(\[[^\]]*\]);",
        lambda m: f"mbarrier.arrive.shared.b64 _, {m[1]}, 1;",
    )


def queries_unfenced(text: str) -> str:
    """No fence after Q is turned, before the other warpgroup multiplies it."""
    return edits.replace(text, r"fence\.proxy\.async\.shared::cta;(\s+bar\.sync\s+3, 256;)", lambda m: m[1])


def queries_not_awaited(text: str) -> str:
    """Left does not wait until Q is turned."""
    return edits.replace(text, r"bar\.sync\s+3, 256;", "bar.arrive 3, 256;", slice(0, 1))


def keys_unfenced(text: str) -> str:
    """No fences before products whose operands other threads wrote."""
    return edits.replace(text, r"fence\.proxy\.async\.shared::cta;(\s+wgmma\.fence)", lambda m: m[1])


def fence_before(what: str) -> Callable[[str], str]:
    """No proxy fence where this comes next."""
    return lambda text: edits.replace(text, rf"fence\.proxy\.async\.shared::cta;(\s+{what})", lambda m: m[1])


def weights_unfenced(text: str) -> str:
    """The first fence before a meeting of a consumer's warps is missing."""
    met = r"fence\.proxy\.async\.shared::cta;(\s+bar\.sync\s+1, 128;)"
    return edits.replace(text, met, lambda m: m[1], slice(0, 1))


def telling_nobody(text: str) -> str:
    return edits.replace(text, r"@p mbarrier\.arrive\.shared::cluster[^;]*;", "")


def awaits_own_cta(text: str) -> str:
    """The producers wait only for the warps of their own CTA."""
    return edits.replace(text, r"barrier\.cluster\.wait;", "bar.sync 3, 256;", slice(0, 1))


def expecting_nothing(text: str) -> str:
    """No bytes are expected from the peer, except those of Q."""
    sent = r"mbarrier\.arrive\.expect_tx\.shared\.b64\s+%rd\d+, (\[[^\]]*\]), %r\d+;"
    return edits.replace(text, sent, lambda m: f"mbarrier.arrive.shared.b64 _, {m[1]}, 1;", slice(1, None))


def constants(**changed: int) -> Callable[[str], str]:
    """Other numbers in place of some, which are named by `_` and their digits."""

    def edit(text: str) -> str:
        for name, value in changed.items():
            text = edits.replace(text, rf"(mov\.b32\s+%r\d+, ){name[1:]};", lambda m, value=value: f"{m[1]}{value};")
        return text

    return edit


def descriptor_swizzle(text: str) -> str:
    """WGMMA reads 64-byte swizzled rows: the upper two bits of a descriptor's high word are 2 instead of 1."""
    return edits.replace(text, r"1073741888", str(1073741888 + (1 << 30)))


def named_barrier_count(text: str) -> str:
    return edits.replace(text, r"bar\.sync\s+1, 128;", "bar.sync 1, 256;")


def unswizzled(tensor: TensorMap) -> TensorMap:
    return dataclasses.replace(tensor, swizzle=0)


def short_tensor(tensor: TensorMap) -> TensorMap:
    """The map claims more keys than there are."""
    extents = (tensor.extents[0], tensor.extents[1] + 4096, *tensor.extents[2:])
    return dataclasses.replace(tensor, extents=extents)


def longer_tile(tensor: TensorMap) -> TensorMap:
    """A tile of keys that overlap others goes on after its end."""
    d, keys, *others = tensor.extents
    return dataclasses.replace(tensor, extents=(d, keys + 1, *others))


FAULTS = [
    # wrong answers
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
        "a key after a tile's last, where there are to be zeros",
        LATENT,
        OutOfBounds,
        r"a tensor map reads past the end of k0",
        parameters={"cut_k0.map": longer_tile},
    ),
    PlantedFault(
        "wrong swizzle in an SMEM descriptor",
        DENSE,
        Wrong,
        r"lse is wrong in 161 of 192 rows, first in batch entry 0, query 0, head 1 ",
        descriptor_swizzle,
    ),
    # nothing can proceed, or something is left over
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
        "a named barrier that restates the number of threads",
        LATENT,
        Deadlock,
        r"named barrier 1: 128 of 256 threads",
        named_barrier_count,
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
    # races
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
        without_wait(DENSE, "k_full0", slice(0, 1)),
    ),
    PlantedFault(
        "V handed on before it has come",
        DENSE,
        EARLY,
        early(r"wgmma", "v", r"tma"),
        without_wait(DENSE, "v_landed0", slice(0, 1)),
        case={"s_q": 8, "s_kv": 300},
    ),
    PlantedFault(
        "P read before the softmax barrier",
        LATENT,
        EARLY,
        unordered(r"wgmma", "p", r"stmatrix"),
        without_wait(LATENT, "p_shared0", slice(0, 1)),
    ),
    PlantedFault(
        "the maximum read before it is handed over",
        LATENT,
        EARLY,
        early(r"ld\.shared", "max", r"st\.shared"),
        without_wait(LATENT, "max_shared0", slice(0, 1)),
    ),
    PlantedFault(
        "P shared without a proxy fence",
        LATENT,
        Race,
        unfenced("p", r"stmatrix"),
        without(r"fence\.proxy\.async"),
    ),
    PlantedFault(
        "the norm of q without eps",
        TURNED,
        Wrong,
        r"lse is wrong in 63 of 72 rows, first in batch entry 0, query 0, head 0 ",
        parameters={"eps": lambda x: 0.0},
        answers=lambda x, scale: attention.answer(x, scale, eps=0.0),
    ),
    PlantedFault(
        "a row turned by the next query's position",
        TURNED,
        OutOfBounds,
        r"ld\.global\.[^\n]*\n[^\n]*table",
        parameters={"table": lambda address: address + 256},
    ),
    PlantedFault(
        "Q turned without a proxy fence",
        TURNED,
        Race,
        unfenced("q", r"st\.shared"),
        queries_unfenced,
    ),
    PlantedFault(
        "Q and its squares read before they are there",
        TURNED,
        EARLY,
        early(r"ld\.shared", "squares", r"st\.shared"),
        queries_not_awaited,
    ),
    PlantedFault(
        "cleared keys read without a proxy fence",
        DENSE,
        Race,
        unfenced("v", r"st\.shared"),
        without(r"fence\.proxy\.async"),
    ),
    PlantedFault(
        "gathered keys read without a proxy fence",
        GATHERED,
        Race,
        unfenced("k", r"cp\.async"),
        keys_unfenced,
    ),
    PlantedFault(
        "arrives before its copies are there",
        GATHERED,
        EARLY,
        early(r"wgmma", "k", r"cp\.async"),
        arrive_at_once,
    ),
    PlantedFault(
        "odd columns in place of even ones",
        E4M3,
        Wrong,
        r"^o is wrong in \d+ of .*; lse is right",
        constants(_25632=0x7531),
    ),
    PlantedFault(
        "a byte of a pair for two keys",
        E4M3,
        Wrong,
        r"^o is wrong in \d+ of .*; lse is right",
        constants(_25632=0x4420),
    ),
    PlantedFault(
        "the unit of another batch entry",
        E4M3,
        OutOfBounds,
        r"ld\.global[^\n]*\n[^\n]*table",
        parameters={"table": lambda address: address + 4},
    ),
    PlantedFault(
        "codes of keys and q read without a proxy fence",
        E4M3,
        Race,
        unfenced("(k|q)", r"(cp\.async|st\.shared)"),
        fence_before(r"// begin inline asm\s+mov\.b32"),
    ),
    PlantedFault(
        "codes of P read without a proxy fence",
        E4M3,
        Race,
        unfenced("p", r"st\.shared"),
        fence_before(r"bar\.warp\.sync\s+-1;"),
    ),
    PlantedFault(
        "codes announced before they are there",
        E4M3,
        EARLY,
        early(r"(wgmma|ldmatrix|ld\.shared)", "k", r"cp\.async"),
        arrive_at_once,
    ),
    PlantedFault(
        "codes of P read before they are there",
        E4M3,
        EARLY,
        unordered(r"(wgmma|ld\.shared)", "(p|rose|factor)", r"st\.shared"),
        without_wait(E4M3, "p_full0"),
    ),
    PlantedFault(
        "codes of P written over others that are still read",
        E4M3,
        EARLY,
        unordered(r"(wgmma|ld\.shared)", "(p|rose|factor)", r"st\.shared"),
        without_wait(E4M3, "p_empty0"),
        case={"s_kv1": 600, "topk": 600},  # more tiles than places
    ),
    PlantedFault(
        "codes of keys written over others that are still read",
        E4M3,
        Race,
        r"cp\.async[^\n]*\n\s+overwrites SMEM of k while nothing orders this",
        without_wait(E4M3, "k_empty0"),
    ),
    PlantedFault(
        "the sum of a tile added before it is complete",
        E4M3,
        Race,
        r"reads register %r\d+ while the wgmma of line \d+ may still write it",
        without(r"wgmma\.wait_group", slice(-1, None)),
    ),
    PlantedFault(
        "e2m1 without its sign",
        NIBBLES,
        Wrong,
        r"lse is wrong",
        constants(_1027489600=0x43424140, _876100156=0x4C484644),
        answers=wrong_answers.with_the_second(np.abs),
    ),
    PlantedFault(
        "the high nibble of a byte first",
        NIBBLES,
        Wrong,
        r"lse is wrong",
        constants(_29040=0x7071, _29554=0x7273),
        answers=wrong_answers.with_the_second(lambda k: k.reshape(*k.shape[:-1], -1, 2)[..., ::-1].reshape(k.shape)),
    ),
    PlantedFault(
        "the high nibble of a byte first, beside bfloat16",
        MXFP4,
        Wrong,
        r"lse is wrong",
        constants(_29040=0x7071, _29554=0x7273),
        answers=wrong_answers.with_the_second(lambda k: k[..., np.arange(512) ^ (np.arange(512) < 448)]),
    ),
    PlantedFault(
        "a scale for the next group too",
        MXFP4,
        Wrong,
        r"lse is wrong",
        lambda text: edits.replace(text, r"mul\.lo\.s32\s+(%r\d+), %r\d+, 4112;", lambda m: f"mov.b32 {m[1]}, 0;"),
        answers=wrong_answers.a_scale_for_two_groups,
    ),
    PlantedFault(
        "no proxy fence after the unpacking",
        PACKED,
        Race,
        unfenced("k", r"st\.shared"),
        keys_unfenced,
    ),
    PlantedFault(
        "unpacks over keys that are still read",
        PACKED,
        Race,
        late(r"st\.shared", "k", r"wgmma"),
        without_wait(PACKED, "k_empty1"),
    ),
    PlantedFault(
        "the odd tile handed back before it is multiplied",
        PACKED,
        Race,
        late(r"st\.shared", "k", r"wgmma"),
        odd_handed_back_early,
    ),
    PlantedFault(
        "keys of the peer's read without a proxy fence",
        PAIRED,
        Race,
        unfenced("k", r"(st\.shared|st\.async)"),
        keys_unfenced,
    ),
    PlantedFault(
        "the peer not told that keys were read",
        PAIRED,
        Deadlock,
        r"4 of 132 arrivals pending",
        telling_nobody,
    ),
    PlantedFault(
        "keys written over that are still read here or there",
        PAIRED,
        Race,
        late(r"st\.(shared|async)", "k", r"wgmma"),
        without_wait(PAIRED, "k_empty1"),
    ),
    PlantedFault(
        "keys of the peer's not waited for",
        PAIRED,
        EARLY,
        early(r"wgmma", "k", r"st\.async"),
        expecting_nothing,
    ),
    PlantedFault(
        "sends to a peer that may not have begun",
        PAIRED,
        Fault,
        r"CTA (\d) warp [^\n]*\n[^\n]*(no mbarrier [^\n]*)? of CTA (?!\1)\d(?(2)$|[^\n]*(begun|nothing orders))",
        awaits_own_cta,
    ),
    PlantedFault(
        "ends while its peer may still come to it",
        PAIRED,
        Fault,
        r"ends while nothing orders that after CTA \d|of CTA \d, which has ended",
        without_wait(PAIRED, "k_empty2", slice(-1, None)),
    ),
    PlantedFault(
        "weights of a few heads without a proxy fence",
        FEW_HEADS,
        Race,
        unfenced("p", r"stmatrix"),
        weights_unfenced,
    ),
    PlantedFault(
        "weights of a few heads multiplied before all warps have shared them",
        FEW_HEADS,
        EARLY,
        unordered(r"wgmma", "p", r"stmatrix"),
        without(r"bar\.sync\s+1, 128", slice(1, 2)),
    ),
    PlantedFault(
        "values handed back before they are multiplied",
        FEW_HEADS,
        Race,
        late(r"cp\.async", "k", r"wgmma"),
        without(r"wgmma\.wait_group\.sync\.aligned\s+2"),
        case={"topk": 300},
    ),
    PlantedFault(
        "weights of a few heads shared while O leaves from their place",
        FEW_HEADS,
        Race,
        late(r"stmatrix", "p", r"tma"),
        without(r"cp\.async\.bulk\.wait_group\.read\s+0"),
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
        "O's slab overwritten while TMA reads it",
        LATENT,
        Race,
        late(r"stmatrix", "[op]", r"tma"),  # slabs go through both by turns
        without(r"cp\.async\.bulk\.wait_group\.read\s+1"),
    ),
    PlantedFault(
        "the last keys of an odd tile announced before they have come",
        LONG_ODD,
        EARLY,
        early(r"wgmma", "k", r"cp\.async"),
        arrive_at_once,
    ),
    PlantedFault(
        "the last keys of an odd tile copied while those before are read",
        LONG_ODD,
        Race,
        r"overwrites SMEM of k [^\n]*nothing orders this and the write by cp\.async",
        without_wait(LONG_ODD, "k_empty3", slice(-1, None)),
    ),
    PlantedFault(
        "the last keys of an odd tile read without a proxy fence",
        LONG_ODD,
        Race,
        unfenced("k", r"cp\.async"),
        keys_unfenced,
    ),
    PlantedFault(
        "O staged while the weights in its place are multiplied",
        LONG_ODD,
        Race,
        r"stmatrix[^\n]*\n\s+overwrites SMEM of p [^\n]*nothing orders this and the write by [^\n]*stmatrix",
        without_wait(LONG_ODD, "all_read"),
    ),
    PlantedFault(
        "the last store of O not waited for",
        LATENT,
        Leak,
        r"ends while TMA may still read shared memory",
        without(r"cp\.async\.bulk\.wait_group\.read\s+0", slice(-1, None)),
    ),
    # addresses
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


def run_with(fault, seed):
    """The message names places in shared memory; a fault's very answer is compared before it is judged."""
    k = kernel(fault.kernel)
    k = dataclasses.replace(k, ptx=fault.planted_in(k.ptx))
    x = attention.operands(k.variant, **{**SHAPES[fault.kernel], **(fault.case or {})})
    run = launch(k, x, seed=seed, processors=1, edits=fault.parameters)
    try:
        got = run.run()
        if fault.answers is not None:
            wrong_answers.assert_given(got, fault.answers(x, run.scale))
        judge(got, x, run.scale)
    except Fault as found:
        raise type(found)(by_name(str(found), fault.kernel)) from None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=SEEDS)


@pytest.mark.faults
@pytest.mark.parametrize("key", SHAPES)
def test_nothing_is_found_without_a_fault(key):
    """The same launches, unchanged."""
    k = kernel(key)
    x = attention.operands(k.variant, **SHAPES[key])
    for seed in SEEDS:
        run = launch(k, x, seed=seed, processors=1)
        judge(run.run(), x, run.scale)
