"""The formats of packed matrices, which `_definitions/packed_matrix.py` makes once."""

from kernels.lib.e4m3 import E4m3

FORMATS = {"e4m3": E4m3()}
