"""All orders: whether a launch ends in every order of events, shown from one run of it.

    skeleton.py     what a run leaves of each warp and operation: where it waits, arrives, expects and brings bytes
    causality.py    what each event needs, and whether another order may do something else than the run
    world.py        a skeleton that goes on step by step: an order that does, and a search of all states
    verdict.py      runs of a machine, all of this, and the interpreter in an order that deviates

The argument. A skeleton is the sequence of waits, arrivals and bytes of every warp, each with the phase of its barrier
that it belonged to in the run, and the arrivals and bytes of every operation that was issued. What an event needs is
what its warp did before, and, of a wait, the completion of its phase: a partial order. Now take another order, and in
it the first event that belongs to another phase than in the run. Up to there it did what the partial order allows. So
such an event is possible only if the partial order allows

    early       somebody to come to a barrier for a phase while the phase before is not complete: it would count there,
                or a wait would take the parity of two phases ago for the one that it wants; or
    slept       a barrier to complete two phases while somebody has not passed its wait for the first: by parity it
                then waits for a third; or
    late bytes  a phase to complete before somebody has announced that it expects bytes in it.

Each is a comparison of what is known to have happened where. If nothing of this is possible, every order has the
events of the run, in the phases of the run: none ends in a deadlock, and what one run shows of races holds for all.
A wait that may pass in several phases does no harm if this holds with nothing known from it, and if the last phase of
its barrier lets it pass.
"""
