"""kernels.compare on cubins of the library, as they are and with a byte changed; it skips without kernels."""

import itertools
from pathlib import Path

import pytest

from interpreter.kernels import native
from jax_dsv4_fmha._host import library
from kernels import compare
from kernels.cubin import read_code, read_kernel

KEYS = [v.key for v in sorted(library.held(), key=lambda v: v.cubin_bytes)[:2]]


@pytest.fixture
def builds(tmp_path) -> tuple[Path, Path]:
    """Two directories with the two smallest kernels."""
    if len(KEYS) < 2:
        pytest.skip("needs kernels")
    try:
        compare.nvdisasm()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for folder, key in itertools.product(("before", "after"), KEYS):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{key}.cubin").write_bytes(native.cubin(key))
    return tmp_path / "before", tmp_path / "after"


def compared(builds: tuple[Path, Path], capsys, *options: str) -> tuple[int, list[str]]:
    """The exit status, and the lines printed."""
    status = compare.main([*map(str, builds), *options])
    return status, capsys.readouterr().out.splitlines()


def change(path: Path, at: int, to: int) -> None:
    image = bytearray(path.read_bytes())
    image[at] = to
    path.write_bytes(image)


def test_equal(builds, capsys):
    assert compared(builds, capsys) == (0, [*(f"equal     {key}" for key in sorted(KEYS)), "2 of 2 kernels are equal"])


def test_one_changed_instruction(builds, capsys):
    path = builds[1] / f"{KEYS[0]}.cubin"
    image = path.read_bytes()
    change(path, image.index(read_code(image)) + 2, 7)  # the destination of the first
    status, lines = compared(builds, capsys)
    assert status == 1 and f"different {KEYS[0]}: 1 lines" in lines and f"equal     {KEYS[1]}" in lines
    before, after = (next(line.split() for line in lines if line.strip().startswith(sign)) for sign in "-+")
    assert before[1] == after[1] == "/*0000*/" and before[2] == after[2] and "R7," in after and "R7," not in before


def test_a_changed_wait_of_an_instruction(builds, capsys):
    """Which nvdisasm shows in the encoding alone."""
    path = builds[1] / f"{KEYS[0]}.cubin"
    image = path.read_bytes()
    at = image.index(read_code(image)) + 14
    change(path, at, image[at] ^ 0x20)
    status, lines = compared(builds, capsys)
    assert status == 1 and f"different {KEYS[0]}: 1 lines" in lines


def test_a_changed_fact(builds, capsys):
    """Its registers, which are not in the code."""
    path = builds[1] / f"{KEYS[0]}.cubin"
    image, registers = path.read_bytes(), read_kernel(path.read_bytes()).registers
    places = [
        at for at in range(len(image) - 12) if image[at : at + 4] == b"\x04\x2f\x08\x00" and image[at + 8] == registers
    ]
    change(path, places[-1] + 8, registers + 8)
    assert read_kernel(path.read_bytes()).registers == registers + 8
    status, lines = compared(builds, capsys)
    assert status == 1 and f"different {KEYS[0]}: 1 lines" in lines


def test_renamed_kernels_are_found_by_their_code(builds, capsys):
    path = builds[1] / f"{KEYS[0]}.cubin"
    symbol = read_kernel(path.read_bytes()).name
    (builds[1] / "other.cubin").write_bytes(path.read_bytes().replace(symbol.encode(), symbol.upper().encode()))
    path.unlink()
    status, lines = compared(builds, capsys)
    assert status == 0 and f"equal     {KEYS[0]} -> other" in lines


def test_missing_and_new_kernels(builds, capsys):
    path = builds[1] / f"{KEYS[0]}.cubin"
    image = path.read_bytes()
    other = path.rename(builds[1] / "other.cubin")
    change(other, image.index(read_code(image)) + 2, 7)
    status, lines = compared(builds, capsys)
    assert status == 1 and {f"missing   {KEYS[0]}", "new       other"} <= set(lines)
    status, lines = compared(builds, capsys, "--renamed", f"{KEYS[0]}=other")
    assert status == 1 and f"different {KEYS[0]} -> other: 1 lines" in lines
    assert compared(builds, capsys, "--only", KEYS[1]) == (0, [f"equal     {KEYS[1]}", "1 of 1 kernels are equal"])


def test_nothing_is_not_equal(builds, capsys):
    assert compared(builds, capsys, "--only", "nothing")[0] == 1
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(builds[0]), str(builds[0].parent)])
