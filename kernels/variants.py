"""Everything that is shipped, as data.  The build, the C++ table and the tests read this list; nothing restates it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One cubin: an op for one architecture with its compile-time choices.  Everything else is decided at run time."""

    op: str  # "fwd"
    arch: str  # "sm_90a"
    module: str  # the module with `compile(variant, out_dir)`
    d: int  # head dimension, of keys and values alike
    dtype: str  # "bfloat16" or "float16": q, k, v and o
    shared_kv: bool  # one array is both K and V

    @property
    def key(self) -> str:
        """A name that is unique among the variants and fit for files and C symbols."""
        return f"{self.op}_{self.arch}_d{self.d}_{self.dtype}" + "_shared_kv" * self.shared_kv


DTYPES = ("bfloat16", "float16")

VARIANTS: tuple[Variant, ...] = (
    *(Variant("fwd", "sm_90a", "kernels.fwd_sm90", d, dtype, False) for d in (64, 128, 256) for dtype in DTYPES),
    *(Variant("fwd", "sm_90a", "kernels.latent_sm90", 512, dtype, True) for dtype in DTYPES),
)
