"""Instructions that the DSL does not offer, each a function; no other file writes PTX."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

REGISTERS = {Int32: "r", Uint32: "r", Int64: "l", Float32: "f"}  # as constraints name them


@dsl_user_op
def ptx(text: str, *operands, gives: tuple = (), early: bool = False, pure: bool = False, loc=None, ip=None) -> tuple:
    """Emits `text`, whose $0, $1, ... are its results, with these types, then its operands.

    `early`: results may be written before the last operand is read. `pure`: the compiler may move it, or leave it out.
    """
    results = [t.mlir_type for t in gives]
    result = llvm.inline_asm(
        (llvm.StructType.get_literal(results) if len(results) > 1 else results[0]) if results else None,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        text,
        ",".join([("=&" if early else "=") + REGISTERS[t] for t in gives] + [REGISTERS[type(x)] for x in operands]),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(results) < 2:
        return tuple(t(result) for t in gives)
    values = (llvm.extractvalue(t, result, [i], loc=loc, ip=ip) for i, t in enumerate(results))
    return tuple(t(value) for t, value in zip(gives, values, strict=True))


# ---- registers and bits


def thread_id_again() -> Int32:
    """This thread of its CTA, read where it is needed, so that nothing derived from it stays in registers."""
    return ptx("mov.u32 $0, %tid.x;", gives=(Int32,))[0]


def keep(x: Int32) -> Int32:
    """x, kept in a register: LLVM would otherwise compute it anew in every iteration."""
    return ptx("mov.b32 $0, $1;", Int32(x), gives=(Int32,))[0]


def bits_of(x: Float32) -> Int32:
    return ptx("mov.b32 $0, $1;", Float32(x), gives=(Int32,), pure=True)[0]


def float_of(bits: Int32) -> Float32:
    return ptx("mov.b32 $0, $1;", Int32(bits), gives=(Float32,), pure=True)[0]


def nearest(value: Float32) -> Float32:
    """The bits of the integer nearest to value."""
    return ptx("{ .reg .s32 x; cvt.rni.s32.f32 x, $1; mov.b32 $0, x; }", Float32(value), gives=(Float32,), pure=True)[0]


def power_of_two(exponent: Int32) -> Float32:
    """2^(exponent - 127), by its biased exponent."""
    text = "{ .reg .b32 x; shl.b32 x, $1, 23; mov.b32 $0, x; }"
    return ptx(text, Int32(exponent), gives=(Float32,), pure=True)[0]


def shift_left(x: Int32, n: Int32) -> Int32:
    """x << n; 0 for an n beyond 31."""
    return ptx("shl.b32 $0, $1, $2;", Int32(x), n, gives=(Int32,), pure=True)[0]


def leading_zeros(x: Uint32) -> Int32:
    return ptx("clz.b32 $0, $1;", Uint32(x), gives=(Int32,), pure=True)[0]


def permute_bytes(low: Uint32, high: Uint32, order: Uint32) -> Uint32:
    """Four of the eight bytes, each by three bits of a nibble of `order`; the fourth bit asks for copies of the byte's
    sign instead."""
    return ptx("prmt.b32 $0, $1, $2, $3;", Uint32(low), Uint32(high), order, gives=(Uint32,), pure=True)[0]


# ---- arithmetic


def min_u32(a: Uint32, b: Uint32) -> Uint32:
    return ptx("min.u32 $0, $1, $2;", Uint32(a), Uint32(b), gives=(Uint32,), pure=True)[0]


def max_u32(a: Uint32, b: Uint32) -> Uint32:
    return ptx("max.u32 $0, $1, $2;", Uint32(a), Uint32(b), gives=(Uint32,), pure=True)[0]


def warp_min_u32(x: Uint32) -> Uint32:
    return ptx("redux.sync.min.u32 $0, $1, 0xffffffff;", x, gives=(Uint32,))[0]


def warp_max_u32(x: Uint32) -> Uint32:
    return ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", x, gives=(Uint32,))[0]


def rank_of(bits: Uint32) -> Uint32:
    """An unsigned number for the bits of a float32, in the same order: -0 is 0, and NaN comes before all others."""
    text = (
        "{ .reg .pred p; .reg .b32 x, s; setp.eq.u32 p, $1, 0x80000000; selp.b32 x, 0, $1, p;"
        " shr.s32 s, x, 31; or.b32 s, s, 0x80000000; xor.b32 s, s, x;"
        " and.b32 x, x, 0x7fffffff; setp.gt.u32 p, x, 0x7f800000; selp.b32 $0, 1, s, p; }"
    )
    return ptx(text, Uint32(bits), gives=(Uint32,), pure=True)[0]


def relu(x: Float32) -> Float32:
    """max(x, 0); NaN stays NaN."""
    return ptx("max.NaN.f32 $0, $1, 0f00000000;", Float32(x), gives=(Float32,), pure=True)[0]


def add_relu(x: Float32, factor: Float32, total: Float32) -> Float32:
    """total + factor * max(x, 0), rounded once; NaN stays NaN."""
    text = "{ .reg .f32 cut; max.NaN.f32 cut, $1, 0f00000000; fma.rn.f32 $0, cut, $2, $3; }"
    return ptx(text, Float32(x), Float32(factor), Float32(total), gives=(Float32,), pure=True)[0]


def least(x: Float32, y: Float32) -> Float32:
    """min(x, y); NaN stays NaN."""
    return ptx("min.NaN.f32 $0, $1, $2;", Float32(x), Float32(y), gives=(Float32,), pure=True)[0]


def bounded(x: Float32, limit: Float32) -> Float32:
    """The number nearest to x between -limit and limit; NaN stays NaN."""
    text = "{ .reg .f32 y; neg.f32 y, $2; max.NaN.f32 y, $1, y; min.NaN.f32 $0, y, $2; }"
    return ptx(text, Float32(x), Float32(limit), gives=(Float32,), pure=True)[0]


def clip(x: Float32, limit: Float32) -> Float32:
    """The number nearest to x between -limit and limit; x is not NaN."""
    text = "{ .reg .f32 y; neg.f32 y, $2; max.f32 y, $1, y; min.f32 $0, y, $2; }"
    return ptx(text, Float32(x), Float32(limit), gives=(Float32,), pure=True)[0]


def max_abs(a: Float32, b: Float32) -> Float32:
    """The greater of a, which is nonnegative, and |b|."""
    text = "{ .reg .f32 x; abs.f32 x, $2; max.f32 $0, $1, x; }"
    return ptx(text, Float32(a), Float32(b), gives=(Float32,), pure=True)[0]


def max_abs_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """The greater of |a| and |b|, of pairs of bf16, with any sign; a number rather than NaN."""
    return ptx("max.xorsign.abs.bf16x2 $0, $1, $2;", a, b, gives=(Uint32,), pure=True)[0]


def fma_bf16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """a b + c of pairs of bf16."""
    return ptx("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c, gives=(Uint32,), pure=True)[0]


def multiply_by_half(a: Uint32, b: Uint32, half: int) -> Uint32:
    """A pair of bf16 times one half of another pair, subnormal numbers among them. It is computed where this stands,
    before the fence of a product."""
    one = ("low", "high")[half]
    text = f"""{{ .reg .b16 low, high;
        .reg .b32 both;
        mov.b32 {{low, high}}, $2;
        mov.b32 both, {{{one}, {one}}};
        mul.rn.bf16x2 $0, $1, both;\n}}"""
    return ptx(text, a, b, gives=(Uint32,))[0]


def add_weighted(total: Float32, acc: tuple, x: tuple, factor: Float32, lse: Float32) -> tuple[Float32, ...]:
    """(total + factor, acc + factor x) for four numbers x; unchanged where lse is -inf, whatever x holds."""
    return ptx(
        "{ .reg .pred p; setp.neu.f32 p, $15, 0fFF800000;"
        " mov.b32 $0, $5; mov.b32 $1, $6; mov.b32 $2, $7; mov.b32 $3, $8; mov.b32 $4, $9; @p add.rn.f32 $0, $0, $14;"
        " @p fma.rn.f32 $1, $10, $14, $1; @p fma.rn.f32 $2, $11, $14, $2;"
        " @p fma.rn.f32 $3, $12, $14, $3; @p fma.rn.f32 $4, $13, $14, $4; }",
        *(total, *acc, *x, factor, lse),
        gives=(Float32,) * 5,
        early=True,
        pure=True,
    )


def sleep_if_negative(a: Float32, b: Float32) -> None:
    """Sleeps for 0 ns if a or b is negative. ptxas moves no wait before it."""
    ptx(
        "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; setp.lt.or.f32 p, $1, 0f00000000, p; @p nanosleep.u32 0; }",
        Float32(a),
        Float32(b),
    )


def multiply_warp(sums: tuple, a: tuple, b: tuple) -> tuple[Float32, ...]:
    """A warp's sums + a b, 16 x 8 float32, of a 16 x 16 and b 16 x 8 in bf16, by each lane's registers of these."""
    operands = (*map(Uint32, a), *map(Uint32, b), *map(Float32, sums))
    registers = ("{$0, $1, $2, $3}", "{$4, $5, $6, $7}", "{$8, $9}", "{$10, $11, $12, $13}")
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {', '.join(registers)};"
    return ptx(text, *operands, gives=(Float32,) * 4, pure=True)


def multiply_warp_tf32(sums: tuple, a: tuple, b: tuple) -> tuple[Float32, ...]:
    """A warp's sums + a b, 16 x 8 float32, of a 16 x 8 and b 8 x 8 in tf32, by each lane's registers of these: the bits
    of float32 whose lower 13 are 0."""
    operands = (*map(Uint32, a), *map(Uint32, b), *map(Float32, sums))
    registers = ("{$0, $1, $2, $3}", "{$4, $5, $6, $7}", "{$8, $9}", "{$10, $11, $12, $13}")
    text = f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {', '.join(registers)};"
    return ptx(text, *operands, gives=(Float32,) * 4, pure=True)


# ---- conversions


def round_pair(low: Float32, high: Float32, dtype) -> Uint32:
    """Two numbers rounded into one register.

    It is assembly, because LLVM moves a plain conversion at the end of a loop through the phi to its use in the next
    iteration. The wide fp32 values then stay alive beside the next scores: a third more registers.
    """
    name = {BFloat16: "bf16x2", Float16: "f16x2"}[dtype]
    text = f"cvt.rn.{name}.f32 $0, $1, $2;"
    return ptx(text, Float32(high), Float32(low), gives=(Uint32,), pure=True)[0]


def to_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four numbers rounded to e4m3, a in the lowest byte; beyond 448 they become 448."""
    text = """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};\n}"""
    return ptx(text, *map(Float32, (a, b, c, d)), gives=(Uint32,), early=True, pure=True)[0]


def scale_of_ue8m0(codes: Uint32, order: Uint32) -> Uint32:
    """One of four ue8m0 as a pair of bf16; 0 is 0, for absent keys. `order` makes the bytes 0, code, 0, code of codes
    and zeros. A code of 255 becomes inf, and inf 0 + inf is NaN.
    """
    text = """{ .reg .b32 x, zeros;
        mov.b32 zeros, 0;
        prmt.b32 x, $1, zeros, $2;
        shr.u32 x, x, 1;
        fma.rn.bf16x2 $0, x, zeros, x;\n}"""
    return ptx(text, codes, order, gives=(Uint32,), early=True, pure=True)[0]


def scale_of_e4m3(code: Uint32, middle: int) -> tuple[Uint32, Uint32]:
    """Half of an e4m3 scale, and -`middle` times that half, as pairs of bf16; 0 is 0, for absent keys. `middle` is the
    bits of a bf16."""
    text = f"""{{ .reg .b16 pair, low, high;
        .reg .b32 x;
        .reg .f32 f;
        cvt.u16.u32 pair, $2;
        cvt.rn.f16x2.e4m3x2 x, pair;
        mov.b32 {{low, high}}, x;
        cvt.f32.f16 f, low;
        mul.rn.f32 f, f, 0f3F000000;
        cvt.rn.bf16x2.f32 $0, f, f;
        mov.b32 x, {(middle | 0x8000) * 0x10001:#x};
        mul.rn.bf16x2 $1, $0, x;\n}}"""
    return ptx(text, code, gives=(Uint32,) * 2, early=True, pure=True)


def e4m3_to_bf16(packed: Uint32, scale: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 times a pair of equal scales, exactly except for what bf16 cannot hold: all that e4m3 has, f16 has, and
    bf16 too."""
    return _four_e4m3(packed, Uint32(scale), "cvt.rn.bf16x2.f32 x, g, f;", "mul.rn.bf16x2 {result}, x, $3;")


def e4m3_times_float32(packed: Uint32, scale: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 times the float32 with these bits, rounded, as bf16."""
    by = "mul.rn.f32 f, f, $3;\n        mul.rn.f32 g, g, $3;"
    return _four_e4m3(packed, Uint32(scale), by, "cvt.rn.bf16x2.f32 {result}, g, f;")


def _four_e4m3(packed: Uint32, scale: Uint32, *ends: str) -> tuple[Uint32, Uint32]:
    """Two pairs, from the f32 f and g of each on."""
    one_pair = """
        cvt.rn.f16x2.e4m3x2 x, {packed};
        mov.b32 {{low, high}}, x;
        cvt.f32.f16 f, low;
        cvt.f32.f16 g, high;
        """ + "\n        ".join(ends)
    pairs = (one_pair.format(packed=pair, result=f"${i}") for i, pair in enumerate(("first", "second")))
    return ptx(
        "{ .reg .b16 first, second, low, high;\n .reg .b32 x;\n .reg .f32 f, g;\n mov.b32 {first, second}, $2;"
        + "".join(pairs)
        + "\n}",
        Uint32(packed),
        scale,
        gives=(Uint32,) * 2,
        early=True,
        pure=True,
    )


# ---- shared memory


def load_shared(address: Int32) -> Float32:
    return ptx("ld.shared.f32 $0, [$1];", Int32(address), gives=(Float32,))[0]


def load_shared_four(address: Int32) -> tuple[Float32, ...]:
    return ptx("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", Int32(address), gives=(Float32,) * 4)


def load_shared_word(address: Int32) -> Uint32:
    return ptx("ld.shared.b32 $0, [$1];", Int32(address), gives=(Uint32,))[0]


def load_shared_words(address: Int32) -> tuple[Uint32, ...]:
    """16 bytes."""
    return ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", Int32(address), gives=(Uint32,) * 4)


def store_shared(address: Int32, x: Float32) -> None:
    ptx("st.shared.f32 [$0], $1;", Int32(address), Float32(x))


def store_shared_two(address: Int32, offset: int, x: Float32, y: Float32) -> None:
    """Two numbers, `offset` bytes after address."""
    ptx(f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};", Int32(address), Float32(x), Float32(y))


def store_shared_four(address: Int32, *values: Float32) -> None:
    ptx("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", Int32(address), *map(Float32, values))


def store_shared_words(address: Int32, words: tuple[Uint32, ...]) -> None:
    """Stores 16 bytes."""
    ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", Int32(address), *map(Uint32, words))


def store_shared_e4m3(address: Int32, offset: int, x: Float32, y: Float32) -> None:
    """Two numbers rounded to e4m3, `offset` bytes after address; beyond 448 they become 448."""
    text = f"""{{ .reg .b16 codes;
        cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1;
        st.shared.b16 [$0+{offset}], codes;\n}}"""
    ptx(text, Int32(address), Float32(x), Float32(y))


def count_in_shared(address: Int32) -> None:
    """Adds 1 to a number in shared memory."""
    ptx("red.shared.add.u32 [$0], 1;", address)


def take_next(address: Int32) -> Int32:
    """A number in shared memory, to which 1 is added."""
    return ptx("atom.shared.add.u32 $0, [$1], 1;", address, gives=(Int32,))[0]


# ---- global memory


def send_line(address: Int64, words: tuple[Int32, Int32], message: Int32) -> None:
    """Writes two words into any device's memory, and a number after each. A word and its number arrive together."""
    ptx(
        "{ .reg .b64 x, y; mov.b64 x, {$1, $3}; mov.b64 y, {$2, $3}; st.relaxed.sys.global.v2.b64 [$0], {x, y}; }",
        Int64(address),
        *words,
        Int32(message),
    )


def read_line(address: Int64) -> tuple[Int32, ...]:
    """Two words of a line as it is now, and the number after each."""
    return ptx(
        "{ .reg .b64 x, y; ld.relaxed.sys.global.v2.b64 {x, y}, [$4]; mov.b64 {$0, $2}, x; mov.b64 {$1, $3}, y; }",
        Int64(address),
        gives=(Int32,) * 4,
    )


def stop_with_error() -> None:
    """Ends the program on this device, with an error that the host gets."""
    ptx("trap;")


def cluster_among(n: Int32, ctas: int) -> Int32:
    """A number below n, another one for each cluster of so many CTAs, found where it is needed."""
    return ptx(
        f"{{ .reg .b32 x; mov.u32 x, %ctaid.x; shr.u32 x, x, {ctas.bit_length() - 1}; "
        "mul.lo.u32 x, x, 2654435769; mul.hi.u32 $0, x, $1; }",
        Int32(n),
        gives=(Int32,),
    )[0]


def load_four_words(address: Int64) -> tuple[Int32, ...]:
    return ptx("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", Int64(address), gives=(Int32,) * 4)


def load_again(address: Int64) -> Float32:
    """Loads a number where it is needed, so that it does not stay in a register."""
    return ptx("ld.global.nc.f32 $0, [$1];", address, gives=(Float32,))[0]


def load_words_unless(none: int, address: Int64, x: Uint32, count: int) -> tuple[Uint32, ...]:
    """1, 2 or 4 words, loaded where this stands, or zeros where x is `none`."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    words = f"v{count}.b32 {{{', '.join(f'${i}' for i in range(count))}}}" if count > 1 else "b32 $0"
    return ptx(
        f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, {none}; {zeros}"
        f" @p ld.global.nc.L1::evict_last.L2::256B.{words}, [${count}]; }}",
        Int64(address),
        x,
        gives=(Uint32,) * count,
        early=True,
    )


def load_four_if(address: Int64, wanted: Int32) -> tuple[Float32, ...]:
    """Four numbers, if wanted; otherwise they are undefined."""
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }"
    return ptx(text, address, Int32(wanted), gives=(Float32,) * 4, early=True)


def load_or_minus_inf(address: Int64, i: int, n: Int32) -> Float32:
    """Element i of n numbers, or -inf if there are not so many."""
    text = "{ .reg .pred p; setp.lt.s32 p, %d, $2; mov.b32 $0, 0fFF800000; @p ld.global.b32 $0, [$1 + %d]; }"
    return ptx(text % (i, 4 * i), address, n, gives=(Float32,), early=True)[0]


def prefetch_unless(none: int, address: Int64, x: Uint32) -> None:
    """Prefetches the line of an address into L2, unless x is `none`."""
    ptx(f"{{ .reg .pred p; setp.ne.u32 p, $1, {none}; @p prefetch.global.L2 [$0]; }}", Int64(address), x)


def prefetch_bulk(address: Int64, size: int) -> None:
    """Prefetches so many bytes into L2."""
    ptx(f"cp.async.bulk.prefetch.L2.global [$0], {size};", Int64(address))


def add_pair(address: Int64, there: Int32, offset: int, x: Float32, y: Float32) -> None:
    """Adds to two numbers in memory, `offset` bytes after address, unless `there` is negative: without a branch, as
    products may be under way."""
    ptx(
        f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p red.relaxed.gpu.global.add.v2.f32 [$0+{offset}], {{$2, $3}}; }}",
        Int64(address),
        Int32(there),
        Float32(x),
        Float32(y),
    )


def add_four(address: Int64, there: Int32, offset: int, *values: Float32) -> None:
    """`add_pair` for four numbers."""
    ptx(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; "
        f"@p red.relaxed.gpu.global.add.v4.f32 [$0+{offset}], {{$2, $3, $4, $5}}; }}",
        Int64(address),
        Int32(there),
        *map(Float32, values),
    )


def add_word(address: Int64, offset: int, bits: Float32) -> None:
    """Adds an integer to one of 32 bits in memory, `offset` bytes after address."""
    text = f"{{ .reg .b32 x; mov.b32 x, $1; red.relaxed.gpu.global.add.u32 [$0+{offset}], x; }}"
    ptx(text, Int64(address), Float32(bits))


def add_upwards(address: Int64, there: Int32, value: Float32) -> None:
    """Adds the least integer that is not below value to a 64-bit integer in memory, unless `there` is negative. Sets
    the highest bit instead where value is above 2^61 or NaN: no sum of the others reaches that."""
    ptx(
        "{ .reg .pred p, q, r; .reg .f32 y; .reg .b64 x; setp.ge.s32 p, $1, 0; "
        "setp.le.and.f32 q, $2, 0f5E000000, p; setp.gtu.and.f32 r, $2, 0f5E000000, p; "
        "min.f32 y, $2, 0f5E000000; cvt.rpi.u64.f32 x, y; @q red.relaxed.gpu.global.add.u64 [$0], x; "
        "mov.b64 x, 0x8000000000000000; @r red.relaxed.gpu.global.or.b64 [$0], x; }",
        Int64(address),
        Int32(there),
        Float32(value),
    )


# ---- copies between shared and global memory


def copy_or_zero(smem: Int32, gmem: Int64, present: Int32) -> None:
    """cp.async of 16 bytes through L2 only; `present` of them are read, the rest are zeros."""
    ptx("cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;", Int32(smem), Int64(gmem), Int32(present))


def in_a_register(address: Int32) -> Int32:
    """A multiple of 16, of which ptxas does not know that it is a sum of a lane's part and a warp's."""
    return ptx("and.b32 $0, $1, 0xfffffff0;", Int32(address), gives=(Int32,), pure=True)[0]


def copy_once_or_zero(smem: Int32, gmem: Int64, present: Int32) -> None:
    """`copy_or_zero` of bytes that are not read again: L2 evicts their lines first. A build is refused in which ptxas
    takes a part of smem from a uniform register (`kernels/cubin.py`): `in_a_register` hides that there is one.
    """
    text = """{ .reg .b64 evict_first; mov.b64 evict_first, 0x12F0000000000000;
        cp.async.cg.shared.global.L2::cache_hint.L2::256B [$0], [$1], 16, $2, evict_first; }"""
    ptx(text, Int32(smem), Int64(gmem), Int32(present))


def copy_bulk(smem: Int32, gmem: Int64, size: int, barrier: cute.Pointer) -> None:
    """A bulk copy, which the barrier counts."""
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
    ptx(text, Int32(smem), Int64(gmem), barrier.toint())


def copy_bulk_once(smem: Int32, gmem: Int64, size: int, barrier: cute.Pointer) -> None:
    """A bulk copy of bytes that are not read again, which the barrier counts: L2 evicts their lines first."""
    text = f"""{{ .reg .b64 evict_first; mov.b64 evict_first, 0x12F0000000000000;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], {size}, [$2],
        evict_first; }}"""
    ptx(text, Int32(smem), Int64(gmem), barrier.toint())


def copy_out(gmem: Int64, smem: Int32) -> None:
    """16 bytes of shared memory to global memory, at once."""
    ptx(
        "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$1]; st.global.v4.b32 [$0], {a, b, c, d}; }",
        Int64(gmem),
        Int32(smem),
    )


# ---- mbarriers, and the other CTAs of a cluster


def arrive_if(barrier: cute.Pointer, condition: Int32) -> None:
    """Arrives without a branch, because products may be under way."""
    ptx(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        barrier.toint(),
        Int32(condition),
    )


def arrive_in_cluster_if_zero(barrier: Int32, x: Int32) -> None:
    """Arrives, if x is 0, at the barrier of any CTA of the cluster: without a branch, as products may be under way, and
    without a fence of the cluster's scope, because the arrival tells only that something has been read."""
    ptx(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [$0]; }",
        Int32(barrier),
        Int32(x),
    )


def address_in(here: Int32, rank: Int32) -> Int32:
    """The address of another CTA's same place, in the shared memory of the cluster."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", Int32(here), Int32(rank), gives=(Int32,), pure=True)[0]


def address_again(here: Int32, rank: Int32) -> Int32:
    """`address_in`, computed where it is needed, so that it does not stay in a register."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", Int32(here), Int32(rank), gives=(Int32,))[0]


def load_of(here: Int32, rank: int) -> Int32:
    """A number of a CTA of the cluster, from its same place as here."""
    return ptx("ld.shared::cluster.s32 $0, [$1];", address_in(here, Int32(rank)), gives=(Int32,))[0]


def load_four_of(here: Int32, rank: int) -> tuple[Float32, ...]:
    """Four numbers of a CTA of the cluster, from its same place as here."""
    there = address_in(here, Int32(rank))
    return ptx("ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", there, gives=(Float32,) * 4)


def load_matrices(address: Int32) -> tuple[Int32, ...]:
    """Four matrices of 8 x 8 numbers of 16 bits: lane i says where row i % 8 of matrix i / 8 is, and gets two
    neighbours of row i / 4 of each."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return ptx(text, Int32(address), gives=(Int32,) * 4)


def send_words(address: Int32, words: tuple[Uint32, ...], barrier: Int32, offset: int | None = None) -> None:
    """Sends 16 bytes to another CTA's place, `offset` bytes after address; its barrier counts them when they arrive."""
    place = "$0" if offset is None else f"$0+{offset}"
    ptx(
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{place}], {{$2, $3, $4, $5}}, [$1];",
        Int32(address),
        Int32(barrier),
        *map(Uint32, words),
    )
