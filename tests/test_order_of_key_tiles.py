"""The order in which the gradient's CTAs of keys come, and walk over rows: `KeyTile` with numbers of Python's."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def key_tiles():
    pytest.importorskip("cutlass")
    from kernels.sm90.mha.bwd import key_tiles

    return key_tiles


@pytest.fixture
def order(key_tiles, monkeypatch):
    """A function of how many pairs and tiles there are, and how many CTAs a cluster has: the tiles of a launch."""
    monkeypatch.setattr(key_tiles, "divide", divmod)
    monkeypatch.setattr(key_tiles, "Int32", int)

    def tile(index, pairs, tiles, ctas):
        monkeypatch.setattr(key_tiles.cute.arch, "block_idx", lambda: (index * ctas + ctas - 1, 0, 0))
        return key_tiles.KeyTile.of(SimpleNamespace(pairs=pairs, h_kv=2), tiles * 64 - 1, 64, ctas)

    return lambda pairs, tiles, ctas=1: [tile(i, pairs, tiles, ctas) for i in range(pairs * tiles)]


SHAPES = [(1, 1), (2, 1), (2, 300), (6, 64), (8, 64), (10, 63), (2, 129), (300, 1), (64, 2), (24, 23), (4, 700)]


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(("pairs", "tiles"), SHAPES)
def test_every_tile_is_there_once(order, pairs, tiles, ctas):
    found = [(x.batch, x.kv_head, x.key0) for x in order(pairs, tiles, ctas)]
    assert sorted(found) == [(*divmod(pair, 2), 64 * i) for pair in range(pairs) for i in range(tiles)]


@pytest.mark.parametrize(("pairs", "tiles"), [(8, 64), (4, 128), (1, 64), (1, 1)])
def test_ctas_read_rows_together(order, key_tiles, pairs, tiles):
    """Under a causal mask, where a tile of rows belongs to each tile of keys, and takes a step."""
    waiting, running, steps, reads = order(pairs, tiles), [], 0, 0
    while waiting or running:
        while waiting and len(running) < key_tiles.AT_ONCE:
            x = waiting.pop(0)
            running.append((x, list(range(x.key0 // 64, tiles))[:: -1 if x.backwards else 1]))
        reads += len({(x.batch, x.kv_head, rows[0]) for x, rows in running})
        steps += 1
        running = [(x, rows[1:]) for x, rows in running if len(rows) > 1]
    assert reads <= 2.1 * pairs * tiles
    assert steps <= 1.02 * max(pairs * tiles * (tiles + 1) / 2 / key_tiles.AT_ONCE, tiles) + 1
