"""Split-KV: the number of parts into which the keys of few queries are split, so that the whole chip attends to
them.
"""

import jax

LARGEST = {"sm_90a": 132, "sm_100f": 152}
"""SMs of the largest device of an architecture: H100 and H200 SXM, of which an H100 PCIe has 114 and an H20 78; GB200,
of which a B200 has 148. A program without a device is made for the first of those that it has kernels for.
"""

COLUMNS = 8
"""CTAs that share out the columns of a tile of rows"""

_LAUNCH_COST = 6.0
"""The cost of one more launch, in units of `split_count`'s model: what splitting the last queries alone must gain."""


def processors(arch: str) -> int:
    """The fewest SMs that a device of this architecture in this process has; without such a device, the most there are.

    So a program that is exported, or compiled beside the device, is made for the largest one.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        devices = []
    counts = [getattr(x, "core_count", None) for x in devices if architecture(x.compute_capability) == arch]
    return min((n for n in counts if n), default=LARGEST[arch])


def architecture(compute_capability: str) -> str:
    """The target of kernels for a compute capability: "sm_90a" for "9.0", and "sm_100f" for the family 10."""
    major, minor = compute_capability.split(".")
    if int(major) >= 10:
        return f"sm_{major}0f"
    return f"sm_{major}{minor}" + ("a" if int(major) == 9 else "")


def split_count(row_tiles: int, key_tiles: int, unit: int, processors: int) -> int:
    """The number of parts into which the keys of every tile of rows are split; each part is a CTA's.

    It follows from shapes and the chip alone, so that a call always makes the same launches. key_tiles is the greatest
    number of tiles that a tile of rows may see, and a CTA takes whole units of key tiles. The kernel divides the tiles
    that are seen evenly on the device.

    The result is 1 where the tiles of rows alone fill the chip. Otherwise it minimises a model, fitted to times on an
    H200 at d = 512, in units of 1.4 us; for Blackwell nobody has fitted it anew. For each wave of CTAs the model adds
    the time of one part, by the tile, which grows with the number of CTAs that read from memory, and the time of a
    CTA's begin and end. For the merge it adds another launch, and the parts written and read.
    """
    if row_tiles >= processors:
        return 1
    most = min(-(-key_tiles // unit), processors)
    return min(range(1, most + 1), key=lambda splits: _cost(row_tiles, key_tiles, unit, processors, splits))


def whole_queries(queries: int, tiles: int, key_tiles: int, unit: int, processors: int) -> int:
    """The number of the first queries, of so many tiles of rows each, that fill whole waves of CTAs, so that splitting
    the keys of the others alone pays: 0 where it does not, and where there is no whole wave.

    The others are a launch of their own, which begins while the first one ends.
    """
    whole = queries * tiles // processors * processors // tiles
    rest = (queries - whole) * tiles, key_tiles, unit, processors
    pays = 0 < whole < queries and _cost(*rest, 1) - _cost(*rest, split_count(*rest)) > _LAUNCH_COST
    return whole if pays else 0


def columns_pay(row_tiles: int, key_tiles: int, processors: int) -> bool:
    """True if, where sums may not be split, two launches that share out keys and then columns are faster than one.

    In units of `split_count`'s model: what a wave of pairs of key tiles takes, and one of columns, whose CTAs read all
    scores.
    """
    scores = -(-row_tiles * -(-key_tiles // 2) // processors) * 5
    columns = -(-row_tiles * COLUMNS // processors) * (2 + key_tiles / 4)
    return scores + columns < _cost(row_tiles, key_tiles, 1, processors, 1)


def _cost(row_tiles: int, key_tiles: int, unit: int, processors: int, splits: int) -> float:
    """The model of `split_count`."""
    ctas, part = row_tiles * splits, -(-key_tiles // (unit * splits)) * unit
    waves, contention = -(-ctas // processors), min(ctas, processors) / 240
    merge = 1.4 + ctas / 37 if splits > 1 else 0
    return waves * (part * (1 + contention) + 5.7) + merge
