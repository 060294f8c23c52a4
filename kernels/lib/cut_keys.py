"""Arrays of a span's keys as TMA loads them: a tile has as many keys as are wanted, and then zeros."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from .forward import Source
from .launch import Shapes
from .rows import RowTile


def cut_keys(shapes: Shapes, x: Source, tile_n: int) -> cute.Tensor:
    """A span's array as tiles of keys, which overlap: (tile_n, d, s_kv + 1, h_kv, b). Row i of tile t is key
    t + i - tile_n.
    """
    key = Int64(shapes.n.h_kv) * shapes.d
    first = x.k.toint() - tile_n * key * (x.k.value_type.width // 8)
    return cute.make_tensor(
        cute.make_ptr(x.k.value_type, first, x.k.memspace, assumed_align=16),
        cute.make_layout(
            (tile_n, shapes.d, x.s_kv + 1, shapes.n.h_kv, shapes.b), stride=(key, 1, key, shapes.d, key * x.s_kv)
        ),
    )


def first_keys(tile: RowTile, gmem: cute.Tensor, key: Int32, count: Int32, tile_n: int, columns: int) -> cute.Tensor:
    """(tile_n, columns, 1, column tile) of what `cut_keys` makes: so many keys from `key` on. They end a tile, so what
    would follow is out of bounds, and TMA puts zeros there.
    """
    place = (tile_n - count, 0, key + count, tile.kv_head, tile.batch)
    return cute.local_tile(cute.domain_offset(place, gmem)[None, None, 0, 0, 0], (tile_n, columns), (None, None))
