"""Raw calls of attention's gradients. All take do like o, and lse, sink_factor and delta of every row of q, float32
`[b, s_q, h_q]`, as `_dispatch.attention_op.gradient` defines them. Rows whose lse is -inf see no key; their other
numbers may be anything.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import fixed_point
from .call import call
from .mode import Mode, name_of


def mla_bwd(
    op: str,
    mode: Mode,
    q: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    sink_factor: jax.Array,
    delta: jax.Array,
    *sources: jax.Array,
    scale: float,
    deterministic: bool = False,
    eps: float | None = None,
) -> tuple[jax.Array, ...]:
    """The gradient of a call over sources whose keys are values too: dq like q, and a float32 gradient like each
    source's keys.

    Sums over queries and heads are in no fixed order. With deterministic their result does not depend on the order, and
    a first call bounds the sums of every key.

    Args:
      op: the forward call is `mla_span_fwd` for "mla_span_bwd", and `mla_sparse_fwd`, `csa_fwd` or `hca_fwd` for
        "mla_sparse_bwd", "csa_bwd" or "hca_bwd".
      mode: in a rotary one q is before its norm and RoPE, and dq is of that; do is of o after RoPE back, in groups of
        heads, `[groups, b, s_q, h_q / groups, d]`; after the sources comes the table of the forward call, and `eps`.
      sources: of each source three arrays, as the forward call takes them: its keys, and start and stop, or indices and
        length.
    """
    keys = sources[: len(sources) // 3 * 3 : 3]
    numbers: dict[str, Any] = {"scale": np.float32(scale)}
    numbers |= {} if eps is None else {"eps": np.float32(eps)}
    units: list[jax.Array] = []
    if deterministic:
        rows, of_bounds = fixed_point.of_rows(q, do, lse, sink_factor, delta, keys, scale)
        bounds = [jax.ShapeDtypeStruct((*x.shape[:-1], 2), jnp.uint32) for x in keys]
        given = (q, do, lse, rows.sink_factor, rows.delta, rows.most_of_p, of_bounds, *sources)
        bounded = call(name_of(op, replace(mode, bounds=True)), bounds, *given, **numbers)
        units = [fixed_point.resolution(x, of_bounds) for x in bounded]
    resolution = jnp.concatenate([jnp.zeros(0, jnp.float32), *(x.ravel() for x in units)])
    sums = [jax.ShapeDtypeStruct(x.shape, jnp.uint32 if deterministic else jnp.float32) for x in keys]
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), *sums)
    dq, *dkv = call(name_of(op, mode), results, q, do, lse, sink_factor, delta, resolution, *sources, **numbers)
    if deterministic:
        dkv = [fixed_point.to_float32(x, of_key) for x, of_key in zip(dkv, units, strict=True)]
    return dq, *map(unshuffle_accumulator_columns, dkv)


def mha_bwd(
    q: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    sink_factor: jax.Array,
    delta: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    deterministic: bool = True,
) -> tuple[jax.Array, ...]:
    """The gradient of `mha_fwd` over `k` and `v [b, s_kv, h_kv, d]`: (dq, dk, dv), in q's dtype; (dq, dk + dv) without
    v.

    If deterministic, the results have the same bits on every run; else one kernel sums dq up in no fixed order.
    """
    if v is None and q.shape[-1] == 512:  # a kernel of 512 has dK and dV in different CTAs
        arrays = (q, do, lse, sink_factor, delta, k, k, start, stop)
        dq, dk, dv = mha_bwd(*arrays, scale=scale, deterministic=deterministic)
        return dq, (dk.astype(jnp.float32) + dv.astype(jnp.float32)).astype(k.dtype)
    keys = (k,) if v is None else (k, v)
    seen = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * (q.shape[2] // k.shape[2]), 2), jnp.int32)
    sums = jax.ShapeDtypeStruct(q.shape, q.dtype if deterministic else jnp.float32)
    results = (sums, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in keys), seen)
    target, of_rows = "mha_bwd" + "_shared_kv" * (v is None), (q, do, lse, sink_factor, delta)
    dq, *of_keys, _ = call(target, results, *of_rows, *keys, start, stop, scale=np.float32(scale))
    if not deterministic:
        dq = (np.float32(scale) * unshuffle_accumulator_columns(dq)).astype(q.dtype)
    return dq, *of_keys


def unshuffle_accumulator_columns(sums: Any) -> Any:
    """The columns of sums that kernels add to as their accumulators have them: of 16 columns four lanes have two of
    the first eight and two of the others each, and four of a lane lie together."""
    if sums.shape[-1] % 16:  # there is no kernel: the call raises an error when it runs
        return sums
    return sums.reshape(*sums.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(sums.shape)
