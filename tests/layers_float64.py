"""DeepSeek-V4's and V4.1's attention layers in float64, one token and one entry at a time, for tests to compare
with.
"""

import cmath
import math

import ml_dtypes
import numpy as np

V4 = 64, "float8_e4m3fn", 448, 448e-4
WINDOW = 32, "float8_e4m3fn", 448, 1e-4
ENTRIES = 16, "float4_e2m1fn", 6, 6 * 2.0**-9
INDEX = 32, "float4_e2m1fn", 6, 1e-30
"""Formats of kept rows: how many numbers share a scale; their dtype, its greatest number, and the least amax"""


def kept(x, how, plain=0):
    """x `[…, d]` as a cache holds it, the last `plain` of d unchanged. Scales are powers of two, of entries e4m3."""
    (group, dtype, most, least), n = how, x.shape[-1] - plain
    groups = x[..., :n].reshape(*x.shape[:-1], -1, group)
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True), least) / most
    scale = scale.astype(ml_dtypes.float8_e4m3fn) if how == ENTRIES else 2.0 ** np.ceil(np.log2(scale))
    codes = np.clip(groups / scale.astype(np.float64), -most, most).astype(dtype)
    values = codes.astype(np.float64) * scale.astype(np.float64)
    return np.concatenate([values.reshape(*x.shape[:-1], n), x[..., n:]], -1)


def of_index(x, ix):
    """An indexer's queries or keys as `fake_quantize` has them; V4's are multiplied by Sylvester's matrix first."""
    if not (ix.fake_quantize and len(x)):
        return x
    matrix = np.ones((1, 1))
    while ix.transforms and len(matrix) < ix.d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return kept(x @ matrix if ix.transforms else x, INDEX)


def norm(x, weight=1.0, eps=1e-6):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def turn(x, position, how, direction=1):
    x = x.copy()
    n = how.dims
    for i in range(n // 2):
        f = how.theta ** (-2 * i / n)
        if how.factor != 1:

            def pair(turns):
                return n * math.log(how.original / (turns * 2 * math.pi)) / (2 * math.log(how.theta))

            first, last = max(math.floor(pair(how.beta_fast)), 0), min(math.ceil(pair(how.beta_slow)), n - 1)
            slowed = min(max((i - first) / max(last - first, 1e-3), 0), 1)
            f = f * (1 - slowed) + f / how.factor * slowed
        at = x.shape[-1] - n + 2 * i
        z = (x[..., at] + 1j * x[..., at + 1]) * cmath.exp(1j * direction * position * f)
        x[..., at], x[..., at + 1] = z.real, z.imag
    return x


def latents(c, p, x):
    """The compressor's entries before RoPE."""
    wkv, wgate = p["w"][:, : c.channels], p["w"][:, c.channels :]
    out = []
    for w in range(len(x) // c.ratio):
        rows = []  # (kv, score)
        for t in range((w - c.blocks + 1) * c.ratio, (w + 1) * c.ratio):
            if t < 0:
                continue
            half = slice(None)
            if c.overlap:
                half = slice(c.d, None) if t >= w * c.ratio else slice(0, c.d)
            score = 0.0
            if c.ratio > 1:
                score = x[t] @ wgate[:, half] + (p["ape"][t % c.ratio, half] if c.has_ape else 0)
            rows.append((x[t] @ wkv[:, half], score + np.zeros(c.d)))
        kv, score = (np.stack(r) for r in zip(*rows, strict=True))
        weight = np.exp(score - score.max(0))
        out.append(norm((kv * weight).sum(0) / weight.sum(0), p["norm"], c.eps))
    return np.array(out).reshape(-1, c.d)


def choose(ix, p, x, c, keys, ratio, how, shared):
    """The entries that each token chooses, and the blocks it leaves to later layers."""
    chosen, blocks = [], []
    for t in range(len(x)):
        q = of_index(np.stack([turn(c[t] @ p["wq_b"][:, h], t, how) for h in range(ix.heads)]), ix)
        w = x[t] @ p["weights_proj"] / math.sqrt(ix.d * ix.heads)
        scores = {s: float(w @ np.maximum(q @ keys[s], 0)) for s in range(min((t + 1) // ratio, len(keys)))}
        if ix.candidate_blocks:
            best = {}
            for s, score in scores.items():
                best[s // ix.block] = max(best.get(s // ix.block, -math.inf), score)
            if best:
                best[max(best)] = math.inf
            blocks.append(set(sorted(best, key=lambda b: -best[b])[: ix.candidate_blocks]))
        if ix.within_candidates:
            scores = {s: score for s, score in scores.items() if s // ix.block in shared["blocks"][t]}
        chosen.append(sorted(sorted(scores, key=lambda s: (-scores[s], s))[: ix.topk]))
    return chosen, blocks


def layer(one, p, x, shared):
    """One sequence x [s, hidden] -> [s, hidden]; `shared` is what layers of V4.1 hand to later ones, and changes."""
    s, how = len(x), one.rope
    window, of_entries, plain = (V4, V4, how.dims) if one.norm_heads else (WINDOW, ENTRIES, 0)
    c = np.stack([norm(x[t] @ p["wq_a"], p["q_norm"], one.eps) for t in range(s)])
    kv = np.stack([turn(norm(x[t] @ p["wkv"], p["kv_norm"], one.eps), t, how) for t in range(s)])
    kv = kept(kv, window, plain) if one.fake_quantize else kv
    if one.compressor is not None:
        raw = latents(one.compressor, p["compressor"], x)
        entries = np.array([turn(e, w * one.ratio, how) for w, e in enumerate(raw)]).reshape(-1, one.d)
        shared["entries"] = kept(entries, of_entries, plain) if one.fake_quantize and len(entries) else entries
        if one.indexer is not None:
            ip = p["indexer"]
            if one.indexer.compressor is not None:
                of_keys = latents(one.indexer.compressor, ip["compressor"], x)
            else:
                of_keys = [norm(e @ ip["wk"], ip["k_norm"], one.indexer.eps) for e in raw]
            keys = np.array([turn(k, w * one.ratio, how) for w, k in enumerate(of_keys)])
            shared["keys"] = of_index(keys, one.indexer)
    if one.indexer is not None:
        chosen, blocks = choose(one.indexer, p["indexer"], x, c, shared["keys"], one.ratio, how, shared)
        shared["chosen"] = chosen
        shared["blocks"] = blocks or shared.get("blocks")
    y = []
    for t in range(s):
        keys = [kv[j] for j in range(max(t - one.window + 1, 0), t + 1)]
        if one.sparse:
            keys += [shared["entries"][w] for w in shared["chosen"][t]]
        elif one.ratio:
            keys += list(shared["entries"][: (t + 1) // one.ratio])
        y.append(attended(one, p, c[t], t, np.stack(keys)))
    return np.stack(y)


def attended(one, p, c, t, keys):
    """Returns what the token at t, with queries made of c, takes from keys [n, d]."""
    o = []
    for h in range(one.heads):
        q = c @ p["wq_b"][:, h]
        q = turn(norm(q, eps=one.eps) if one.norm_heads else q, t, one.rope)
        weight = np.exp(keys @ q / math.sqrt(one.d))
        o.append(turn(weight @ keys / (weight.sum() + math.exp(p["sink"][h])), t, one.rope, -1))
    o = np.stack(o).reshape(one.o_groups, -1, one.d)
    return np.einsum("gr,grm->m", np.einsum("ghd,ghdr->gr", o, p["wo_a"]), p["wo_b"])


def drafted(one, p, main, x):
    """Drafts x [block, hidden] after tokens that have main [n, hidden]: each sees the window and the block."""
    n, first = len(main), max(len(main) - one.window, 0)
    keys = [norm(z @ p["wkv"], p["kv_norm"], one.eps) for z in [*main[first:], *x]]
    keys = np.stack([turn(key, first + i, one.rope) for i, key in enumerate(keys)])
    if one.fake_quantize:
        keys = kept(keys, *((V4, one.rope.dims) if one.norm_heads else (WINDOW, 0)))
    c = [norm(z @ p["wq_a"], p["q_norm"], one.eps) for z in x]
    return np.stack([attended(one, p, z, n + i, keys) for i, z in enumerate(c)])
