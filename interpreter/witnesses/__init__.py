"""Witnesses: kernels that others wrote for B200s (and H200s), compiled here and run by the interpreter.

Their makers test them on the chips. Where their PTX gives the right answers here, the interpreter's model agrees with
the chip in whatever they use. `python -m interpreter.witnesses` runs them, in the environment that
`make test-witnesses` makes; nothing of theirs is part of this project.

    catalogue.py   what there is
    drivers/       for each family: operands, what is wanted of them in float64, and how its makers' class is called
    recording.py   one witness, compiled in a process of its own, and kept in a cache
    verdict.py     runs of one witness: answers, rules of the manual that it breaks, planted faults
    __main__.py    the command line
"""
