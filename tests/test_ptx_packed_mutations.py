"""Faults planted in the kernels of a step over packed caches: the interpreter must find and name each."""

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Deadlock, Fault, Race
from tests import wrong_answers
from tests.planted import KIB, MLA_BARRIERS, MLA_REGIONS, SEEDS, Subject, constants, keys_unfenced, run_with
from tests.symptoms import EARLY, early, late, unfenced

STEP = "dsv4_decode_sm_90a_d512_bfloat16_"


def subject(packing: str, **case: int) -> Subject:
    return Subject(STEP + packing, {"b": 1, "s_q": 2, "h_q": 8, **case}, MLA_BARRIERS, MLA_REGIONS)


PACKED = subject("v4_fp8_h64", s_kv=70, s_kv1=300, topk=200)
NIBBLES = subject("v41_fp4_h64", s_kv=9, s_kv1=90, topk=80)
MXFP4 = subject("v4_fp4_h64", s_kv=9, s_kv1=90, topk=80)
LATENT = Subject(
    "mla_sparse_fwd_v512_sm_90a_d576_bfloat16_v32_fp8_h64",
    {"b": 1, "s_q": 2, "h_q": 8, "s_kv": 300, "topk": 200},
    MLA_BARRIERS,
    {"q": 72 * KIB, "k": 144 * KIB, "max": 512},
)
PAIRED = subject("v4_fp8", h_q=66, s_kv=70, s_kv1=300, topk=200)  # two CTAs, each of which unpacks for both


def odd_handed_back_early(text: str) -> str:
    """Right does not wait for the products of its own tile before its half of that tile is given back."""
    arrival = rf"\s*mbarrier\.arrive\.shared\.b64[^;]*\+{PACKED.barrier(text, 'k_empty3')}\][^;]*;"
    return edits.replace(text, rf"wgmma\.wait_group\.sync\.aligned\s+0;({arrival})", lambda m: m[1])


def scales_exchanged(text: str) -> str:
    """The two scales of a half of a value are taken for one another."""
    return edits.replace(
        text, r"(v2\.b32 \{)(%r\d+), (%r\d+)(\}, \[%rd\d+\]; \})", lambda m: m[1] + m[3] + ", " + m[2] + m[4]
    )


def telling_nobody(text: str) -> str:
    return edits.replace(text, r"@p mbarrier\.arrive\.shared::cluster[^;]*;", "")


def awaits_own_cta(text: str) -> str:
    """The producers wait only for the warps of their own CTA."""
    return edits.replace(text, r"barrier\.cluster\.wait;", "bar.sync 3, 256;", slice(0, 1))


def expecting_nothing(text: str) -> str:
    """No bytes are expected from the peer, except those of Q."""
    sent = r"mbarrier\.arrive\.expect_tx\.shared\.b64\s+%rd\d+, (\[[^\]]*\]), %r\d+;"
    return edits.replace(text, sent, lambda m: f"mbarrier.arrive.shared.b64 _, {m[1]}, 1;", slice(1, None))


FAULTS = [
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
        "the scale of the next group",
        LATENT,
        Wrong,
        r"lse is wrong",
        scales_exchanged,
    ),
    PlantedFault(
        "keys unpacked over P that is still read",
        LATENT,
        Race,
        r"st\.shared[^\n]*\n\s+overwrites SMEM of k\b[^\n]*nothing orders this and the (read|write) by",
        LATENT.without_wait("k_empty1"),
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
        PACKED.without_wait("k_empty1"),
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
        PAIRED.without_wait("k_empty1"),
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
        PAIRED.without_wait("k_empty2", slice(-1, None)),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=SEEDS)


@pytest.mark.faults
@pytest.mark.parametrize("subject", [PACKED, NIBBLES, MXFP4, LATENT, PAIRED], ids=str)
def test_nothing_is_found_without_a_fault(subject):
    subject.judge_as_it_is()
