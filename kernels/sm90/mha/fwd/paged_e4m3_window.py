"""A window of a step over keys in pages as codes of e4m3, which the kernel finds."""

from pathlib import Path

from kernels.abi import Forward
from kernels.aot import Compiled

from .paged_e4m3 import MhaFwdPagedE4m3Sm90
from .paged_window import WindowConfig, WindowSteps


class MhaFwdPagedE4m3WindowSm90(WindowSteps, MhaFwdPagedE4m3Sm90):
    symbol = "mha_fwd_paged_e4m3_window_sm90"


def compile(variant: Forward, out_dir: Path) -> Compiled:
    config = WindowConfig(variant.d, variant.dtype, variant.sources)
    return MhaFwdPagedE4m3WindowSm90(config).compile(variant, out_dir, ctas=config.ctas)
