"""Compile-time choices of `mla_bwd_sm90`, and the tiles, counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB

from .smem import LEFT, STAGES, Barriers


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int  # of q and keys
    dtype: str
    sources: tuple[str, ...]  # kinds of the sources, in the order in which the kernel takes them: "span" or "selection"
    tile_m: int = 64
    tile_n: int = 64
    pieces: int = 4  # pieces of the columns, in which Q, dO and K arrive
    chunk: int = 32  # columns of dKV in one chunk
    under_way: int = 2  # chunks
    chunks_of_left: int = 4  # the last chunks, which left makes while it waits for keys; in whole pieces
    deterministic: bool = False  # sums of dKV in fixed point, by the unit of each key, independent of order
    bounds: bool = False  # no gradients: a bound of what will be added to each key, which its unit is made of
    cluster: int = 1  # CTAs whose rows have the same keys; two add up their results for right's chunks
    turns: bool = False  # whether q is normed and turned here, dO turned, and dq taken through both
    rope: int = 0  # numbers of a key that are no values, the last ones of d: none or a slab

    @property
    def gathers(self) -> bool:
        """True if the keys differ from query to query: then a tile holds heads of one query only."""
        return self.sources[-1] != "span"

    @property
    def prefetches(self) -> bool:
        """True if sums of dKV come to L2 ahead: where each CTA adds by itself, to keys all over memory."""
        return self.gathers and self.cluster == 1 and not self.bounds

    @property
    def threads(self) -> int:
        return (1 + self.consumers) * WARPGROUP

    @property
    def consumers(self) -> int:
        """Warpgroups that read Q, dO and K."""
        return 1 if self.bounds else 2

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}  # without it ptxas silently drops setmaxnreg

    @property
    def registers(self) -> tuple[int, int, int]:
        """(producer, left, right) registers a thread; a launch gives all three warpgroups the same number at first."""
        return (40, 240, 224) if self.rope else (56, 224, 224)

    @property
    def spans(self) -> int:
        """Sources in which rows may see different keys of a tile."""
        return 0 if self.gathers else len(self.sources)

    @property
    def numbers(self) -> int:
        """Numbers of a row in SMEM."""
        return 3 + 2 * self.turns + self.bounds

    @property
    def consecutive(self) -> bool:
        """True if places in memory follow from the first key of a tile, not from the keys that the producer lists."""
        return self.turns and not self.gathers

    @property
    def listed(self) -> int:
        """The number of keys of a tile that are listed: the first, if the places of the others follow from it."""
        return 1 if self.consecutive else self.tile_n

    @property
    def key_words(self) -> int:
        """Words of 32 bits that are added to in memory for a key: of dKV, or of a bound."""
        return 2 if self.bounds else self.d

    @property
    def slot_bytes(self) -> int:
        """Bytes of a chunk of dKV in SMEM."""
        return 4 * self.tile_n * self.chunk

    @property
    def stages_sums(self) -> bool:
        """True if a chunk of dKV passes through SMEM, so that a warp adds 128 bytes or more of a key at a time."""
        return (self.cluster == 1 and not self.rope) or self.deterministic

    @property
    def stages_over_p(self) -> bool:
        """True if it does so where P stands, once right has loaded that: SMEM has no other place."""
        return self.rope > 0 and self.deterministic

    @property
    def reads_ds(self) -> bool:
        """True if chunks of dKV read dS from SMEM: with RoPE's columns of dQ right has no registers for it."""
        return self.rope > 0

    @property
    def slots(self) -> int:
        """Chunks of dKV that have a place of their own in SMEM."""
        return 0 if self.rope else 2

    @property
    def finds_places_late(self) -> bool:
        """True if right looks up where it adds after what it sends: there are no registers for that before."""
        return self.deterministic and self.gathers and self.cluster > 1

    @property
    def d_v(self) -> int:
        """Numbers of a value, and of dO."""
        return self.d - self.rope

    @property
    def half(self) -> int:
        return self.d_v // 2

    @property
    def keys_of_dp(self) -> int:
        """Keys of which left makes dP at a time: with RoPE's columns of dQ it has no registers for a whole tile's."""
        return self.tile_n // 2 if self.rope else self.tile_n

    def columns_of_dq(self, side: int) -> tuple[tuple[int, int], ...]:
        """The columns of dQ that a side makes, by the accumulators that hold them: the first, and how many."""
        of_values = (side * self.half, self.half)
        of_rope = (self.d_v + side * self.rope // 2, self.rope // 2)
        return (of_values, of_rope) if self.rope else (of_values,)

    def chunks(self, side: int) -> range:
        """The chunks of dKV that a side makes."""
        chunks = self.d // self.chunk
        border = chunks - self.chunks_of_left
        return range(border, chunks) if side == LEFT else range(border)

    @property
    def slabs_of_piece(self) -> int:
        return self.d_v // self.pieces // SLAB

    def slabs(self, piece: int, d: int | None = None) -> range:
        """The slabs of a piece of the columns, of d; RoPE's is with the last one."""
        first, stop = (i * self.slabs_of_piece for i in (piece, piece + 1))
        return range(first, (d or self.d) // SLAB if piece == self.pieces - 1 else stop)

    def piece_of(self, column: int) -> int:
        return min(column // (self.slabs_of_piece * SLAB), self.pieces - 1)

    @property
    def pieces_in_order(self) -> tuple[int, ...]:
        """The pieces of Q and dO as they come. The last one comes first if rows are turned: left's few chunks free it
        early, so that there is time to turn it."""
        pieces = range(self.pieces)
        return (pieces[-1], *pieces[:-1]) if self.turns else tuple(pieces)

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * (self.d * (self.tile_m + self.tile_n) + self.d_v * self.tile_m)
        p_and_ds = 2 * 2 * self.tile_m * self.tile_n
        infos = 4 * 2 * PUBLISHED * (1 + len(self.sources))
        rows = 4 * self.tile_m * (self.numbers + 2 * self.spans)
        out = self.slots * self.slot_bytes
        return tiles + p_and_ds + out + 4 * STAGES * self.listed + infos + rows + 8 * Barriers.COUNT + 16

    def __post_init__(self):
        if self.d_v % (2 * SLAB) or self.half > 256:
            raise ValueError(
                f"d_v must be a multiple of {2 * SLAB} up to 512 (half of it is one WGMMA's N), got {self.d_v}"
            )
        if self.rope not in (0, SLAB) or (self.rope and (self.cluster > 1 or self.turns or self.chunks_of_left)):
            raise ValueError(f"rope must be 0, or {SLAB} of single CTAs where q is ready and right makes all chunks")
        at_launch = registers_at_launch(self.threads)
        if sum(self.registers) > 3 * at_launch:  # or the last to ask would wait for ever
            raise ValueError(f"a launch gives {at_launch} registers a thread, too few for {self.registers}")
        if self.deterministic and self.cluster > 1 and self.chunks_of_left:
            raise ValueError("left has no SMEM of its own in a cluster, through which numbers of fixed point go out")
        if self.deterministic and self.turns:
            raise ValueError(
                "where q is turned, left makes the last chunks, so that the slab that is turned comes first"
            )
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
