import jax
import jax.numpy as jnp
import numpy as np


def array(x):
    if isinstance(x, jax.Array):
        return np.asarray(x)
    if "float8" in str(x.dtype):
        return np.asarray(array(x.view(__import__("torch").uint8))).view(jnp.float8_e4m3fn)
    return np.asarray(jnp.from_dlpack(x))


def indexer_forward_wrapper(q, k, w, ratio=4, sm_scale=1.0, q_causal_offsets=None, precision="bf16", **scales):
    q, k, w = map(array, (q, k, w))
    (b, s, h, d), n = q.shape, k.shape[1]
    assert k.shape == (b, n, 1, d) and d == 128 and h in (32, 64) and w.shape == (b, s, h) and ratio >= 1
    assert q.dtype == k.dtype == {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[precision] and w.dtype == np.float32
    assert set(scales) == ({"q_scale", "k_scale"} if precision == "fp8" else set())
    products = np.einsum("bshd,bnd->bsnh", q.astype(np.float32), k[:, :, 0].astype(np.float32))
    if scales:
        q_scale, k_scale = array(scales["q_scale"]), array(scales["k_scale"])
        assert q_scale.shape == (b, s, h) and (q_scale == 1).all() and k_scale.shape == (b, n, 1)
        products = products * k_scale[:, None]
    scores = np.einsum("bsnh,bsh->bsn", np.maximum(products, 0), w) * sm_scale
    first = 0 if q_causal_offsets is None else array(q_causal_offsets)[0]
    seen = np.arange(n) < ((first + np.arange(s) + 1) // ratio)[:, None]
    return {"scores": jnp.asarray(np.where(seen, scores, -np.inf), jnp.float32)}


def indexer_top_k_wrapper(input_values, seq_lens, top_k, next_n=1, return_val=True):
    values, lengths = array(input_values), array(seq_lens)
    assert values.ndim == 2 and lengths.shape == values.shape[:1] and lengths.dtype == np.int32
    assert next_n == 1 and not return_val
    values = np.where(np.arange(values.shape[1]) < lengths[:, None], values, -np.inf)
    order = np.argsort(-values, 1)[:, :top_k].astype(np.int32)
    return {"indices": jnp.asarray(np.where(np.take_along_axis(values, order, 1) > -np.inf, order, -1)), "values": None}
