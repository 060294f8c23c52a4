"""A step of generation over one long context whose compressed cache is shared out over devices.

Entries and index keys go to the devices in turns of `TURN`, so that each has as many as the others however long the
sequence is. A device scores its own keys and chooses `topk` of them; of all devices' candidates the best `topk` are the
choice, which is exactly that of one device. Each then attends to those of the chosen entries that it holds, the first
one to the window too, and the parts are merged. Between devices go, for a query, `topk` scores and numbers and one part
of o: nothing that grows with the context. Without GPUs there are four virtual CPU devices.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache, Span, dsv4_decode, lightning_indexer, merge

TURN = 64  # entries


class Held(NamedTuple):
    """`[b, capacity, d]` each, sharded along the capacity: device r has the entries w with `w // TURN % n == r`."""

    entries: jax.Array
    keys: jax.Array


def zeros(mesh, b, capacity, d, d_index, dtype=jnp.bfloat16):
    """Makes empty caches for so many entries; raises ValueError unless that is a multiple of TURN times the devices."""
    (ring,) = mesh.axis_names
    if capacity % (TURN * mesh.size):
        raise ValueError(f"capacity: got {capacity}, want a multiple of {TURN} entries on each of {mesh.size} devices")
    spec = NamedSharding(mesh, P(None, ring))
    return Held(*(jax.device_put(jnp.zeros((b, capacity, width), dtype), spec) for width in (d, d_index)))


def number_held(entries, device, n):
    """Counts those of the first `entries` that a device holds."""
    rounds, rest = jnp.divmod(entries, TURN * n)
    return rounds * TURN + jnp.clip(rest - device * TURN, 0, TURN)


def candidates(scores, indices, device, n):
    """int32 `[2, b, s_q, topk]`, one array to send: the scores' bits, and the numbers of the entries."""
    score = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # which come last, but before those that are absent
    entry = jnp.where(indices < 0, 2**31 - 1, (indices // TURN * n + device) * TURN + indices % TURN)
    return jnp.stack([jax.lax.bitcast_convert_type(score, jnp.int32), entry])


def number_before(mine, of_all):
    """Counts those of all devices' `[n, 2, b, s_q, topk]` that come before each of `mine`: with a higher score, or as
    lower entries of its own score."""
    score, entry = jax.lax.bitcast_convert_type(mine[0], jnp.float32)[..., None], mine[1][..., None]
    scores, entries = jax.lax.bitcast_convert_type(of_all[:, 0], jnp.float32)[..., None, :], of_all[:, 1, ..., None, :]
    return ((scores > score) | ((scores == score) & (entries < entry))).sum((0, -1))


def append(held, mesh, entry, key, place):
    """Entry and key `[b, n, …]` of the entries number `place` int32 `[b, n]`, each kept by the device that holds it."""
    (ring,) = mesh.axis_names
    part = P(None, ring)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(part, part, P(), P(), P()), out_specs=part)
    def local(entries, keys, entry, key, place):
        me, n = jax.lax.axis_index(ring), mesh.size
        mine = place // TURN % n == me
        at = jnp.where(mine, place // TURN // n * TURN + place % TURN, -1)  # a place below 0 is not kept
        return Held(*(Cache(x).append(new, at).entries for x, new in ((entries, entry), (keys, key))))

    return local(*held, entry, key, place)


def attend(q, index_q, weights, window_cache, held, lengths, sink, *, mesh, ratio=4, topk=512, window=128):
    """`dsv4_decode` over the choice of `lightning_indexer`: q [b, s_q, h, d], the last tokens of every sequence, whose
    window is in no pages."""
    (ring,) = mesh.axis_names
    part = P(None, ring)
    specs = (P(), P(), P(), P(), part, part, P(), P())

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    def local(q, index_q, weights, window_cache, entries, keys, lengths, sink):
        me, n, s_q = jax.lax.axis_index(ring), mesh.size, q.shape[1]
        positions = lengths[:, None] - s_q + jnp.arange(s_q)
        seen = Span(0, number_held(jnp.maximum(positions + 1, 0) // ratio, me, n))
        indices, scores = lightning_indexer(index_q, keys, weights, topk=topk, span=seen, return_scores=True)

        of_all = jax.lax.all_gather(candidates(scores, indices, me, n), ring)
        chosen = number_before(of_all[me], of_all) < topk

        page = jnp.where(me == 0, jnp.arange(len(lengths)), -1)  # others have no page of the window
        recent = Cache(window_cache.entries, page[:, None])
        how = {"lengths": lengths, "indices": jnp.where(chosen, indices, -1), "window": window}
        here = dsv4_decode(q, recent, Cache(entries), **how)
        os, lses = (jax.lax.all_gather(x, ring) for x in here)
        return merge([*zip(os, lses, strict=True)], sink)

    return local(q, index_q, weights, window_cache, *held, lengths, sink)


def attend_on_one(q, index_q, weights, window_cache, entries, keys, lengths, sink, *, ratio=4, topk=512, window=128):
    """The same where one device has all entries and keys."""
    past = Span.compressed(q.shape[1], ratio, lengths - q.shape[1])
    indices = lightning_indexer(index_q, keys, weights, topk=topk, span=past)
    how = {"lengths": lengths, "indices": indices, "sink": sink, "ratio": ratio, "window": window}
    return dsv4_decode(q, window_cache, Cache(entries), **how)


def main(b=2, tokens=1500, h=4, d=32, index_heads=4, d_index=16, topk=24, ratio=4):
    mesh = jax.make_mesh((jax.device_count(),), ("ring",))
    count, turn = tokens // ratio, TURN * mesh.size
    capacity = -(-count // turn) * turn
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    window_cache = Cache(normal(b, 256, d))
    entries, index_keys = normal(b, count, d), normal(b, count, d_index)
    q, index_q = normal(b, 1, h, d), normal(b, 1, index_heads, d_index)
    weights, sink = jax.random.normal(next(keys), (b, 1, index_heads)), jax.random.normal(next(keys), (h,))
    lengths = jnp.array([tokens, tokens // 3])[:b]

    held = zeros(mesh, b, capacity, d, d_index)
    places = jnp.broadcast_to(jnp.arange(count), (b, count))
    held = jax.jit(append, static_argnums=1, donate_argnums=0)(held, mesh, entries, index_keys, places)
    step = jax.jit(functools.partial(attend, mesh=mesh, ratio=ratio, topk=topk))
    o, lse = step(q, index_q, weights, window_cache, held, lengths, sink)

    on_one = jax.jit(functools.partial(attend_on_one, ratio=ratio, topk=topk))
    want, want_lse = on_one(q, index_q, weights, window_cache, entries, index_keys, lengths, sink)
    off = float(jnp.max(jnp.abs(lse - want_lse)))
    on_each = [x.data.shape[1] for x in held.entries.addressable_shards]
    print(
        f"{mesh.size} {jax.default_backend()} devices with room for {on_each[0]} entries each: lse differs by {off:.1e}"
    )
    assert off < 1e-3
    assert jnp.allclose(o.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
