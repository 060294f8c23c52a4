"""MaxText's attention by this package's kernels, in the place of its dot products of training and of prompts.

Read and run with MaxText 0.2.5. `python -m jax_dsv4_fmha.adapters.maxtext` is MaxText's trainer after `register()`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import Span, _check, dsv4_attention, fmha
from ._seen import segments, within

try:
    from maxtext.common.common_types import MODEL_MODE_PREFILL, MODEL_MODE_TRAIN, AttentionType
    from maxtext.layers.attention_compressed import CompressedAttention, DeepseekV4Indexer
    from maxtext.layers.attention_op import AttentionOp
except ImportError as e:
    raise ImportError(f"jax_dsv4_fmha.adapters.maxtext: {e}; pip install 'maxtext>=0.2.5', and what it pins") from e

_OP = "maxtext.AttentionOp"
_attention, _choose = AttentionOp.apply_attention, DeepseekV4Indexer.__call__
_mask = CompressedAttention.get_compressed_mask
_chosen: list[jax.Array] = []  # of the layer that is being traced: what its indexer chose


def register(implementation: _check.Implementation | None = None) -> None:
    """Layers with `attention="dot_product"` attend by `fmha`, of V4 by `dsv4_attention`, in training and prefill.

    Steps of decoding, chunks of a prompt and other values of `attention` stay MaxText's. So do V4's compressors and its
    indexer, whose indices count as they are. The mask that MaxText makes of them is left out of the compiled program,
    if no indexer loss asks for it. Where the tokens of a segment stand in several places, the batch entry gets NaN.

    Args:
      implementation: as in `fmha`.

    Raises, while a layer is traced:
      NotImplementedError: soft caps, MoBA, bidirectional masks, the sparse indexer of MLA, maxima of logits, V of
        another width than K, or a sequence that devices share.
    """

    def apply_attention(self: Any, query: Any, key: Any, value: Any, **rest: Any) -> Any:
        whole = rest["model_mode"] in (MODEL_MODE_TRAIN, MODEL_MODE_PREFILL) and rest.get("previous_chunk") is None
        if self.attention_kernel != "dot_product" or not whole:
            return _attention(self, query=query, key=key, value=value, **rest)
        return _attend(self, query, key, value, implementation, **rest), None, None

    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        indices, scores = _choose(self, *args, **kwargs)
        _chosen[:] = [indices]
        return indices, scores

    def mask(self: Any, inputs_positions: Any, compressed_len: Any, sparse_compressed_mask: Any = None) -> Any:
        if sparse_compressed_mask is None:  # all entries count, as without an indexer
            _chosen.clear()
        return _mask(self, inputs_positions, compressed_len, sparse_compressed_mask)

    AttentionOp.apply_attention, DeepseekV4Indexer.__call__ = apply_attention, choose
    CompressedAttention.get_compressed_mask = mask


def _attend(
    op: Any, q: Any, k: Any, v: Any, implementation: Any, *, decoder_segment_ids: Any, compressed_mask: Any,
    compress_ratio: int, sinks: Any, **rest: Any,
) -> jax.Array:  # fmt: skip
    s, kind = q.shape[1], op.attention_type
    n = k.shape[1] - (0 if compressed_mask is None else compressed_mask.shape[-1])  # keys before V4's entries
    for name, x, wanted in (
        ("attn_logits_soft_cap", op.attn_logits_soft_cap or None, None),
        ("moba", op.config.moba, False),
        *((name, rest[name], None) for name in ("bidirectional_mask", "indexer_mask")),
        ("record_max_logits", rest["record_max_logits"], False),
        ("value", v.shape, k.shape),
        ("key", n, s),
        ("devices that share a sequence", op._context_parallel_size(), 1),
    ):
        if x is not wanted and (isinstance(x, jax.Array) or x != wanted):
            raise _check.error(NotImplementedError, _OP, name, x, f"{wanted}, more is not supported")
    i = jnp.arange(s, dtype=jnp.int32)[None]
    if kind == AttentionType.CHUNK:
        span = Span(i // op.chunk_attn_window_size * op.chunk_attn_window_size, i + 1, width=op.chunk_attn_window_size)
    elif kind == AttentionType.BLOCK_DIFFUSION:
        span = Span(0, (i // op.causal_block_size + 1) * op.causal_block_size)
    else:
        windows = kind in (AttentionType.LOCAL_SLIDING, AttentionType.COMPRESSED)
        left = op.sliding_window_size - 1 if windows and op.sliding_window_size is not None else None
        span = within(_OP, s, left, None if kind == AttentionType.FULL else 0)
    first, broken = 0, None  # of each query's document
    if decoder_segment_ids is not None:
        of_ids, broken = segments(decoder_segment_ids)
        first, span = of_ids.start, span & of_ids
    k, v = k.astype(q.dtype), None if v is k else v.astype(q.dtype)  # V4's layers of a window alone pass one latent
    sink = None if sinks is None else sinks.astype(jnp.float32)
    how = {"sink": sink, "scale": 1.0, "implementation": implementation}  # MaxText scales q
    if kind != AttentionType.COMPRESSED:
        o, _ = fmha(q, k, v, span=span, **how)
    else:  # entries of which a document has all tokens; MaxText counts them from the first token of the row
        entries: dict[str, Any] = {"indices": _chosen.pop()} if _chosen and compress_ratio == 4 else {}
        if compressed_mask is not None and not entries:
            stop = jnp.where(span.start < span.stop, (i + 1) // compress_ratio, 0)
            entries = {"ratio": Span(-(-first // compress_ratio), stop)}
        o, _ = dsv4_attention(q, k[:, :n, 0], k[:, n:, 0] if entries else None, window=span, **entries, **how)
    return o if broken is None else o + jnp.where(broken, jnp.nan, 0)


def main() -> None:
    """MaxText's `maxtext.trainers.pre_train.train`, with its arguments, after `register()`."""
    from absl import app
    from maxtext.trainers.pre_train import train

    register()
    app.run(train.main)


if __name__ == "__main__":
    main()
