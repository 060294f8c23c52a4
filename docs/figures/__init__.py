"""What `generate.py` writes between the marks of pages: a function of that name makes each, from the JSON files."""

from collections.abc import Callable, Iterator
from inspect import isfunction
from types import ModuleType

from . import attention, gradients, interpreter, layers, ops, options, pages, peers, ran, training

MODULES = (attention, gradients, layers, interpreter, peers, options, ops, pages, ran, training)


def found(module: ModuleType) -> Iterator[tuple[str, Callable[[], str]]]:
    """Its own functions that make a text of nothing."""
    for name, x in vars(module).items():
        if isfunction(x) and x.__module__ == module.__name__ and x.__annotations__ == {"return": str}:
            yield name, x


GENERATED = {name: x for module in MODULES for name, x in found(module)}
