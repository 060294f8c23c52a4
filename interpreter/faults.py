"""Faults to plant in kernels, in their launches and in programs: where each is, and by what it must be found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from .machine.handwritten import Handwritten
from .machine.hazards import Fault

K = TypeVar("K")
C = TypeVar("C")
Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, eq=False)
class PlantedFault(Generic[K, C]):
    """A mistake in one place, and its symptom: what a run raises, and a pattern of what that says.

    It is planted in the kernel's PTX, in its sources, or in a launch's parameters.
    """

    name: str
    kernel: K  # a variant's key, or a program
    raises: Errors
    says: str
    edit: Callable[[str], str] | None = None  # of PTX
    source: tuple[tuple[str, str], ...] = ()  # what stands once in the kernel's sources, and what then stands there
    parameters: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # by name
    case: C | None = None  # what it runs on, where that is not what the kernel's other faults run on
    answers: Callable[..., Any] | None = None  # the very answer that it gives
    also: tuple[tuple[Errors, str], ...] = ()  # symptoms in orders of events in which something else comes first
    seeds: tuple[int, ...] = ()  # orders of events in which all of its symptoms are seen, if it needs its own

    def __str__(self) -> str:
        return self.name

    def planted_in(self, ptx: str) -> str:
        edited = ptx if self.edit is None else self.edit(ptx)
        if edited == ptx and not self.parameters:
            raise LookupError(f"{self.name}: the edit changes nothing")
        return edited

    def findings(self, run: Callable[[PlantedFault[K, C], int], object], seeds: Iterable[int]) -> list[Exception]:
        """Returns what `run` raises, with the fault planted, for each seed; LookupError if it once raises nothing."""
        found: list[Exception] = []
        for seed in self.seeds or seeds:
            try:
                run(self, seed)
            except (Fault, AssertionError) as error:
                found.append(error)
            else:
                raise LookupError(f"{self.name}: nothing is found with seed {seed}")
        return found

    def symptoms_of(self, error: Exception) -> set[int]:
        """The numbers of those of its symptoms that an error shows."""
        symptoms = ((self.raises, self.says), *self.also)
        return {
            n
            for n, (raises, says) in enumerate(symptoms)
            if isinstance(error, raises)
            if re.search(says, str(error), re.S)
        }

    def is_shown_by(self, found: Iterable[Exception]) -> bool:
        """True if every error shows one of its symptoms, and each symptom is shown."""
        shown = list(map(self.symptoms_of, found))
        return all(shown) and set().union(*shown) == set(range(1 + len(self.also)))

    def check(
        self,
        run: Callable[[PlantedFault[K, C], int], object],
        *,
        seeds: Iterable[int] = (0, 1),
        among: Iterable[PlantedFault[K, C]] = (),
    ) -> list[Exception]:
        """Returns what each run raises; asserts that it is one of this fault's symptoms, that each of them is seen, and
        that no other fault has the same."""
        found = self.findings(run, seeds)
        for error in found:
            assert self.symptoms_of(error), f"{type(error).__name__}: {error}"
        assert self.is_shown_by(found), f"not every symptom is seen: {found}"
        assert [other.name for other in among if other is not self and other.is_shown_by(found)] == [], found
        return found


def interpret(fault: PlantedFault[Handwritten, Mapping[str, Any]], seed: int) -> None:
    """Runs a program with a fault; its case says what else is other than in the program."""
    body = fault.planted_in(fault.kernel.body)
    replace(fault.kernel, body=body, **fault.case or {}).interpret(seed)
