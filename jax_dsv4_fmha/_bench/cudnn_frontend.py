"""The cuDNN frontend as a peer: its indexer's scores and its choice of entries, through torch, as of version 1.32."""

import functools
import importlib
from typing import Any

import jax.numpy as jnp

from .._ops.indexer_keys import E4M3
from .indexer import AttendedRow, BlocksRow, ChoiceRow, IndexerRow, InsideBlocksRow, StepRow, TopkRow
from .measure import Operands
from .outside import Call, Peer, choices_differ, from_torch, require, to_torch, torch
from .row import CallRow

_HEADS = (32, 64)


def cudnn_frontend() -> Peer:
    """The cuDNN frontend that is installed.

    Raises:
      ImportError: it or torch is not installed, torch has no GPU, or its version has another API.
    """
    found = torch()
    try:
        package = importlib.import_module("cudnn")
        indexer = importlib.import_module("cudnn.deepseek_sparse_attention")
    except ImportError as e:
        raise ImportError(f"cudnn: not found ({e}), wanted: pip install nvidia-cudnn-frontend, 1.32 or later") from e
    require(indexer, "indexer_forward_wrapper", "indexer_top_k_wrapper")
    facts = {"version": package.__version__, "torch": found.__version__}
    return Peer("cudnn_frontend", facts, takes, functools.partial(_prepare, indexer), _differs, most=0.01)


def takes(row: CallRow) -> CallRow | None:
    """A choice from scores of a prompt of one sequence, or from given scores."""
    if isinstance(row, (StepRow, BlocksRow, InsideBlocksRow, AttendedRow)):
        return None
    if isinstance(row, ChoiceRow):
        return row if row.b == 1 and row.h in _HEADS else None
    return row if isinstance(row, TopkRow) else None


def _differs(theirs: Any, ours: Any) -> float:
    return choices_differ(from_torch(theirs), ours)


def _prepare(indexer: Any, row: IndexerRow, operands: Operands) -> Call:
    """The choice of every query from the entries that it sees, which the lengths tell."""
    seen = jnp.full((row.b, row.s_q), row.s_c, jnp.int32)
    ratio = row.ratio if isinstance(row, ChoiceRow) else 0
    if ratio:
        seen = jnp.minimum((jnp.arange(row.s_q, dtype=jnp.int32) + 1) // ratio, row.s_c)[None]
    lengths = to_torch(seen.reshape(-1))
    if isinstance(row, ChoiceRow):
        scores = _scores(indexer, row, operands)
    else:
        given = to_torch(operands["scores"])
        scores = lambda: given  # noqa: E731

    def call() -> Any:
        rows = scores().reshape(-1, row.s_c)
        return indexer.indexer_top_k_wrapper(rows, lengths, row.topk, return_val=False)["indices"]

    return call


def _scores(indexer: Any, row: ChoiceRow, operands: Operands) -> Call:
    """float32 `[1, s_q, s_c]`. Our weights of e4m3 have the scales of q already."""
    choices: dict[str, Any] = {"ratio": row.ratio or 1, "sm_scale": 1.0}
    if not row.ratio:  # all entries are visible
        choices["q_causal_offsets"] = to_torch(jnp.full((1,), row.s_c, jnp.int32))
    q, k, weights = operands["q"], operands["k"], to_torch(operands["weights"])
    if jnp.dtype(row.dtype) != E4M3:
        return _call(indexer, to_torch(q), to_torch(k[:, :, None]), weights, choices | {"precision": "bf16"})
    scales = {
        "q_scale": to_torch(jnp.ones(q.shape[:3], jnp.float32)),
        "k_scale": to_torch(k.scales[:, :, None]),
    }
    q_codes, k_codes = (to_torch(x.view(jnp.uint8)).view(torch().float8_e4m3fn) for x in (q, k.codes[:, :, None]))
    return _call(indexer, q_codes, k_codes, weights, choices | scales | {"precision": "fp8"})


def _call(indexer: Any, q: Any, k: Any, weights: Any, choices: dict[str, Any]) -> Call:
    return lambda: indexer.indexer_forward_wrapper(q, k, weights, **choices)["scores"]
