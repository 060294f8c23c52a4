"""Everything that is shipped, as data.  The build, the C++ table and the tests read this list; nothing restates it."""

from dataclasses import dataclass

ANY_HEADS = 2**31 - 1


@dataclass(frozen=True)
class Variant:
    """One cubin: an op for one architecture with its compile-time choices.  Everything else is decided at run time."""

    op: str  # "fwd", "sparse_fwd", "dsv4_sparse_fwd", "dsv4_dense_fwd", "dsv4_decode", "dsv4_decode_fp8" or "combine"
    arch: str  # "sm_90a" or "sm_100a"
    module: str  # the module with `compile(variant, out_dir)`
    d: int  # head dimension, of keys and values alike; 0: any
    dtype: str  # "bfloat16" or "float16": q, k, v and o
    shared_kv: bool  # one array is both K and V
    sources: tuple[str, ...]  # of keys: "span" (an interval per query), "selection" (a list of indices per query) or
    # "packed" (a selection of keys that are kept in FP8)
    most_heads: int = ANY_HEADS  # of q that it takes; of several that take a call's, that of the fewest is called

    @property
    def key(self) -> str:
        """A name that is unique among the variants and fit for files and C symbols."""
        key = f"{self.op}_{self.arch}_d{self.d}_{self.dtype}" + "_shared_kv" * self.shared_kv
        return key + (f"_h{self.most_heads}" if self.most_heads < ANY_HEADS else "")

    @property
    def gathers(self) -> bool:
        """Whether keys differ from query to query: then a tile of rows has one query's heads, and all are gathered."""
        return any(kind != "span" for kind in self.sources)

    @property
    def splits(self) -> bool:
        """Whether the keys of a tile of rows may be split over CTAs."""
        return self.arch == "sm_90a" and self.sources != ()

    @property
    def evidence(self) -> str:
        """How it is known to be right."""
        return EVIDENCE[self.arch]


DTYPES = ("bfloat16", "float16")

EVIDENCE = {
    "sm_90a": "run on hardware",
    "sm_100a": "compiled, interpreted, not run on hardware",
}

LATENT_OPS = {
    "fwd": ("span",),
    "sparse_fwd": ("selection",),
    "dsv4_sparse_fwd": ("span", "selection"),  # the window, then the top-k
    "dsv4_dense_fwd": ("span", "span"),  # the window, then all compressed entries that are visible
    "dsv4_decode": ("selection", "selection"),  # the window's and the top-k's entries of pools
}

VARIANTS: tuple[Variant, ...] = (
    *(
        Variant("fwd", "sm_90a", "kernels.fwd_sm90", d, dtype, False, ("span",))
        for d in (64, 128, 256)
        for dtype in DTYPES
    ),
    *(
        Variant("fwd", "sm_100a", "kernels.fwd_sm100", d, dtype, False, ("span",))
        for d in (64, 128, 256)
        for dtype in DTYPES
    ),
    *(
        Variant(op, "sm_100a", "kernels.fwd_sm100", 512, dtype, True, sources)
        for op, sources in LATENT_OPS.items()
        for dtype in DTYPES
    ),
    *(
        Variant(op, "sm_90a", "kernels.latent_sm90", 512, dtype, True, sources)
        for op, sources in LATENT_OPS.items()
        for dtype in DTYPES
    ),
    # a tile of rows holds heads of several queries, which see a window and a few keys more
    *(Variant("fwd", "sm_90a", "kernels.latent_sm90", 512, dtype, True, ("span",), 63) for dtype in DTYPES),
    *(
        Variant(op, "sm_90a", "kernels.few_heads_sm90", 512, dtype, True, LATENT_OPS[op], heads)
        for op in ("sparse_fwd", "dsv4_sparse_fwd", "dsv4_decode")
        for dtype in DTYPES
        for heads in (8, 16, 32)
    ),
    *(
        Variant("dsv4_decode_fp8", "sm_90a", "kernels.latent_sm90", 512, "bfloat16", True, ("packed", "packed"), heads)
        for heads in (64, ANY_HEADS)
    ),
    *(Variant("combine", "sm_90a", "kernels.combine", 0, dtype, False, ()) for dtype in DTYPES),  # of split keys
)
