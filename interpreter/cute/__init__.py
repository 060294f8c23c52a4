"""Anybody's CuTe DSL functions: compiled without a GPU, their launches recorded, and run by the machine.

Modules, each for one concern:

    record.py      compiles a function, and records what its own host code launches (needs nvidia-cutlass-dsl)
    recorder.c     stands in for CUDA meanwhile
    launches.py    launches and the memory that they get, run in the interpreter
    session.py     for a while, calls of the DSL's functions run here: `interpreted`, `interpreting`
    script.py      the command `python -m interpreter run`
    forms.py       which forms of instructions a run has executed
"""

from __future__ import annotations

from .session import Report, interpreted, interpreting

__all__ = ["Report", "interpreted", "interpreting"]
