"""Blackwell's kernels for d 512: their PTX in the interpreter, with planted faults."""

import pytest

from interpreter.faults import PlantedFault
from interpreter.machine.hazards import Deadlock, Misuse, Race, Undefined
from tests import wrong_answers
from tests.sm100 import (  # noqa: F401
    CASES,
    ENDS_ALONE,
    LD,
    MMA,
    NEEDS_DSL,
    QUIET,
    RISES,
    RISING,
    SM100,
    SPLIT,
    ST,
    WRONG,
    WRONG_O,
    assert_right,
    compiler,
    find,
    unfenced,
    unordered,
)

pytestmark = [NEEDS_DSL, QUIET]

LATENTS = {key: v for key, v in SM100.items() if v.shared_kv}
DECODE = "dsv4_decode_sm_100f_d512_bfloat16"
UNPACKING = {  # what warps unpack is other code for each format and number of CTAs; the rest of the kernel is not
    f"{DECODE}_v4_fp8": ("few", "split few", "window"),
    f"{DECODE}_v4_fp8_h64": ("few", "tiles"),
    f"{DECODE}_v4_fp4": ("few", "turns"),
    f"{DECODE}_v41_fp8": ("few",),
    f"{DECODE}_v41_fp8_h64": ("few",),
    f"{DECODE}_v41_fp4": ("few", "turns"),
    f"{DECODE}_v41_fp4_h64": ("few",),
}
RUNS = [  # `cases` has the ops of a layer, where CASES has more for fmha
    (key, case)
    for key, v in LATENTS.items()
    for case in (CASES if v.sources == ("span",) else UNPACKING.get(key, ("tiles", "few", "turns")))
    if case != RISES  # large keys are large values there; there is another list for them
]
RUNS += [(key, RISING) for key, v in LATENTS.items() if v.op == "mla_sparse_fwd"]
SPLITTING = {"mla_span": "three tiles, ragged", "csa": "turns", "dsv4": "turns"}
RUNS += [
    (key, SPLIT + case)
    for op, case in SPLITTING.items()
    for key, v in LATENTS.items()
    if v.op.startswith(op) and key not in UNPACKING
]


@pytest.mark.parametrize(("key", "case"), RUNS)
def test_is_right(key, case):
    assert_right(key, case, first=2 * RUNS.index((key, case)))


def test_config_refuses_what_does_not_fit():
    from kernels.sm100.mla.config import Config

    class Deep(Config):
        stages = 7

    for config, cluster, says in (
        (Config, 1, "spans are for pairs"),
        (Deep, 2, "needs 26.* bytes of SMEM, 232448 fit"),
    ):
        with pytest.raises(ValueError, match=says):
            config("bfloat16", ("span",), cluster)


LATENT = "mla_span_fwd_sm_100f_d512_bfloat16"
FUSED = "csa_fwd_sm_100f_d512_bfloat16"
ALONE = "csa_fwd_sm_100f_d512_bfloat16_h64"
PACKED, PACKED_ALONE = f"{DECODE}_v4_fp8", f"{DECODE}_v4_fp8_h64"
LATENT_TILE = 64  # keys

FAULTS = [
    PlantedFault(
        "the maximum of a thread's part, not of its row",
        LATENT,
        *WRONG,
        answers=wrong_answers.maximum_of_a_part(2, lambda j: j % LATENT_TILE // 32),
        source=(("raise_max(measured, scores), cute.arch.fmax)", "raise_max(measured, scores), lambda a, b: a)"),),
        case="one tile",
    ),
    PlantedFault(
        "the collector is to give a P that it has not kept",
        LATENT,
        Misuse,
        r"takes an operand from collector a, which has nothing",
        edit=lambda ptx: ptx.replace("collector::a::fill", "collector::a::discard"),
        case="one tile",
    ),
    PlantedFault(
        "the collector is to give another part of P than it has kept",
        LATENT,
        Misuse,
        r"takes an operand from collector a, which has another operand",
        source=(("p.index * c.p_bytes + rows * 2 * K_STEP, 16)", "p.index * c.p_bytes + half * 2 * K_STEP, 16)"),),
        case="one tile",
    ),
    PlantedFault(
        "absent keys are not masked",
        FUSED,
        *WRONG,
        answers=wrong_answers.absent_as_zeros(LATENT_TILE),
        source=(("if bits != Uint32(0):", "if bits == Uint32(1):"),),
        case="few",
    ),
    PlantedFault(
        "the second source's tiles are counted from the first's",
        FUSED,
        *WRONG,
        answers=wrong_answers.without_the_second,
        source=(("action(sources[1], t - first, *arguments)", "action(sources[1], t, *arguments)"),),
        case="few",
    ),
    PlantedFault(
        "the rails of Q are exchanged",
        LATENT,
        *WRONG,
        answers=wrong_answers.with_k(wrong_answers.halves_exchanged),
        source=(("q + (row * c.d + w.part *", "q + (row * c.d + (1 - w.part) *"),),
    ),
    PlantedFault(
        "scores of one rail alone",
        LATENT,
        *WRONG,
        answers=wrong_answers.with_k(wrong_answers.half_of_each(lambda j: j % LATENT_TILE // 32)),
        source=(("scores[4 * i + j] = scores[4 * i + j] + x", "scores[4 * i + j] = scores[4 * i + j] + 0 * x"),),
    ),
    PlantedFault(
        "a thread's halves are exchanged before the other has written its own",
        LATENT,
        (Race, Undefined),
        unordered(r"st\.shared", r"ld\.shared", "SMEM of exchange")
        + r"|ld\.shared[^\n]*\n\s+reads SMEM of exchange, which nobody wrote",
        source=(("for j in range(4)))\n        self.meet_other(w)", "for j in range(4)))"),),
    ),
    PlantedFault(
        "O is rescaled while products of a pair add to it",
        LATENT,
        Race,
        unordered(f"({LD}|{ST})", MMA, "TMEM of o"),
        source=(("(t > 0):\n                    bar.p.at(fill + 1).wait_empty()  # the last P V", "(t > 0):"),),
        case="mixed",
    ),
    PlantedFault(
        "P in SMEM without a proxy fence",
        LATENT,
        Race,
        unfenced(MMA, "SMEM of p", r"st\.shared"),
        source=(
            (
                'for j in range(4)))\n        cute.arch.fence_proxy("async.shared", space="cta")',
                "for j in range(4)))",
            ),
        ),
    ),
    PlantedFault(
        "Q is overwritten while products read it",
        LATENT,
        Race,
        unordered(ST, MMA, "TMEM of q"),
        source=(("wait_for(bar.q_empty, wave - 1)\n                    after_thread_sync()", "pass"),),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "O is overwritten while it is read",
        LATENT,
        Race,
        unordered(r"tcgen05\.ld\.sync", MMA, "TMEM of o"),
        source=(("wait_for(bar.o_empty, finished - 1)", "pass"),),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "numbers of a tile of rows are overwritten while they are read",
        LATENT,
        Race,
        unordered(r"st\.shared", r"ld\.shared", "SMEM of the rest"),
        source=(("info.wait_empty()", "pass"),),
        case="causal, several row tiles a CTA",
    ),
    PlantedFault(
        "a CTA ends while the other one of its pair may still reach it",
        LATENT,
        Race,
        r"^CTA \d ends while nothing orders that after CTA \d warp ",
        source=(ENDS_ALONE,),
    ),
    PlantedFault(
        "the bytes of one CTA alone are expected",
        LATENT,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM of keys\b[^\n]*(which nobody wrote|the write by tma)",
        source=(
            ("expect_full(self.config.cluster * self.config.stage_bytes)", "expect_full(self.config.stage_bytes)"),
        ),
    ),
    PlantedFault(
        "a row more is expected than a copy brings",
        FUSED,
        Deadlock,
        r" 128 transaction bytes outstanding",
        source=(
            (
                "expect_full(self.config.cluster * self.config.stage_bytes)",
                "expect_full(self.config.cluster * self.config.stage_bytes + 128)",
            ),
        ),
        case="few",
    ),
    PlantedFault(
        "each CTA gathers the other's columns",
        FUSED,
        *WRONG,
        answers=wrong_answers.with_keys(wrong_answers.halves_exchanged),
        source=(("column = cta.rank * c.columns_k", "column = (1 - cta.rank) * c.columns_k"),),
        case="few",
    ),
    PlantedFault(
        "rows are gathered in another order",
        FUSED,
        *WRONG,
        answers=wrong_answers.at_positions(LATENT_TILE, keys=lambda j: j ^ 1),
        source=(("shuffle_sync(row, first + i)", "shuffle_sync(row, first + (i ^ 1))"),),
        case="few",
    ),
    PlantedFault(
        "the rails of a tile of keys do not take turns",
        ALONE,
        *WRONG,
        answers=wrong_answers.with_keys(wrong_answers.slabs_in_order),
        source=(("c.slab_of(slab) * c.slab_bytes", "slab * c.slab_bytes"),),
        case="few",
    ),
    PlantedFault(
        "P is not swizzled",
        ALONE,
        *WRONG_O,
        answers=wrong_answers.at_positions(LATENT_TILE, values=lambda j, head: j ^ head % 8 * 8),
        source=(("(chunk ^ w.row % 8)", "chunk"),),
        case="tiles",
    ),
    PlantedFault(
        "each split begins with a tile of the one before",
        LATENT,
        *WRONG,
        source=(("source.part(first, last - first)", "source.part(cutlass.max(first - 1, 0), last - first)"),),
        case="split three tiles, ragged",
    ),
    PlantedFault(
        "a part has the sink",
        ALONE,
        *WRONG_O,
        source=(("sink if n.splits == 1 else -Float32.inf", "sink"),),
        case="split few",
    ),
    PlantedFault(
        "parts are stored as if every row had one",
        LATENT,
        WRONG_O[0],
        r"^o is wrong in .*; lse is right",
        source=(("row * n.splits + tile.split", "row + tile.split"),),
        case="split three tiles, ragged",
    ),
    PlantedFault(
        "a slab has the scales of the next one",
        PACKED_ALONE,
        *WRONG,
        source=(("scale_of(form, scales, slab - slabs[0],", "scale_of(form, scales, (slab - slabs[0]) ^ 1,"),),
        case="few",
    ),
    PlantedFault(
        "registers are loaded for the next tile before they are unpacked",
        PACKED_ALONE,
        *WRONG,
        source=(
            (
                "self.unpack(t, half, key, place)\n        self.fetch(t + self.config.teams, half, key)",
                "self.fetch(t + self.config.teams, half, key)\n        self.unpack(t, half, key, place)",
            ),
        ),
        case="few",
    ),
    PlantedFault(
        "entries of a list are read a tile late",
        PACKED_ALONE,
        *WRONG,
        source=(("self.prefetch_indices(t + 2 * teams)", "self.prefetch_indices(t + teams)"),),
        case="tiles",
    ),
    PlantedFault(
        "unpacked keys are not swizzled",
        PACKED_ALONE,
        *WRONG,
        source=(("(chunk ^ self.row0 % ATOM_ROWS) * 16", "chunk * 16"),),
        case="few",
    ),
    PlantedFault(
        "each CTA unpacks the other's columns",
        PACKED,
        *WRONG,
        source=(("halves[rank : rank + 1]", "halves[1 - rank : 2 - rank]"),),
        case="few",
    ),
    PlantedFault(
        "products read unpacked keys without a proxy fence",
        PACKED_ALONE,
        Race,
        unfenced(MMA, "SMEM of keys", r"st\.shared"),
        source=(
            (
                'c.unpacks):\n                cute.arch.fence_proxy("async.shared", space="cta")\n',
                "c.unpacks):\n",
            ),
        ),
        case="few",
    ),
    PlantedFault(
        "the other CTA tells of its keys without a proxy fence",
        PACKED,
        Race,
        unfenced(MMA, "SMEM of keys", r"st\.shared"),
        source=(
            ('state.wait_full()\n        cute.arch.fence_proxy("async.shared", space="cta")\n', "state.wait_full()\n"),
        ),
        case="few",
    ),
    PlantedFault(
        "products do not wait for the other CTA's keys",
        PACKED,
        (Race, Undefined),
        rf"{MMA}[^\n]*\n\s+reads SMEM of keys\b",
        source=(("cute.arch.mbarrier_wait(bar.peer_full + keys.index, keys.phase)", "pass"),),
        case="few",
    ),
    PlantedFault(
        "warps unpack into a place that products still read",
        PACKED_ALONE,
        Race,
        unordered(MMA, r"st\.shared", "SMEM of keys"),
        source=(("            state.wait_empty()\n            stage", "            stage"),),
        case="tiles",
    ),
    PlantedFault(
        "both teams begin with the same tile",
        PACKED,
        Race,
        unordered(r"st\.shared", r"st\.shared", "SMEM of keys"),
        source=(("(thread // self.team + fill) % self.teams", "fill % self.teams"),),
        case="few",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_finds(fault, tmp_path, compiler):  # noqa: F811
    find(fault, tmp_path, compiler)
