"""Makes an op that ends in a kernel work under jax.jit, vmap, grad and meshes: one mechanism for all ops.

An op (`op.py`) is data: the axes of its operands and results, a kernel and a reference. A call passes these layers, the
outermost first, each of which is a module:

    autodiff   custom_vjp: another op, with a kernel or without, computes the gradient from the residuals
    batching   custom_vmap: a mapped axis becomes one more leading batch axis, of size 1 where nothing is mapped
    sharding   which devices compute what. All axes manual: this device computes all. Explicit: jax.shard_map. Auto, or
               no mesh: custom_partitioning, which compiles to nothing on a single device
    folding    all batch axes become the one that a kernel has, on one device, where that moves no data
    lowering   kernel or reference, by the platform that XLA compiles for

Batch, s_q and h_q may be sharded, and h_kv with h_q. A row needs all its keys, all of d and all its indices, so no
other axis may be sharded. A forward op has no collective; a result that lacks a sharded axis, as dk lacks s_q, is
summed.
"""
