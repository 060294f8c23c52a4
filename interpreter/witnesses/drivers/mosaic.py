"""Kernels that JAX's Mosaic GPU compiles: those of JAX and of tokamax, and single products in text of our own."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ...machine.state import Array
from . import TYPES, Case, attention, bare, folder, normal
from . import causal as causal_mask

BF16 = ml_dtypes.bfloat16
OPS = "jax.experimental.pallas.ops.gpu"


def case(function: Callable[..., Any], args: list[Array], wanted: dict[str, Array], tolerance: float) -> Case:
    """Its kernel's results have the names of what is wanted, in their order."""
    return Case(function, args, {}, wanted, tolerance)


def small(*shape: int, dtype: Any = BF16, seed: int = 1, up_to: int = 2) -> Array:
    """Integers that are small enough for exact sums."""
    return np.random.default_rng([seed, *shape]).integers(1 - up_to, up_to, shape).astype(dtype)


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def matmul(*, n: int = 128, pair: bool = False, mnk: tuple[int, int, int] = (256, 256, 128), stages: int = 2) -> Case:
    """C[m, n] = A[m, k] B[k, n] of small integers, by tiles of 128 x n, or of 256 x 2n by a pair."""
    a, b = small(mnk[0], mnk[2]), small(mnk[2], mnk[1], seed=2)

    def function(a: Any, b: Any) -> Any:
        module = importlib.import_module(f"{OPS}.blackwell_matmul_mgpu")
        config = module.TuningConfig(tile_m=128, tile_n=n, tile_k=64, max_concurrent_steps=stages, collective=pair)
        return module.matmul_kernel(a, b, config)

    return case(function, [a, b], {"c": wide(a) @ wide(b)}, 0.0)


def ragged(
    *, pair: bool = False, tokamax: bool = False, groups: tuple[int, ...] = (100, 156), k: int = 128, block_k: int = 64
) -> Case:
    """C[m, n] = A[m, k] B[group of m, k, n], with groups that end within tiles."""
    sizes = np.array(groups, np.int32)
    a, b = small(int(sizes.sum()), k), small(len(sizes), k, 256, seed=2)
    group = np.repeat(np.arange(len(sizes)), sizes)
    wanted = np.einsum("mk,mkn->mn", wide(a), wide(b)[group])

    def of_jax(a: Any, b: Any, sizes: Any) -> Any:
        module = importlib.import_module(f"{OPS}.blackwell_ragged_dot_mgpu")
        dimension = importlib.import_module(f"{OPS}.blackwell_matmul_mgpu").MatmulDimension.N
        shape = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 2, "epilogue_tile_n": 64}
        config = module.TuningConfig(**shape, collective=pair, grid_tile_width=1, grid_minor_dim=dimension)
        return module.ragged_dot_kernel(a, b, sizes, config)

    def of_tokamax(a: Any, b: Any, sizes: Any) -> Any:
        module = tokamax_module("ragged_dot.pallas_mosaic_gpu_kernel_sm100")
        shape = {"block_m": 128, "block_n": 128, "block_k": block_k, "num_stages": 2, "split_k": 1}
        config = module.common.Config(**shape, collective=pair)
        return module.ragged_dot_gpu_non_quant_blackwell_kernel(a, b, sizes, a.dtype, config)

    return case(of_tokamax if tokamax else of_jax, [a, b, sizes], {"c": wanted}, 0.0)


def tokamax_module(name: str) -> Any:
    """A module of tokamax's operations, without what its own __init__ wants."""
    if "tokamax" not in sys.modules:
        bare("tokamax", folder("tokamax"))
    return importlib.import_module(f"tokamax._src.ops.{name}")


def forward(*, d: int, causal: bool = False, pair: bool = False, s: int = 256) -> Case:
    q, k, v = (normal(s, 1, d, seed=n) for n in (1, 2, 3))
    scale = d**-0.5
    o, _, _ = attention(q[None], k[None], v[None], scale, causal_mask(s, s) if causal else None)

    def function(q: Any, k: Any, v: Any) -> Any:
        module = tokamax_module("attention.pallas_mosaic_gpu_kernel_sm100")
        block_q = 256 if pair else 128
        config = module.Config(block_q=block_q, block_kv=128, num_stages=2, collective=pair)
        options = {"out_dtype": q.dtype, "normalize_output": True, "return_residuals": False}
        options |= {"is_causal": causal, "logits_soft_cap": None, "logits_scale": scale}
        options |= {"use_stable_softmax": True, "rescale_threshold": 1.0, "config": config}
        return module.flash_attention_kernel(q, k, v, None, None, None, None, **options)[0]

    return case(function, [q, k, v], {"o": o[0]}, 8e-3)


def gated(*, pair: bool = False) -> Case:
    """silu(x W0) * (x W1)."""
    m, k, n = 256, 128, 128
    x, w = normal(m, k), normal(k, 2, n, seed=2, scale=k**-0.5)
    gate, up = (wide(x) @ wide(w)[:, half] for half in (0, 1))

    def function(x: Any, w: Any) -> Any:
        import jax

        module = tokamax_module("gated_linear_unit.pallas_mosaic_gpu_kernel_sm100")
        config = module.common.Config(tile_m=128, tile_n=64, tile_k=64, num_stages=2, cluster_size_m=1 + pair)
        return module.gated_linear_unit_sm100(x, w, activation=jax.nn.silu, config=config)

    return case(function, [x, w], {"c": gate / (1 + np.exp(-gate)) * up}, 1.2e-2)


def product(
    *,
    n: int,
    k: int = 128,
    dtype: str = "bfloat16",
    a_in: str = "k",
    b_in: str = "k",
    pair: bool = False,
) -> Case:
    """C[m, n] = A[m, k] B[k, n] by 128 rows a CTA and one product for each 32 bytes of k. `a_in`, `b_in`: the mode that
    is contiguous in shared memory, or "tmem".

    The text is our own, in Pallas; descriptors and layouts are what Mosaic GPU makes of it.
    """
    m = 128 * (1 + pair)
    a, b = small(m, k, dtype=TYPES[dtype]), small(k, n, dtype=TYPES[dtype], seed=2)
    wanted = wide(a) @ wide(b)
    given = [a.T if a_in == "m" else a, b.T if b_in == "k" else b]
    function = functools.partial(product_of, m=m, n=n, k=k, a_in=a_in, b_in=b_in, pair=pair)
    return case(function, [np.ascontiguousarray(x) for x in given], {"c": wanted}, 0.0)


def product_of(a: Any, b: Any, *, m: int, n: int, k: int, a_in: str, b_in: str, pair: bool) -> Any:
    import jax
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax import lax

    ctas = 1 + pair
    columns = n // ctas  # of B in a CTA

    def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
        swizzle = plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8)
        tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    def kernel(a_gmem: Any, b_gmem: Any, c_gmem: Any, **refs: Any) -> None:
        cta = lax.axis_index("x")
        rows, mine = pl.ds(cta * 128, 128), pl.ds(cta * columns, columns)
        a_smem, b_smem, acc = refs["a_smem"], refs["b_smem"], refs["acc"]
        plgpu.copy_gmem_to_smem(a_gmem.at[:, rows] if a_in == "m" else a_gmem.at[rows], a_smem, refs["loaded"])
        plgpu.copy_gmem_to_smem(b_gmem.at[mine] if b_in == "k" else b_gmem.at[:, mine], b_smem, refs["loaded"])
        plgpu.barrier_wait(refs["loaded"])
        left = plgpu.transpose_ref(a_smem, (1, 0)) if a_in == "m" else a_smem
        right = plgpu.transpose_ref(b_smem, (1, 0)) if b_in == "k" else b_smem
        if a_in == "tmem":
            left = refs["a_tmem"]
            plgpu.async_store_tmem(left, plgpu.load(a_smem, (), layout=plgpu.Layout.TCGEN05))
            plgpu.commit_tmem()
        if pair:
            plgpu.barrier_arrive(refs["both"])
            plgpu.barrier_wait(refs["both"])

        @pl.when(cta == 0)
        def _() -> None:
            axis = "x" if pair else None
            plgpu.tcgen05_mma(acc, left, right, refs["done"], accumulate=False, collective_axis=axis)

        plgpu.barrier_wait(refs["done"])
        refs["c_smem"][...] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs["c_smem"], c_gmem.at[rows])
        plgpu.wait_smem_to_gmem(0)

    scratch = {
        "a_smem": tiled((k, 128) if a_in == "m" else (128, k), a.dtype),
        "b_smem": tiled((columns, k) if b_in == "k" else (k, columns), b.dtype),
        "c_smem": plgpu.SMEM((128, n), np.float32),
        "acc": plgpu.TMEM((128, n), np.float32, collective=pair),
        "loaded": plgpu.Barrier(num_arrivals=2),
        "done": plgpu.Barrier(orders_tensor_core=True),
    }
    if a_in == "tmem":
        scratch["a_tmem"] = plgpu.TMEM((128, k), a.dtype, packed=True, collective=pair)
    if pair:
        scratch["both"] = plgpu.ClusterBarrier(collective_axes=("x",), orders_tensor_core=True)
    made = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), np.float32),
        scratch_types=scratch,
        grid=(1,),
        grid_names=("one",),
        cluster=(ctas,),
        cluster_names=("x",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return made(a, b)


def steady(*, tiles: int = 3, keys: int = 64, fault: str = "") -> Case:
    """One tile of 128 rows of attention, d 128: S = Q K' and O += P V into tensor memory, as in our own kernels.

    The text is our own, in Pallas; descriptors and layouts are what Mosaic GPU makes of it.
    """
    q, k, v = (normal(rows, 128, seed=n) for n, rows in ((1, 128), (2, tiles * keys), (3, tiles * keys)))
    o, _, _ = attention(q[None, :, None], k[None, :, None], v[None, :, None], 128**-0.5, None)
    function = functools.partial(steady_of, tiles=tiles, keys=keys, fault=fault)
    return case(function, [q, k, v], {"o": o[0, :, 0]}, 8e-3)


def steady_of(q: Any, k: Any, v: Any, *, tiles: int, keys: int, fault: str = "", **options: Any) -> Any:
    """`fault` is one of FAULTS; `options` are those of plgpu.kernel."""
    import jax
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.numpy as jnp
    from jax import lax

    rows, d = q.shape
    slots, scale = 2, float(d**-0.5 * np.log2(np.e))
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE

    def wide_in(x: Any, columns: int) -> Any:
        return lax.broadcast_in_dim(x, (rows, columns), [0])

    def softmax(o_gmem: Any, refs: dict[str, Any]) -> None:
        s_tmem, p_tmem, o_tmem = refs["s"], refs["p"], refs["o"]

        def turn(i: Any, carry: Any) -> Any:
            before, total = carry
            plgpu.barrier_wait(refs["scored"])
            s = plgpu.async_load_tmem(s_tmem, layout=layout)
            plgpu.wait_load_tmem()

            @pl.when(i + 1 < tiles)
            def _() -> None:
                plgpu.barrier_arrive(refs["taken"])

            most = jnp.maximum(before, s.max(axis=1) * scale)
            alpha = jnp.exp2(before - most)
            p = jnp.exp2(s * scale - wide_in(most, keys))
            if fault == "race":  # P is still being read
                plgpu.async_store_tmem(p_tmem, p.astype(q.dtype))

            @pl.when(i > (fault == "phase"))
            def _() -> None:
                plgpu.barrier_wait(refs["added"])

            @pl.when(i > 0)
            def _() -> None:
                o = plgpu.async_load_tmem(o_tmem, layout=layout)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(o_tmem, o * wide_in(alpha, d))

            if fault != "race":
                plgpu.async_store_tmem(p_tmem, p.astype(q.dtype))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(refs["stored"])
            return most, total * alpha + p.sum(axis=1)

        lowest = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), layout.reduce(1))
        none = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), layout.reduce(1))
        _, total = lax.fori_loop(0, tiles, turn, (lowest, none))
        plgpu.barrier_wait(refs["added"])
        o = plgpu.async_load_tmem(o_tmem, layout=layout)
        plgpu.wait_load_tmem()
        refs["o_smem"][...] = o / wide_in(total, d)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs["o_smem"], o_gmem)
        plgpu.wait_smem_to_gmem(0)

    def products(refs: dict[str, Any]) -> None:
        def score(i: Any) -> None:
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(refs["loaded"].at[slot])
            transposed = plgpu.transpose_ref(refs["k_smem"].at[slot], (1, 0))
            plgpu.tcgen05_mma(refs["s"], refs["q_smem"], transposed, refs["scored"], accumulate=False)

        def turn(i: Any, carry: None) -> None:
            @pl.when(i + 1 < tiles)
            def _() -> None:
                plgpu.barrier_wait(refs["taken"])
                score(i + 1)

            slot = lax.rem(i, slots)
            plgpu.barrier_wait(refs["stored"])
            plgpu.tcgen05_mma(refs["o"], refs["p"], refs["v_smem"].at[slot], accumulate=i > 0)
            if fault != "commit":
                plgpu.tcgen05_commit_arrive(refs["added"])

            @pl.when(i + slots < tiles)
            def _() -> None:
                plgpu.tcgen05_commit_arrive(refs["freed"].at[slot])

        plgpu.barrier_wait(refs["q_loaded"])
        score(jnp.int32(0))
        lax.fori_loop(0, tiles, turn, None)

    def loads(q_gmem: Any, k_gmem: Any, v_gmem: Any, refs: dict[str, Any]) -> None:
        def turn(i: Any, carry: None) -> None:
            slot = lax.rem(i, slots)

            @pl.when(i >= slots)
            def _() -> None:
                plgpu.barrier_wait(refs["freed"].at[slot])

            those = pl.ds(i * keys, keys)
            plgpu.copy_gmem_to_smem(k_gmem.at[those], refs["k_smem"].at[slot], refs["loaded"].at[slot])
            plgpu.copy_gmem_to_smem(v_gmem.at[those], refs["v_smem"].at[slot], refs["loaded"].at[slot])

        plgpu.copy_gmem_to_smem(q_gmem, refs["q_smem"], refs["q_loaded"])
        lax.fori_loop(0, tiles, turn, None)

    def kernel(q_gmem: Any, k_gmem: Any, v_gmem: Any, o_gmem: Any, **refs: Any) -> None:
        thread = lax.axis_index("thread")
        pl.when(thread == 0)(lambda: softmax(o_gmem, refs))
        pl.when(thread == 1)(lambda: products(refs))
        pl.when(thread == 2)(lambda: loads(q_gmem, k_gmem, v_gmem, refs))

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def of_tensor_core(number: int = 1) -> Any:
        return plgpu.Barrier(num_barriers=number, orders_tensor_core=True)

    scratch = {
        "q_smem": plgpu.SMEM((rows, d), q.dtype, transforms=tiled),
        "k_smem": plgpu.SMEM((slots, keys, d), q.dtype, transforms=tiled),
        "v_smem": plgpu.SMEM((slots, keys, d), q.dtype, transforms=tiled),
        "o_smem": plgpu.SMEM((rows, d), np.float32),
        "s": plgpu.TMEM((rows, keys), np.float32),
        "p": plgpu.TMEM((rows, keys), q.dtype, packed=True),
        "o": plgpu.TMEM((rows, d), np.float32),
        "q_loaded": plgpu.Barrier(),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        "freed": of_tensor_core(slots),
        "scored": of_tensor_core(),
        "taken": of_tensor_core(),
        "stored": of_tensor_core(),
        "added": of_tensor_core(),
    }
    made = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, d), np.float32),
        scratch_types=scratch,
        grid=(1,),
        grid_names=("one",),
        num_threads=3,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **options,
    )
    return made(q, k, v)
