"""The host's side of a call: the native library, and the raw calls into it, by family.

A raw call is for one CUDA device; it has no checks, no gradient, no batching or sharding rule. If operands do not fit
together, or no kernel is built for them, it raises jax.errors.JaxRuntimeError when it runs.
"""
