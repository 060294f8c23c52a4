"""The SASS that ptxas made of the built kernels."""

import functools
import itertools
import re
import subprocess
import tempfile

import pytest

from interpreter.kernels.native import cubin, variant_of
from jax_dsv4_fmha._host import library
from kernels import sass
from kernels.compare import nvdisasm
from kernels.cubin import read_code
from kernels.variants import MHA

OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]+)", re.MULTILINE)

BYTES = 16  # of an instruction


@functools.cache
def opcodes_of(arch: str) -> dict[str, list[str]]:
    """The opcodes of every kernel, by one run of nvdisasm: to start it takes longer than to disassemble a kernel."""
    codes = {v.key: read_code(cubin(v.key)) for v in library.held() if v.arch == arch}
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes.values()))
        file.flush()
        command = [nvdisasm(), "--binary", arch.replace("sm_", "SM"), file.name]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
    found = OPCODE.findall(run.stdout)
    assert len(found) * BYTES == sum(map(len, codes.values()))
    rest = iter(found)
    return {key: [*itertools.islice(rest, len(code) // BYTES)] for key, code in codes.items()}


@pytest.mark.parametrize("key", [v.key for v in library.held()])
def test_sass(key):
    """Nothing is spilled, and there are as many products as the kernel was written with, in groups."""
    try:
        opcodes = opcodes_of(variant_of(key).arch)[key]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    variant = variant_of(key)
    (facts,) = (row for row in library.manifest()["variants"] if row["key"] == key)
    count = {name: sum(opcode.split(".")[0] == name for opcode in opcodes) for name in ("LDL", "STL", *sass.KINDS)}
    assert count["LDL"] == count["STL"] == 0, count
    wanted = sass.expected(variant, facts)
    for kind in sass.KINDS:
        number = wanted.get(kind, 0)
        least, most = (number, number) if isinstance(number, int) else number
        assert least <= count[kind] <= most, (kind, count[kind], number)
    groups = sum(opcode.startswith("WARPGROUP.ARRIVE") for opcode in opcodes)
    if (many := count["HGMMA"] + count["QGMMA"]) >= 16:  # ptxas may serialise them, and then each is a group
        assert 3 * groups <= many, groups
    if variant.module == MHA:
        softmax = opcodes[: opcodes.index("NANOSLEEP")]  # of wait_after, whose wait must not come before this one
        waits = [i for i, opcode in enumerate(softmax) if opcode.startswith("WARPGROUP.DEPBAR")]
        assert softmax[waits[-1] :].count("MUFU.EX2") >= facts["tile_n"] // 2  # a thread's scores of a tile
