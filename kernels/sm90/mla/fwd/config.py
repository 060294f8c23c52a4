"""Compile-time choices of `mla_fwd_sm90`, and the tiles, counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.abi import gathers
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB
from kernels.packings import PACKED

from .smem import Barriers


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int  # of q and keys
    dtype: str
    sources: tuple[str, ...]  # their kinds, in the order in which they are taken: "span", "selection" or one of PACKED
    extra_keys: int = 0  # keys that odd tiles have beyond tile_n, which a separate warp copies
    cluster: int = 1  # CTAs with heads of the same query; two unpack keys for one another
    turns: bool = False  # whether q is normed and turned here, and o turned back
    rope: int = 0  # numbers of a key that are no values, the last ones of d: none or a slab
    tile_m: int = 64
    tile_n: int = 64
    shared_kv: bool = True

    @property
    def gathers(self) -> bool:
        """True if the keys differ from query to query: then a tile holds heads of one query only."""
        return gathers(self.sources)

    @property
    def run(self) -> int:
        """Row tiles that a CTA takes in a row: 128 heads of a query are two, with the same window. Where P stands in
        the keys' place, the second would not find them there."""
        return 2 if self.sources == ("span",) and not self.rope else 1

    @property
    def unpacks(self) -> bool:
        """True if the producer unpacks what it gathers; then all keys are packed."""
        return self.sources[0] in PACKED

    @property
    def is_short(self) -> bool:
        """True if a producer has too few registers: for two layouts, whose entries both have numbers in bf16. It then
        loads those of the first one late, and finds places of its scales anew."""
        return self.sources == ("v4_fp8", "v4_fp4") or (self.rope > 0 and self.cluster > 1)

    @property
    def tile_keys(self) -> tuple[int, int]:
        """Keys of the even and of the odd tile of a pair."""
        return self.tile_n, self.tile_n + self.extra_keys

    @property
    def slabs_of_o(self) -> int:
        """Separate places for each side's outgoing O, besides that of its P."""
        return 0 if self.extra_keys else 1

    @property
    def moves_o(self) -> bool:
        """True if threads store O. P then stands where its tile's slab of RoPE was, and O would have no place."""
        return self.rope > 0

    @property
    def threads(self) -> int:
        return (self.producers + 2) * WARPGROUP

    @property
    def producers(self) -> int:
        """Warpgroups."""
        return 2 if self.unpacks else 1

    @property
    def unit(self) -> int:
        """Key tiles that splits share out as a unit: pairs. Unpacking two takes longer than merging two splits of
        one.
        """
        return 1 if self.unpacks else 2

    @property
    def loaders(self) -> int:
        """Threads that fill key tiles: a lane issues TMA, warpgroups gather."""
        return self.producers * WARPGROUP if self.gathers else 1

    @property
    def fillers(self) -> int:
        """Those of them that fill one tile: all, or in each CTA of a cluster a warpgroup."""
        return self.loaders // self.cluster

    @property
    def lanes_a_key(self) -> int:
        """Lanes that unpack a key: eight store a whole row of a slab, so the peer is sent whole lines of 128 bytes."""
        return 4 * self.cluster

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread, out of what a launch gives to all warpgroups alike."""
        if self.unpacks:
            return 48, 208
        return (56, 224) if self.gathers else (40, 232)

    @property
    def half(self) -> int:
        return self.d_v // 2

    @property
    def d_v(self) -> int:
        """Numbers of a value, and of o."""
        return self.d - self.rope

    @property
    def columns_k(self) -> int:
        """Columns of keys that a TMA copy takes: half of a value's, or one slab, where RoPE's are not values."""
        return SLAB if self.rope else self.half

    def slabs(self, which: int, half: int) -> tuple[int, ...]:
        """Slabs of a key tile, EVEN or ODD, that are filled and freed together: a half of a value's. RoPE's slab, where
        the tile's P stands later, is with the half that the reader of this P frees."""
        slabs, rope = self.half // SLAB, range(self.d_v // SLAB, self.d // SLAB)
        return *range(half * slabs, (half + 1) * slabs), *(rope if half != which else ())

    def blocks(self, which: int, half: int) -> list[int]:
        """The same columns of q and a tile, by the 16 of one WGMMA."""
        return [i for slab in self.slabs(which, half) for i in range(slab * SLAB // 16, (slab + 1) * SLAB // 16)]

    def filled_bytes(self, which: int, half: int) -> int:
        return len(self.slabs(which, half)) * self.tile_n * SLAB * 2

    @property
    def columns_o(self) -> int:
        """Columns of one WGMMA. Those of a half take 128 registers, all that each of four warpgroups has at launch;
        ptxas then assembles none of them."""
        return self.half // self.producers

    @property
    def columns_q(self) -> int:
        return self.d

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}  # without it ptxas silently drops setmaxnreg

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def smem_bytes(self) -> int:
        barriers = 8 * sum(Barriers.COUNTS)
        p_and_o = 0 if self.moves_o else 2 * self.tile_m * (sum(self.tile_keys) + 2 * self.slabs_of_o * SLAB)
        rows, infos = 4 * self.tile_m * 2 * (1 + self.turns), 4 * 2 * PUBLISHED * (1 + len(self.sources))
        return (self.tile_m + sum(self.tile_keys)) * self.row_bytes + p_and_o + rows + infos + barriers

    def __post_init__(self):
        if self.d_v % (2 * SLAB) or self.half > 256:
            raise ValueError(
                f"d_v must be a multiple of {2 * SLAB} up to 512 (half of it is one WGMMA's N), got {self.d_v}"
            )
        if self.rope not in (0, SLAB) or (self.rope and (self.extra_keys or self.turns)):
            raise ValueError(f"rope must be 0, or {SLAB} where all tiles are alike and q is ready, got {self.rope}")
        at_launch = registers_at_launch(self.threads)
        wanted = self.producers * self.registers[0] + 2 * self.registers[1]
        if wanted > self.threads // WARPGROUP * at_launch:  # or the last to ask would wait for ever
            raise ValueError(f"a launch gives {at_launch} registers a thread, too few for {self.registers}")
        if self.tile_n != SLAB and not self.moves_o:
            raise ValueError(f"tile_n must be {SLAB}, for O is staged where a tile's P stands, got {self.tile_n}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
