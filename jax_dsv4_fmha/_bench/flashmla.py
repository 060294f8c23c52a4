"""FlashMLA as a peer: the torch package `flash_mla` that the user built, with the API of its commit 9241ae3 (Hopper).

It gets a prompt's window and compressed entries as one array and one list of indices, and a step's entries as slots of
their pages. Both are made before anything is timed, as is the schedule of a step, which its first call makes.
"""

import functools
import hashlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.packed import LAYOUTS, V4_FP8
from .._definitions.span import Span
from .._dispatch.seen_slots import seen_slots
from .attention import AttentionRow, E4m3Row, FmhaRow, LayerRow, SparseRow
from .decode import PAGE, ChunkRow, DecodeRow
from .latent import LatentStepRow
from .measure import Operands
from .outside import Call, Peer, from_torch, numbers_differ, require, to_torch, torch
from .row import CallRow

_HEADS = (64, 128)
_INDICES = 128  # a list's length is a multiple of this
_PACKAGE = "flash_mla"


def flashmla(path: str) -> Peer:
    """FlashMLA from the folder that holds its package, or from a file of the package, such as its extension.

    Raises:
      ImportError: there is no such package, no extension in it, or none for this torch; torch is missing or has no GPU.
    """
    package, extension = _load(Path(path).resolve())
    facts = {
        "commit": _commit(extension.parent.parent),
        "extension": extension.name,
        "sha256": hashlib.sha256(extension.read_bytes()).hexdigest(),
        "torch": torch().__version__,
    }
    return Peer("flashmla", facts, takes, functools.partial(_prepare, package), _differs, most=0.02)


def _load(path: Path) -> tuple[Any, Path]:
    """The package, and the file of its extension."""
    at = next(
        (x for x in (path, path / _PACKAGE, path.parent) if x.name == _PACKAGE and (x / "__init__.py").is_file()), None
    )
    if at is None:
        raise ImportError(f"{path}: no package {_PACKAGE}, wanted the folder that holds it, or its extension")
    extension = next(iter(sorted((*at.glob("cuda*.so"), *at.glob("cuda*.pyd")))), None)
    if extension is None:
        raise ImportError(
            f"{at}: no extension cuda*.so, wanted a built package: `python setup.py build_ext --inplace` in its sources"
        )
    torch()
    spec = importlib.util.spec_from_file_location(_PACKAGE, at / "__init__.py", submodule_search_locations=[str(at)])
    assert spec is not None and spec.loader is not None
    package = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except ImportError as e:
        del sys.modules[_PACKAGE]
        raise ImportError(f"{extension}: {e}; was it built for this torch and this Python?") from e
    require(package, "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")
    return package, extension


def _commit(folder: Path) -> str | None:
    """The commit of the sources, where the package lies in their clone."""
    if not (folder / ".git").exists():  # git would answer for a clone further up
        return None
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def takes(row: CallRow) -> CallRow | None:
    """A layer's prompt of one sequence, or a step, by products in 16 bits. It has steps from V4's FP8 alone, which it
    takes beside ours from bfloat16 too. Prompts of fewer heads over selections get zeros beside them.
    """
    if not isinstance(row, AttentionRow) or row.d not in (512, 576) or row.dtype != "bfloat16":
        return None
    if row.h_q not in _HEADS and not (isinstance(row, SparseRow | LayerRow) and row.h_q < min(_HEADS)):
        return None
    match row:
        case E4m3Row() | ChunkRow():
            return None
        case DecodeRow():
            fits = row.topk > 0 and row.caches in ("", "fp8") and not (row.window | row.topk) % (_INDICES // 2)
            return replace(row, caches="fp8") if fits else None
        case LatentStepRow():
            return row if not row.topk % _INDICES and row.layout == "v32_fp8" else None
        case LayerRow():
            return row if row.b == 1 and row.topk and not row.page and not (row.window + row.topk) % _INDICES else None
        case SparseRow():
            return row if row.b == 1 and not row.topk % _INDICES else None
        case FmhaRow() if _is_dense_step(row):
            return row
        case FmhaRow():
            return row if row.b == 1 and row.window and row.has_sink and not row.window % _INDICES else None
    return None


def _differs(theirs: Any, ours: Any) -> float:
    """The difference of the two o, by `numbers_differ`; lse is not compared."""
    o = from_torch(theirs[0])
    return numbers_differ(o[..., : ours[0].shape[2], :], ours[0])


def _is_dense_step(row: FmhaRow) -> bool:
    return row.d == 576 and row.s_q == 1 and row.span is None and not row.has_sink and not row.s_kv % PAGE


def _prepare(package: Any, row: AttentionRow, operands: Operands) -> Call:
    if isinstance(row, DecodeRow):
        return _step(package, row, operands)
    if isinstance(row, LatentStepRow):
        return _latent_step(package, row, operands)
    if isinstance(row, FmhaRow) and _is_dense_step(row):
        return _dense_step(package, row, operands)
    x = prompt(row, operands)
    absent = max(0, min(_HEADS) - row.h_q)
    x |= {"q": jnp.pad(x["q"], ((0, 0), (0, absent), (0, 0)))} if absent else {}
    x |= {"sink": jnp.pad(x["sink"], (0, absent))} if absent and "sink" in x else {}
    given = {name: to_torch(value) for name, value in x.items()}
    return functools.partial(
        package.flash_mla_sparse_fwd, given["q"], given["kv"], given["indices"], row.d**-0.5, row.d_v, given.get("sink")
    )


def prompt(row: AttentionRow, operands: Operands) -> Operands:
    """q `[s, h, d]`, kv `[n, 1, d]`, indices `[s, 1, k]`, and a sink."""
    near: list[jax.Array] = []
    far: list[jax.Array] = []
    match row:
        case SparseRow():
            keys, far = operands["kv"], [operands["indices"]]
        case LayerRow():
            keys = jnp.concatenate([operands["window_kv"], operands["compressed_kv"]], 1)
            _, ends = row.far.bounds(1, row.s_q, row.s_c)
            past = operands["indices"] < ends[..., None]
            near = [_window(row, row.near, row.window)]
            far = [jnp.where(past, operands["indices"] + row.s_kv, -1)]
        case FmhaRow():
            assert row.window is not None
            keys = operands["k"][:, :, 0]
            near = [_window(row, Span.sliding_window(row.s_q, row.window, row.s_kv - row.s_q), row.window)]
        case _:
            raise NotImplementedError(row.name)
    indices = jnp.concatenate([*near, *far], -1)
    rest = {name: x for name, x in operands.items() if name == "sink"}
    return {"q": operands["q"][0], "kv": keys[0][:, None], "indices": indices[0][:, None], **rest}


def _window(row: AttentionRow, span: Span, window: int) -> jax.Array:
    """int32 `[1, s_q, window]`: the keys that a query sees, and -1."""
    start, stop = span.bounds(1, row.s_q, row.s_kv)
    keys = start[..., None] + jnp.arange(window, dtype=jnp.int32)
    return jnp.where(keys < stop[..., None], keys, -1)


def _step(package: Any, row: DecodeRow, operands: Operands) -> Call:
    caches = operands["window_cache"], operands["compressed_cache"]
    sources = seen_slots(
        row.s_q, *caches, operands["lengths"], operands["indices"], row.ratio, row.window, with_kernel=False
    )
    parts = [x for source in sources for x in source.parts()]
    slots = [jnp.where(jnp.arange(x.indices.shape[2]) < x.length[..., None], x.indices, -1) for x in parts]
    (near, near_slots), (far, far_slots) = (
        (_pages(to_torch(cache.entries), row.page), to_torch(x)) for cache, x in zip(caches, slots, strict=True)
    )
    schedule, _ = package.get_mla_metadata()
    return functools.partial(
        package.flash_mla_with_kvcache,
        to_torch(operands["q"]),
        near,
        None,
        None,
        row.d,
        schedule,
        softmax_scale=row.d**-0.5,
        is_fp8_kvcache=True,
        indices=near_slots,
        attn_sink=to_torch(operands["sink"]),
        extra_k_cache=far,
        extra_indices_in_kvcache=far_slots,
    )


def _latent_step(package: Any, row: LatentStepRow, operands: Operands) -> Call:
    """The chosen entries of each query, from the same bytes."""
    cache = operands["cache"]
    seen = {"indices": to_torch(cache.slots(operands["indices"])), "is_fp8_kvcache": True}
    pages = to_torch(cache.entries).reshape(-1, PAGE, 1, LAYOUTS[row.layout].entry)
    return _over_latents(package, row, operands["q"], pages, None, None, **seen)


def _dense_step(package: Any, row: FmhaRow, operands: Operands) -> Call:
    """One query of each sequence, which sees all of its keys, in pages that lie in order."""
    n = row.s_kv // PAGE
    table = jnp.arange(row.b * n, dtype=jnp.int32).reshape(row.b, n)
    pages = to_torch(operands["k"]).reshape(-1, PAGE, 1, row.d)
    return _over_latents(package, row, operands["q"], pages, table, jnp.full(row.b, row.s_kv, jnp.int32))


def _over_latents(
    package: Any, row: AttentionRow, q: jax.Array, pages: Any, table: Any, lengths: Any, **seen: Any
) -> Call:
    """A step over one cache, whose schedule its first call makes."""
    schedule, _ = package.get_mla_metadata()
    given = (None if x is None else to_torch(x) for x in (table, lengths))
    return functools.partial(
        package.flash_mla_with_kvcache,
        *(to_torch(q), pages, *given, row.d_v, schedule),
        softmax_scale=row.d**-0.5,
        **seen,
    )


def _pages(pages: Any, entries: int) -> Any:
    """The same bytes as `[pages, entries, 1, bytes of an entry]`, without the padding of a page."""
    size = LAYOUTS[V4_FP8].entry
    return pages[:, : entries * size].reshape(-1, entries, 1, size)
