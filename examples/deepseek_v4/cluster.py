"""Processes on several hosts as one program, by `jax.distributed`."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from . import common


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a program that many processes may run: the arguments of `joined`."""
    its = parser.add_argument_group("many processes", "each runs the same command, and has its host's GPUs")
    its.add_argument("--cluster", action="store_true", help="JAX finds the others, by Slurm, Kubernetes or Open MPI")
    its.add_argument("--coordinator", help="HOST:PORT of process 0, where the others are not found")
    its.add_argument("--processes", type=common.at_least(1), help="how many there are, with --coordinator")
    its.add_argument("--process", type=common.at_least(0), help="the number of this one, with --coordinator")


@contextmanager
def joined(
    cluster: bool = False, coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> Iterator[None]:
    """Makes this process one of many, whose devices are all in `jax.devices()`; or leaves it alone, without arguments.

    Raises:
      ValueError: an address without the rest, or there are no other processes to be found.
      RuntimeError: JAX is in use already.
    """
    given = [x is not None for x in (coordinator, processes, process)]
    if any(given) != all(given) or (cluster and any(given)):
        raise ValueError("wanted --coordinator, --processes and --process together, or --cluster alone")
    if not cluster and not any(given):
        yield
        return
    if process is not None and process >= processes:
        raise ValueError(f"--process: got {process}, wanted 0 to {processes - 1}, as there are {processes}")
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except ValueError as e:  # JAX's words name an argument that no option has
        raise ValueError(f"--cluster: got no Slurm, Kubernetes or Open MPI around this process ({e})") from None
    yield
    jax.distributed.shutdown()  # after an error the others would be waited for
