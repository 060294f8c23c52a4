"""The other CTA of a cluster of two: its shared memory (distributed shared memory, DSMEM) and its barriers."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels.lib.ptx import ptx

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

    def tell(self, barrier: cute.Pointer) -> None:
        """A warp arrives at the peer's barrier, once."""
        arrive_once(barrier.toint() + self.shift, cute.arch.lane_idx())


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


def address_in(here: Int32, rank: Int32) -> Int32:
    """The address of another CTA's same place, in the shared memory of the cluster."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", Int32(here), Int32(rank), gives=(Int32,), pure=True)[0]


def send_words(address: Int32, words: tuple[Uint32, ...], barrier: Int32) -> None:
    ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$2, $3, $4, $5}, [$1];",
        Int32(address),
        Int32(barrier),
        *map(Uint32, words),
    )


def arrive_once(barrier: Int32, lane: Int32) -> None:
    """Arrives by assembly: without a branch, because products may be under way, and without a fence of the cluster's
    scope, because the arrival tells only that something has been read."""
    ptx(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [$0]; }",
        Int32(barrier),
        Int32(lane),
    )
