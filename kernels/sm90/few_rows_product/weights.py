"""What a matrix may be packed in, which `_definitions/packed_matrix.py` does once."""

from kernels.lib.e4m3 import E4m3

FORMATS = {"e4m3": E4m3()}
