"""The boxes of keys by which windows are read, and the tiles of keys of the kernels that find windows."""

import pytest

from jax_dsv4_fmha._dispatch import sources
from kernels.params import WINDOWS


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kind", WINDOWS)
def test_boxes_of_windows_are_those_that_dispatch_counts_on(d, kind):
    """`in_reach` decides by them which windows the kernel finds; they follow from the kernel's tiles of keys."""
    pytest.importorskip("cutlass")
    from kernels.sm90.mha.fwd import config, paged_window

    tile_n = paged_window.WindowConfig(d, "bfloat16", (kind,)).tile_n
    assert (sources.BOX, sources.LARGEST_BOX) == (config.BOX, config.LARGEST_BOX)
    assert sources.BOX_OF_WINDOW.get(d, sources.LARGEST_BOX) == min(tile_n & -tile_n, config.LARGEST_BOX)
