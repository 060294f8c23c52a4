"""The other CTA of a cluster of two: its shared memory (distributed shared memory, DSMEM) and its barriers."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32

from .ptx import address_in, arrive_in_cluster_if_zero, send_words

CLUSTER = 2  # CTAs


@dataclass(frozen=True)
class Peer:
    rank: Int32
    shift: Int32  # distance from a place of ours to the peer's same place

    @staticmethod
    def of(here: cute.Pointer) -> "Peer":
        """The peer's place of `here`, which is anything in shared memory."""
        rank = cute.arch.block_idx_in_cluster() ^ 1
        return Peer(rank, address_in(here.toint(), rank) - here.toint())

    def send(self, address: Int32, words: tuple[Uint32, ...], barrier: cute.Pointer) -> None:
        """Sends 16 bytes to this place of the peer's; its barrier counts them when they arrive."""
        send_words(address + self.shift, words, barrier.toint() + self.shift)

    def arrive(self, barrier: cute.Pointer) -> None:
        """A warp arrives at the peer's barrier, once."""
        arrive_in_cluster_if_zero(barrier.toint() + self.shift, cute.arch.lane_idx())


def arrive(cluster: int) -> None:
    """Arrives where all threads meet once. A single CTA waits here; a cluster of so many waits for the others later."""
    if cluster > 1:
        cute.arch.sync_warp()  # a lane has initialised barriers that its warp uses before it waits
        cute.arch.cluster_arrive()
    else:
        cute.arch.sync_threads()


def await_others(cluster: int) -> None:
    if cluster > 1:
        cute.arch.cluster_wait()
