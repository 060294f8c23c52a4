"""Checkpoints that are damaged: each is an error that names the file and the tensor, or it is the same model.

`pytest -m fuzz` damages them at random. The cases here are of every kind.
"""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.deepseek_v4 import common
from examples.deepseek_v4.checkpoint import Checkpoint
from examples.deepseek_v4.drafts import DSpark
from examples.deepseek_v4.save import save
from examples.deepseek_v4.weights import load
from jax_dsv4_fmha.layers import DSV4Attention, Rope, from_state_dict

from .test_deepseek_v4_checkpoint import checkpoint

CONFIG = {
    **common.SMALL, "hidden_size": 192, "moe_intermediate_size": 160, "layer_types": ["sliding_attention"] * 2,
    "num_hidden_layers": 2, "head_dim": 16, "qk_rope_head_dim": 8, "index_head_dim": 16, "n_routed_experts": 3,
    "n_mtp_layers": 1, "dspark_target_layer_ids": [0, 1],
}  # fmt: skip
INDEX = "model.safetensors.index.json"


class Files(dict):
    """The tensors of a directory's files, each a dtype, a shape and bytes: file -> name -> [dtype, shape, bytes]."""

    @classmethod
    def of(cls, directory):
        made = cls()
        for path in sorted(directory.glob("*.safetensors")):
            whole = path.read_bytes()
            begin = 8 + int.from_bytes(whole[:8], "little")
            header = json.loads(whole[8:begin])
            made[path.name] = {
                name: [x["dtype"], list(x["shape"]), whole[slice(*(begin + n for n in x["data_offsets"]))]]
                for name, x in header.items()
            }
        return made

    def write(self, directory, index=False):
        for file, tensors in self.items():
            header, at = {}, 0
            for name, (dtype, shape, data) in tensors.items():
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
                at += len(data)
            text = json.dumps(header).encode()
            data = b"".join(x[2] for x in tensors.values())
            (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
        if index:
            listed = {name: file for file, tensors in self.items() for name in tensors}
            (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))

    def file(self, name):
        return next(file for file, tensors in self.items() if name in tensors)

    def tensor(self, name):
        return self[self.file(name)][name]

    def drop(self, name):
        return self[self.file(name)].pop(name)

    def rename(self, name, other):
        file = self.file(name)
        self[file] = {other if x == name else x: y for x, y in self[file].items()}

    def put(self, name, x, dtype="F32"):
        self["model-0.safetensors"][name] = [dtype, list(x.shape), x.tobytes()]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model with drafts, its checkpoint in FP4 and FP8, and its parameters."""
    directory = tmp_path_factory.mktemp("good")
    model = DSpark.from_config(CONFIG)
    checkpoint(model, directory, 128)
    Files.of(directory).write(directory, index=True)
    want = {packed: load(model, directory, jnp.float32, packed=packed) for packed in (False, True)}
    (directory / INDEX).unlink()
    return model, directory, want


EXPERT, FP8, ATTENTION, PLAIN = (
    "layers.1.ffn.experts.2.w1", "layers.0.ffn.shared_experts.w2", "layers.1.attn.wq_b", "layers.1.ffn_norm",
)  # fmt: skip
NONE = np.zeros((1, 1), np.float32)


def to_bfloat16(files, name):
    """The matrix in bfloat16, beside the scales that it had."""
    entry = files.tensor(f"{name}.weight")
    columns = entry[1][1] * (2 if entry[0] == "I8" else 1)
    entry[:] = ["BF16", [entry[1][0], columns], bytes(2 * entry[1][0] * columns)]


def in_blocks_of_64(files, name):
    scale, (dtype, (rows, columns), _) = files.tensor(f"{name}.scale"), files.tensor(f"{name}.weight")
    shape = [-(-rows // 64), -(-columns * (2 if dtype == "I8" else 1) // 64)]
    scale[1:] = [shape, bytes([127]) * (shape[0] * shape[1])]


def not_numbers(files, name):
    entry = files.tensor(name)
    entry[2] = b"\xff" * len(entry[2])


def of_float32(name, number):
    def change(files):
        entry = files.tensor(name)
        entry[0], entry[2] = "F32", np.full(entry[1], number, np.float32).tobytes()

    return change


def of_dtype(name, dtype, bytes_each=None):
    def change(files):
        entry = files.tensor(name)
        n = int(np.prod(entry[1]))
        entry[0], entry[2] = dtype, entry[2] if bytes_each is None else bytes(n * bytes_each)

    return change


def of_shape(name, *shape):
    def change(files):
        files.tensor(name)[1] = list(shape)

    return change


CASES = {
    # what is missing
    "no norm": (lambda f: f.drop(f"{PLAIN}.weight"), r": layers.1.ffn_norm.weight: got none, wanted float32\[192\]"),
    "no expert": (lambda f: f.drop(f"{EXPERT}.weight"), rf": {EXPERT}.weight: got none, wanted float32\[160, 192\]"),
    "no embedding": (lambda f: f.drop("embed.weight"), r"embed.weight: got none, wanted float32\[64, 192\]"),
    "no attention": (lambda f: f.drop(f"{ATTENTION}.weight"), rf"{ATTENTION}.weight: got none, wanted floats"),
    "no draft": (lambda f: f.drop("mtp.0.main_norm.weight"), "mtp.0.main_norm.weight: got none, wanted"),
    "no file": (lambda f: f.clear(), r"no \*.safetensors in"),
    # scales
    "FP4 without": (lambda f: f.drop(f"{EXPERT}.scale"),
                    rf"\d.safetensors: {EXPERT}.weight: got uint8\[160, 96\] without scales, wanted {EXPERT}.scale"),
    "FP8 without": (lambda f: f.drop(f"{FP8}.scale"),
                    rf"\d.safetensors: {FP8}.weight: got float8_e4m3fn\[192, 160\] without scales, wanted {FP8}.scale"),
    "attention without": (lambda f: f.drop(f"{ATTENTION}.scale"),
                          rf"\d.safetensors: {ATTENTION}.weight: got float8_e4m3fn\[.*, wanted .*wq_b.scale, its"),
    "FP4 no more": (lambda f: to_bfloat16(f, EXPERT),
        rf": {EXPERT}.scale: got scales of a tensor in bfloat16, wanted non"),
    "FP8 no more": (lambda f: to_bfloat16(f, FP8), rf": {FP8}.scale: got scales of a tensor in bfloat16, wanted none"),
    "attention no more": (lambda f: to_bfloat16(f, ATTENTION),
        rf": {ATTENTION}.weight: got bfloat16\[.*wanted no wq_b\.scale"),
    "scales of a norm": (lambda f: f.put(f"{PLAIN}.scale", NONE),
        r"ffn_norm.scale: got scales of a tensor in float32, wan"),
    "of an embedding": (lambda f: f.put("embed.scale", NONE),
        "embed.scale: got scales of a tensor in float32, wanted none"),
    "FP4 of 64": (lambda f: in_blocks_of_64(f, EXPERT),
                  rf": {EXPERT}.scale: got F8_E8M0\[3, 3\], wanted one of .* block of 1 x 32 numbers of \[160, 192\]"),
    "FP8 of 64": (lambda f: in_blocks_of_64(f, FP8),
        rf": {FP8}.scale: got F8_E8M0\[3, 3\], wanted .* 128 x 128 or 32 x 32"),
    "attention of 64": (lambda f: in_blocks_of_64(f, ATTENTION),
        rf": {ATTENTION}.weight: got scales \[2, 1\], wanted one"),
    "integer scales": (of_dtype(f"{EXPERT}.scale", "U8"),
        rf": {EXPERT}.scale: got U8\[160, 6\], wanted one of F8_E8M0"),
    "of attention": (of_dtype(f"{ATTENTION}.scale", "U8"),
        rf": {ATTENTION}.scale: got uint8\[1, 1\], wanted scales, in"),
    "NaN in scales": (lambda f: not_numbers(f, f"{EXPERT}.scale"), rf": {EXPERT}.scale: got NaN or inf among scales"),
    "NaN in attention's": (lambda f: not_numbers(f, f"{ATTENTION}.scale"),
        rf": {ATTENTION}.weight: got scales that are NaN or inf, wanted finite"),
    "negative scales": (of_float32(f"{EXPERT}.scale", -1),
        rf": {EXPERT}.scale: got -1 among scales, wanted .* above 0"),
    "scales of 0": (of_float32(f"{FP8}.scale", 0), rf": {FP8}.scale: got 0 among scales, wanted numbers above 0"),
    "negative in attention's": (of_float32(f"{ATTENTION}.scale", -2),
        rf": {ATTENTION}.weight: got scales down to -2, wanted scales above 0"),
    # what is there twice
    "a copy": (lambda f: f["model-1.safetensors"].update(f["model-0.safetensors"]),
               r"model-1.safetensors: .*: got it twice, wanted it once: model-0.safetensors: .* is the same tensor"),
    "another name": (lambda f: f.put("lm_head.weight", np.zeros((64, 192), np.float32)),
                     r"\d.safetensors: (lm_)?head.weight: got it twice, .*: model-\d.safetensors: (lm_)?head.weight"),
    "another attention": (lambda f: f.put("layers.1.attn.q_b_proj.weight", NONE),
        "got q_b_proj.weight under 'layers.1.attn"),
    # what nobody knows
    "unknown": (lambda f: f.put("layers.0.ffn.gate.other", NONE),
                r"got 1 tensors of no use here, wanted none: model-0.safetensors: layers.0.ffn.gate.other$"),
    "one expert more": (lambda f: f.put("layers.0.ffn.experts.3.w1.weight", NONE),
        r"got 1 tensors of no use .*experts\.3"),
    "one layer more": (lambda f: f.put("layers.2.attn.wq_a.weight", NONE),
        "of no use here, wanted none: .*layers.2.attn.wq"),
    "attention's bias": (lambda f: f.put("layers.1.attn.bias", NONE),
        "got bias under 'layers.1.attn.', wanted a layer's"),
    "a name": (lambda f: f.rename(f"{PLAIN}.weight", f"{PLAIN}.weights"), f"{PLAIN}.weight: got none, wanted"),
    # dtypes and shapes
    "E5M2": (of_dtype(f"{FP8}.weight", "F8_E5M2"),
        rf"\d.safetensors: {FP8}.weight: got F8_E5M2, wanted one of F64, F32"),
    "E5M2 attention": (of_dtype(f"{ATTENTION}.weight", "F8_E5M2"),
        rf"{ATTENTION}.weight: got F8_E5M2, wanted one of F64"),
    "integers": (of_dtype(f"{PLAIN}.weight", "I32"), rf"{PLAIN}.weight: got int32\[192\], wanted float32, bfloat16"),
    "bytes": (of_dtype("embed.weight", "I64", 8), r"embed.weight: got int64\[64, 192\], wanted float32, bfloat16"),
    "scales as numbers": (of_dtype(f"{PLAIN}.weight", "F8_E8M0", 1),
        r"ffn_norm.weight: got float8_e8m0fnu\[192\], wanted"),
    "one expert in FP8": (of_dtype(f"{EXPERT}.weight", "F8_E4M3"),
        rf"{EXPERT}.weight: got float8_e4m3fn\[160, 96\], wanted"),
    "float table": (of_dtype("layers.0.ffn.gate.tid2eid", "F32"),
        r"tid2eid: got float32\[64, 3\], wanted int64, int32"),
    "other experts": (lambda f: f.put("layers.0.ffn.gate.tid2eid", np.full((64, 3), 3, np.int32), "I32"),
                      "tid2eid: got numbers of experts from 3 to 3, wanted 0 to 2"),
    "turned": (of_shape("embed.weight", 192, 64), r"embed.weight: got float32\[192, 64\], wanted \[64, 192\]"),
    "flat": (of_shape("embed.weight", 192 * 64), r"embed.weight: got float32\[12288\], wanted \[64, 192\]"),
    "turned FP4": (of_shape(f"{EXPERT}.weight", 96, 160),
        rf"{EXPERT}.weight: got uint8\[96, 160\] of two numbers each, wan"),
    "turned attention": (of_shape(f"{ATTENTION}.weight", 32, 128), rf"{ATTENTION}.weight: got .*would fit transposed"),
    "too few bytes": (of_shape(f"{PLAIN}.weight", 191), rf"{PLAIN}.weight: got 768 bytes of F32\[191\], wanted 764"),
    "a negative size": (of_shape(f"{PLAIN}.weight", -1, -192), rf"{PLAIN}.weight: got 768 bytes of F32\[-1, -192\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_tensors_are_wrong(case, good, tmp_path):
    model, directory, _ = good
    change, message = CASES[case]
    files = Files.of(directory)
    change(files)
    files.write(tmp_path)
    for packed in (False, True):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
            load(model, tmp_path, jnp.float32, packed=packed)
        assert str(tmp_path) in str(raised.value) or ".safetensors: " in str(raised.value)


def header(text):
    return lambda whole: len(text).to_bytes(8, "little") + text + whole[8 + int.from_bytes(whole[:8], "little") :]


def in_header(old, new):
    def change(whole):
        begin = 8 + int.from_bytes(whole[:8], "little")
        text = whole[8:begin]
        assert old in text
        return header(text.replace(old, new, 1))(whole)

    return change


DAMAGED = {
    "empty": (lambda x: b"", r"got 0 bytes, wanted a whole file of safetensors"),
    "seven bytes": (lambda x: x[:7], r"got 7 bytes, wanted a whole file"),
    "a pointer": (lambda x: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "got a pointer of Git LFS"),
    "half": (lambda x: x[: len(x) // 2], r"got a file of \d+ bytes, wanted \d+: it is cut"),
    "a byte less": (lambda x: x[:-1], r"got a file of \d+ bytes, wanted \d+: it is cut"),
    "a byte more": (lambda x: x + b"\0", r"got \d+ bytes, wanted \d+, where its tensors end"),
    "in the header": (lambda x: x[:100], r"got 100 bytes and a header of \d+, wanted a whole file"),
    "a page": (lambda x: b"<!DOCTYPE html><html>" + b" " * 99,
        r"got 120 bytes and a header of \d+, wanted a whole file"),
    "no JSON": (header(b"{{"), "got no header of safetensors, wanted one: JSONDecodeError"),
    "no text": (header(b"\xff\xff"), "got no header of safetensors, wanted one: UnicodeDecodeError"),
    "a list": (header(b"[]"), "got no header of safetensors, wanted one"),
    "deep": (header(b"[" * 99_999), "got no header of safetensors, wanted one: RecursionError"),
    "no object": (header(b'{"x": 1}'), "got no header of safetensors, wanted one: TypeError"),
    "no dtype": (header(b'{"x": {"shape": [], "data_offsets": [0, 0]}}'),
        "got no header of safetensors, wanted one: KeyError, 'dtype'"),
    "no integers": (header(b'{"x": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}'),
        "no header .*: TypeError"),
    "one offset": (header(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}'), "no header .*: ValueError"),
    "twice": (header(b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "x": 1}'), "x is there twice"),
    "none": (header(b"{}"), r"got \d+ bytes, wanted 10, where its tensors end"),
    "a gap": (in_header(b'"data_offsets": [0, ', b'"data_offsets": [4, '), r"got .* bytes of|got its bytes at"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_what_files_are_damaged(case, good, tmp_path):
    model, directory, _ = good
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    change, message = DAMAGED[case]
    path = tmp_path / "model-1.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"model-1\.safetensors: .*(?:{message})"):
        load(model, tmp_path)


INDICES = {
    "no JSON": (lambda x: "{", r"index.json: got no JSON, wanted an object"),
    "a list": (lambda x: "[1]", r"index.json: got \[1\], wanted a JSON object"),
    "no map": (lambda x: "{}", r"index.json: got no weight_map of tensors and files, wanted one"),
    "map of numbers": (lambda x: '{"weight_map": {"a": 1}}', r"index.json: got no weight_map"),
    "no tensors": (lambda x: '{"weight_map": {}}', r"no \*.safetensors in"),
    "no file": (lambda x: x.replace("model-1.s", "model-2.s"),
        "model-2.safetensors: got no such file, wanted it: .* says that"),
    "another tensor": (lambda x: x.replace('"embed.weight"', '"embed.weights"'),
                       r"embed.weight: got it here, wanted it where model.safetensors.index.json says"),
    "outside": (lambda x: re.sub(r'"(model-1\.)', r'"../\1', x),
                r"index.json: .*: got the file '../model-1.safetensors', wanted one in this folder"),
    "one more": (lambda x: x.replace('"embed.weight"', '"more": "model-0.safetensors", "embed.weight"'),
                 "model-0.safetensors: more: got none, wanted it here, as model.safetensors.index.json says"),
    "another file": (lambda x: re.sub('("embed.weight": "model-)(.)', lambda m: m[1] + "10"[int(m[2])], x),
                     r"embed.weight: got it here, wanted it where"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_what_indices_are_damaged(case, good, tmp_path):
    model, directory, _ = good
    Files.of(directory).write(tmp_path, index=True)
    change, message = INDICES[case]
    path = tmp_path / INDEX
    path.write_text(change(path.read_text()))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(model, tmp_path)


def test_an_index_says_which_files_count(good, tmp_path):
    """Without it, a second copy of the tensors is an error."""
    model, directory, want = good
    files = Files.of(directory)
    files.write(tmp_path, index=True)
    shutil.copy(tmp_path / "model-0.safetensors", tmp_path / "consolidated.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(model, tmp_path, jnp.float32), want[False])
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match="got it twice, wanted it once"):
        load(model, tmp_path)


def test_scales_of_a_table_are_numbers(tmp_path):
    """An engram's table has them as a parameter of its own."""
    Files({"model-0.safetensors": {"embed.scale": ["F8_E8M0", [3, 2], b"\x7f" * 4 + b"\xff\x7f"]}}).write(tmp_path)
    made = Checkpoint(tmp_path)
    assert made.piece("embed.scale", (slice(0, 2), slice(None)), None)[0].shape == (2, 2)
    with pytest.raises(ValueError, match=r"embed\.scale: got NaN or inf among scales, wanted finite ones"):
        made.piece("embed.scale", (slice(None), slice(None)), None)


def is_the_same(got, want):
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), got, want)
    return jax.tree.structure(got) == jax.tree.structure(want) and all(jax.tree.leaves(same))


def assert_error_or_same(model, directory, want, packed):
    """Files that are damaged are an error, or give the numbers that they had."""
    try:
        got = load(model, directory, jnp.float32, packed=packed)
    except (ValueError, FileNotFoundError) as e:
        assert re.search(r"\.(safetensors|json)|" + str(directory), str(e)) and re.search("wanted|no \\*", str(e)), e
    else:
        assert is_the_same(got, want[packed])


KINDS = ("drop", "double", "rename", "swap names", "dtype", "shape", "cut", "header", "bytes gone")


def damage(files, directory, kind, random, index):
    """Does something of a kind to a random tensor or file."""
    names = [(file, name) for file, tensors in files.items() for name in tensors]
    file, name = names[random.integers(len(names))]
    _, other = names[random.integers(len(names))]
    entry = files[file][name]
    if kind == "drop":
        files.drop(name)
    elif kind == "double":
        to = sorted(files)[random.integers(len(files))]
        new = (
            name if random.random() < 0.5 else random.choice([f"model.{name}", name.replace("attn.", "self_attn.", 1)])
        )
        files[to] = {**files[to], new: entry}
    elif kind == "rename":
        at = random.integers(len(name) + 1)
        files.rename(name, name[:at] + str(random.choice(list("abwx.0123_"))) + name[at + random.integers(2) :])
    elif kind == "swap names" and entry[:2] != files.tensor(other)[:2]:  # two of a form may be swapped, unnoticed
        one, two = files.tensor(name), files.tensor(other)
        one[:], two[:] = list(two), list(one)
    elif kind == "dtype":
        entry[0] = str(random.choice(["F32", "I32", "F16", "F8_E5M2", "F64", "I8", "F8_E4M3", "BOOL"]))
    elif kind == "shape":
        entry[1] = [[*entry[1], 1], entry[1][::-1], entry[1][:-1], [2 * n for n in entry[1]]][random.integers(4)]
    elif kind == "bytes gone":
        entry[2] = entry[2][: -int(random.integers(1, 5))]
    files.write(directory, index)
    path = directory / file
    whole = bytearray(path.read_bytes())
    if kind == "cut":
        del whole[random.integers(len(whole)) :]
    elif kind == "header":
        whole[random.integers(8 + int.from_bytes(whole[:8], "little"))] = random.integers(256)
    path.write_bytes(whole)


def damaged_at_random(good, directory, seed):
    model, source, want = good
    random = np.random.default_rng(seed)
    files, kind = Files.of(source), KINDS[random.integers(len(KINDS))]
    damage(files, directory, kind, random, index=random.random() < 0.3)
    assert_error_or_same(model, directory, want, packed=random.random() < 0.5)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_at_random(seed, good, tmp_path):
    damaged_at_random(good, tmp_path, seed)


@pytest.mark.fuzz
@settings.get_profile("fuzz")
@given(seed=st.integers(12, 2**32))
def test_any_damage(seed, good, tmp_path_factory):
    directory = tmp_path_factory.mktemp("damaged")
    damaged_at_random(good, directory, seed)
    shutil.rmtree(directory)


# ---- a layer's own state dict


LAYER = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
SHAPES = {
    "wq_a.weight": (32, 64), "q_norm.weight": (32,), "wq_b.weight": (128, 32), "wkv.weight": (32, 64),
    "kv_norm.weight": (32,), "attn_sink": (4,), "wo_a.weight": (32, 64), "wo_b.weight": (64, 32),
}  # fmt: skip


def state(**changes):
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name, x in changes.items():
        made[name.replace("__", ".")] = x
    return made


def fp8(*shape, dtype=jnp.float8_e4m3fn):
    return np.ones(shape, np.float32).astype(dtype)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"wkv__scale": NONE}, r"wkv\.weight: got float32\[32, 64\], wanted no wkv\.scale, which scales e4m3"),
        ({"wkv__weight_scale_inv": NONE}, r"wkv\.weight: got .*, wanted no wkv\.weight_scale_inv,"),
        ({"kv_norm__scale": NONE}, r"kv_norm\.weight: got .*, wanted no kv_norm\.scale"),
        ({"wkv__weight": fp8(32, 64)}, r"wkv\.weight: got float8_e4m3fn\[32, 64\], wanted wkv\.scale, its scales, too"),
        ({"wkv__weight": fp8(32, 64, dtype=jnp.float8_e5m2), "wkv__scale": NONE},
         r"wkv\.weight: got float8_e5m2\[32, 64\], wanted floats\[32, 64\] for wkv, in float32, .*float8_e4m3fn"),
        ({"wkv__weight": fp8(32, 64, dtype=jnp.float8_e8m0fnu)},
            r"wkv\.weight: got float8_e8m0fnu\[32, 64\], wanted floats"),
        ({"wkv__weight": np.zeros((32, 32), np.uint8), "wkv__scale": fp8(32, 2, dtype=jnp.float8_e8m0fnu)},
         r"wkv\.weight: got uint8\[32, 32\], wanted floats\[32, 64\]"),
        ({"wkv__weight": fp8(32, 64), "wkv__scale": np.ones((1, 1), np.int32)},
            r"wkv\.scale: got int32\[1, 1\], wanted scal"),
        ({"wkv__weight": fp8(32, 64), "wkv__scale": np.ones((2, 1), np.float32)},
            r"wkv\.weight: got scales \[2, 1\], wanted"),
        ({"wkv__weight": fp8(32, 64), "wkv__scale": NONE[0]}, r"wkv\.weight: got scales \[1\], wanted one for a block"),
        ({"kv_norm__weight": fp8(32), "kv_norm__scale": NONE[0]}, r"kv_norm\.weight: got scales \[1\], wanted one"),
        ({"wkv__weight": fp8(32, 64), "wkv__scale": NONE, "wkv__weight_scale_inv": NONE},
            "got wkv.weight_scale_inv under"),
        ({"wkv__weight": fp8(32, 64), "wkv__scale": NONE * np.nan}, r"wkv\.weight: got scales that are NaN or inf"),
        ({"wkv__weight": fp8(32, 64), "wkv__scale": NONE}, r"wkv\.weight: got scales down to 0, wanted scales above 0"),
        ({"kv_proj__weight": np.zeros((32, 64), np.float32)}, "got kv_proj.weight under '', wanted a layer's alone"),
    ],
)  # fmt: skip
def test_scales_of_a_state_dict(changes, message):
    with pytest.raises(ValueError, match=f"from_state_dict: .*{message}"):
        from_state_dict(LAYER, state(**changes))


def without(tree, name):
    return {key: x for key, x in tree.items() if key != name}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: without(p, "norm"), r"params: norm: got none, wanted \[192\]"),
        (lambda p: {**p, "other": jnp.ones(3)}, r"params: other: got float32\[3\], wanted none"),
        (lambda p: {**p, "norm": jnp.ones(3)}, r"params: norm: got float32\[3\], wanted \[192\]"),
        (lambda p: {**p, "layers": p["layers"][:1]}, r"params: layers/1/\S+: got none, wanted"),
        (lambda p: {**p, "layers": [*p["layers"], {"x": jnp.ones(2)}]}, r"layers/2/x: got float32\[2\], wanted none"),
        (lambda p: {**p, "layers": [{}, p["layers"][1]]}, r"params: layers/0/\S+: got none, wanted"),
    ],
)
def test_only_the_parameters_of_a_model_are_saved(good, change, message, tmp_path):
    """Those that are too many were left out without a word, and those that were missing were a KeyError."""
    model, _, want = good
    params = without(want[False], "drafts")
    with pytest.raises(ValueError, match=message):
        save(model.model, change(params), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_drafts_and_packed_matrices_are_not_saved(good, tmp_path):
    model, _, want = good
    with pytest.raises(TypeError, match="save: model: got DSpark, wanted a Model"):
        save(model, want[False], tmp_path / "new")
    with pytest.raises(ValueError, match=r"params: drafts/.*wanted none"):
        save(model.model, want[False], tmp_path / "new")
    with pytest.raises(ValueError, match=r"params: layers/0/\w+/\w+: got Packed\w*, wanted"):
        save(model.model, without(want[True], "drafts"), tmp_path / "new")
