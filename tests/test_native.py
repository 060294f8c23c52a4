"""ffi/ in C++ against a stand-in for the CUDA driver, under sanitizers; and how the library is linked."""

import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

import jax_dsv4_fmha
from jax_dsv4_fmha._host import library
from kernels import tables
from kernels.variants import VARIANTS

HERE = Path(__file__).parent
FUNCTIONS = (
    *("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuLibraryLoadData"),
    *("cuLibraryGetKernel", "cuKernelSetAttribute", "cuCtxPushCurrent", "cuKernelGetFunction"),
    *("cuTensorMapEncodeTiled", "cuLaunchKernelEx"),
)
KERNELS = (
    *("mha_fwd_sm_90a_d64_bfloat16", "mha_fwd_sm_100f_d64_bfloat16", "combine_sm_90a_bfloat16"),
    *("indexer_scores_at_sm_90a_heads32_bfloat16", "indexer_scores_at_bwd_sm_90a_heads32_bfloat16"),
    *("rope_sm_90a_dims64_bfloat16", "norm_rope_sm_90a_d512_dims64_bfloat16"),
    *("mla_sparse_fwd_sm_90a_d512_bfloat16", "all_reduce_sm_90a_bfloat16"),
)


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def program(request, tmp_path_factory):
    """ffi_test, with a few kernels, whose cubins are their numbers."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    out = tmp_path_factory.mktemp("native")
    records = {}
    for i, key in enumerate(KERNELS):
        (out / f"{key}.cubin").write_bytes(bytes([i]))
        facts = {"threads": 128, "smem_bytes": 1024, "tile_m": 64, "tile_n": 4, "ctas": 2, "cluster": 1, "unit": 1}
        if key.startswith("mla_sparse_fwd"):  # the one that is launched in clusters
            facts["cluster"] = 2
        records[key] = {**facts, "symbol": f"kernel_{i}", "cubin_bytes": 1, "sha256": ""}
    tables.write(VARIANTS, records, "none", out)
    include = Path(util.find_spec("jaxlib").origin).parent / "include"
    flags = [
        "-std=c++20",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-fsanitize={request.param}",
        "-fno-sanitize-recover=all",
    ]
    folders = [f"-I{HERE.parent / 'ffi'}", f"-I{out}", "-isystem", str(include), f"-L{out}", f"-Wl,-rpath,{out}"]

    def compile(*arguments: object) -> None:
        run = subprocess.run(["g++", *flags, *folders, *map(str, arguments)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr

    driver = out / "libcuda.so.1"
    compile("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", HERE / "stand_in_driver.cc", "-o", driver)
    compile(HERE / "ffi_test.cc", out / "cubins.cc", driver, "-ldl", "-pthread", "-o", out / "ffi_test")
    return out / "ffi_test"


@pytest.mark.parametrize(
    "scenario",
    [
        ("threads",),
        ("fails for some",),
        ("refusals",),
        ("last split",),
        ("last split overlaps",),
        ("order",),
        ("entries",),
        ("rows",),
        ("exchanges",),
        ("experts",),
        ("decodes",),
        *(("fails", function, times) for function in FUNCTIONS for times in ("1", "3")),
    ],
    ids="-".join,
)
def test_against_a_stand_in_driver(program, scenario):
    run = subprocess.run([program, *scenario], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "passed\n", "")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_library_is_hardened():
    """Once the library is loaded, nothing that a stray write could redirect is writable; the stack has guards."""
    if (path := library.library_path()) is None:
        pytest.skip("no native library")
    text = subprocess.run(["readelf", "-W", "-l", "-d", "--dyn-syms", path], capture_output=True, text=True).stdout
    assert "GNU_RELRO" in text and "BIND_NOW" in text and "__stack_chk_fail" in text
    (stack,) = (line for line in text.splitlines() if "GNU_STACK" in line)
    assert " RWE " not in stack


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda path: path.write_bytes(b"\x7fELF and no more"), "cannot be loaded"),
        (lambda path: path.write_bytes(path.read_bytes()[: 2**16]), "cannot be loaded"),
        (
            lambda path: subprocess.run(["gcc", "-shared", "-xc", "/dev/null", "-o", path], check=True),
            "another version",
        ),
    ],
    ids=["no library", "half of it", "another"],
)
def test_a_damaged_library_leaves_the_reference(damage, says, tmp_path):
    """The import says what is wrong and where, and ops run on the reference."""
    if (path := library.library_path()) is None:
        pytest.skip("no native library")
    package = tmp_path / "jax_dsv4_fmha"
    shutil.copytree(Path(jax_dsv4_fmha.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(path, package / "_native.so")
    damage(package / "_native.so")
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from jax_dsv4_fmha import fmha
    from jax_dsv4_fmha._host import library
(warning,) = (str(w.message) for w in caught if "_native" in str(w.message))
print(warning)
import jax.numpy as jnp
q = jnp.ones((1, 2, 2, 8))
assert library.variants() == () and fmha(q, q)[0].shape == q.shape
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-S", "-c", _SITE + code], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert str(package / "_native.so") in run.stdout and says in run.stdout, run.stdout


_SITE = f"import sys; sys.path += {[p for p in sys.path if p.endswith('site-packages')]}\n"
"""Packages without the paths that an editable install puts first"""
