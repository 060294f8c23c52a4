"""A checkpoint's tensors by name, in *.safetensors that are mapped into memory; what is damaged in them is an error.

Every error names the file and the tensor, and says what was found and what is wanted.
"""

import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES = {
    "F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16, "I64": jnp.int64,
    "I32": jnp.int32, "I8": jnp.uint8, "U8": jnp.uint8, "F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu,
}  # fmt: skip
PLAIN = ("F32", "BF16", "F16", "F64")
CODES = {"F8_E4M3": 1, "I8": 2, "U8": 2}
"""dtypes of quantised matrices, and how many numbers a byte has: one of e4m3, or two of e2m1"""
BLOCKS = {"F8_E4M3": ((128, 128), (32, 32), (1, 32), (1, 128)), "I8": ((1, 32),), "U8": ((1, 32),)}
"""rows and columns that have one scale"""
LONGEST_HEADER = 100_000_000
"""bytes, as safetensors has it"""
SCALES = ("F8_E8M0", "F32", "BF16")
NAMES = {
    r"^model\.": "", r"^language_model\.": "", r"^embed_tokens\.": "embed.", r"^lm_head\.": "head.",
    r"^hc_head\.hc_": "hc_head_", r"\.self_attn\.": ".attn.", r"\.attn\.norm\.": ".attn.kv_norm.", r"\.mlp\.": ".ffn.",
    r"\.input_layernorm\.": ".attn_norm.", r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.attn_hc\.": ".hc_attn_", r"\.ffn_hc\.": ".hc_ffn_", r"\.weight_scale_inv$": ".scale",
    r"\.gate\.e_score_correction_bias$": ".gate.bias", r"experts\.gate_proj\.": "experts.w1.",
    r"experts\.down_proj\.": "experts.w2.", r"experts\.up_proj\.": "experts.w3.",
}  # fmt: skip
"""DeepSeek's names for Hugging Face's, outside of attention"""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs in JSON; raises ValueError if a name has two values."""
    found: dict[str, Any] = {}
    for name, x in pairs:
        if name in found and found[name] != x:
            raise ValueError(f"{name} is there twice")
        found[name] = x
    return found


def read_json(path: str | Path) -> dict[str, Any]:
    """The object of a JSON file; raises ValueError, which names the file, if it has none, or says something twice."""
    try:
        found = json.loads(Path(path).read_bytes(), object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: got no JSON, wanted an object: {e}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {str(found)[:40]}, wanted a JSON object")
    return found


class Entry(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: np.ndarray
    """mapped into memory"""

    @property
    def data(self) -> np.ndarray:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self}: got {self.dtype}, wanted one of {', '.join(DTYPES)}")
        return self.bytes.view(DTYPES[self.dtype]).reshape(self.shape)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.name}"


def entries(path: Path) -> list[Entry]:
    """The tensors of a *.safetensors.

    Raises:
      ValueError: the file is cut or empty, is a pointer of Git LFS, has a header that is none, names a tensor twice, or
        has bytes that are not those of its tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path}: got a pointer of Git LFS, wanted the tensors, which `git lfs pull` fetches")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, LONGEST_HEADER):
            of_header = f" and a header of {length}" if len(start) == 8 else ""
            raise ValueError(f"{path}: got {size} bytes{of_header}, wanted a whole file of safetensors")
        text = file.read(length)
    begin = 8 + length

    try:
        header = json.loads(text, object_pairs_hook=once)
        header.pop("__metadata__", None)
        spans = {name: tuple(begin + operator.index(n) for n in x["data_offsets"]) for name, x in header.items()}
        shapes = {name: tuple(map(operator.index, x["shape"])) for name, x in header.items()}
        dtypes = {name: str(x["dtype"]) for name, x in header.items()}
        at = begin
        for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
            if dtypes[name] in DTYPES:
                wanted = math.prod(shapes[name]) * np.dtype(DTYPES[dtypes[name]]).itemsize
                if last - first != wanted or min(shapes[name], default=0) < 0:
                    got = f"{last - first} bytes of {dtypes[name]}{list(shapes[name])}"
                    raise ValueError(f"{name}: got {got}, wanted {wanted}")
            if not at == first <= last:
                raise ValueError(f"{name}: got its bytes at {first} to {last}, wanted them from {at} on")
            at = last
            if at > size:
                raise ValueError(f"{name}: got a file of {size} bytes, wanted {at}: it is cut")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        is_said = isinstance(e, ValueError) and "wanted" in str(e)
        what = str(e) if is_said else f"got no header of safetensors, wanted one: {type(e).__name__}, {e}"
        raise ValueError(f"{path}: {what}") from None
    if at != size:
        raise ValueError(f"{path}: got {size} bytes, wanted {at}, where its tensors end")
    whole = np.memmap(path, np.uint8, "r")
    return [Entry(path, name, dtypes[name], shapes[name], whole[slice(*span)]) for name, span in spans.items()]


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a directory's *.safetensors by DeepSeek's names: read where they are used.

    An index, model.safetensors.index.json, says which files count, if there is one. (The library safetensors gives
    NumPy no tensors of 8 bits.)

    Raises:
      FileNotFoundError: there are no such files, or one that the index names is not there.
      ValueError: a file is damaged, two tensors are the same one, or the index and the files differ.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory, self.entries = Path(directory), dict[str, Entry]()
        index = self.directory / "model.safetensors.index.json"
        listed = self._listed(index) if index.exists() else None
        paths = sorted(self.directory.glob("*.safetensors") if listed is None else set(listed.values()))
        if not paths:
            raise FileNotFoundError(f"no *.safetensors in {directory}")
        missing = dict(listed or {})
        for path in paths:
            for entry in entries(path):
                if listed is not None and missing.pop(entry.name, None) != path:
                    raise ValueError(f"{entry}: got it here, wanted it where {index.name} says, and nowhere else")
                self._add(entry)
        for name, path in missing.items():
            raise ValueError(f"{path.name}: {name}: got none, wanted it here, as {index.name} says")

    @staticmethod
    def _listed(index: Path) -> dict[str, Path]:
        """The file of each tensor."""
        found = read_json(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise ValueError(f"{index}: got no weight_map of tensors and files, wanted one")
        listed = {name: index.parent / file for name, file in found.items()}
        for name, path in listed.items():
            if Path(found[name]).is_absolute() or ".." in path.relative_to(index.parent).parts:
                raise ValueError(f"{index}: {name}: got the file {found[name]!r}, wanted one in this folder")
            if not path.is_file():
                raise FileNotFoundError(f"{path}: got no such file, wanted it: {index.name} says that {name} is there")
        return listed

    def _add(self, entry: Entry) -> None:
        name = entry.name
        for theirs, ours in NAMES.items():
            name = re.sub(theirs, ours, name)
        stacked = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)  # Hugging Face's: all experts in one
        if not stacked:
            return self._put(name, entry)
        parts = {"gate_up": ("w1", "w3"), "down": ("w2",)}[stacked[2]]
        if len(entry.shape) != 3 or entry.shape[1] % len(parts) or not all(entry.shape):
            raise ValueError(f"{entry}: got {entry.dtype}{list(entry.shape)}, wanted [experts, out, in]")
        experts, out, columns = entry.shape
        names = [f"{stacked[1]}.{e}.{part}.weight" for e in range(experts) for part in parts]
        for name, its in zip(names, np.split(entry.bytes, len(names)), strict=True):
            self._put(name, entry._replace(shape=(out // len(parts), columns), bytes=its))
        return None

    def _put(self, name: str, entry: Entry) -> None:
        if name in self.entries:
            raise ValueError(f"{entry}: got it twice, wanted it once: {self.entries[name]} is the same tensor")
        self.entries[name] = entry

    def __getitem__(self, name: str) -> np.ndarray:
        return self.entries[name].data

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def named(self, text: str) -> str:
        """The text, in which tensors have their files and the names that they have there."""
        return re.sub(r"[\w.]+", lambda m: str(self.entries.get(m[0], m[0])), text)

    def scale(self, name: str) -> str:
        """The name of a matrix's scales."""
        return name.removesuffix(".weight") + ".scale"

    def check(self, name: str, shape: tuple[int, ...], dtype: Any) -> tuple[str, tuple[int, int] | None]:
        """The dtype of a tensor in its file, and for codes that have scales the rows and columns of a block.

        Raises:
          ValueError: it is not there, or is no parameter of this dtype and, in the tensor's order of axes, shape.
        """
        if name not in self:
            raise ValueError(f"{self.directory}: {name}: got none, wanted {jnp.dtype(dtype)}{list(shape)}")
        entry, is_matrix = self.entries[name], jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
        got = f"{entry.data.dtype}{list(entry.shape)}"
        scale = self.entries.get(self.scale(name)) if is_matrix else None
        per_byte = CODES.get(entry.dtype, 0) if is_matrix else 0
        if not per_byte and entry.dtype not in (kinds := kinds_of(dtype)):
            raise ValueError(f"{entry}: got {got}, wanted {', '.join(str(np.dtype(DTYPES[x])) for x in kinds)}")
        if (*entry.shape[:-1], *(n * max(per_byte, 1) for n in entry.shape[-1:])) != shape:
            of_codes = " of two numbers each" * (per_byte > 1)
            raise ValueError(f"{entry}: got {got}{of_codes}, wanted {list(shape)}")
        if not per_byte:
            if scale is not None:
                raise ValueError(f"{scale}: got scales of a tensor in {entry.data.dtype}, wanted none")
            return entry.dtype, None
        if scale is None:
            raise ValueError(f"{entry}: got {got} without scales, wanted {self.scale(name)}, too")
        for block in BLOCKS[entry.dtype] if scale.dtype in SCALES else ():
            if len(shape) == 2 and scale.shape == tuple(-(-n // b) for n, b in zip(shape, block, strict=True)):
                return entry.dtype, block
        blocks = " or ".join(f"{rows} x {columns}" for rows, columns in BLOCKS[entry.dtype])
        wanted = f"one of {', '.join(SCALES)} for each block of {blocks} numbers of {list(shape)}"
        raise ValueError(f"{scale}: got {scale.dtype}{list(scale.shape)}, wanted {wanted}")

    def piece(
        self, name: str, index: Sequence[slice], block: tuple[int, int] | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """A part of a tensor as it is in the file, and the scales of its rows, one for each block of columns, if any.

        index is one of the tensor unpacked: a byte of FP4 has two columns. block: what `check` returns.
        """
        x = self[name]
        if block is None:
            part = x[tuple(index)]
            return part if self.entries[name].dtype != "F8_E8M0" else self._usable(name, part), None
        per_byte = CODES[self.entries[name].dtype]
        rows, columns = (s.indices(n) for s, n in zip(index, (x.shape[0], x.shape[1] * per_byte), strict=True))
        step = math.gcd(block[1], *columns[:2])  # columns that have one scale, wherever the part begins and ends
        scale = self._usable(self.scale(name), self[self.scale(name)])
        scale = np.repeat(scale, block[0], 0)[rows[0] : rows[1]]
        scale = np.repeat(scale, block[1] // step, 1)[:, columns[0] // step : columns[1] // step]
        return x[rows[0] : rows[1], columns[0] // per_byte : columns[1] // per_byte], scale

    def _usable(self, name: str, scales: np.ndarray) -> np.ndarray:
        """Returns these scales, of the tensor of this name; raises ValueError if one is no number, or not above 0."""
        numbers = scales.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ValueError(f"{self.entries[name]}: got NaN or inf among scales, wanted finite ones")
        if numbers.size and numbers.min() <= 0:
            raise ValueError(f"{self.entries[name]}: got {numbers.min():g} among scales, wanted numbers above 0")
        return scales


def kinds_of(dtype: Any) -> Sequence[str]:
    """Dtypes in a file of what a parameter of this dtype may be, without scales."""
    if jnp.issubdtype(dtype, jnp.integer):
        return "I64", "I32"
    return [x for x in DTYPES if DTYPES[x] == jnp.dtype(dtype)] if jnp.dtype(dtype).itemsize == 1 else PLAIN
