"""Words that code no longer uses, and what it says instead. The glossary (docs/glossary.md) has the words that it uses.

A word is an identifier, as `fnmatch` reads it. It is looked for in identifiers, in strings without a space, as keys of
kernels are, and in names of files and folders. Prose may use it: comments, docstrings and messages are not read.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from pathlib import Path

PACKAGE, KERNELS, FFI = "jax_dsv4_fmha", "kernels", "ffi"
EVERYWHERE = (PACKAGE, KERNELS, FFI, "interpreter", "tests", "examples", "docs")
ATTENTION = (
    "kernels/lib",
    *(f"kernels/sm90/{name}" for name in ("mha", "mla", "mla_few_heads")),
    "kernels/plain/combine",
    "kernels/sm100",
    FFI,
)
PYTHON = (PACKAGE, "tests", "examples", "docs")
SURFACE = (f"{PACKAGE}/_ops", f"{PACKAGE}/layers", f"{PACKAGE}/reference.py")
HERE = Path(__file__).name


@dataclass(frozen=True)
class Retired:
    word: str
    new: str
    folders: tuple[str, ...] = EVERYWHERE  # or files
    active: bool = True  # nothing says it any more

    @property
    def example(self) -> str:
        return self.word.replace("*", "")


RETIRED = (
    # ops and targets
    Retired("fwd_shared_kv", "mla_span_fwd"),
    Retired("sparse_fwd*", "mla_sparse_fwd"),
    Retired("sparse_bwd*", "mla_sparse_bwd"),
    Retired("dsv4_sparse_fwd*", "csa_fwd"),
    Retired("dsv4_sparse_bwd*", "csa_bwd"),
    Retired("dsv4_dense_fwd*", "hca_fwd"),
    Retired("dsv4_dense_bwd*", "hca_bwd"),
    Retired("dense_bwd*", "mha_bwd"),
    Retired("fwd_sm_90a_*", "mha_fwd_sm_90a_…, or mla_span_fwd_sm_90a_…"),
    Retired("bwd_sm_90a_*", "mla_span_bwd_sm_90a_…"),
    Retired("dsv4_decode_fp8*", "dsv4_decode, whose packing is a choice"),
    Retired("dsv4_decode_v41*", "dsv4_decode, whose packing is a choice"),
    Retired("row_gradients*", "mha_dq"),
    Retired("all_gradients*", "mha_dqdkdv"),
    Retired("key_gradients_sm*", "mha_dkdv"),
    Retired("key_gradients", "dkdv, or dkv where K is V"),
    Retired("row_spans*", "tile_spans"),
    Retired("index_scores*", "indexer_scores"),
    Retired("index_at*", "indexer_scores_at"),
    # kernels and families
    Retired("fwd_sm90", "mha_fwd_sm90"),
    Retired("fwd_sm100", "mha_fwd_sm100, or mla_fwd_sm100"),
    Retired("latent_sm90*", "mla_fwd_sm90"),
    Retired("latent_bwd*", "mla_bwd"),
    Retired("few_heads_sm90*", "mla_few_heads_fwd_sm90"),
    Retired("few_heads_bwd*", "mla_few_heads_bwd"),
    Retired("DenseBackward*", "MhaBackward"),
    Retired("dense_backward*", "mha_backward"),
    Retired("RowSpans*", "TileSpans", (FFI, "kernels/abi")),
    Retired("IndexScores*", "IndexerScores"),
    Retired("IndexAt*", "IndexerScoresAt"),
    # inside
    Retired("*apart*", "separate", (PACKAGE, KERNELS, FFI)),
    Retired("Fit", "Support", (PACKAGE,)),
    Retired("when", "KernelUse", (PACKAGE,)),
    Retired("_learn", "a name that says what is differentiated", (PACKAGE,)),
    Retired("_learned", "a name that says what is differentiated", (PACKAGE,)),
    Retired("in_order", "unshuffle_accumulator_columns", (PACKAGE,)),
    Retired("_BEGIN", "_LAUNCH_COST", (PACKAGE,)),
    Retired("crowd*", "contention", (PACKAGE, KERNELS, FFI)),
    Retired("Walk", "TileScheduler", (KERNELS,)),
    Retired("together", "section", (KERNELS, FFI)),
    Retired("tell_rows", "publish_rows", (KERNELS,)),
    Retired("told", "published", (KERNELS,)),
    Retired("tellers", "publishers", (KERNELS,)),
    Retired("aim", "destination", (KERNELS,)),
    Retired("leave_others", "release_unread", (KERNELS,)),
    Retired("foresee", "prefetch, or prefetch_entries", (KERNELS,)),
    Retired("settle", "mark_absent", (KERNELS,)),
    Retired("look_up", "prefetch_indices", (KERNELS,)),
    Retired("KeyGradients", "KvGradient", ("kernels/sm90/mla",)),
    Retired("Target", "Destination", ("kernels/sm90/mla",)),
    Retired("Latent*", "Mla…", (KERNELS,)),
    Retired("turn", "wave", ("kernels/lib/pipeline.py", "kernels/lib/tile_scheduler.py")),
    Retired("forge", "compile_server", (KERNELS,)),
    Retired("Kept", "Once", (FFI,)),
    Retired("Give", "SetResults", (FFI,)),
    Retired("weight", "sink_factor", (*ATTENTION, "kernels/abi")),
    # public
    Retired("swa_lens", "a Span as window", (PACKAGE,)),
    Retired("window_lengths", "window=… & Span.lengths(…)", PYTHON),
    Retired("kv_offset", "Span.keys_from", PYTHON),
    Retired("compressed_span", "a Span as ratio", PYTHON),
    Retired("rope_table", "QueryRope", PYTHON),
    Retired("topk_length", "-1 in indices", (*SURFACE, f"{PACKAGE}/_testing", "examples")),
    Retired("method", "merge, for two passes", (*SURFACE, f"{PACKAGE}/_dispatch", f"{PACKAGE}/_testing")),
    Retired("in_groups", "GroupedRope", (f"{PACKAGE}/_ops",)),
    Retired(
        "o_groups",
        "GroupedRope",
        (f"{PACKAGE}/_ops", f"{PACKAGE}/_dispatch", f"{PACKAGE}/reference.py", f"{PACKAGE}/_testing"),
    ),
    Retired("with_products", "with_precision", ("examples",)),
    Retired("how", "a name that explains itself", ("jax_dsv4_fmha/layers",)),
    Retired("room", "a name that explains itself", ("jax_dsv4_fmha/layers",)),
    Retired("within", "a name that explains itself", ("jax_dsv4_fmha/layers",)),
    Retired("makes", "candidate_blocks", (PACKAGE,)),
)


def in_string(text: str) -> list[str]:
    return [] if re.search(r"\s", text) else re.findall(r"[A-Za-z_]\w*", text)


def python_identifiers(source: str) -> set[str]:
    """Names, attributes, parameters, keywords and imports, and words of strings without a space."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for _, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(node, ast.Constant):
                    found.update(in_string(part) if isinstance(part, str) else ())
                elif isinstance(part, str):
                    found.update(part.split("."))
    return found


def cpp_identifiers(source: str) -> set[str]:
    """All that is not a comment, nor a string with a space."""
    tokens = re.findall(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|[A-Za-z_]\w*", source, re.S)
    code = [token for token in tokens if not token.startswith(("//", "/*"))]
    return {word for token in code for word in (in_string(token[1:-1]) if token.startswith('"') else [token])}


def identifiers(path: Path, source: str) -> set[str]:
    """Those of a file, and of its path relative to the repository."""
    found = python_identifiers(source) if path.suffix == ".py" else cpp_identifiers(source)
    return found | {part.split(".")[0] for part in path.parts}


def come_back(path: Path, names: Iterable[str], words: Iterable[Retired]) -> list[str]:
    """Lists those of a file's identifiers that are retired words, each with the word to say."""
    here = [r for r in words if any(map(path.is_relative_to, r.folders))]
    retired = re.compile("|".join(translate(r.word) for r in here) or "$^")  # most names are none of them
    found = ((name, r) for name in sorted(filter(retired.match, names)) for r in here if fnmatchcase(name, r.word))
    return [f"{path}: {name} is retired, say {r.new}" for name, r in found]


def sources() -> Iterator[tuple[Path, set[str]]]:
    """Every file with code, relative to the repository, and its identifiers."""
    root = Path(__file__).parents[1]
    for path in (path for folder in EVERYWHERE for path in sorted((root / folder).rglob("*"))):
        if path.suffix in (".py", ".h", ".cc") and path.name != HERE:
            yield path.relative_to(root), identifiers(path.relative_to(root), path.read_text())
