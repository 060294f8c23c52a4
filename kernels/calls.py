"""The ABI of custom calls, as data: the operands, results and attributes of each, which XLA passes to our C++ code.

`kernels/targets.py` generates the handlers and the checks of operands from here, and what Python knows of them.
"""

from dataclasses import dataclass

from .abi import (
    BACKWARD_OPS,
    BF16_ROPE,
    BOUNDS,
    BOUNDS_OF_576,
    BY_COLUMNS,
    FEW_HEADS,
    FIRST_512,
    FORWARD_OPS,
    FP8,
    PLAIN,
    POOL,
    ROTARY,
    UNIT_BYTES,
    Mode,
    name_of,
)
from .packings import ROPE


@dataclass(frozen=True)
class Form:
    """A dtype and axes that an array may have."""

    dtype: str  # as XLA prints it, "f32"; T is that of the call's first array
    axes: tuple[str, ...]  # an axis has the same extent wherever a call has it; "128" is an extent

    def __str__(self) -> str:
        return f"{self.dtype}[{' '.join(self.axes)}]"


@dataclass(frozen=True)
class Array:
    """An operand or a result of a call."""

    name: str  # as errors and raw calls have it
    forms: tuple[Form, ...]  # it has one of these; no two have the same rank and dtype
    fields: tuple[str, ...]  # what the launcher calls it
    source: int | None = None  # which source of keys it belongs to
    aligned: bool = False  # whether kernels move 16 bytes of it at a time

    def __str__(self) -> str:
        return f"{self.name}: {' or '.join(map(str, self.forms))}"


Arrays = tuple[Array, ...]


def array(text: str, *fields: str, source: int | None = None, aligned: bool = False) -> Array:
    """`text` is "name: dtype[axis axis]", or several forms with "or" between them. Arrays of T are aligned."""
    name, _, forms = text.partition(": ")
    parsed = tuple(
        Form(form[: form.index("[")], tuple(form[:-1].split("[")[1].split())) for form in forms.split(" or ")
    )
    return Array(name, parsed, fields or (name,), source, aligned or parsed[0].dtype == "T")


def arrays(*texts: str) -> Arrays:
    return tuple(map(array, texts))


@dataclass(frozen=True)
class Target:
    """A custom call: XLA passes operands, results and attributes to the C++ code of a family of calls."""

    name: str  # after "dsv4_fmha_"
    calls: str  # ffi/CALLS.h has the code that serves it
    operands: Arrays
    results: Arrays
    attributes: dict[str, str]  # name to type
    sources: tuple[str, ...] = ()  # kinds of its sources of keys
    state: str = ""  # the type of what all devices share of such a call, in ffi/target.h's words


def span(i: int, name: str, axes: str, start: str = "start", stop: str = "stop", dtype: str = "T") -> Arrays:
    """A source of keys that are values too, of which query j sees those in [start[j], stop[j])."""
    return (
        array(f"{name}: {dtype}[{axes}]", "k", "v", source=i, aligned=True),
        array(f"{start}: s32[b s_q]", "from", source=i),
        array(f"{stop}: s32[b s_q]", "to", source=i),
    )


def selection(i: int, name: str, axes: str, prefix: str = "", packed: bool = False, dtype: str = "T") -> Arrays:
    """A source of keys that are values too, of which query j sees those that indices[j, :length[j]] name; its keys may
    be a pool of all sequences, or pages of packed entries.
    """
    (_, s_kv, width), topk = axes.split(), f"{prefix}topk"
    forms = f"{dtype}[{axes}] or {dtype}[{s_kv} {width}]" + f" or u8[{prefix}pages {prefix}page_bytes]" * packed
    return (
        array(f"{name}: {forms}", "k", "v", source=i, aligned=True),
        array(f"{prefix}indices: s32[b s_q {topk}]", "from", source=i),
        array(f"{prefix}length: s32[b s_q]", "to", source=i),
    )


CODES = "f8e4m3fn"


def window_and(op: str, dtype: str = "T", width: str = "d") -> Arrays:
    """The keys of `csa_fwd` or `hca_fwd`: a window, and compressed ones."""
    window = span(0, "window_kv", f"b s_w {width}", dtype=dtype)
    if op == "csa_fwd":
        return (*window, *selection(1, "kv", f"b s_c {width}", dtype=dtype))
    return (*window, *span(1, "kv", f"b s_c {width}", "start2", "stop2", dtype=dtype))


def codes_of(op: str, precision: str) -> Arrays:
    """These keys as codes of e4m3, RoPE's numbers in bfloat16, where scores take them so, and a unit."""
    return window_and(op, CODES, str(512 + 2 * ROPE * (precision == BF16_ROPE) + UNIT_BYTES))


SPAN_OF_HEADS = span(0, "kv", "b s_kv h_kv d")
TABLES_OF_PAGES = tuple(array(f"{name}: s32[b width]", name, source=0) for name in ("k_pages", "v_pages"))
IN_PAGES = (
    array("k: T[pages page h_kv d]", "k", source=0),
    array("v: T[pages page h_kv d]", "v", source=0),
    *SPAN_OF_HEADS[1:],
    *TABLES_OF_PAGES,
)
CODES_IN_PAGES = (
    array(f"k: {CODES}[pages page h_kv d]", "k", source=0, aligned=True),
    array(f"v: {CODES}[pages page h_kv d]", "v", source=0, aligned=True),
    *SPAN_OF_HEADS[1:],
    *TABLES_OF_PAGES,
    array("scales: f32[b h_kv 2]", "scales", source=0),  # of K and of V
)
SOURCES = {
    "mha_fwd": (
        array("k: T[b s_kv h_kv d]", "k", source=0),
        array("v: T[b s_kv h_kv d]", "v", source=0),
        *SPAN_OF_HEADS[1:],
    ),
    "mha_fwd_paged": IN_PAGES,
    "mha_fwd_paged_window": IN_PAGES,  # start and stop: how many tokens there are up to the query's, and in all
    "mha_fwd_paged_e4m3": CODES_IN_PAGES,
    "mha_fwd_paged_e4m3_window": CODES_IN_PAGES,
    "mla_span_fwd": SPAN_OF_HEADS,
    "mla_sparse_fwd": selection(0, "kv", "b s_kv d"),
    "csa_fwd": window_and("csa_fwd"),
    "hca_fwd": window_and("hca_fwd"),
    "dsv4_decode": (
        *selection(0, "window_kv", "b s_w d", "window_", packed=True),
        *selection(1, "kv", "b s_c d", packed=True),
    ),
}
"""The keys of each of `abi.FORWARD_OPS`; gradients take them too"""

SCALE, EPS = {"scale": "float32"}, {"eps": "float32"}
SQUARES = array("squares: f32[b s_q n_squares]")  # which tell how x is left to be normed; n_squares may be 0
PACKED_MATRIX = "tiles_of_w slabs_of_w slab_bytes"  # of 64 columns, and of 64 of k; either even in number
OF_ROPE = array(f"table: f32[b s_q {ROPE}]", aligned=True)  # cos and sin by turns, for each query
OF_POOLS = tuple(f"{prefix}{name}" for prefix in ("window_", "") for name in POOL[1:])


def attention(op: str, mode: Mode = PLAIN, sources: Arrays = (), **attributes: str) -> Target:
    """A call of attention in a mode, over the op's `SOURCES` if no others are given."""
    d_v = str(mode.d_v or "d")
    results = arrays(
        f"o: T[b s_q h_q {d_v}]",
        "lse: f32[b s_q h_q]",
        # of the last b_split sequences, whose keys are split; without splits there are none
        f"o_parts: f32[b_split s_q h_q splits {d_v}]",
        "lse_parts: f32[b_split s_q h_q splits]",
    )
    operands = (array("q: T[b s_q h_q d]"), *(sources or SOURCES[op]), array("sink: f32[h_q]"))
    # order: in which a query's keys are summed (docs/bits.md), by its number; 0 for any
    attributes = SCALE | attributes | {"order": "int64"}
    if mode.rotary:
        operands, attributes = (*operands, OF_ROPE), attributes | EPS
    if mode == BY_COLUMNS:  # what its two kernels leave for one another are results too
        results = results[:2] + arrays(
            "scores: f32[b s_q head_tiles tiles 4096]",  # of 64 heads and 64 keys
            "tops: f32[b s_q head_tiles tiles 64]",
            "gathered: T[b s_q tiles 64 d]",
            "counts: s32[b s_q]",
        )
    calls = "by_columns" if mode == BY_COLUMNS else "forward"
    return Target(name_of(op, mode), calls, operands, results, attributes, FORWARD_OPS[op])


def of_rows(do: str) -> Arrays:
    """Returns the arrays that the gradient of attention takes for each row of q; do: the axes of dO."""
    numbers = arrays("lse: f32[b s_q h_q]", "sink_factor: f32[b s_q h_q]", "delta: f32[b s_q h_q]")
    return (array("q: T[b s_q h_q d]"), array(f"do: T[{do}]", "dout"), *numbers)


OF_ROWS = of_rows("b s_q h_q d")
IN_GROUPS = of_rows("groups b s_q group_heads d")  # do in groups of heads, as a product over these makes it


def mla_gradient(op: str, mode: Mode = PLAIN) -> Target:
    """The gradient of a call of attention in a mode, or the bounds of it. Where resolution has numbers, dkv is in fixed
    point. A bound is 64 bits for a key, the low word first.
    """
    sources, attributes = SOURCES[op.replace("_bwd", "_fwd")], SCALE
    rows = of_rows(f"b s_q h_q {mode.d_v or 'd'}")
    resolution = arrays(f"resolution: f32[{1 if mode.bounds else 'n_resolution'}]")
    results: Arrays
    if mode.bounds:
        rows = (*rows, array("most_of_p: f32[b s_q h_q]", "table"))
        name, forms, results = "bounds", {"u32": "2"}, ()
    else:
        name, forms, results = "dkv", {"f32": "d", "u32": "d"}, arrays("dq: T[b s_q h_q d]")
    for keys in sources[::3]:
        sums = [f"{dtype}[{' '.join((*x.axes[:-1], last))}]" for x in keys.forms for dtype, last in forms.items()]
        results += (array(f"{name}: {' or '.join(sums)}", "dkv", source=keys.source, aligned=True),)
    operands = (*rows, *resolution, *sources)
    if mode.rotary:
        operands, attributes = (*IN_GROUPS, *resolution, *sources, OF_ROPE), SCALE | EPS
    return Target(name_of(op, mode), "mla_backward", operands, results, attributes, BACKWARD_OPS[op])


def mha_gradient(name: str, sources: Arrays, *of_keys: Array) -> Target:
    """dq is float32 where one kernel makes all gradients, and adds to dq / scale."""
    dq = array("dq: T[b s_q h_q d] or f32[b s_q h_q d]")
    seen = array("seen: s32[b rows_of_kv_head 2]", aligned=True)  # what every tile of rows sees
    return Target(name, "mha_backward", (*OF_ROWS, *sources), (dq, *of_keys, seen), SCALE, ("span",))


QUERIES = arrays("q: T[b s_q heads 128]")
WEIGHTS = arrays("weights: f32[b s_q heads]")
SEEN = arrays("start: s32[b s_q]", "stop: s32[b s_q]")
ENTRIES = arrays("k: T[b s_c 128]")
CHOSEN = arrays("indices: s32[b s_q topk]", "values: f32[b s_q n_values]")  # n_values is topk, or 0 for no values
WORKSPACE = arrays("scores: f32[n_rows stride]")  # of blocks of queries
BETWEEN = arrays("oldest: s32[b s_q]", "newest: s32[b s_q]")  # blocks oldest <= j < newest are judged
PAGES = (array("pool: T[pages page 128] or u8[pages page_bytes]", "k"),)
AT_ENTRIES = (*QUERIES, *ENTRIES, *WEIGHTS, *arrays("indices: s32[b s_q topk]"))
ROWS_TO_TURN = array("x: T[b s_q h d]", "x", "dy")
TABLE = array("table: f32[b s_q dims]", aligned=True)  # cos and sin by turns, for each token

BETWEEN_SUBLAYERS = (
    *arrays("x: T[b s_q 4 hidden]", "y: T[b s_q hidden]"),
    *(array(f"{name}: f32[b s_q {axes}]", aligned=True) for name, axes in (("post", "4"), ("mix", "4 4"))),
    array("taken: f32[b s_q n_taken]", aligned=True),  # n_taken is 4, or 0 where z takes the new pre
    array("fn: f32[24 4 hidden]", aligned=True),
    *arrays("scale: f32[3]", "base: f32[24]"),
    array("norm: f32[hidden]", aligned=True),
)

KEPT_BY_INSERTION = (
    array("cache: T[pages page entry] or u8[pages page_bytes]", aligned=True),
    array("state: f32[b ring width]", aligned=True),  # earlier rows of a block
    array("sums: f32[b n_sums d]", aligned=True),  # three of the tokens before them
    array("folded: s32[b n_folded]"),  # how many tokens these are
)
"""What an insertion changes: a cache, and what it pools: calls have no empty arrays, which XLA copies, and in whose
place other calls may have theirs."""

TARGETS = (
    *map(attention, ("mha_fwd", "mha_fwd_paged", "mha_fwd_paged_e4m3", "mla_span_fwd")),
    *(attention(op, window="int64") for op in ("mha_fwd_paged_window", "mha_fwd_paged_e4m3_window")),
    attention("mla_span_fwd", FEW_HEADS, span(0, "kv", "b s_kv d")),
    *map(attention, ("mla_sparse_fwd", "csa_fwd", "hca_fwd")),
    *(attention(op, ROTARY) for op in ("mla_span_fwd", "csa_fwd", "hca_fwd")),
    *(attention(op, Mode(precision=x), codes_of(op, x)) for x in FP8 for op in ("csa_fwd", "hca_fwd")),
    attention("mla_span_fwd", FIRST_512),
    attention("mla_sparse_fwd", FIRST_512, selection(0, "kv", "b s_kv d", packed=True), packing="string"),
    attention("dsv4_decode", packing="string"),
    *(attention(op, BY_COLUMNS) for op in ("mla_sparse_fwd", "csa_fwd")),
    attention("dsv4_decode", BY_COLUMNS, packing="string"),
    *map(mla_gradient, BACKWARD_OPS),
    *(mla_gradient(op, ROTARY) for op in ("mla_span_bwd", "csa_bwd", "hca_bwd")),
    *(mla_gradient(op, BOUNDS) for op in BACKWARD_OPS),
    *(mla_gradient(op, mode) for mode in (FIRST_512, BOUNDS_OF_576) for op in ("mla_span_bwd", "mla_sparse_bwd")),
    mha_gradient("mha_bwd", SOURCES["mha_fwd"], *arrays("dk: T[b s_kv h_kv d]", "dv: T[b s_kv h_kv d]")),
    mha_gradient("mha_bwd_shared_kv", SPAN_OF_HEADS, array("dk: T[b s_kv h_kv d]")),
    Target(
        "lightning_indexer",
        "indexer",
        (*QUERIES, *ENTRIES, *WEIGHTS, *arrays("k_scale: f32[b s_c]"), *SEEN),
        (*CHOSEN, *WORKSPACE),
        {},
    ),
    Target(
        "paged_lightning_indexer",
        "indexer",
        (*QUERIES, *PAGES, *WEIGHTS, *arrays("table: s32[b width]"), *SEEN),
        (*CHOSEN, *WORKSPACE),
        {},
    ),
    Target(
        "indexer_blocks",
        "indexer",
        (*QUERIES, *ENTRIES, *WEIGHTS, *arrays("k_scale: f32[b s_c]"), *SEEN, *BETWEEN),
        (*CHOSEN, *WORKSPACE),
        {},
    ),
    Target(
        "paged_indexer_blocks",
        "indexer",
        (*QUERIES, *PAGES, *WEIGHTS, *arrays("table: s32[b width]"), *SEEN, *BETWEEN),
        (*CHOSEN, *WORKSPACE),
        {},
    ),
    *(
        Target(
            name,
            "indexer_within",
            (
                *QUERIES,
                *keys,
                *WEIGHTS,
                *of_keys,
                # a query's blocks; of the keys in these, one after the other, it sees first <= j < last
                *arrays("blocks: s32[b s_q n_blocks]", "start: s32[b s_q]", "first: s32[b s_q]", "last: s32[b s_q]"),
            ),
            arrays("indices: s32[b s_q topk]", "values: f32[b s_q topk]", "scores: f32[n_rows listed]"),
            {"from_start": "int64"},
        )
        for name, keys, of_keys in (
            ("indexer_within", ENTRIES, arrays("k_scale: f32[b s_c]")),
            ("paged_indexer_within", PAGES, arrays("table: s32[b width]")),
        )
    ),
    Target(
        "indexer_scores",
        "indexer",
        (*QUERIES, *ENTRIES, *WEIGHTS, *arrays("k_scale: f32[b s_c]"), *SEEN),
        WORKSPACE,
        {"skip": "int64"},
    ),
    Target("indexer_topk", "indexer", (*arrays("scores: f32[b s_q s_c]"), *SEEN), CHOSEN, {}),
    Target("indexer_scores_at", "indexer_scores_at", AT_ENTRIES, arrays("scores: f32[b s_q topk]"), {}),
    Target(
        "indexer_scores_at_bwd",
        "indexer_scores_at",
        (*AT_ENTRIES, array("dscores: f32[b s_q topk]", "scores")),
        arrays("dq: T[b s_q heads 128]", "dk: f32[b s_c 128]", "dweights: f32[b s_q heads]"),
        {},
    ),
    Target(
        "head_summed_probabilities",
        "probabilities",
        arrays("q: T[b s_q h_q d]", "k: T[b s_kv d]", "lse: f32[b s_q h_q]", "indices: s32[b s_q topk]"),
        arrays("p: f32[b s_q topk]"),
        SCALE,
    ),
    Target("rope", "rope", (ROWS_TO_TURN, TABLE), arrays("y: T[b s_q h d]"), {"direction": "float32"}),
    Target(
        "rope_hadamard",
        "rope",
        (array("x: T[b s_q h 128]"), TABLE),
        arrays("y: T[b s_q h 128]"),
        {"direction": "float32"},
    ),
    Target(
        "index_query",
        "rope",
        (array("x: T[b s_q h 128]"), TABLE),
        (array("codes: f8e4m3fn[b s_q h 128]", aligned=True), *arrays("scales: f32[b s_q h]")),
        {},
    ),
    Target("norm_rope", "rope", (ROWS_TO_TURN, TABLE), arrays("y: T[b s_q h d]"), {"eps": "float32"}),
    Target(
        "norm_rope_bwd",
        "rope",
        (array("x: T[b s_q h d]"), TABLE, *arrays("dy: T[b s_q h d]")),
        arrays("y: T[b s_q h d]"),
        {"eps": "float32"},
    ),
    Target(
        "few_rows_product",
        "few_rows_product",
        arrays("x: T[b s_q g k]", f"w: T[g k n] or u8[g {PACKED_MATRIX}]"),
        (array("y: T[b s_q g n] or f32[b s_q g n]", aligned=True),),
        {"parts": "int64"},
    ),
    Target(
        "few_rows_product_of_turned",
        "few_rows_product",
        (*arrays("x: T[b s_q g k]", f"w: T[g k n] or u8[g {PACKED_MATRIX}]"), OF_ROPE),
        arrays("y: T[b s_q g n]"),
        {"parts": "int64"},
    ),
    Target(
        "few_rows_product_and_low_rank",
        "few_rows_product",
        (
            *arrays("x: T[b s_q g k]", f"w: T[g k n] or u8[g {PACKED_MATRIX}]"),
            array("gain: f32[low_columns]", aligned=True),
        ),
        (
            array("y: f32[b s_q g n]", aligned=True),
            # y's first columns times gain, and the sum of squares of every 128 of them
            *arrays("low: T[b s_q low_columns]", "squares: f32[b s_q n_squares]"),
        ),
        {"parts": "int64"},
    ),
    Target(
        "few_rows_product_norm_rope",
        "few_rows_product",
        (*arrays("x: T[b s_q k]", f"w: T[k h 512] or u8[{PACKED_MATRIX}]"), OF_ROPE, SQUARES),
        arrays("y: T[b s_q h 512]"),
        EPS,
    ),
    Target(
        "few_rows_product_index_query",
        "few_rows_product",
        (
            *arrays("x: T[b s_q k]", f"w: T[k h 128] or u8[{PACKED_MATRIX}]"),
            OF_ROPE,
            SQUARES,
            *arrays("given: f32[b s_q columns]"),  # of which h from `column` on are the weights of heads
        ),
        (
            array("y: T[b s_q h 128] or f8e4m3fn[b s_q h 128]", aligned=True),
            *arrays("weights: f32[b s_q h]"),  # times `scale`, and times that of a row of e4m3
        ),
        {"parts": "int64", "column": "int64", "scale": "float32", **EPS},
    ),
    Target(
        "unpack_matrix",
        "unpack_matrix",
        (array(f"data: u8[m {PACKED_MATRIX}]", aligned=True),),
        (array("w: bf16[m rows columns]", aligned=True),),
        {},
    ),
    *(
        Target(
            name,
            "route",
            (array("logits: f32[b s_q n_parts e]", aligned=True), *of_choice),  # a logit is the sum of its parts
            arrays("weights: f32[b s_q n_chosen]", "chosen: s32[b s_q n_chosen]"),
            {"unit": "float32", "scale": "float32", "score": "string"},
        )
        for name, of_choice in (
            ("route", (array("bias: f32[e]", aligned=True),)),
            ("route_by_table", arrays("table: s32[vocabulary n_chosen]", "tokens: s32[b s_q]")),
        )
    ),
    Target(
        "fused_moe",
        "fused_moe",
        (
            *arrays("x: T[b s_q k]"),
            array("chosen: s32[b s_q n_chosen]", "group"),
            array("weights: f32[b s_q n_chosen]", "chosen_weight"),
            array("w13: u8[groups tiles13 slabs13 slab_bytes] or T[groups 2 n k]", aligned=True),
            *arrays("factor13: f32[n_factors]"),  # n_factors is groups, or 0 of matrices that are not packed
            array("w2: u8[groups tiles2 slabs2 slab_bytes] or T[groups k n]", aligned=True),
            *arrays("factor2: f32[n_factors]"),
        ),
        (
            *arrays("y: T[rows k]", "places: s32[b s_q n_chosen]"),  # rows by expert, and where each choice's is
            *arrays("inner: T[rows n]"),
            array("list: s32[rows]"),
            array("sorted: f32[rows]", "sorted_weights"),
            array("tiles: s32[n_tiles 4]", aligned=True),
            *arrays("count: s32[1]"),
        ),
        {"limit": "float32", "format": "string", "num_experts": "int64"},
    ),
    *(
        Target(  # rows by group, as `tiles` lists them, with each group's matrix, or that transposed
            name,
            "expert_product",
            (
                array("a: T[rows m]", aligned=True),
                array(f"b: T[groups {axes}]", aligned=True),
                *arrays("list: s32[rows]"),  # the row of y that each row's result is
                array("tiles: s32[n_tiles 4]", aligned=True),
                *arrays("count: s32[1]"),
            ),
            (array("y: T[rows n]", aligned=True),),
            {},
        )
        for name, axes in (("expert_product", "n m"), ("expert_product_turned", "m n"))
    ),
    Target(  # gates and up projections, and the channels that they make, times weights
        "expert_product_gated",
        "expert_product",
        (
            array("a: T[rows m]", aligned=True),
            array("b: T[groups 2 n m]", aligned=True),
            *arrays("list: s32[rows]"),
            array("tiles: s32[n_tiles 4]", aligned=True),
            *arrays("count: s32[1]", "weights: f32[rows]"),
        ),
        (array("y: T[rows 2 n]", aligned=True), array("inner: T[rows n]", aligned=True)),
        {"limit": "float32"},
    ),
    Target(  # the gradients of gates and up projections, the channels again, and parts of the gradient of weights
        "expert_product_gated_back",
        "expert_product",
        (
            array("a: T[rows m]", aligned=True),
            array("b: T[groups m n]", aligned=True),
            array("made: T[rows 2 n]", aligned=True),
            *arrays("list: s32[rows]"),
            array("tiles: s32[n_tiles 4]", aligned=True),
            *arrays("count: s32[1]", "weights: f32[rows]"),
        ),
        (
            array("y: T[rows 2 n]", aligned=True),
            array("inner: T[rows n]", aligned=True),
            *arrays("of_weights: f32[rows n_parts]"),
        ),
        {"limit": "float32"},
    ),
    Target(  # the sum over a group's rows of their outer products
        "expert_outer_product",
        "expert_product",
        (
            *(array(f"{name}: T[rows {axis}]", aligned=True) for name, axis in (("a", "m"), ("b", "n"))),
            *arrays("first: s32[groups]", "sizes: s32[groups]"),
        ),
        (array("y: T[groups m n]", aligned=True),),
        {},
    ),
    Target(  # rows of tokens by expert: row r of y is that of the choice in place r of the list
        "expert_rows_taken",
        "expert_rows",
        (array("x: T[tokens k]", aligned=True), *arrays("which: s32[rows]", "count: s32[1]")),
        (array("y: T[rows k]", aligned=True),),
        {},
    ),
    Target(  # sums of rows over each token's choices that are experts from 0 on
        "expert_rows_summed",
        "expert_rows",
        (array("x: T[rows k]", aligned=True), *arrays("which: s32[tokens c]")),
        (array("y: T[tokens k]", aligned=True),),
        {"experts": "int64"},
    ),
    Target(
        "hyper_connection",
        "hyper_connection",
        BETWEEN_SUBLAYERS,
        (
            *arrays("new_x: T[b s_q 4 hidden]", "z: T[b s_q hidden]"),
            *arrays("new_pre: f32[b s_q 4]", "new_post: f32[b s_q 4]", "new_mix: f32[b s_q 4 4]"),
            array("totals: f32[b s_q 24]", aligned=True),  # fn new_x
            *arrays("squares: f32[b s_q]"),  # the sum of new_x's
        ),
        {"iterations": "int64", "hc_eps": "float32", **EPS},
    ),
    Target(  # after what it takes and some of what it made come its results' cotangents
        "hyper_connection_bwd",
        "hyper_connection_bwd",
        (
            *BETWEEN_SUBLAYERS,
            *arrays("new_x: T[b s_q 4 hidden]", "totals: f32[b s_q 24]", "squares: f32[b s_q]"),
            *arrays("dnew_x: T[b s_q 4 hidden]", "dz: T[b s_q hidden]"),
            *arrays("dnew_pre: f32[b s_q 4]", "dnew_post: f32[b s_q 4]", "dnew_mix: f32[b s_q 4 4]"),
        ),
        (
            *arrays("dx: T[b s_q 4 hidden]", "dy: T[b s_q hidden]", "dtaken: f32[b s_q n_taken]"),
            array("numbers: f32[b s_q 32]", aligned=True),
            array("shares: f32[parts b s_q 20]", aligned=True),  # parts of the gradients of post and mix
            array("dnorm: f32[walks hidden]", aligned=True),  # parts of it
        ),
        {"iterations": "int64", "hc_eps": "float32", **EPS},
    ),
    *(
        Target(
            name,
            "kv_insert",
            (
                *kept,
                array("rows: f32[b s_q columns]", aligned=True),  # of which `width` from `column` on are used
                # n_ape is ratio, or 0 for none
                *([array("ape: f32[n_ape channels]", aligned=True)] if len(kept) > 1 else []),
                array("norm: f32[d]", aligned=True),
                array("table: f32[b n dims]", aligned=True),  # cos and sin by turns, for each entry
                # tokens with the new ones; and where these begin, if not s_q before that
                *arrays("bounds: s32[b n_bounds]"),
                *arrays("block_table: s32[b table_width]"),  # table_width is 0 without pages
            ),
            tuple(array(f"new_{x}", aligned=x.aligned) for x in kept),  # all in place
            # rope: whether RoPE's numbers follow the d of an entry that the norm covers
            {"column": "int64", "ratio": "int64", "packing": "string"}
            | {"hadamard": "int64", "rope": "int64", "eps": "float32"},
        )
        for name, kept in (
            ("kv_insert", KEPT_BY_INSERTION[:1]),
            ("kv_insert_pooled", KEPT_BY_INSERTION[:2]),
            ("kv_insert_running", KEPT_BY_INSERTION),
        )
    ),
    Target(
        "key_codes",
        "key_codes",
        (array("keys: bf16[rows 512] or u8[pages page_bytes]", aligned=True), *arrays("slots: s32[b n]")),
        (array("codes: f8e4m3fn[b n row_bytes]", aligned=True),),
        {"packing": "string"},
    ),
    Target("all_reduce", "all_reduce", arrays("x: T[n]"), arrays("y: T[n]"), {"devices": "int64"}, state="exchange"),
    Target(
        "seen_slots",
        "seen_slots",
        arrays(
            "lengths: s32[b]",
            "position: s32[b s_q n_position]",  # as many numbers as are given, 1 or none
            *("window_table: s32[b window_width]", "table: s32[b width]"),  # no pages without a block table
            *("indices: s32[b s_q topk]", "topk_length: s32[b s_q n_topk_length]"),
        ),
        arrays(
            *("near: s32[b s_q window]", "near_length: s32[b s_q]"),
            *("far: s32[b s_q n_far]", "far_length: s32[b s_q]"),
        ),
        dict.fromkeys(("ratio", *OF_POOLS), "int64"),
    ),
)
