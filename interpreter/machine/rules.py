"""Rules of the PTX manual, and one that is stricter, that a B200 does not need.

Kernels of others, which their makers test on B200s, break them (docs/witnesses.md). So a run has a set of rules that it
checks: `MANUAL`, all of them, for our own kernels, because what obeys the manual runs on every chip; `CHIP`, none of
them, for kernels that are known to be right on a B200. `CHIP | {Rule.WAIT_LD}` adds one.

What a rule forbids is no fault in a run that does not check it; the interpreter then does what the chip does.
"""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """A rule of the manual: (what it says, what happens without it, what shows that a B200 does so)."""

    TMEM_FENCES = (
        "`tcgen05.fence::before_thread_sync` and `::after_thread_sync` stand between accesses to TMEM that a barrier "
        "orders",
        "a barrier orders them, as it does other accesses",
        "SASS has no instruction for either fence; no kernel of CUTLASS or FlashAttention 4 has any",
    )
    WAIT_LD = (
        "registers of `tcgen05.ld` are read after `tcgen05.wait::ld` alone (more than the manual asks: 9.7.16.6.4.5)",
        "an instruction that names such a register waits for it",
        "in SASS, LDTM sets a scoreboard and `wait::ld` is an empty instruction that waits for it; compilers put uses "
        "before it",
    )
    LD_ORDER = (
        "an arrival tells of a `tcgen05.ld` after `tcgen05.wait::ld` alone (9.7.16.6.4.4, 9.7.16.6.4.5)",
        "it tells of loads whose registers the warp has used",
        "as for `WAIT_LD`: to use a register is to wait for the load's scoreboard",
    )
    PRODUCT_ORDER = (
        "a thread's products happen in order on the same accumulator and shape alone",
        "all products and copies to TMEM of a thread happen in the order of their issue",
        "FlashAttention 4 and CUTLASS's FMHA write S(i + 1) over P(i), which an earlier product of the thread reads; "
        "cuDNN's kernels copy over what products before read",
    )
    COMMIT_ORDER = (
        "commits of a thread arrive in any order",
        "they arrive in order, and a later one tells what an earlier one did",
        "pairs of CTAs of FlashAttention 4 wait for the last commit alone before they end",
    )
    EXPECTED_BYTES = (
        "no mbarrier is left with bytes that it expects",
        "a producer may expect bytes that nobody copies, if nobody waits for them",
        "the last step of a producer in FlashAttention 4 expects a stage that is never loaded",
    )
    LAST_STORES = (
        "a CTA waits until TMA has read its shared memory before it ends",
        "it may end before",
        "FlashAttention 4's backward kernels do not wait for their last stores",
    )
    NAMED_BARRIERS = (
        "no named barrier is left with some of its threads arrived",
        "one may be",
        "warpgroups of FlashAttention 3 that take turns end with the other's turn announced",
    )
    OWN_LANES = (
        "an address of `tcgen05.ld` or `st` names the first of the warp's own 32 lanes",
        "the lane's bits for the warp are ignored",
        "all warps of kernels of FlashInfer, cuDNN and DeepGEMM say lane 0",
    )
    CP_ASYNC_PROXY = (
        "`fence.proxy.async` stands between `cp.async` and products that read what it wrote",
        "an mbarrier that `cp.async.mbarrier.arrive` completes is enough",
        "FlashAttention 4's top-k kernels and CUTLASS's GEMM with `cp.async` have no such fence",
    )
    OWN_STORES = (
        "`cp.async.mbarrier.arrive` tells of the thread's copies, not of its own stores",
        "it tells of both",
        "cuDNN's sparse attention of d 576 clears rows by plain stores before it",
    )
    INIT_FENCE = (
        "`fence.mbarrier_init` or `fence.proxy.async` stands between the initialisation of an mbarrier and a copy by "
        "TMA that completes on it",
        "a barrier of warps is enough",
        "cuDNN's attention of d 256 over named keys has neither for the mbarrier of its queries",
    )
    RELAXED_END = (
        "a relaxed arrival at the cluster's barrier does not order a CTA's end after what others did in its memory",
        "a CTA that waits there outlives what others did before they arrived",
        "pairs of CTAs of JAX's Mosaic GPU end so",
    )
    DESCRIPTOR_VERSION = (
        "bits 46 to 48 of a product's descriptor of shared memory are 0b001",
        "0b000 does as well",
        "all products of JAX's Mosaic GPU have 0b000 there",
    )

    def __init__(self, says: str, without: str, evidence: str):
        self.says, self.without, self.evidence = says, without, evidence


MANUAL = frozenset(Rule)
CHIP: frozenset[Rule] = frozenset()
