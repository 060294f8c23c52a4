"""All orders of a launch, shown from one run: against a search of all states, on faults that no seed meets, and on
kernels."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from interpreter import edits
from interpreter.kernels import cases, command, few_rows_product, native
from interpreter.kernels.launch import Kernel, launch
from interpreter.kernels.orders import examined, keys
from interpreter.machine.handwritten import Handwritten, wait
from interpreter.machine.hazards import Deadlock, Fault, Misuse, Undefined
from interpreter.orders.causality import Order, finding
from interpreter.orders.skeleton import Barrier, Entry, Event, Kind, Skeleton, recorded, waited_for
from interpreter.orders.verdict import verdict
from interpreter.orders.world import World

# ---- against a search of all states


def random_run(rng: random.Random) -> Skeleton | None:
    """A run of two or three warps that arrive, expect, copy and wait at two mbarriers as it comes; None if it hangs."""
    counts = [rng.randint(1, 2) for _ in range(2)]
    names = [f"warp {n}" for n in range(rng.randint(2, 3))]
    programs = []
    for _ in names:
        parities, program = [0, 0], list[tuple[Kind, int, int]]()
        for _ in range(rng.randint(2, 5)):
            bar, what = rng.randrange(2), rng.random()
            if what < 0.4:
                program.append((Kind.WAITS, bar, parities[bar]))
                parities[bar] ^= 1
            elif what < 0.75:
                program.append((Kind.ARRIVES, bar, 1))
            elif what < 0.9:
                program.append((Kind.ISSUES, bar, 0))  # an arrival
            else:
                program += [(Kind.EXPECTS, bar, 16), (Kind.ARRIVES, bar, 1), (Kind.ISSUES, bar, 16)]
        programs.append(program)
    x = Skeleton(names, [[] for _ in names], [], [], [Barrier(f"bar {n}", c, True) for n, c in enumerate(counts)], [])
    bars, flying = [[0, c, 0] for c in counts], list[tuple[int, int, int]]()  # phase, missing, bytes

    def happens(warp: int, operation: int, kind: Kind, bar: int, amount: int) -> bool:
        phase, e = bars[bar][0], bars[bar]
        event = Event(kind, bar, phase - (kind is Kind.WAITS), amount)
        (x.warps[warp] if operation < 0 else x.operations[operation]).append(event)
        x.log.append(Entry(warp, operation, event, bar))
        e[1] -= amount if kind is Kind.ARRIVES else 0
        e[2] += {Kind.EXPECTS: amount, Kind.BRINGS: -amount}.get(kind, 0)
        if kind is not Kind.WAITS and e[1] == 0 and e[2] == 0:
            bars[bar] = [phase + 1, counts[bar], 0]
            x.log.append(Entry(-1, -1, None, bar))
        return e[1] >= 0

    while True:
        able = [
            w for w, p in enumerate(programs) if p and (p[0][0] is not Kind.WAITS or bars[p[0][1]][0] & 1 != p[0][2])
        ]
        moves = [*able, *(-1 - n for n in range(len(flying)))]
        if not moves:
            break
        if (move := rng.choice(moves)) < 0:
            place, bar, size = flying.pop(-1 - move)
            if not happens(-1, place, *((Kind.BRINGS, bar, size) if size else (Kind.ARRIVES, bar, 1))):
                return None
            continue
        kind, bar, amount = programs[move].pop(0)
        if kind is Kind.ISSUES:
            place = len(x.operations)
            x.operations.append([])
            x.issuers.append((move, f"copy {place}"))
            x.warps[move].append(Event(kind, place))
            x.log.append(Entry(move, -1, x.warps[move][-1], place))
            flying.append((place, bar, amount))
        elif not happens(move, -1, kind, bar, 0 if kind is Kind.WAITS else amount):
            return None
    return x if not any(programs) else None


def test_causality_finds_what_a_search_of_all_states_finds() -> None:
    rng, seen = random.Random(0), {True: 0, False: 0}
    while min(seen.values()) < 60:
        x = random_run(rng)
        if x is None:
            continue
        world = World(x)
        found = world.search()
        assert found.whole
        same = not found.wrong and all(map(world.ended, found.ends))
        assert all(map(world.ended, found.ends)) or not finding(x).ends, x
        if not Order(x).found:
            assert same, x
        elif all(d.kind != "late bytes" for d in Order(x).found):
            assert not same, (x, [d.says for d in Order(x).found])
        seen[same] += 1


def test_a_barrier_that_nobody_waits_for_orders_nothing() -> None:
    """Without it a run ends in every order if it did with it, and warps that arrive there twice do not differ."""
    rng, seen = random.Random(1), {True: 0, False: 0}
    while min(seen.values()) < 20:
        if (x := random_run(rng)) is None or (y := waited_for(x)) is x:
            continue
        of, without = World(x), World(y)
        assert y.left_out and not any(
            x.barriers[e.barrier].name in y.left_out for _, _, e, _ in y.log if e and e.amount
        )
        end = [all(map(world.ended, world.search().ends)) for world in (of, without)]
        assert end[0] == end[1], x
        seen[end[0]] += 1


# ---- faults that no seed meets

ROUNDS = 200
MADE = """
  mov.u32 %r8, 32;
  setp.ne.u32 %p0, %r1, 0;
  @%p0 bra made;
  mbarrier.init.shared.b64 [%r3], %r8;
  mbarrier.init.shared.b64 [%r3+8], %r8;
  mbarrier.init.shared.b64 [%r3+16], %r8;
made:
  bar.sync 0;
  shr.u32 %r9, %r1, 5;
  mov.u32 %r10, 0;
  setp.eq.u32 %p1, %r9, 1;
  @%p1 bra second;
  setp.eq.u32 %p1, %r9, 2;
  @%p1 bra third;
"""


def turns(name: str, first: str) -> str:
    """One side of many turns, of two warps in which one waits for the other."""
    gives, takes = ("8", 16) if first == "first" else ("16", 8)
    give = f"mbarrier.arrive.shared.b64 _, [%r3+{gives}];"
    take = wait(f"{name}_waits", takes, "%r11")
    return f"""
{name}_again:
  and.b32 %r11, %r10, 1;
  {give + take if first == "first" else take + give}
  add.u32 %r10, %r10, 1;
  setp.lt.u32 %p2, %r10, {ROUNDS};
  @%p2 bra {name}_again;
"""


ARRIVE = "mbarrier.arrive.shared.b64 _, [%r3];"
# The third warp has until the others have taken many turns to see that the first phase is complete.
SLEEPS = f"""{MADE}
  {ARRIVE} {turns("a", "first")} {ARRIVE}
  bra done;
second: {turns("b", "second")}
  bra done;
third: {wait("sleeps", 0)}
done:
"""
# The third warp wants the second phase, and has taken many turns when it asks. Before the first it passes, too.
EARLY = f"""{MADE}
  {ARRIVE}
  st.shared.b32 [%r4+1024], %r1;
  {ARRIVE}
  bra done;
second: {turns("b", "second")}
  bra done;
third: {turns("c", "first")} {wait("early", 0, 1)}
  ld.shared.b32 %r12, [%r4+768];
done:
"""


def program(body: str) -> Handwritten:
    return Handwritten(body, threads=96)


@pytest.mark.parametrize("body", [SLEEPS, EARLY], ids=["deadlock", "phase"])
def test_no_seed_meets_the_fault(body: str) -> None:
    for seed in range(20):
        program(body).interpret(seed)


@pytest.mark.parametrize(("body", "kind", "raises"), [(SLEEPS, "slept", Deadlock), (EARLY, "early", Undefined)])
def test_the_order_that_does_is_found(body: str, kind: str, raises: type[Fault]) -> None:
    found = verdict(lambda seed: program(body).machine(seed))
    assert not found.right and found.proved == (raises is Undefined)
    (other,) = found.others
    assert other.deviation.kind == kind and other.raised is not None
    assert other.raised.startswith(raises.__name__), other.raised
    assert bool(other.stuck) == (raises is Deadlock)


def test_what_depends_on_the_order_is_refused() -> None:
    """A question that is asked once, whose answer decides."""
    body = SLEEPS.replace("@!%p7 bra sleeps;", "")
    with pytest.raises(Misuse, match=r"asks a barrier, and goes on"):
        verdict(lambda seed: program(body).machine(seed))


def test_a_wait_that_may_pass_in_several_phases() -> None:
    """It does no harm where the last phase lets it pass, too."""
    body = SLEEPS.replace("bra done;\nsecond", f"{ARRIVE}\n  bra done;\nsecond")
    found = verdict(lambda seed: program(body).machine(seed))
    assert found.right and found.proved and found.loose == 1
    assert [other.raised for other in found.others] == [""]


# ---- kernels


def skeleton_of(name: str) -> Skeleton:
    kernel = Kernel.of(command.find(name))
    x = cases.operands(kernel.variant, kernel.facts["tile_n"], "turns")
    assert x is not None
    return recorded(launch(kernel, x, processors=cases.PROCESSORS["turns"]).machine)


def without(x: Skeleton, line: int) -> Skeleton:
    """The run of a kernel that does not wait in a line."""

    def stays(e: Event | None) -> bool:
        return e is None or e.kind is not Kind.WAITS or e.line != line

    warps = [list(filter(stays, events)) for events in x.warps]
    return Skeleton(x.names, warps, x.operations, x.issuers, x.barriers, [y for y in x.log if stays(y.event)])


def test_the_page_has_every_kernel() -> None:
    """Else: make test-orders ARGS="KEY --record docs/orders.json", and python docs/generate.py."""
    shown = json.loads((Path(__file__).parents[1] / "docs/orders.json").read_text())
    assert {x["kernel"] for x in shown} == set(keys([]))


@pytest.mark.parametrize("name", ["mha_fwd_sm_90a_d128_bfloat16", "mha_fwd_sm_100f_d128_bfloat16"])
def test_a_kernel_ends_in_every_order(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    native.library()  # without it there is nothing to run
    assert command.main([name, "--orders"]) == 0
    assert "every order does the same and ends" in capsys.readouterr().out


def test_a_ring_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of few rows that does not wait for empty stages ends in every order while it uses none twice."""
    key = "few_rows_product_sm_90a_bfloat16_parts2_r64"
    kernel = Kernel.of(native.variant_of(key))
    offsets = edits.barriers(kernel.ptx)
    empty = {*offsets[len(offsets) // 2 :]}
    unchanged = few_rows_product.launched
    hasty = functools.partial(unchanged, edit=lambda ptx: edits.drop_waits(ptx, empty))
    monkeypatch.setattr(few_rows_product, "launched", hasty)
    short = few_rows_product.Problem.typical(kernel.variant, 5)
    assert verdict(lambda seed: hasty(short, seed=seed)).right
    (found,) = examined(key)
    assert not found["right"] and "an arrival too many" in found["says"][0]


def test_waits_that_a_kernel_needs() -> None:
    """Without any of seven of its ten waits an order hangs. Races, which every run would show, do not count here."""
    x = skeleton_of("mha_fwd_sm_90a_d128_bfloat16")
    lines = {e.line for events in x.warps for e in events if e.kind is Kind.WAITS and x.barriers[e.barrier].parity}
    assert len(lines) == 10
    assert sum(hangs(without(x, line)) for line in lines) == 7
    assert not hangs(x)


def hangs(x: Skeleton) -> bool:
    """Whether the first order that does something else does."""
    world, found = World(x), Order(x).found
    return bool(found) and bool(world.stuck(world.outcome(found[0])[0]))
