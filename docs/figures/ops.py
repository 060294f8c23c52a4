"""Which op to call: one list for README, the page on ops and the API page."""

from collections.abc import Iterable

from .records import texts

OPS = (  # what the reader has, and the call
    ("q, k and v, as for `jax.nn.dot_product_attention`; also sinks, as gpt-oss has them", "`dot_product_attention`"),
    ("the same, and a mask as a `Span`; I want `lse`", "`fmha`"),
    ("latents, and for each query the indices of its keys", "`sparse_fmha`"),
    ("a V4 layer's window, its compressed entries, and a choice of them", "`dsv4_attention`"),
    ("the same over caches: a step, drafts, or a chunk of a prompt", "`dsv4_decode` over `Cache`"),
    ("an indexer's queries and keys; I want the entries to attend to", "`lightning_indexer`"),
    ("a config.json and a checkpoint; I want a V4 layer", "`layers.from_config`, `layers.from_state_dict`"),
    ("the same of DeepSeek-V3, V3.2, Kimi K2, GLM-5, GLM-5.3-Flash or Hy4", "`layers.LatentAttention.from_config`"),
    ("a flax module", "`layers.flax.attention_fn`; a whole layer: `layers.flax.NNX`"),
    ("a model in MaxText, Levanter, EasyDeL or AXLearn", "one line of `jax_dsv4_fmha.adapters`"),
    ("a call that is slow", "`explain`"),
)

MORE = (
    ("a latent that is both K and V, and no other keys", "`fmha(q, kv)`, without v"),
    ("the same, and numbers for RoPE that are K alone", "`fmha` or `sparse_fmha` with `d_v`"),
    ("the same over a cache, of all tokens or of chosen ones: a step", "`mla_decode` over `Cache`"),
    (
        "caches of keys and of values, of several heads, as gpt-oss and Llama have them: a step",
        "`gqa_decode` over `Cache`",
    ),
    ("an indexer that chooses blocks first, as V4.1's", "`indexer_blocks`, then `lightning_indexer` with `blocks`"),
    ("an indexer to train", "`indexer_loss`, `indexer_scores`, `head_summed_probabilities`"),
    ("parts of attention, over keys that no two share", "`merge`"),
    ("a router's logits; I want each token's experts and their weights", "`route`"),
    ("experts of a mixture", "`fused_moe`; of weights in MXFP4 or FP8 `pack_experts` first"),
    ("a V4 layer whose projections are to stay in FP8", "`layers.from_state_dict` with `packed=True`"),
    ("a residual of four streams, between two sublayers", "`hyper_connection`"),
)

CODE_BASES = (  # whose attention an adapter takes over, the version, and the line that does it
    (
        "MaxText",
        "0.2.5",
        "`python -m jax_dsv4_fmha.adapters.maxtext …`, in the place of `python -m maxtext.trainers.pre_train.train …`",
    ),
    (
        "Levanter",
        "marin-levanter 0.2.227.dev40316220070",
        "`from jax_dsv4_fmha.adapters.levanter import attention`, in the place of `levanter.grug.attention`'s",
    ),
    (
        "EasyDeL, by ejkernel",
        "ejkernel 0.0.80.3",
        "`import jax_dsv4_fmha.adapters.ejkernel as adapter; adapter.register()`",
    ),
    (
        "AXLearn",
        "commit 34aed43 of July 2026",
        "`import jax_dsv4_fmha.adapters.axlearn as adapter; adapter.register()`",
    ),
    ("flax", "0.12", "`attention_fn=jax_dsv4_fmha.layers.flax.attention_fn`, of flax's attention modules"),
)


def _listed(rows: Iterable[tuple[str, str]]) -> str:
    return texts("I have … | → call …", rows)


def which_op_in_short() -> str:
    return _listed(OPS)


def which_op() -> str:
    return _listed(OPS[:-1] + MORE + OPS[-1:])


def code_bases() -> str:
    """The line for each of other people's code bases."""
    return texts("in … | version | … the line is", CODE_BASES)
