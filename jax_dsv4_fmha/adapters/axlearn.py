"""AXLearn's flash attention by this package's kernels: an entry of its list of backends.

Read and run with AXLearn's main of July 2026, commit 34aed43; PyPI has one of February 2024, without this list.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, fmha
from ._seen import segments, within

try:
    from axlearn.common import attention_bias as biases
    from axlearn.common.flash_attention.common import BaseFlashAttention
    from axlearn.common.flash_attention.utils import BACKENDS
except ImportError as e:
    raise ImportError(f"jax_dsv4_fmha.adapters.axlearn: {e}; pip install git+https://github.com/apple/axlearn") from e

_OP = "axlearn.FMHA"


def register(backend: str = "gpu") -> None:
    """Puts `FMHA` first in AXLearn's list of a backend's kernels; AXLearn takes the first that supports a call."""
    BACKENDS[backend].insert(0, FMHA)


class FMHA(BaseFlashAttention):  # type: ignore[misc]
    """`fmha` as one of AXLearn's kernels, with logit sinks.

    It takes forward passes with causal masks, windows and segment ids, and leaves the rest to the next kernel of the
    list; AXLearn logs why. `backend_overrides={"implementation": …}` is `fmha`'s. A batch entry gets NaN where the
    tokens of a segment stand in several places, or positions do not count them.
    """

    def is_supported(self, input_batch: Any, kv_cache_type: Any) -> bool:
        super().is_supported(input_batch, kv_cache_type)  # or an error
        q, k, v = (input_batch[name] for name in ("query", "key", "value"))
        if kv_cache_type is not None or input_batch.get("page_tables") is not None:
            return self._log_unsupported("it is a step of decoding")
        if self.cfg.dropout_rate:
            return self._log_unsupported("there is no dropout")
        if _split(input_batch["bias"])[-1].has_value():
            return self._log_unsupported("of a bias, or of a mask that is not causal, a window or segment ids")
        if q.shape[1] != k.shape[1]:
            return self._log_unsupported(f"of {q.shape[1]} queries and {k.shape[1]} keys")
        try:  # a kernel, except where AXLearn interprets its own: on a CPU
            how = self.get_backend_overrides("implementation", None if self.cfg.interpret else "cubin")
            jax.eval_shape(lambda *x: fmha(*(y.astype(q.dtype) for y in x), implementation=how), q, k, v)
        except NotImplementedError as e:
            return self._log_unsupported(str(e))
        return True

    def __call__(self, input_batch: Any) -> jax.Array:
        q, sink = input_batch["query"], input_batch.get("logit_sink")
        causal, window, ids, _ = _split(input_batch["bias"])
        left = window.sliding_window_size if window.has_value() else None
        span = within(_OP, q.shape[1], left, 0 if causal.has_value() or left is not None else None)
        broken, same = jnp.zeros((1, 1, 1, 1), bool), jnp.bool_(True)
        if ids.has_value():
            ids = ids.segment_ids - jnp.minimum(ids.segment_ids.min(), 0)  # so that none is padding
            (of_ids, broken), same = segments(ids), ids[:, 1:] == ids[:, :-1]
            span &= of_ids
        for mask in (mask for mask in (causal, window) if mask.has_value()):
            at, of_keys = mask.target_positions, mask.source_positions
            if at.shape[-1] != of_keys.shape[-1]:  # devices share the sequence
                raise _check.error(NotImplementedError, _OP, "query", q, f"all {of_keys.shape[-1]} positions")
            other = ((jnp.diff(at) != 1) & same).any(1) | (at != of_keys).any(1)
            broken = broken | other[:, None, None, None]
        k, v = (input_batch[name].astype(q.dtype) for name in ("key", "value"))
        sink = None if sink is None else sink.astype(jnp.float32)
        how = self.get_backend_overrides("implementation", None)
        o, _ = fmha(q, k, v, span=span, sink=sink, scale=self.cfg.softmax_scale, implementation=how)
        return o + jnp.where(broken, jnp.nan, 0)


def _split(bias: Any) -> list[Any]:
    kinds = (biases.CausalAttentionBias, biases.SlidingWindowAttentionBias, biases.SegmentIdAttentionBias)
    return [*biases.split(bias, *kinds)]
