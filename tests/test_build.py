import ast
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import util
from pathlib import Path

import pytest

from interpreter.kernels import kv_insert
from interpreter.kernels.expert_product import FORMS
from interpreter.kernels.native import (
    TYPES,
    Shape,
    cubin,
    library,
    plan,
    plan_all_reduce,
    plan_combine,
    plan_expert_product,
    plan_expert_rows,
    plan_few_rows_product,
    plan_group_rows,
    plan_grouped_product,
    plan_hyper_connection,
    plan_hyper_connection_bwd,
    plan_index_query,
    plan_indexer,
    plan_indexer_scores_at,
    plan_indexer_within,
    plan_key_codes,
    plan_kv_insert,
    plan_mha_backward,
    plan_probabilities,
    plan_rope,
    plan_route,
    plan_row_columns,
    plan_row_scores,
    plan_seen_slots,
    plan_tile_spans,
    plan_unpack_matrix,
    variant_of,
)
from jax_dsv4_fmha._host.library import held, manifest
from kernels import build
from kernels.abi import (
    AllReduce,
    Combine,
    ExpertProduct,
    ExpertRows,
    FewRowsProduct,
    Forward,
    GroupedProduct,
    GroupRows,
    HyperConnection,
    HyperConnectionBackward,
    IndexerScores,
    IndexerScoresAt,
    IndexerScoresWithin,
    IndexQuery,
    KeyCodes,
    KvInsert,
    MhaBackward,
    NormRope,
    Probabilities,
    Rope,
    Route,
    RowColumns,
    RowScores,
    SeenSlots,
    TileSpans,
    TopK,
    UnpackMatrix,
)
from kernels.cache import KernelCache
from kernels.cubin import KernelInfo, read_code, read_kernel, wild_copies
from kernels.variants import (
    MHA_512,
    MLA,
    MLA_BLACKWELL,
    MLA_FEW_HEADS,
    MLA_FEW_HEADS_BACKWARD,
    MLA_FEW_HEADS_SPANS,
    MLA_SCORES,
    VARIANTS,
)

ROOT = Path(__file__).parent.parent
HAS_DSL = util.find_spec("cutlass") is not None
needs_dsl = pytest.mark.skipif(not HAS_DSL, reason="needs nvidia-cutlass-dsl")
every_built_variant = pytest.mark.parametrize("key", [v.key for v in held()])
GOOD = KernelInfo("fwd", 168, 384, 0, tuple(p.bytes for p in VARIANTS[0].params))
INDEX_SHAPE = {"b": 2, "s_q": 70, "s_c": 150, "heads": 64, "topk": 100}
FACTS = {"threads": 384, "smem_bytes": 1 << 17, "tile_m": 128, "tile_n": 128, "ctas": 1, "cluster": 1, "unit": 1}


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture
def without_dsl(tmp_path):
    """An environment in which `import cutlass` fails."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow/sitecustomize.py").write_text("import sys; sys.modules['cutlass'] = None")
    return {"PYTHONPATH": str(tmp_path / "shadow")}


def test_test_files_import_no_kernel():
    """Kernels import the compiler; without it a file that imports one cannot even be collected, on a GPU either."""
    for file in (ROOT / "tests").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{x.name}" for x in node.names]
            else:
                names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            found = [x for x in names if re.match(r"cutlass|kernels\.(lib|plain|sm)", x)]
            assert found == [], f"{file.name} imports {found[0]} when it is collected"


def test_keys_are_unique_and_fit_for_c():
    keys = [v.key for v in VARIANTS]
    assert len(set(keys)) == len(keys)
    assert all(key.isidentifier() for key in keys)


def test_lists_without_the_dsl(without_dsl):
    run = python("-m", "kernels.build", "--list", **without_dsl)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [v.key for v in VARIANTS]


@every_built_variant
def test_embedded_cubin_is_what_the_manifest_says(key):
    row = next(row for row in manifest()["variants"] if row["key"] == key)
    image = cubin(key)
    kernel = read_kernel(image)
    assert (len(image), hashlib.sha256(image).hexdigest()) == (row["cubin_bytes"], row["sha256"])
    assert (kernel.name, kernel.registers, kernel.threads) == (row["symbol"], row["registers"], row["threads"])
    assert kernel.local_bytes == row["spill_bytes"] == 0
    assert kernel.params == tuple(p.bytes for p in variant_of(key).params)
    assert [p.name for p in variant_of(key).params] == row["params"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.key)
def test_the_launcher_hands_over_what_the_table_says(variant):
    shape = Shape(2, 70, 150, 8, 1, 512, s_kv1=200, topk=100)
    if variant.name.endswith("window"):  # of a query
        shape = shape._replace(s_q=1, window=90)
    if isinstance(variant, IndexerScores | TopK):
        paging = (9, 50, 3) if "paged" in variant.layout else (0, 0, 0)
        extents = {**INDEX_SHAPE, **dict(zip(("pages", "page", "width"), paging, strict=True))}
        kind = TYPES[variant.dtype] if isinstance(variant, IndexerScores) else 9
        extents |= {"type": kind, "queries": 4, "stride": 256, "wants_values": 1, "keys_of_score": 1}
        extents |= {"of_4_bits": int(not isinstance(variant, TopK) and variant.packing != "")}
        launch = plan_indexer(extents)[isinstance(variant, TopK)]
    elif isinstance(variant, IndexerScoresWithin):
        extents = INDEX_SHAPE | {"pages": 9, "page": 56, "width": 3 * variant.paged, "type": TYPES[variant.dtype]}
        extents |= {"of_4_bits": int(variant.packing != ""), "queries": 1, "stride": 160, "wants_values": 1}
        extents |= {"keys_of_score": 1}
        launch, _ = plan_indexer_within(extents, 20, False)
    elif isinstance(variant, IndexerScoresAt):
        launch = plan_indexer_scores_at(INDEX_SHAPE, gradient=variant.op == "indexer_scores_at_bwd")
    elif isinstance(variant, Probabilities):
        launch = plan_probabilities({"b": 2, "s_q": 70, "h_q": 8, "s_kv": 150, "topk": 100})
    elif isinstance(variant, RowScores):
        launch = plan_row_scores(variant, shape, room=9)
    elif isinstance(variant, RowColumns):
        launch = plan_row_columns(variant.dtype, shape, room=9)
    elif isinstance(variant, Rope | NormRope):
        launch = plan_rope(variant.family, {"b": 2, "s": 70, "heads": 8, "d": 512}, 1.0, tile_m=32)
    elif isinstance(variant, IndexQuery):
        launch = plan_index_query({"b": 2, "s": 70, "heads": 8, "d": 128}, tile_m=32)
    elif isinstance(variant, FewRowsProduct):
        sizes = {"rows": 70, "groups": 2, "k": 1024, "n": 512, "type": TYPES[variant.dtype]}
        sizes |= {"makes_heads": variant.norms, "takes_heads": variant.turns_back}
        sizes |= {"indexes": variant.indexes, "columns": 4 * variant.indexes}
        if variant.weights:
            sizes |= {"is_packed": 1, "tiles": 8, "slabs": 16, "slab_bytes": 4112}
        launch = plan_few_rows_product(sizes, 1.0, tile_m=64, tile_n=128, cluster=2)
    elif isinstance(variant, UnpackMatrix):
        sizes = {"matrices": 2, "rows": 70, "columns": 264, "tiles": 2, "slabs": 6, "slab_bytes": 4112}
        launch = plan_unpack_matrix(sizes, tile_m=64, tile_n=256)
    elif isinstance(variant, KvInsert):
        x = kv_insert.Problem.of(variant, (9, 3), 2, ratio=4 if variant.pooled else 1)
        launch = plan_kv_insert(x.shape, 1.0, tile_m=1)
    elif isinstance(variant, SeenSlots):
        sizes = {"b": 2, "s_q": 3, "window": 9, "ratio": 4, "n_position": 1, "n_topk_length": 0, "n_far": 5, "topk": 5}
        pool = {"width": 2, "room": 16, "page": 8, "pages": 9, "stride": 0}
        launch = plan_seen_slots(sizes, pool, pool, tile_n=128)
    elif isinstance(variant, KeyCodes):
        launch = plan_key_codes({"b": 2, "n": 70, "rows": 9, "page": 64, "page_bytes": 37440}, tile_m=32)
    elif isinstance(variant, Route):
        sizes = {"rows": 7, "parts": 3, "experts": 256, "chosen": 6, "vocabulary": 0, "is_sigmoid": 0}
        launch = plan_route(sizes, 1.0, 1.5, tile_m=4)
    elif isinstance(variant, GroupRows | GroupedProduct):
        sizes = {"tokens": 7, "chosen": 3, "k": 512, "inner": 256, "experts": 5, "tiles": 26}
        sizes |= {"num_experts": 10, "tiles13": 8, "slabs13": 8, "tiles2": 8, "slabs2": 4}
        if isinstance(variant, GroupRows):
            launch = plan_group_rows(sizes, tile_m=16)
        else:
            launch = plan_grouped_product(sizes, variant.gated, 1.0, tile_m=16, tile_n=128, processors=132)
    elif isinstance(variant, ExpertProduct):
        sizes = {
            "form": FORMS.index(variant.form),
            "rows": 7,
            "m": 128,
            "n": 256,
            "groups": 3,
            "type": TYPES["bfloat16"],
            "tiles": 3,
        }
        launch = plan_expert_product(sizes, 1.0, tile_m=128, tile_n=256, processors=132)
    elif isinstance(variant, ExpertRows):
        sizes = {"tokens": 7, "choices": 3, "k": 512, "experts": 5, "summed": int(variant.form == "summed")}
        launch = plan_expert_rows(sizes, tile_m=8)
    elif isinstance(variant, HyperConnection):
        sizes = {"tokens": 7, "hidden": 4096, "taken": 0, "iterations": 20}
        launch = plan_hyper_connection(sizes, 1.0, 1.0, tile_m=16, tile_n=24, cluster=8, processors=8)
    elif isinstance(variant, AllReduce):
        launch = plan_all_reduce({"bytes": 64, "device": 0, "devices": 2, "tile_n": 256})
    elif isinstance(variant, HyperConnectionBackward):
        sizes = {"tokens": 7, "hidden": 4096, "taken": 0, "iterations": 20}
        walks = 8 if variant.part == "streams" else 0
        launch = plan_hyper_connection_bwd(sizes, walks, 1.0, 1.0, tile_m=8, tile_n=32)
    elif isinstance(variant, MhaBackward):
        launch = plan_mha_backward(variant, shape)
    elif isinstance(variant, TileSpans):
        launch = plan_tile_spans(shape)
    else:
        launch = plan_combine(shape._replace(splits=3)) if isinstance(variant, Combine) else plan(variant, shape)
    assert {name: len(blob) for name, blob in launch.params.items()} == {p.name: p.bytes for p in variant.params}
    assert list(launch.params) == [p.name for p in variant.params]
    assert set(launch.maps) == {p.name for p in variant.params if p.kind == "map"}


@pytest.mark.parametrize(
    ("facts", "kernel", "says"),
    [
        (FACTS, {"local_bytes": 16}, "16 bytes of local memory"),
        (FACTS, {"params": (128, 16)}, r"got parameters of \(128, 16\)"),
        (FACTS, {"wild_copies": 2}, "2 cp.async name uniform registers"),
        (FACTS, {"threads": 256}, "cubin requires 256 threads, its module says 384"),
        ({"threads": 384}, {}, "does not say smem_bytes, tile_m, tile_n, ctas, cluster, unit"),
    ],
)
def test_refuses(facts, kernel, says):
    with pytest.raises(build.Refused, match=says):
        build.check(VARIANTS[0], facts, KernelInfo(**{**vars(GOOD), **kernel}))


def test_accepts():
    build.check(VARIANTS[0], FACTS, GOOD)


def test_read_kernel_refuses_what_is_no_cubin():
    with pytest.raises(ValueError, match="not an ELF file"):
        read_kernel(b"cubin.path")


def test_copies_by_two_uniform_registers_are_counted():
    by_two = 0x000FE6000B901DC0_0000000032047DAE  # LDGSTS.E.BYPASS.LTC256B.128 [R4+UR0], desc[UR1][R50.64]
    by_one = 0x0003E80008101DD8_0000000004077FAE  # LDGSTS.E.BYPASS.LTC256B.128 [R7], desc[UR24][R4.64], P0
    code = b"".join(word.to_bytes(16, "little") for word in (by_one, by_two, by_one, by_two))
    assert (wild_copies(code), wild_copies(code[:16])) == (2, 0)


def test_digest_covers_sources_and_variant(tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    first, other = VARIANTS[0], VARIANTS[1]
    before = build.digest(first, tmp_path)
    assert before == build.digest(first, tmp_path) != build.digest(other, tmp_path)
    (tmp_path / "kernels/build.py").write_text("# does not matter to a cubin")
    assert build.digest(first, tmp_path) == before
    with open(tmp_path / "kernels/lib/rows.py", "a") as module:  # a module that it imports changed
        module.write("\n# a comment\n")
    assert build.digest(first, tmp_path) == before
    with open(tmp_path / "kernels/lib/rows.py", "a") as module:
        module.write("CHANGED = 1\n")
    assert build.digest(first, tmp_path) != before


def test_one_word_for_all_kernels(capsys):
    """The name of a cache of them."""
    found = []
    for arguments in (["--only", "rope"], ["--only", "rope"], ["--only", "combine"], []):
        assert build.main(["--digest", *arguments]) == 0
        found.append(capsys.readouterr().out.strip())
    assert found[0] == found[1] and len({*found}) == 3 and all(len(x) == 64 for x in found)


def test_comments_docstrings_and_layout_are_no_code():
    code = "def f(x):\n    return x + 1\n"
    same = '"""A module."""\n\n\ndef f(\n    x,\n):  # of x\n    """Adds one."""\n    return x + 1\n'
    assert build.code(code) == build.code(same)
    for other in (code.replace("+ 1", "+ 2"), code.replace("x", "y"), code + "f(1)\n", code.replace("x + 1", "'x'")):
        assert build.code(other) != build.code(code), other


def test_an_edit_of_one_kernel_s_module_makes_its_variants_stale_alone(tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    before = {v: build.digest(v, tmp_path) for v in VARIANTS}
    for module, wanted in (
        ("lib/column_softmax.py", lambda v: v.module in (MLA_FEW_HEADS, MLA_FEW_HEADS_SPANS)),
        ("lib/packed.py", lambda v: v.module in (MLA, MLA_SCORES, MHA_512, MLA_BLACKWELL) or isinstance(v, KeyCodes)),
        ("sm100/mla/gather.py", lambda v: v.module == MLA_BLACKWELL),
        ("plain/combine/kernel.py", lambda v: isinstance(v, Combine)),
        ("variants.py", lambda v: False),
        ("lib/ptx.py", lambda v: True),
        ("lib/launch.py", lambda v: True),
    ):
        path = tmp_path / "kernels" / module
        text = path.read_text()
        path.write_text(text + "\nEDITED = 1\n")
        stale = {v for v in VARIANTS if build.digest(v, tmp_path) != before[v]}
        path.write_text(text)
        assert stale == set(filter(wanted, VARIANTS)), module


def test_one_module_writes_ptx():
    """Kernels call its instructions by name."""
    writes = re.compile(r"\bptx\(|inline_asm")
    writers = [path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.py") if writes.search(path.read_text())]
    assert writers == [Path("kernels/lib/ptx.py")]


def test_kernels_share_modules_of_lib_alone():
    """So an edit of any other module makes the variants of one kernel stale, except for this one."""
    shared = {MLA_FEW_HEADS_BACKWARD: "kernels.sm90.mla.bwd"}
    for module in {v.module for v in VARIANTS}:
        files = {path.relative_to(ROOT) for path in build.modules(module, ROOT) if path.name != "__init__.py"}
        modules = {".".join(path.with_suffix("").parts) for path in files if path.parts[1] != "lib"}
        home = module.rpartition(".")[0]
        others = {m for m in modules if m.count(".") > 1 and not f"{m}.".startswith(f"{home}.")}
        allowed = shared.get(module, "none")
        assert all(f"{m}.".startswith(f"{allowed}.") for m in others), (module, others)
        assert bool(others) == (module in shared), module


FOR_B200_ALONE = """
import dataclasses, sys; from pathlib import Path; from kernels import aot; from kernels.variants import VARIANTS
(variant,) = (v for v in VARIANTS if v.key == sys.argv[1])
print(aot.compile_variant(dataclasses.replace(variant, arch="sm_100a"), Path(sys.argv[2])).cubin.hex())
"""


@needs_dsl
@pytest.mark.slow
def test_one_build_for_a_family_costs_a_b200_nothing(tmp_path):
    """For sm_100f ptxas makes the instructions that it makes for sm_100a."""
    key = next(v.key for v in VARIANTS if v.arch == "sm_100f" and isinstance(v, Forward))
    if key not in {v.key for v in held()}:
        pytest.skip("kernels are built for other architectures")
    settings = {"CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
    run = python("-c", FOR_B200_ALONE, key, str(tmp_path), **settings)
    assert run.returncode == 0, run.stderr
    assert read_code(bytes.fromhex(run.stdout.split()[-1])) == read_code(cubin(key))


@needs_dsl
@pytest.mark.slow
def test_rebuild_is_cached_and_byte_identical(tmp_path):
    key = next(v.key for v in VARIANTS if isinstance(v, Combine))  # a small one
    clone, command = tmp_path / "clone", ("-m", "kernels.build", "--only", key, "--out")

    def built(out: str, *options: str, root: Path = ROOT) -> str:
        run = python(*command, str(tmp_path / out), *options, cwd=root, XDG_CACHE_HOME=str(tmp_path))
        assert run.returncode == 0, run.stderr
        return run.stdout

    first = built("a")
    assert "0 up to date, 0 from " in first and "1 to compile" in first and f"[1/1] {key}: " in first
    assert "1 up to date, 0 from " in built("a")
    shutil.copytree(ROOT / "kernels", clone / "kernels")
    from_cache = built("b", root=clone)
    assert f"0 up to date, 1 from {tmp_path}/jax_dsv4_fmha/kernels, 0 to compile" in from_cache
    assert "0 up to date, no cache, 1 to compile" in built("c", "--no-cache")
    a, b, c = ((tmp_path / out / f"{key}.cubin").read_bytes() for out in "abc")
    assert a == b == c
    assert {path.name for path in tmp_path.glob(f"a/{key}.*")} == {path.name for path in tmp_path.glob(f"b/{key}.*")}
    if key in {v.key for v in held()}:
        assert a == cubin(key)
    (tmp_path / f"a/{key}.cubin").write_bytes(a[:-1])  # a damaged cubin is replaced
    assert "0 up to date, 1 from " in built("a")
    assert (tmp_path / f"a/{key}.cubin").read_bytes() == a


def entry(folder: Path, **files: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def test_cache_gives_back_what_it_was_given(tmp_path):
    cache = KernelCache(tmp_path / "cache")
    assert not cache.take("digest", tmp_path)
    cache.keep("digest", entry(tmp_path / "in", cubin=b"code", json=b"{}"))
    (tmp_path / "out").mkdir()
    assert cache.take("digest", tmp_path / "out") and not cache.take("other", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {"cubin": b"code", "json": b"{}"}
    assert [path.name for path in cache.folder.iterdir()] == ["digest.zip"]


def test_cache_ignores_a_damaged_entry(tmp_path):
    cache = KernelCache(tmp_path / "cache")
    cache.keep("digest", entry(tmp_path / "in", cubin=random.Random(0).randbytes(500)))
    path = cache.folder / "digest.zip"
    whole = path.read_bytes()
    for damaged in (b"", whole[:10], whole[:300], whole[:-1], whole[:300] + bytes([whole[300] ^ 1]) + whole[301:]):
        path.write_bytes(damaged)
        assert not cache.take("digest", tmp_path / "in"), damaged
    cache.keep("digest", entry(tmp_path / "in", cubin=b"new"))  # replaces it
    assert cache.take("digest", tmp_path / "in")


def test_a_wrong_cubin_in_the_cache_is_not_taken(tmp_path):
    """An archive may be whole, and its cubin not what its record says."""
    variant, cache = VARIANTS[0], KernelCache(tmp_path / "cache")
    record = {"digest": build.digest(variant), "sha256": hashlib.sha256(b"right").hexdigest()}
    files = {f"{variant.key}.cubin": b"wrong", f"{variant.key}.json": json.dumps(record).encode()}
    cache.keep(build.digest(variant), entry(tmp_path / "in", **files))
    (tmp_path / "out").mkdir()
    assert build.taken(variant, tmp_path / "out", cache) is None
    assert (tmp_path / "out" / f"{variant.key}.cubin").exists()


def test_cache_removes_what_was_used_longest_ago(tmp_path):
    noise = random.Random(0).randbytes(1000)
    cache = KernelCache(tmp_path / "cache", limit=2500)
    for n, name in enumerate(("first", "second", "third")):
        cache.keep(name, entry(tmp_path / "in", cubin=noise))
        os.utime(cache.folder / f"{name}.zip", (n, n))
    assert cache.take("first", tmp_path / "in")  # it is the newest now
    cache.evict()
    assert {path.stem for path in cache.folder.iterdir()} == {"first", "third"}


def test_without_the_dsl(tmp_path, without_dsl):
    out = tmp_path / "out"
    insisting = python("-m", "kernels.build", "--out", str(out), **without_dsl)
    assert insisting.returncode == 1
    optional = python("-m", "kernels.build", "--optional", "--out", str(out), **without_dsl)
    assert optional.returncode == 0
    for run in (insisting, optional):
        assert "WITHOUT GPU KERNELS" in run.stderr and "ModuleNotFoundError" in run.stderr
    assert json.loads((out / "manifest.json").read_text())["variants"] == []


def test_kernels_of_one_architecture():
    keys = python("-m", "kernels.build", "--kernels", "sm_90a", "--list").stdout.split()
    assert keys == [v.key for v in VARIANTS if v.arch == "sm_90a"]


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["tests/test_kernels.py"], 5),
        (["tests/test_kernels.py", "tests/test_names.py::test_public_names"], 5),
        (["tests/test_names.py::test_public_names"], 0),
    ],
)
def test_a_test_file_that_tests_nothing_without_kernels_says_so(arguments, status, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *package: None if name == 'jax_dsv4_fmha._native' else find(name, *package)"
    )
    run = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, PYTHONPATH=str(tmp_path))
    says = "ERROR tests/test_kernels.py tested nothing here: no kernels are built; `make build` builds them"
    assert (run.returncode, says in run.stdout) == (status, status == 5), run.stdout + run.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("here", ["", "sm_90a"])
def test_what_the_demo_installs(here, tmp_path):
    """The package and JAX, and what kernels are built with where there is a GPU for them; no tools of tests."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("ffi", "kernels"):
        (tmp_path / name).mkdir()
    outside = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # of `make test`
    command = ["make", "-n", "demo", f"HERE={here}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=outside)
    assert run.returncode == 0, run.stderr
    wanted = "install -e '.[cuda12]' -C" if here else "install -e '.' -C cmake.define.KERNELS=none"
    assert wanted in run.stdout and "quickstart.py" in run.stdout
    assert (".compilers" in run.stdout, "KERNELS=sm_90a" in run.stdout) == (bool(here), bool(here))
    assert ".tools" not in run.stdout and "pytest" not in run.stdout


BACKEND = """
import sys; from pathlib import Path; sys.path.insert(0, str(Path("ffi").resolve())); import build_backend as backend
settings = {"cmake.define.KERNELS": sys.argv[1]}
"""


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_what_a_build_demands(hook):
    """Without kernels it demands neither their compiler, nor JAX, nor CMake."""
    pytest.importorskip("scikit_build_core")
    demand = f"{BACKEND}print(*backend.get_requires_for_build_{hook}(settings), sep='\\n')"
    without, with_kernels = (python("-c", demand, kernels) for kernels in ("none", "sm_90a"))
    assert without.returncode == with_kernels.returncode == 0, without.stderr + with_kernels.stderr
    assert without.stdout.split() == []
    assert {"ninja", "jaxlib>=0.10", "nvidia-cutlass-dsl==4.8.1;"} <= set(with_kernels.stdout.split())


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_a_wheel_without_kernels_is_python_alone(hook, tmp_path):
    """It is for every platform, and its modules are those of git, with the table of kernels."""
    pytest.importorskip("scikit_build_core")
    run = python("-c", f"{BACKEND}print(backend.build_{hook}({str(tmp_path)!r}, settings))", "none", PATH="")
    assert run.returncode == 0, run.stderr
    name = run.stdout.split()[-1]
    assert name.endswith("-py3-none-any.whl")
    packed = set(zipfile.ZipFile(tmp_path / name).namelist())
    if hook == "wheel":
        assert {path for path in packed if path.startswith("jax_dsv4_fmha/")} == {
            str(path.relative_to(ROOT))
            for path in (ROOT / "jax_dsv4_fmha").rglob("*")
            if path.suffix in (".py", ".json", ".typed")
        }


@pytest.mark.slow
def test_library_without_the_dsl(tmp_path, without_dsl):
    """The whole build succeeds, says so, and gives a library without kernels."""
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja", path=str(Path(sys.executable).parent))
    if cmake is None or ninja is None:
        pytest.skip("needs cmake and ninja")
    env = {**os.environ, **without_dsl}
    configure = [cmake, "-S", "ffi", "-B", str(tmp_path / "b"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    run = subprocess.run(configure, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and "CMake Warning" in run.stderr and "WITHOUT GPU KERNELS" in run.stderr, run.stderr
    subprocess.run([cmake, "--build", str(tmp_path / "b")], env=env, check=True, capture_output=True)
    ask = (
        "import ctypes, json; f = ctypes.CDLL({!r}).dsv4_fmha_manifest; f.restype = ctypes.c_char_p;"
        "assert json.loads(f())['variants'] == []"
    )
    run = python("-c", ask.format(str(tmp_path / "b/_native.so")))
    assert run.returncode == 0, run.stderr


def test_library_is_self_contained():
    """It needs the C++ run time and no library of NVIDIA's, and exports only its own C functions."""
    path = str(library()._name)
    needed = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout
    libraries = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.*)\]", needed)}
    assert libraries <= {"libstdc++", "libgcc_s", "libc", "libm", "libdl", "libpthread"} | {
        name for name in libraries if name.startswith("ld-linux")
    }
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True).stdout
    assert all(line.split()[-1].startswith("dsv4_fmha_") for line in symbols.splitlines()), symbols
