"""Everything that is shipped, as data.  The build, the C++ table and the tests read this list; nothing restates it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One cubin: an op for one architecture with its compile-time choices.  Everything else is decided at run time."""

    op: str  # "fwd", "sparse_fwd", "dsv4_sparse_fwd" or "dsv4_dense_fwd"
    arch: str  # "sm_90a" or "sm_100a"
    module: str  # the module with `compile(variant, out_dir)`
    d: int  # head dimension, of keys and values alike
    dtype: str  # "bfloat16" or "float16": q, k, v and o
    shared_kv: bool  # one array is both K and V
    sources: tuple[str, ...]  # of keys: "span" (an interval per query) or "selection" (a list of indices per query)

    @property
    def key(self) -> str:
        """A name that is unique among the variants and fit for files and C symbols."""
        return f"{self.op}_{self.arch}_d{self.d}_{self.dtype}" + "_shared_kv" * self.shared_kv

    @property
    def evidence(self) -> str:
        """How it is known to be right."""
        return EVIDENCE[self.arch]


DTYPES = ("bfloat16", "float16")

EVIDENCE = {"sm_90a": "run on hardware", "sm_100a": "compiled, interpreted, not run on hardware"}

LATENT_OPS = {
    "fwd": ("span",),
    "sparse_fwd": ("selection",),
    "dsv4_sparse_fwd": ("span", "selection"),  # the window, then the top-k
    "dsv4_dense_fwd": ("span", "span"),  # the window, then all compressed entries that are visible
}

VARIANTS: tuple[Variant, ...] = (
    *(
        Variant("fwd", "sm_90a", "kernels.fwd_sm90", d, dtype, False, ("span",))
        for d in (64, 128, 256)
        for dtype in DTYPES
    ),
    *(
        Variant("fwd", "sm_100a", "kernels.fwd_sm100", d, dtype, d == 512, ("span",))
        for d in (64, 128, 256, 512)
        for dtype in DTYPES
    ),
    *(
        Variant(op, "sm_90a", "kernels.latent_sm90", 512, dtype, True, sources)
        for op, sources in LATENT_OPS.items()
        for dtype in DTYPES
    ),
)
