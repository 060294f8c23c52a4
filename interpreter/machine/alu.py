"""Arithmetic, logic, comparison, selection, conversion, moves (PTX ISA 9.7.1 integer, 9.7.3 floating point, 9.7.6
comparison and selection, 9.7.8 logic and shift, 9.7.9 mov and cvt).

A result is defined in the lanes where all of its operands are. fp32 is IEEE; `.approx` is NumPy's correctly rounded
value, where the hardware's may be off by two units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .decode import DTYPES, Decoder, Step, bits_of, instruction
from .fusion import Lanewise
from .parser import Arg, Instruction
from .state import FULL, GENERIC_PARAM_BASE, LANES, PARAM_BASE, SHARED_WINDOW, Array, Warp, mask_of

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
HALVES = {"bf16": BF16, "f16": np.float16}


def kind_of(i: Instruction, d: Decoder) -> str:
    """The type that an opcode ends with."""
    kind = i.mods[-1] if i.mods else ""
    if kind not in DTYPES:
        raise d.fail(f"type .{kind} of {i.opcode}")
    return kind


def elementwise(
    d: Decoder,
    i: Instruction,
    to: str,
    kinds: list[str],
    compute: Callable[..., Array],
    args: tuple[Arg, ...] | None = None,
) -> Step:
    """d <- compute(operands), lane by lane."""
    args = i.args if args is None else args
    if len(args) != 1 + len(kinds):
        raise d.fail(f"{i.opcode} with {len(args)} operands")
    slots = tuple(d.slot(a, k) for a, k in zip(args[1:], kinds, strict=True))
    return Lanewise((d.sink(args[0], to),), slots, tuple(DTYPES[k] for k in kinds), compute)


def truncate(x: Array, dtype: DTypeLike) -> Array:
    return x.astype(dtype)


def _min_relu(a: Array, b: Array) -> Array:
    return np.maximum(np.minimum(a, b), 0)


WIDER: dict[type[np.generic], type[np.generic]] = {
    np.int16: np.int32,
    np.uint16: np.uint32,
    np.int32: np.int64,
    np.uint32: np.uint64,
}


def _divide(a: Array, b: Array) -> Array:
    """Truncates towards zero; a division by zero gives some value, as on the machine."""
    b = np.where(b == 0, 1, b)
    wide = a.astype(np.int64 if a.dtype.itemsize < 8 else np.float64)
    return (np.sign(wide) * (np.abs(wide) // np.abs(b)) * np.sign(b)).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    b = np.where(b == 0, 1, b)
    return np.fmod(a, b).astype(a.dtype)


INTEGER: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "div": _divide,
    "rem": _remainder,
    "min": np.minimum,
    "max": np.maximum,
}
FLOAT: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,
    "max": np.fmax,
}


TINY = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """Subnormals become zeros of their sign."""
    return x * (np.abs(x) >= TINY)


def _rounding(i: Instruction, d: Decoder) -> bool:
    """Returns True if subnormals are flushed. Only rounding to nearest is known."""
    i.only("rn", "ftz", "f32", "approx", "full", "NaN", "relu", *("f64",))
    return i.has("ftz")


def two_floats(i: Instruction, d: Decoder) -> Step:
    """add, sub, mul and fma of .f32x2: of two fp32 in a 64-bit register, to nearest or (.rm) downwards."""
    name = i.opcode.split(".")[0]
    i.only("rn", "rm", "ftz", "f32x2")
    downwards, ftz = i.has("rm"), i.has("ftz")

    def compute(*packed: Array) -> Array:
        given: list[Array] = [flush(x) if ftz else x for x in (x.view(np.float32) for x in packed)]
        x, y, *more = (v.astype(np.float64) for v in given)
        z: Array = more[0] if more else np.asarray(-0.0)
        if name in ("mul", "fma"):  # the product of two fp32 is exact in fp64
            first, second = x * y, z
        else:
            first, second = x, -y if name == "sub" else y
        result = sum_downwards(first, second) if downwards else (first + second).astype(np.float32)
        return (flush(result) if ftz else result).view(np.uint64)

    return elementwise(d, i, "b64", ["u64"] * (3 if name == "fma" else 2), compute)


def with_halves(i: Instruction, d: Decoder) -> Step:
    """add, sub and fma of .f32.f16 and .f32.bf16: all operands except the last have 16 bits, and become fp32 first."""
    name, half = i.opcode.split(".")[0], HALVES[i.mods[-1]]
    i.only("rn", "f32", i.mods[-1])
    base: Callable[..., Array] = fma if name == "fma" else FLOAT[name]

    def compute(*given: Array) -> Array:
        return base(*(x.view(half).astype(np.float32) for x in given[:-1]), given[-1])

    return elementwise(d, i, "f32", ["b16"] * (2 if name == "fma" else 1) + ["f32"], compute)


def fma(a: Array, b: Array, c: Array) -> Array:
    """fp32; the product of two fp32 is exact in fp64."""
    result: Array = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    return result


def sum_downwards(a: Array, b: Array) -> Array:
    """fp32, rounded to minus infinity, of the exact sum of two fp64."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)  # what the sum in fp64 has lost of the exact one
    nearest = total.astype(np.float32)
    wide = nearest.astype(np.float64)
    return np.where(
        (wide > total) | ((wide == total) & (lost < 0)), np.nextafter(nearest, np.float32(-np.inf)), nearest
    )


def greater_sizes(i: Instruction, d: Decoder) -> Step:
    """max.xorsign.abs of pairs of bf16: the greater size, with the product of both signs."""
    if i.opcode != "max.xorsign.abs.bf16x2":
        raise d.fail(i.opcode)

    def compute(a: Array, b: Array) -> Array:
        sizes = [(x & 0x7FFF7FFF).view(BF16).astype(np.float32) for x in (a, b)]
        return np.fmax(*sizes).astype(BF16).view(np.uint32) | (a ^ b) & np.uint32(0x80008000)

    return elementwise(d, i, "b32", ["u32"] * 2, compute)


@instruction("add", "sub", "div", "rem", "min", "max")
def arithmetic(i: Instruction, d: Decoder) -> Step:
    if i.has("f32x2"):
        return two_floats(i, d)
    if i.has("f32") and i.mods[-1] in HALVES:
        return with_halves(i, d)
    if i.has("xorsign"):
        return greater_sizes(i, d)
    name, kind = i.opcode.split(".")[0], kind_of(i, d)
    if kind in ("f32", "f64"):
        ftz = _rounding(i, d)
        base = FLOAT[name]
        if i.has("NaN"):
            base = {"min": np.minimum, "max": np.maximum}[name]
        compute = (lambda a, b: flush(base(flush(a), flush(b)))) if ftz else base
        if len(i.args) == 4 and name in ("min", "max"):
            return elementwise(d, i, kind, [kind] * 3, lambda a, b, c: compute(compute(a, b), c))
    elif i.has("relu"):
        i.only("relu", kind)
        compute = {"min": _min_relu, "max": lambda a, b: np.maximum(np.maximum(a, b), 0)}[name]
    else:
        i.only(kind)
        compute = INTEGER[name]
    return elementwise(d, i, kind, [kind, kind], compute)


@instruction("mul")
def multiply(i: Instruction, d: Decoder) -> Step:
    if i.has("f32x2"):
        return two_floats(i, d)
    if i.has("bf16x2"):  # exact in fp32, except where the value is subnormal
        i.only("rn", "bf16x2")
        return elementwise(d, i, "b32", ["u32"] * 2, lambda a, b: (a.view(BF16) * b.view(BF16)).view(np.uint32))
    kind = kind_of(i, d)
    if kind in ("f32", "f64"):
        ftz = _rounding(i, d)
        return elementwise(d, i, kind, [kind, kind], (lambda a, b: flush(flush(a) * flush(b))) if ftz else np.multiply)
    i.only("lo", "hi", "wide", kind)
    dtype = DTYPES[kind]
    if i.has("wide"):
        wide = WIDER[dtype]
        to = kind[0] + str(2 * int(kind[1:]))
        return elementwise(d, i, to, [kind, kind], lambda a, b: a.astype(wide) * b.astype(wide))
    if i.has("hi"):
        bits = 8 * dtype().itemsize
        wide = WIDER[dtype]
        return elementwise(
            d, i, kind, [kind, kind], lambda a, b: (a.astype(wide) * b.astype(wide) >> bits).astype(dtype)
        )
    return elementwise(d, i, kind, [kind, kind], np.multiply)


@instruction("mad")
def multiply_add(i: Instruction, d: Decoder) -> Step:
    kind = kind_of(i, d)
    i.only("lo", "wide", kind)
    dtype = DTYPES[kind]
    if i.has("wide"):
        wide, to = WIDER[dtype], kind[0] + str(2 * int(kind[1:]))
        return elementwise(d, i, to, [kind, kind, to], lambda a, b, c: a.astype(wide) * b.astype(wide) + c)
    return elementwise(d, i, kind, [kind] * 3, lambda a, b, c: a * b + c)


@instruction("dp4a")
def dot_of_bytes(i: Instruction, d: Decoder) -> Step:
    """9.7.1.23: c and the products of the four bytes of a and of b, by their signs."""
    kinds = {"u32": np.dtype(np.uint8), "s32": np.dtype(np.int8)}
    if len(i.mods) != 2 or not set(i.mods) <= set(kinds):
        raise d.fail(i.opcode)
    kind = "u32" if i.mods == ("u32", "u32") else "s32"
    first, second = (kinds[mod] for mod in i.mods)

    def dot(a: Array, b: Array, c: Array) -> Array:
        bytes_ = (np.ascontiguousarray(x).view(t).reshape(-1, 4).astype(np.int64) for x, t in ((a, first), (b, second)))
        left, right = bytes_
        return ((left * right).sum(1) + c.astype(np.int64)).astype(np.uint32).view(DTYPES[kind])

    return elementwise(d, i, kind, ["b32", "b32", kind], dot)


@instruction("fma")
def fused(i: Instruction, d: Decoder) -> Step:
    if i.has("f32x2"):
        return two_floats(i, d)
    if i.has("bf16x2"):
        i.only("rn", "bf16x2")

        def pairs(a: Array, b: Array, c: Array) -> Array:  # the product of two is exact in fp32
            a, b, c = (x.view(BF16).astype(np.float64) for x in (a, b, c))
            exact = a * b + c
            if ((exact.astype(np.float32) != exact) & ~np.isnan(exact)).any():
                raise d.fail(f"{i.opcode} of what would be rounded twice here")
            return exact.astype(np.float32).astype(BF16).view(np.uint32)

        return elementwise(d, i, "b32", ["u32"] * 3, pairs)
    if i.has("f32") and i.mods[-1] in HALVES:
        return with_halves(i, d)
    if kind_of(i, d) != "f32":
        raise d.fail(i.opcode)
    if i.has("rm"):
        i.only("rm", "f32")
        return elementwise(
            d,
            i,
            "f32",
            ["f32"] * 3,
            lambda a, b, c: sum_downwards(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)),
        )
    compute = (lambda a, b, c: flush(fma(a, b, c))) if _rounding(i, d) else fma
    return elementwise(d, i, "f32", ["f32"] * 3, compute)


@instruction("neg", "abs", "not", "popc", "clz", "brev")
def unary(i: Instruction, d: Decoder) -> Step:
    name, kind = i.opcode.split(".")[0], kind_of(i, d)
    i.only("ftz", kind)
    if kind == "pred":
        return elementwise(d, i, "pred", ["pred"], np.logical_not)
    functions: dict[str, Callable[[Array], Array]] = {
        "neg": np.negative,
        "abs": np.abs,
        "not": np.invert,
        "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
        "clz": lambda a: (32 - np.ceil(np.log2(a.astype(np.float64) + 1))).astype(np.uint32),
        "brev": lambda a: np.array([int(f"{x:032b}"[::-1], 2) for x in a.tolist()], np.uint32),
    }
    return elementwise(d, i, "u32" if name in ("popc", "clz") else kind, [kind], functions[name])


@instruction("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh")
def transcendental(i: Instruction, d: Decoder) -> Step:
    name = i.opcode.split(".")[0]
    if kind_of(i, d) != "f32":
        raise d.fail(i.opcode)
    ftz = _rounding(i, d)
    base: dict[str, Callable[[Array], Array]] = {
        "ex2": lambda a: np.exp2(a.astype(np.float64)),
        "lg2": lambda a: np.log2(a.astype(np.float64)),
        "rcp": lambda a: 1 / a.astype(np.float64),
        "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)),
        "sqrt": lambda a: np.sqrt(a.astype(np.float64)),
        "tanh": lambda a: np.tanh(a.astype(np.float64)),
    }
    compute = base[name]
    if ftz:
        return elementwise(d, i, "f32", ["f32"], lambda a: flush(compute(flush(a)).astype(np.float32)))
    return elementwise(d, i, "f32", ["f32"], lambda a: compute(a).astype(np.float32))


@instruction("and", "or", "xor")
def logic(i: Instruction, d: Decoder) -> Step:
    name, kind = i.opcode.split(".")[0], kind_of(i, d)
    i.only(kind)
    compute = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    if kind == "pred" and name != "xor":
        return short_circuit(i, d, name == "or")
    return elementwise(d, i, kind, [kind, kind], compute)


def short_circuit(i: Instruction, d: Decoder, decisive: bool) -> Step:
    """and, or of predicates: one that decides alone makes the result defined."""
    target, a, b = (d.sink(i.args[0], "pred"), *(d.slot(x, "pred") for x in i.args[1:]))
    flip = 0 if decisive else FULL

    def defined(w: Warp) -> int:
        x, y = w.D[a], w.D[b]
        return x & y | x & (mask_of(w.R[a]) ^ flip) | y & (mask_of(w.R[b]) ^ flip)

    compute = np.logical_or if decisive else np.logical_and
    return Lanewise((target,), (a, b), (np.bool_, np.bool_), compute, defined)


@instruction("lop3")
def lookup3(i: Instruction, d: Decoder) -> Step:
    i.only("b32")
    table = d.immediate(i.args[4])

    def compute(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(LANES, np.uint32)
        for n in range(8):
            if table >> n & 1:
                result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        return result

    return elementwise(d, i, "b32", ["b32"] * 3, compute, i.args[:4])


@instruction("shl", "shr")
def shift(i: Instruction, d: Decoder) -> Step:
    """Amounts at or above the width shift everything out."""
    kind = kind_of(i, d)
    i.only(kind)
    dtype = DTYPES[kind]
    bits, left = 8 * dtype().itemsize, i.opcode.startswith("shl")
    if str(i.args[2]).isdigit() and int(str(i.args[2])) < bits:
        by, move = np.full(LANES, int(str(i.args[2])), dtype), np.left_shift if left else np.right_shift
        return elementwise(d, i, kind, [kind], lambda a: move(a, by), i.args[:2])

    def compute(a: Array, n: Array) -> Array:
        capped = np.minimum(n, bits - 1).astype(dtype)
        shifted = a << capped if left else a >> capped
        if not left and kind[0] == "s":
            return shifted
        return np.where(n < bits, shifted, 0).astype(dtype)

    return elementwise(d, i, kind, [kind, "u32"], compute)


@instruction("shf")
def funnel(i: Instruction, d: Decoder) -> Step:
    i.only("l", "r", "wrap", "clamp", "b32")
    left, wrap = i.has("l"), i.has("wrap")

    def compute(a: Array, b: Array, c: Array) -> Array:
        both = b.astype(np.uint64) << 32 | a
        n = (c & 31 if wrap else np.minimum(c, 32)).astype(np.uint64)
        return (both << n >> 32 if left else both >> n).astype(np.uint32)

    return elementwise(d, i, "b32", ["u32"] * 3, compute)


@instruction("prmt")
def permute(i: Instruction, d: Decoder) -> Step:
    i.only("b32")

    def compute(a: Array, b: Array, c: Array) -> Array:
        both = np.stack([a, b], 1).view(np.uint8)  # [lane, 8 bytes]
        result = np.zeros((LANES, 4), np.uint8)
        for n in range(4):
            which = c >> 4 * n & 15
            byte = both[np.arange(LANES), which & 7]
            result[:, n] = np.where(which & 8, np.where(byte & 128, 255, 0), byte)
        return result.view(np.uint32).ravel()

    return elementwise(d, i, "b32", ["u32"] * 3, compute)


@instruction("bfe")
def extract(i: Instruction, d: Decoder) -> Step:
    """9.7.1.20. Of .s32 the bits above the field are those of its sign."""
    i.only("u32", "s32")

    def field(a: Array, b: Array, c: Array) -> Array:
        return ((a.astype(np.uint64) >> b) & ((np.uint64(1) << c) - 1)).astype(np.uint32)

    def signed(a: Array, b: Array, c: Array) -> Array:
        wide = a.view(np.int32).astype(np.int64)
        place, size = np.minimum(b & 255, 63).astype(np.int64), np.minimum(c & 255, 32).astype(np.int64)
        found = (wide >> place) << 64 - size >> 64 - size
        return np.where(size == 0, 0, found).astype(np.int32)

    if i.has("s32"):
        return elementwise(d, i, "s32", ["b32", "u32", "u32"], signed)
    return elementwise(d, i, "u32", ["u32"] * 3, field)


COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str, kind: str, d: Decoder) -> Callable[[Array, Array], Array]:
    """Returns a comparison. With a NaN, the ordered ones of floats are false and the `u` ones true."""
    if kind not in ("f32", "f64"):
        return COMPARE[name]
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        base = COMPARE[name[:2]]
        return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    return COMPARE[name]


@instruction("setp")
def set_predicate(i: Instruction, d: Decoder) -> Step:
    kind = kind_of(i, d)
    compare, combine = i.mods[0], [m for m in i.mods[1:-1] if m != "ftz"]
    compute = comparison(compare, kind, d)
    if not combine and "|" not in str(i.args[0]):
        return elementwise(d, i, "pred", [kind, kind], compute)
    if len(combine) != 1 or "|" in str(i.args[0]):
        raise d.fail(i.opcode)
    slot, negated = d.predicate(i.args[3])
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine[0]]
    a, b, target = d.slot(i.args[1], kind), d.slot(i.args[2], kind), d.sink(i.args[0], "pred")
    dtypes = (DTYPES[kind], DTYPES[kind], np.bool_)
    return Lanewise((target,), (a, b, slot), dtypes, lambda x, y, p: join(compute(x, y), p ^ negated))


@instruction("selp")
def select(i: Instruction, d: Decoder) -> Step:
    """Defined where the selected operand is."""
    kind = kind_of(i, d)
    i.only(kind)
    target, a, b = d.sink(i.args[0], kind), d.slot(i.args[1], kind), d.slot(i.args[2], kind)
    p, negated = d.predicate(i.args[3])
    if negated:
        a, b = b, a

    def defined(w: Warp) -> int:
        chosen = mask_of(w.R[p])
        return w.D[p] & (w.D[a] & chosen | w.D[b] & ~chosen)

    return Lanewise((target,), (p, a, b), (np.bool_, DTYPES[kind], DTYPES[kind]), np.where, defined)


@instruction("mov")
def move(i: Instruction, d: Decoder) -> Step:
    """Also packs {a, b} into a wider register and unpacks it."""
    kind = i.mods[0]
    i.only(kind)
    to, source = i.args
    wide = bits_of(kind)
    if isinstance(source, tuple):
        narrow = f"b{int(wide[1:]) // len(source)}"
        dtype = DTYPES[narrow]
        slots, target = tuple(d.slot(x, narrow) for x in source), d.sink(to, wide)

        def pack(*values: Array) -> Array:
            packed = np.empty((LANES, len(values)), dtype)
            for n, value in enumerate(values):
                packed[:, n] = value
            return packed.view(DTYPES[wide]).ravel()

        return Lanewise((target,), slots, (dtype,) * len(slots), pack)
    if isinstance(to, tuple):
        narrow = f"b{int(wide[1:]) // len(to)}"
        dtype = DTYPES[narrow]
        slot, targets = d.slot(source, wide), tuple(d.sink(x, narrow) for x in to)

        def unpack(value: Array) -> tuple[Array, ...]:
            return tuple(value.view(dtype).reshape(LANES, -1).T.copy())

        return Lanewise(targets, (slot,), (DTYPES[wide],), unpack)
    return elementwise(d, i, kind, [kind], lambda a: a)


@instruction("cvta")
def convert_address(i: Instruction, d: Decoder) -> Step:
    """Global memory has the same addresses in both spaces; parameters and shared memory have not."""
    if i.has("shared") or i.has("shared::cta") or i.has("shared::cluster"):
        i.only("to", "shared", "shared::cta", "shared::cluster", "u64")
        window = np.uint64(SHARED_WINDOW)
        return elementwise(d, i, "b64", ["b64"], (lambda a: a - window) if i.has("to") else (lambda a: a + window))
    i.only("to", "param", "global", "u64")
    if not (i.has("param") or i.has("global")) or (i.has("to") and i.has("param")):
        raise d.fail(i.opcode)
    there = np.uint64(GENERIC_PARAM_BASE - PARAM_BASE if i.has("param") else 0)
    return elementwise(d, i, "b64", ["b64"], lambda a: a + there)


PACKED = {"bf16x2": BF16, "f16x2": np.float16}


def round_bits(x: Array, dtype: DTypeLike) -> Array:
    """fp32 -> the bits of a 16-bit float, to nearest even."""
    return x.astype(dtype).view(np.uint16)


@instruction("cvt")
def convert(i: Instruction, d: Decoder) -> Step:
    *rest, to, source = i.mods
    if to in PACKED and source == "f32":
        i.only("rn", "satfinite", to, "f32")
        dtype = PACKED[to]
        most = np.float32(ml_dtypes.finfo(dtype).max) if i.has("satfinite") else np.float32(np.inf)

        def pair(high: Array, low: Array) -> Array:
            both = np.empty((LANES, 2), dtype)
            both[:, 0], both[:, 1] = np.clip(low, -most, most), np.clip(high, -most, most)
            return both.view(np.uint32).ravel()

        return elementwise(d, i, "b32", ["f32", "f32"], pair)
    if (to, source) == ("e4m3x2", "f32"):
        i.only("rn", "satfinite", to, source)

        def two_codes(high: Array, low: Array) -> Array:
            codes = (np.clip(x, -448, 448).astype(E4M3).view(np.uint8).astype(np.uint16) for x in (high, low))
            upper, lower = codes
            return upper << 8 | lower

        return elementwise(d, i, "b16", ["f32", "f32"], two_codes)
    if (to, source) == ("f16x2", "e4m3x2"):
        i.only("rn", to, source)
        return elementwise(d, i, "b32", ["b16"], lambda a: a.view(E4M3).astype(np.float16).view(np.uint32))
    if (to, source, rest) == ("f32", "f32", ["sat"]):
        return elementwise(d, i, "f32", ["f32"], lambda a: np.clip(np.nan_to_num(a, nan=0.0), 0, 1).astype(np.float32))
    if rest not in ([], ["rn"], ["rni"], ["rzi"], ["rpi"], ["sat"], ["rn", "ftz"]):
        raise d.fail(i.opcode)
    if to in HALVES and source == "f32":
        return elementwise(d, i, "b16", ["f32"], lambda a: round_bits(a, HALVES[to]))
    if to == "f32" and source in HALVES:
        return elementwise(d, i, "f32", ["b16"], lambda a: a.view(HALVES[source]).astype(np.float32))
    if to not in DTYPES or source not in DTYPES or rest == ["sat"]:
        raise d.fail(i.opcode)
    wide_to, wide_from = bits_of(to), bits_of(source)
    narrowed = source in ("s8", "u8")
    declared = d.program.register_type(str(i.args[1]))
    if declared is not None and source[0] in "us" and int(bits_of(declared)[1:]) > int(wide_from[1:]):
        wide_from, narrowed = bits_of(declared), True  # 9.4.1: the lower bits of a wider register
    target_dtype, source_dtype = DTYPES[to], DTYPES[source]
    register = DTYPES[to] if to[0] in "usf" and bits_of(to)[1:] == to[1:] else DTYPES["s16" if to[0] == "s" else "u16"]

    def compute(a: Array) -> Array:
        a = a.view(DTYPES[wide_from]).astype(DTYPES["u" + source[1:]]).view(source_dtype) if narrowed else a
        if source[0] == "f" and to[0] in "us":
            rounded = (np.rint if "rni" in rest else np.ceil if "rpi" in rest else np.trunc)(a)
            bits = int(to[1:])
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
            a = np.clip(np.nan_to_num(rounded.astype(np.float64)), low, high)
        return a.astype(target_dtype).astype(register)

    return elementwise(d, i, wide_to, [wide_from if narrowed else source], compute)
