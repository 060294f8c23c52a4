"""The interpreter itself, on programs written by hand: what it computes, and what it refuses."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from interpreter import machine
from interpreter.edits import replacing
from interpreter.faults import PlantedFault, interpret
from interpreter.machine import decode, fusion
from interpreter.machine.copies import TensorMap
from interpreter.machine.handwritten import Handwritten
from interpreter.machine.hazards import Deadlock, Leak, Misuse, OutOfBounds, Race, Undefined, Unsupported
from interpreter.machine.state import SMEM_BASE
from kernels import build


def test_the_machine_knows_nothing_of_kernels():
    """What it imports, directly or not, is its own."""
    folder = Path(machine.__file__).parent
    for path in folder.glob("*.py"):
        found = build.modules(f"interpreter.machine.{path.stem}", folder.parents[1])
        assert {file.parent for file in found} == {folder}, path.name


@pytest.fixture(autouse=True, params=[1, 1 << 40], ids=["fused", "one by one"])
def however_it_runs(request, monkeypatch):
    """Lane-wise instructions as compiled runs, and one by one."""
    monkeypatch.setattr(fusion, "HOT", request.param)
    decode.Code.of.cache_clear(), decode.SlotTable.with_declarations.cache_clear()


def run(body, source=None, *, threads=32, seed=0, tensor=None):
    """The words of `result`, one for each thread."""
    return Handwritten(body, source, threads, tensor=tensor).interpret(seed)


def store(register):
    return f"st.global.b32 [%rd5], {register};"


def bf16_of(x, most):
    return np.float32(np.clip(x, -most, most)).astype(ml_dtypes.bfloat16).astype(np.float32)


def dot(a, factors, signed):
    """Of the bytes of a word, the lowest first."""
    parts = np.array([a], np.int32).view(np.int8 if signed else np.uint8).tolist()
    return sum(x * y for x, y in zip(parts, factors, strict=True))


def without_nan(a):
    """A pair of bf16, with zeros of their signs for NaN."""
    halves = [a >> shift & 0xFFFF for shift in (0, 16)]
    low, high = (x if x & 0x7FFF <= 0x7F80 else x & 0x8000 for x in halves)
    return high << 16 | low


A = np.array([0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 12345] * 4, np.int32)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r9, %r8, 5;", lambda a: a + 5),
        ("sub.s32 %r9, 5, %r8;", lambda a: 5 - a),
        ("mul.lo.s32 %r9, %r8, 1717986919;", lambda a: a * 1717986919),
        ("mul.hi.s32 %r9, %r8, 1717986919;", lambda a: a * 1717986919 >> 32),
        ("mul.hi.u32 %r9, %r8, -2;", lambda a: (a % 2**32) * (2**32 - 2) >> 32),
        ("mad.lo.s32 %r9, %r8, 3, %r1;", lambda a, lane: a * 3 + lane),
        ("div.s32 %r9, %r8, -2;", lambda a: abs(a) // 2 * (-1 if a > 0 else 1)),
        ("rem.s32 %r9, %r8, 5;", lambda a: abs(a) % 5 * (-1 if a < 0 else 1)),
        ("div.u32 %r9, %r8, 3;", lambda a: a % 2**32 // 3),
        ("min.relu.s32 %r9, %r8, 6;", lambda a: max(min(a, 6), 0)),
        ("shl.b32 %r9, %r8, %r1;", lambda a, lane: a << lane),
        ("shl.b32 %r9, %r8, 32;", lambda a: 0),
        ("shr.s32 %r9, %r8, 40;", lambda a: -1 if a < 0 else 0),
        ("shr.u32 %r9, %r8, 31;", lambda a: a % 2**32 >> 31),
        ("not.b32 %r9, %r8;", lambda a: ~a),
        ("lop3.b32 %r9, %r8, 255, %r1, 0x6a;", lambda a, lane: a & 255 ^ lane),
        ("setp.lt.s32 %p1, %r8, 0; selp.b32 %r9, 1, 2, %p1;", lambda a: 1 if a < 0 else 2),
        ("setp.lt.u32 %p1, %r8, 8; selp.b32 %r9, 1, 2, %p1;", lambda a: 1 if a % 2**32 < 8 else 2),
        ("cvt.s8.s32 %rs1, %r8; cvt.s32.s16 %r9, %rs1;", lambda a: (a + 128) % 256 - 128),
        ("cvt.u16.u32 %rs1, %r8; cvt.u32.u16 %r9, %rs1;", lambda a: a % 2**16),
        ("mul.wide.s32 %rd6, %r8, -3; shr.s64 %rd6, %rd6, 1; cvt.u32.u64 %r9, %rd6;", lambda a: a * -3 >> 1),
        ("mov.b64 %rd6, {%r1, %r8}; mov.b64 {%r10, %r9}, %rd6;", lambda a: a),
        ("prmt.b32 %r9, %r8, 0, 0x0123;", lambda a: int.from_bytes((a % 2**32).to_bytes(4, "little"), "big")),
        ("dp4a.s32.s32 %r9, %r8, 0x0102FE04, 7;", lambda a: 7 + dot(a, (4, -2, 2, 1), signed=True)),
        ("max.xorsign.abs.bf16x2 %r9, %r8, 0x3F80C000;", lambda a: 0x3F804000 | (a ^ 0x8000) & 0x80008000),
        ("max.xorsign.abs.bf16x2 %r9, %r8, 0;", without_nan),
        ("dp4a.u32.u32 %r9, %r8, 0x0102FE04, 7;", lambda a: 7 + dot(a, (4, 254, 2, 1), signed=False)),
    ],
)
def test_integers(instruction, expected):
    got = run(f"ld.global.b32 %r8, [%rd3]; {instruction} {store('%r9')}", A)
    arguments = expected.__code__.co_argcount
    want = [expected(*(int(a), lane)[:arguments]) % 2**32 for lane, a in enumerate(A)]
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("fma.rn.f32 %r9, %r8, %r8, 0f3F800000;", lambda x: np.float32(np.float64(x) * np.float64(x) + 1)),
        ("max.f32 %r9, %r8, 0f7FC00000;", lambda x: x),  # the operand that is not NaN
        ("add.ftz.f32 %r9, %r8, 0f00000001;", lambda x: x),
        ("setp.neu.f32 %p1, %r8, 0f7FC00000; selp.b32 %r9, 0f3F800000, 0f00000000, %p1;", lambda x: np.float32(1)),
        ("setp.eq.f32 %p1, %r8, 0f7FC00000; selp.b32 %r9, 0f3F800000, 0f00000000, %p1;", lambda x: np.float32(0)),
        ("ex2.approx.ftz.f32 %r9, %r8;", lambda x: np.float32(np.exp2(np.float64(x)))),
        (
            "mul.f32 %r9, %r8, 0f7F000000; cvt.rn.satfinite.bf16x2.f32 %r9, %r9, %r9; and.b32 %r9, %r9, 0xFFFF0000;",
            lambda x: bf16_of(x * np.float64(2.0**127), 3.3895314e38),
        ),
    ],
)
def test_floats(instruction, expected):
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    got = run(f"ld.global.b32 %r8, [%rd3]; {instruction} {store('%r9')}", x)
    np.testing.assert_array_equal(got.view(np.float32), [expected(v) for v in x])


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("idx", 3, 31, lambda lane: 3),
        ("idx", 3, 0x181F, lambda lane: lane // 8 * 8 + 3),  # segments of 8
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("down", 2, 31, lambda lane: lane + 2 if lane < 30 else lane),
        ("up", 2, 0, lambda lane: lane - 2 if lane >= 2 else lane),
    ],
)
def test_shuffles(mode, by, clamp, source):
    got = run(f"shfl.sync.{mode}.b32 %r9, %r1, {by}, {clamp}, -1; {store('%r9')}")
    assert got.tolist() == [source(lane) for lane in range(32)]


def test_lanes_part_and_meet_again():
    """A loop that every lane leaves at another time, with an if in it; after it all lanes vote together."""
    body = f"""
      mov.b32 %r8, 0; mov.b32 %r9, 0;
    LOOP:
      setp.ge.s32 %p1, %r8, %r1;
      @%p1 bra DONE;
      and.b32 %r10, %r8, 1;
      setp.eq.b32 %p2, %r10, 0;
      @%p2 bra EVEN;
      add.s32 %r9, %r9, 100;
      bra NEXT;
    EVEN:
      add.s32 %r9, %r9, 1;
    NEXT:
      add.s32 %r8, %r8, 1;
      bra.uni LOOP;
    DONE:
      setp.gt.s32 %p3, %r1, 3;
      vote.sync.ballot.b32 %r11, %p3, -1;
      add.s32 %r9, %r9, %r11;
      {store("%r9")}"""
    want = [(lane + 1) // 2 + lane // 2 * 100 + 0xFFFFFFF0 for lane in range(32)]
    assert run(body).tolist() == [w % 2**32 for w in want]


MADE = "mbarrier.init.shared.b64 [%r3], 1;"
EXPECT = "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r3], 8;"
ARRIVE = "mbarrier.arrive.shared.b64 %rd6, [%r3];"
WAIT = "AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0; @%p1 bra END; bra AGAIN; END:"


@pytest.mark.parametrize(
    ("fault", "says", "body"),
    [
        (Unsupported, r"line \d+: frobnicate\.b32 .*\n.*unknown instruction", "frobnicate.b32 %r9, %r1;"),
        (Unsupported, r"modifier \.bogus", "bar.sync.bogus 0;"),
        (Undefined, r"condition of a branch is register %p1", "@%p1 bra END; END:"),
        (Undefined, r"stored to global memory is register %r9", store("%r9")),
        (Undefined, r"reads SMEM bytes 1024\.\.1151, which nobody wrote", "ld.shared.b32 %r9, [%r4];"),
        (
            OutOfBounds,
            r"loads 4 bytes at 0x\w+, outside .* 128 bytes after the start of source",
            "ld.global.b32 %r9, [%rd3+4];",
        ),
        (OutOfBounds, r"not aligned", "ld.global.b32 %r9, [%rd3+2];"),
        (OutOfBounds, r"wanted a multiple of 16", "st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1};"),
        (OutOfBounds, r"SMEM 66\d+, outside of", "st.shared.b32 [%r4+65536], %r1;"),
        (Misuse, r"source, which is an operand", "st.global.b32 [%rd3], %r1;"),
        (Race, r"two lanes store different values", "st.shared.b32 [%r3], %r1;"),
        (
            Misuse,
            r"is reached by 0xfffffff0 only",
            "setp.lt.s32 %p1, %r1, 4; @%p1 bra END;shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1; END:",
        ),
        (Misuse, r"no mbarrier at shared memory \+0", "mbarrier.arrive.shared.b64 %rd6, [%r3];"),
        (Misuse, r"an arrival too many", MADE + EXPECT + ARRIVE),
        (
            Deadlock,
            r"warp 0 at line \d+ waits for parity 0: mbarrier \+0 .*: 1 of 33 arrivals pending",
            MADE.replace("1;", "33;") + ARRIVE + WAIT,
        ),
        (Leak, r"8 transaction bytes outstanding", "setp.ne.b32 %p1, %r1, 0; @%p1 bra END;" + MADE + EXPECT + "END:"),
    ],
)
def test_faults(fault, says, body):
    with pytest.raises(fault, match=says):
        run(body)


EXCHANGE = """
  st.shared.b32 [%r4], %r1;
  {barrier}
  xor.b32 %r9, %r2, 128;
  add.s32 %r9, %r9, %r3;
  ld.shared.b32 %r10, [%r9];
  st.global.b32 [%rd5], %r10;
"""


def test_two_warps_exchange():
    got = run(EXCHANGE.format(barrier="bar.sync 0;"), threads=64)
    assert got.tolist() == [*range(32, 64), *range(32)]


def test_two_warps_race():
    """Found in any order: where the other warp has not stored yet, its word is undefined."""
    early = Undefined, "reads SMEM .*, which nobody wrote"
    fault = PlantedFault(
        "no barrier",
        Handwritten(EXCHANGE.format(barrier="bar.sync 0;"), threads=64),
        Race,
        "nothing orders this and the write by warp",
        replacing(("bar.sync 0;", "")),
        also=(early,),
    )
    fault.check(interpret, seeds=range(6))


def test_each_symptom_of_a_fault_must_be_seen():
    raised = {"early": Undefined("which nobody wrote"), "race": Race("nothing orders this"), "other": Leak("a Race")}
    fault = PlantedFault(
        "no barrier", "", Race, "nothing orders", lambda text: "none", also=((Undefined, "which nobody wrote"),)
    )
    other = PlantedFault("another", "", (Race, Undefined), "", lambda text: "none")

    def check(*names, among=()):
        def run(fault, seed):
            if names[seed]:
                raise raised[names[seed]]

        fault.check(run, seeds=range(len(names)), among=among)

    check("early", "race", among=[fault])
    for names, among in (
        (["early", "early"], []),  # no run has seen the race itself
        (["early", "race", "other"], []),
        (["early", "race"], [fault, other]),
    ):
        with pytest.raises(AssertionError):
            check(*names, among=among)
    with pytest.raises(LookupError, match="nothing is found with seed 1"):
        check("race", None)
    with pytest.raises(LookupError, match="the edit changes nothing"):
        fault.planted_in("none")


LOAD = """
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared.b64 [%r3+32768], 1;
  fence.mbarrier_init.release.cluster;
MADE:
  bar.sync 0;
  @%p1 bra WAIT;
  mbarrier.arrive.expect_tx.shared.b64 %rd6, [%r3+32768], {bytes};
  mov.b64 %rd7, map;
  cvta.param.u64 %rd7, %rd7;
  cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd7, {{{at}}}], [%r3+32768];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r3+32768], 0;
  @%p2 bra COME;
  bra WAIT;
COME:
  ld.shared.b32 %r9, [%r4+{offset}];
  st.global.b32 [%rd5], %r9;
"""


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_copy(swizzle):
    """Against the definition, element by element: a box that hangs over every edge."""
    extents, box, at = (40, 5, 3), ((swizzle or 64) // 2, 4, 2), (24, -1, 2)
    values = np.random.default_rng(0).integers(1, 2**16, extents[::-1]).astype(np.uint16)
    expected = np.zeros((16384,), np.uint8)
    for z, y, x in itertools.product(range(box[2]), range(box[1]), range(box[0])):
        where = (at[0] + x, at[1] + y, at[2] + z)
        inside = all(0 <= w < e for w, e in zip(where, extents, strict=True))
        value = int(values[where[::-1]]) if inside else 0
        byte = 2 * (x + box[0] * (y + box[1] * z))
        address = byte ^ (byte >> 7 & swizzle // 16 - 1) << 4 if swizzle else byte  # 16-byte chunks of 128-byte rows
        expected[address : address + 2] = np.frombuffer(np.uint16(value).tobytes(), np.uint8)
    size = 2 * int(np.prod(box))

    def tensor(address):
        return TensorMap(address, 2, box, extents, (80, 400), swizzle)

    for offset in range(0, size, 256):
        body = LOAD.format(bytes=size, at=", ".join(map(str, at)), offset=offset)
        got = run(body, values, threads=64, tensor=tensor)
        assert got.tolist() == expected[offset : offset + 256].view(np.uint32).tolist()


def test_a_tensor_map_has_a_generic_address():
    body = LOAD.format(bytes=512, at="0, 0, 0", offset=0).replace("cvta.param.u64 %rd7, %rd7;", "")
    with pytest.raises(Misuse, match=r"no tensor map at a \.param address"):
        run(body, threads=64, tensor=lambda address: TensorMap(address, 2, (64, 4, 1), (64, 1, 1), (128, 128), 128))


def test_shared_memory_begins_after_what_is_reserved():
    assert run(store("%r4")).tolist() == [SMEM_BASE + 4 * n for n in range(32)]


def test_places_in_sources_are_no_instructions():
    """.loc ends with its line, not with a semicolon: once, the instruction after it was lost."""
    body = "mov.b32 %r8, 1;\n\t.loc\t1 7 14, function_name $L__info, inlined_at 1 8 3\n  add.s32 %r8, %r8, %r1;\n"
    assert run(body + store("%r8")).tolist() == [n + 1 for n in range(32)]
