"""An interpreter for the PTX that the build emits: kernels run on a CPU, and their mistakes are found there.

    from interpreter.kernels.launch import Kernel, launch
    run = launch(Kernel.of(variant), operands, processors=2, seed=0)
    o, lse = run.run()              # raises Deadlock, Race, Undefined, OutOfBounds, Misuse, Leak, Unsupported

What is modelled. A warp is 32 lanes in NumPy vectors; a register is a *slot* of `warp.R` (an array of 32 lanes, never
changed in place) with a bit mask of the lanes where it is defined in `warp.D`. Immediates, special registers and
addresses of symbols are slots too, so that an operand is always a number. Divergence is a stack of (mask, pc), joined
at the immediate post-dominator. A seeded scheduler picks what happens next: some steps of a warp, or one asynchronous
operation (TMA, cp.async, wgmma, tcgen05) that was issued and has not happened yet. A warp that waits is asked again
when there are `machine.news`.

What is tracked. Every warp has a `Clock`: which steps of the other warps, and which asynchronous operations, are known
to have happened before. Synchronisation joins clocks: arrive -> wait of an mbarrier, bar.sync, the cluster's barrier,
wait_group, the completion of a copy on its mbarrier. Every word (4 bytes) of memory remembers who wrote it last and who
has read it since; an access by somebody who does not know of these is a `Race`, whatever order this run happened to
take. A clock has a second half, what is known to be visible to the async proxy; `fence.proxy.async` moves the first
into it.

Modules, each for one concern. The machine knows nothing of this project's kernels:

    machine/
      parser.py      text -> Program: instructions, labels, registers, parameters, post-dominators
      hazards.py     Clock, Shadow (who wrote and read a word), the errors
      state.py       Machine, Cta, Warp, SMEM, global memory, AsyncOp, Wait
      scheduler.py   what happens next; deadlocks; what must be in order at the end
      decode.py      Decoder: operands -> slots; the register of instructions
      fusion.py      runs of instructions on lanes alone -> one Python function each
      alu.py control.py memory.py reductions.py barriers.py clusters.py copies.py lanes.py wgmma.py tmem.py tcgen05.py
      products.py launch_control.py
                     one family of instructions each
      rules.py       what the manual demands and a B200 does not: a switch for each
      handwritten.py programs written by hand, run here or on a chip
      timeline.py    who did what when, as text and as a picture
    kernels/         what knows our kernels
      native.py      launches as our own launcher plans them (ffi/introspect.cc)
      launch.py      the build's PTX; a launch of attention on operands
      attention.py gradients.py       operands in NumPy, and in float64 what is to come out
      cases.py       what kernels of attention are run on;  verdict.py: what is wrong with an answer
      command.py     a kernel of ours, and who did what when;  orders.py: all orders of all kernels of attention
      mla_backward.py mha_backward.py indexer.py probabilities.py rope.py
                     a launch of each other family, its operands, and what is wrong with its answer
    orders/          whether a launch ends in every order of events, from one run of it
    faults.py        PlantedFault: where a fault is, by what it must be found;  edits.py: edits of PTX that plant one
    hardware.py      what a GPU answers, recorded
    cute/            anybody's CuTe DSL functions: compiled without a GPU, recorded, run here
    witnesses/       kernels that others wrote for B200s
    __main__.py      the commands

Seams, for a new family of instructions:

1. Registration. In the family's module, which `decode.py` imports by its list FAMILIES:

       @instruction("tcgen05.mma")                  # the longest registered dotted prefix of an opcode wins
       def mma(i: Instruction, d: Decoder) -> Step:
           i.mods                                   # what follows the prefix: ("cta_group::1", "kind::f16")
           i.only("cta_group::1", "kind::f16")      # Unsupported, naming the line, for any other modifier
           a = d.slot(i.args[1], "b64")             # register, immediate or symbol -> slot
           base, offset = d.address(i.args[0])      # "[%r1+16]" -> (slot of a 32- or 64-bit base, 16)
           def step(w: Warp) -> Wait | None: ...    # run for every execution, with w.active lanes
           return step                          # or a Lanewise, for what happens in each lane alone

   A step reads `w.R[slot]` (`w.read(slot, np.uint32)` views it as a dtype and checks that no asynchronous operation
   has it in flight), writes `w.put(slot, array32, defined=FULL)`, takes a value that must be the same in all active
   lanes with `w.uniform(slot, np.uint32, "what it is")`, and the active ones as `w.active` (int mask) and `w.lanes`
   (bool[32]). A guard (`@%p`) is applied around the step: it sees fewer active lanes. `.aligned` instructions call
   `w.converged(...)`. To block, return `Wait(ready, why)`: the same step runs again once `ready()` is true; `why()` is
   what a deadlock says.

2. State. `w.cta` has `.smem`, `.rank` in its cluster, `.cluster` (list of Ctas), `.barriers` (SMEM offset: MBarrier)
   and `.machine`; `cta.extra` is a dict for a family's own state (TMEM goes here, by `setdefault`).
   An address of shared memory carries the CTA's rank from bit 24 on: `cta.at(address)` is (cta, offset). Whatever
   touches another CTA's memory says so with `cta.visit(actor, does)`: that one must have begun, and not end before.
   `cta.smem.bytes` is uint8, `.words32` its uint32 view; raw data, without checks. `barriers.arrive(bar, count, clock,
   who)`, `barriers.complete_tx(bar, bytes, clock)` and `barriers.lookup(w, address)` serve commits and copies.
   `machine.at_exit(check)`: run when all CTAs have ended, raises what is still wrong (TMEM not freed).

3. Asynchronous operations. `op = w.issue(kind, what, run, after=(...), proxy="async")` records an AsyncOp with the
   warp's clock at this moment; the scheduler calls `run(op)` at any later time, once all of `after` are done. `run`
   checks and does the reads and writes (`cta.smem.shadow.read(op, words)`, `.write(op, words, defined=True)`), then it
   arrives where completion is told: `barriers.arrive(bar, 1, op.completed(), op)` (the clock of the issue, plus the
   operation itself, plus `after`). `w.learn(op)` is for completions that are waited for without a barrier
   (wait_group, tcgen05.wait).

4. Hazards. `Shadow(name, words, readers, events)` for another memory (TMEM). `read(actor, words)` and
   `write(actor, words, defined=True)`: actor is a Warp or an AsyncOp, words an index array or slice. They raise
   Race with both sides' lines, and Undefined for words never written. `actor.clock` is what the actor knows; `proxy` is
   "generic" or "async": an async read of a generic write needs `fence.proxy.async` on the way.
   Registers in flight: `w.hold(slots, op)` and `w.release(slots, op)`: reading or writing a held register is a Race.
"""
