"""The catalogue of witnesses: the maker of each, its driver, and the driver's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

CUTLASS, FLASH, CUDNN, FLASHINFER = (
    "CUTLASS's examples in flashinfer-python",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "flashinfer-python",
)
JAX, TOKAMAX, OURS = "jax", "tokamax", "this project, compiled by jax"
DSL, MOSAIC = ("nvidia-cutlass-dsl",), ("jaxlib", "jax-cuda12-pjrt")
"""Packages that compile: the first CuTe DSL's, the second JAX's Mosaic GPU's."""


@dataclass(frozen=True)
class Witness:
    name: str
    maker: str  # one of the packages above
    what: str
    driver: str  # module.function of `drivers`
    options: Mapping[str, Any] = field(default_factory=dict)
    arch: str = "sm_100a"
    seeds: int = 3

    @property
    def package(self) -> str:
        return self.maker.split()[-1]

    @property
    def compiler(self) -> tuple[str, ...]:
        return MOSAIC if self.maker in (JAX, TOKAMAX, OURS) else DSL

    def __str__(self) -> str:
        return self.name


def gemm(name: str, what: str, **options: Any) -> Witness:
    return Witness(f"gemm {name}", CUTLASS, f"GEMM, {what}", "gemm.blackwell", options)


def mixed(name: str, what: str, **options: Any) -> Witness:
    return Witness(
        f"gemm mixed {name}", CUTLASS, f"GEMM, A of int8 through tensor memory, {what}", "gemm.mixed", options
    )


def fa4(name: str, what: str, **options: Any) -> Witness:
    return Witness(f"fa4 {name}", FLASH, f"attention, {what}", "fa4.forward", options)


def mla(name: str, what: str, **options: Any) -> Witness:
    return Witness(f"fa4 mla {name}", FLASH, f"MLA of d 64 + 512, {what}", "fa4.mla", options)


def dsa(name: str, what: str, **options: Any) -> Witness:
    return Witness(f"dsa {name}", CUDNN, f"sparse attention, {what}", "dsa.forward", options)


def of_mosaic(name: str, maker: str, what: str, driver: str, **options: Any) -> Witness:
    return Witness(f"mosaic {name}", maker, what, f"mosaic.{driver}", options)


def product(name: str, what: str, **options: Any) -> Witness:
    return of_mosaic(f"product {name}", OURS, f"a product, {what}", "product", **options)


PAIR = {"pair": True, "cluster": (2, 1)}

WITNESSES = (
    gemm("128", "tiles of 128 x 128"),
    gemm("64", "tiles of 64 x 128", tile=(64, 128)),
    gemm("64x64", "tiles of 64 x 64", tile=(64, 64)),
    gemm("mn", "A, B and C MN-major, batch 2", a_major="m", b_major="n", c_major="m", mnkl=(256, 128, 128, 2)),
    gemm("64 m", "tiles of 64 x 64, C M-major", tile=(64, 64), c_major="m"),
    gemm(
        "64 to fp8",
        "tiles of 64 x 64, C in e4m3, stored by threads",
        tile=(64, 64),
        c_dtype="float8_e4m3fn",
        tma_store=False,
    ),
    gemm("plain", "C stored by threads", tma_store=False),
    gemm("64x256 mn", "tiles of 64 x 256, B MN-major", tile=(64, 256), b_major="n", mnkl=(128, 256, 128, 1)),
    gemm("plain 64", "C stored by threads, tiles of 128 x 64", tma_store=False, tile=(128, 64)),
    gemm("f16", "float16 in and out", dtype="float16", c_dtype="float16"),
    gemm("fp8", "e4m3", dtype="float8_e4m3fn"),
    gemm("fp8 mn", "e4m3, A and B MN-major", dtype="float8_e4m3fn", a_major="m", b_major="n"),
    gemm("tf32 mn", "tf32, A and B MN-major", dtype="float32", a_major="m", b_major="n"),
    gemm("pair", "pairs of CTAs, 256 x 128", tile=(256, 128), **PAIR),
    gemm("pair 128", "pairs of CTAs, 128 x 128", tile=(128, 128), **PAIR),
    gemm(
        "pair multicast",
        "pairs, multicast in clusters of 4 x 2",
        tile=(256, 128),
        pair=True,
        cluster=(4, 2),
        mnkl=(1024, 256, 128, 1),
    ),
    gemm(
        "persistent",
        "persistent, with prefetches",
        file="dense_gemm_persistent_prefetch.py",
        kernel="PersistentDenseGemmKernel",
    ),
    mixed("256", "tiles of 128 x 256, B MN-major", tile=(128, 256, 64), mnkl=(256, 256, 128, 1), b_major="n"),
    mixed("pair", "pairs of CTAs, 128 x 192", tile=(128, 192, 64), mnkl=(256, 384, 128, 1), **PAIR),
    mixed(
        "pair mn",
        "pairs of CTAs, 128 x 192, B MN-major",
        tile=(128, 192, 64),
        mnkl=(256, 384, 128, 1),
        b_major="n",
        **PAIR,
    ),
    Witness("fmha 64", CUTLASS, "attention, d 64", "fmha.forward", {"d": 64}),
    Witness("fmha 128", CUTLASS, "attention, d 128, causal", "fmha.forward", {"d": 128, "causal": True}),
    fa4("64", "d 64", d=64),
    fa4("128", "d 128, causal", d=128, causal=True),
    fa4("192", "d 192, of V 128", d=192, d_v=128),
    fa4("128 pair", "d 128, pairs of CTAs", d=128, pair=True, s_q=512),
    fa4("128 clc", "d 128, launch control", d=128, launch_control=True, s_q=512),
    mla("1", "one CTA, .ws", one=True),
    mla("2", "pairs of CTAs", h=128, s_q=2, packed=True),
    mla("2 top-k", "pairs of CTAs, top-k gathered", h=128, s_q=2, packed=True, topk=256, s_kv=512),
    Witness("fa4 backward", FLASH, "attention's gradients, d 128, causal", "fa4.backward", {"d": 128, "causal": True}),
    dsa("64", "64 heads, d 512", h=64, d=512),
    dsa("64 of 576", "64 heads, d 576, sink", h=64, d=576, sink=True),
    dsa("128", "128 heads, d 512, pairs of CTAs", h=128, d=512),
    Witness("qsa 256", CUDNN, "attention of d 256 over keys that bits name, causal", "qsa.forward"),
    Witness("mla decode", FLASHINFER, "MLA's decoding, d 512 + 64, 64 heads, pages", "mla_decode.forward"),
    of_mosaic("gemm 128x256", JAX, "GEMM, tiles of 128 x 256, B MN-major", "matmul", n=256),
    of_mosaic("gemm pair", JAX, "GEMM, pairs of CTAs, 256 x 256, B MN-major", "matmul", pair=True),
    of_mosaic("ragged pair", JAX, "ragged products, pairs of CTAs", "ragged", pair=True),
    of_mosaic("ragged", TOKAMAX, "ragged products", "ragged", tokamax=True),
    of_mosaic("ragged pair 2", TOKAMAX, "ragged products, pairs of CTAs", "ragged", tokamax=True, pair=True),
    of_mosaic("attention 64", TOKAMAX, "attention, d 64", "forward", d=64),
    of_mosaic(
        "attention 128 pair", TOKAMAX, "attention, d 128, causal, pairs", "forward", d=128, causal=True, pair=True
    ),
    of_mosaic("glu", TOKAMAX, "gated linear unit", "gated"),
    product("128x256", "128 x 256", n=256),
    product("128x256 mn", "128 x 256, B MN-major", n=256, b_in="n"),
    product("128x64 mn", "128 x 64, A and B MN-major", n=64, a_in="m", b_in="n"),
    product("128x64 tmem", "128 x 64, A in tensor memory", n=64, a_in="tmem"),
    product("fp8 128x256", "128 x 256, e4m3", n=256, dtype="float8_e4m3fn"),
    product("fp8 128x64", "128 x 64, e4m3", n=64, dtype="float8_e4m3fn"),
    product("pair tmem", "256 x 256 of a pair, A in TMEM, B MN-major", n=256, a_in="tmem", b_in="n", pair=True),
    of_mosaic("steady 128", OURS, "attention, d 128, one tile of rows", "steady"),
    Witness("hopper fa3 128", FLASH, "Hopper: attention, d 128", "fa4.hopper", {"d": 128}, arch="sm_90a"),
    Witness(
        "hopper fa3 64",
        FLASH,
        "Hopper: attention, d 64, causal",
        "fa4.hopper",
        {"d": 64, "causal": True},
        arch="sm_90a",
    ),
    Witness("hopper indexer", CUDNN, "Hopper: scores of an indexer, 64 heads", "dsa.indexer", arch="sm_90a"),
    Witness(
        "hopper gemm",
        CUTLASS,
        "Hopper: GEMM, multicast in clusters of 2 x 2",
        "gemm.hopper",
        {"cluster": (2, 2)},
        arch="sm_90a",
    ),
)


def long(x: Witness, **options: Any) -> Witness:
    """The same kernel with more keys, for its clocks."""
    return replace(x, name=f"{x.name} long", options={**x.options, **options})


BY_NAME = {x.name: x for x in WITNESSES}

CLOCKED = (
    long(BY_NAME["fa4 64"], s_kv=1280),
    long(BY_NAME["fa4 128"], s_kv=1280, causal=False),
    long(BY_NAME["fa4 128 pair"], s_kv=1280),
    long(BY_NAME["dsa 64"], s_kv=2048, topk=640),
    long(BY_NAME["dsa 128"], s_kv=2048, topk=1152),
    long(BY_NAME["fa4 mla 2"], s_kv=1280, s_q=1),
    long(BY_NAME["fa4 mla 2 top-k"], s_kv=4096, s_q=1, topk=2048),
    long(BY_NAME["mosaic gemm pair"], mnk=(256, 256, 2048), stages=6),
    long(BY_NAME["mosaic ragged pair 2"], groups=(256,), k=4096, block_k=128),
)
"""The witnesses whose clocks are compared with published times (`timing.py`)."""
