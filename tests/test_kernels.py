"""The SASS that ptxas made of the built kernels."""

import functools
import itertools
import re
import subprocess
import tempfile

import pytest

from interpreter.kernels.native import cubin, variant_of
from jax_dsv4_fmha._host import library
from kernels.abi import (
    ANY,
    Combine,
    FewRowsProduct,
    Forward,
    IndexerScores,
    IndexerScoresAt,
    IndexerScoresWithin,
    IndexQuery,
    KeyCodes,
    KvInsert,
    MhaBackward,
    MlaBackward,
    NormRope,
    Probabilities,
    Rope,
    RowColumns,
    RowScores,
    SeenSlots,
    TileSpans,
    TopK,
)
from kernels.compare import nvdisasm
from kernels.cubin import read_code
from kernels.packings import PACKED
from kernels.variants import MHA, MLA_FEW_HEADS

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
    """The instructions that a kernel was written for are there, in the expected number, and nothing is spilled."""
    try:
        opcodes = opcodes_of(variant_of(key).arch)[key]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    names = ("HGMMA", "USETMAXREG", "WARPGROUP.ARRIVE", "UTMALDG", "LDGSTS", "STAS", "LDL", "STL")
    names += ("REDG", "UTCHMMA", "UTCBAR", "LDTM", "STTM", "UTCATOMSWS")
    count = {name: sum(f"{opcode}.".startswith(f"{name}.") for opcode in opcodes) for name in names}
    variant = variant_of(key)
    assert count["LDL"] == count["STL"] == 0, count
    if isinstance(variant, Combine | TileSpans | TopK):
        return
    if isinstance(variant, Rope | NormRope):  # every number is read once and written once, 16 bytes at a time
        stores, loads = (sum(o == f"{x}.E.128" for o in opcodes) for x in ("STG", "LDG"))
        rows, arrays = 2 if variant.op == "norm_rope_bwd" else 4, 2 if variant.op == "norm_rope_bwd" else 1
        chunks = 1 if isinstance(variant, Rope) else variant.d // 256
        assert stores == rows * chunks and loads == rows * (arrays * chunks + 2), (stores, loads)
        assert not any(o.startswith(("LDG", "STG")) and not o.endswith(".E.128") for o in opcodes)
        return
    if isinstance(variant, IndexQuery):  # of four rows 8 codes a thread, and a scale
        found = {x: opcodes.count(x) for x in ("LDG.E.128", "STG.E.64", "STG.E")}
        assert found == {"LDG.E.128": 12, "STG.E.64": 4, "STG.E": 4}, found
        return
    if isinstance(variant, KvInsert):  # 16 bytes at a time; where a thread has a column, a number of it
        wide, narrow = (sum(o == f"LDG.E{x}" for o in opcodes) for x in (".128", ""))
        assert wide >= 4 and (variant.running or narrow <= 4), (wide, narrow)
        assert any(o == "STG.E.128" for o in opcodes), opcodes
        return
    if isinstance(
        variant, KeyCodes
    ):  # of four keys a slot, and a scale; 16 codes of a key, and of RoPE 32 bytes; the greatest numbers
        found = {x: opcodes.count(x) for x in ("LDG.E", "STG.E.128", "STG.E")}
        scales, again = 4 * (variant.packing != ""), variant.op == "key_codes_again"
        assert found == {"LDG.E": 4 + scales + 2 * again, "STG.E.128": 4 + 8 * variant.rope, "STG.E": 1 - again}, found
        assert sum(o.startswith("ATOMG.E.MAX") for o in opcodes) == 1 - again, opcodes
        return
    if isinstance(variant, FewRowsProduct):  # 64 of k at a time; boxes of 64 columns, and one of x
        assert count["HGMMA"] == 4 and count["UTMALDG"] == (4 if variant.norms else 2) + 1, count
        of_cluster = 4 if variant.norms else variant.parts
        loops = 1 + (
            variant.op == "few_rows_product_index_query" and variant.dtype == "float16"
        )  # with a norm, without
        assert sum(o.startswith("LD.E.128") for o in opcodes) == loops * of_cluster, opcodes
        return
    if isinstance(variant, SeenSlots):  # of a thread 4 indices and 8 pages, and what a query has; 8 slots, 2 lengths
        loads, stores = (sum(opcode.startswith(x) for opcode in opcodes) for x in ("LDG", "STG"))
        assert (loads, stores) == (15, 10), opcodes
        return
    if isinstance(variant, Forward) and variant.is_e4m3:
        # Q K' of 512 in four places, V' P' of 64 keys by four times 64; 32 keys, 8 rows of q and, in the loop, 8 more
        found = {x: sum(o.startswith(x) for o in opcodes) for x in ("QGMMA", "HGMMA", "LDSM", "LDGSTS", "USETMAXREG")}
        scores, of_rope, keys, rows = (14, 4, 40, 4) if variant.keeps_rope else (16, 0, 32, 8)
        copies = {"LDSM": 8, "LDGSTS": keys + 2 * (rows + rows), "USETMAXREG": 3}
        assert found == {"QGMMA": 4 * scores + 8, "HGMMA": 4 * of_rope} | copies, found
        return
    if isinstance(variant, IndexerScores):
        in_bytes = 1 if variant.dtype == "float8_e4m3fn" else 2  # a box of TMA has 128 of a row, an MMA's k is 32
        if variant.arch == "sm_100f":  # two halves of pages' keys; the loads of a thread's 128 columns
            products = sum(opcode in ("UTCHMMA", "UTCQMMA") for opcode in opcodes)
            assert products == (1 + variant.paged) * 128 * in_bytes // 32, opcodes
            assert count["LDTM"] == 8 and count["UTCATOMSWS"] >= 2 and count["STTM"] == 0, count
            assert count["UTMALDG"] == 2 * in_bytes + variant.scaled_pages and count["USETMAXREG"] == 2, count
            return
        products = [opcode for opcode in opcodes if opcode.startswith(("HGMMA.", "QGMMA."))]
        assert len(products) == 128 * in_bytes // 32 and count["WARPGROUP.ARRIVE"] == 1, (products, count)
        boxes = 3 if variant.packing else 2 * in_bytes  # two of q, whose keys of 4 bits are in one
        assert count["UTMALDG"] == boxes + variant.scaled_pages and count["USETMAXREG"] == 2, count
        return
    if isinstance(variant, IndexerScoresAt) and variant.arch == "sm_100f":  # a product's k is 32 bytes
        products = sum(opcode in ("UTCHMMA", "UTCQMMA") for opcode in opcodes)
        assert products == (4 if "float8" in variant.dtype else 8), count
        assert count["LDTM"] == 1 and count["LDGSTS"] > 0 and count["UTCATOMSWS"] >= 2, count
        return
    if isinstance(variant, IndexerScoresAt):
        of_gradients = (variant.heads // 16 + 2 * 64 // 16) * variant.op.endswith("_bwd")  # dk; dq, 64 columns each
        products = sum(opcode.startswith("QGMMA.") for opcode in opcodes)
        assert (count["HGMMA"], products) == ((0, 4) if "float8" in variant.dtype else (8 + of_gradients, 0)), count
        assert (count["REDG"] * 2 >= 64) == variant.op.endswith("_bwd") and count["LDGSTS"] > 0, count
        return
    if isinstance(variant, IndexerScoresWithin):
        products = sum(opcode.startswith("QGMMA.") for opcode in opcodes)
        assert (count["HGMMA"], products) == ((0, 4) if "float8" in variant.dtype else (8, 0)), count
        assert count["REDG"] == 0 and count["LDGSTS"] > 0, count
        return
    if isinstance(variant, Probabilities) and variant.arch == "sm_100f":  # pieces of 64 columns; columns 16 at a time
        assert count["UTCHMMA"] == variant.d // 16 and count["LDTM"] == 128 // 16 and count["UTMALDG"] == 0, count
        assert count["LDGSTS"] > 0 and count["USETMAXREG"] == 3 and count["UTCATOMSWS"] >= 2, count
        return
    if isinstance(variant, Probabilities):
        assert count["HGMMA"] == variant.d // 16 and count["WARPGROUP.ARRIVE"] == 4, count  # a piece is one group
        assert count["LDGSTS"] > 0 and count["UTMALDG"] == 0, count
        return
    if isinstance(variant, MlaBackward) and variant.arch == "sm_100f":
        columns, rows, keys = variant.d // 2, 128, 64  # of a CTA of a pair
        of_scores, of_dq, of_dkv = 2 * columns // 16, keys // 16, 2 * 2 * rows // 16  # dKV of P and dS, by 128 columns
        assert count["UTCHMMA"] == of_scores + of_dq + of_dkv + of_dkv // 2, count  # the last tile's second half
        assert count["REDG"] * 128 == keys * columns, count
        sent = 2 * keys * rows // 2  # half of S and dP; and in 16 bits of P and dS
        assert count["STAS"] * 4 * 128 == sent + sent // 2, count
        assert count["LDGSTS"] > 0 and count["UTMALDG"] == 0 and count["UTCATOMSWS"] >= 2, count
        return
    if isinstance(variant, MlaBackward) and variant.bounds:  # two keys of a lane, added to or marked
        assert (count["HGMMA"], count["WARPGROUP.ARRIVE"]) == (2 * variant.d // 16, 2 * 4), count
        assert (count["REDG"], count["STAS"], count["USETMAXREG"]) == (4, 0, 0), count
        assert count["LDGSTS"] > 0 and count["UTMALDG"] == 0, count
        return
    if isinstance(variant, MlaBackward):
        of_tiles = 2 * variant.d // 16 + 2 * 64 // 16  # S and dP, and both halves of dQ
        of_keys = 2 * variant.d // 32 * 64 // 16  # dS' Q and P' dO, 32 columns at a time
        if variant.max_heads < 64:  # S' and dP' at once, dQ' by 64 rows of d; 16 heads are one step of a product
            of_tiles, of_keys = variant.d // 16 + variant.d // 64 * 64 // 16, 2 * variant.d // 32
        assert of_tiles + of_keys <= count["HGMMA"] <= 2 * (of_tiles + of_keys), count
        merged = count["STAS"] * 128 * 4  # numbers of dKV that go to the other CTA of a cluster
        assert (count["STAS"] > 0) == (variant.max_heads == ANY), count
        at_once = 1 if variant.deterministic else 4  # numbers of a thread
        assert count["REDG"] * 128 * at_once + merged >= 64 * variant.d, count  # a tile of dKV
        assert count["LDGSTS"] > 0 and count["UTMALDG"] == 0, count
        if (
            variant.max_heads < 64
        ):  # a group for each piece of S' and dP', for 64 rows of dQ', and for 32 columns of dKV
            assert count["WARPGROUP.ARRIVE"] == 4 + variant.d // 64 + variant.d // 32, count
        else:
            assert 4 * count["WARPGROUP.ARRIVE"] < count["HGMMA"], count
        assert count["USETMAXREG"] >= 2, count
        return
    if isinstance(variant, MhaBackward):
        row = next(row for row in library.manifest()["variants"] if row["key"] == key)
        of_keys, of_all = variant.op != "mha_dq", variant.op == "mha_dqdkdv"
        depth = 64 if of_keys else row["tile_n"]  # of S and dP, then of one sum or two
        products = 2 * variant.d // 16 + (1 + of_keys) * depth // 16
        if of_all:  # by halves of a tile of rows; and half of dQ of a tile, and of the last one
            products = row["tile_m"] // 64 * products + 2 * row["tile_n"] // 16
        assert count["HGMMA"] == products, count
        sums = 2 * 64 * 64 * of_all  # that a warpgroup adds to
        assert 4 * count["WARPGROUP.ARRIVE"] <= count["HGMMA"] and count["REDG"] * 4 * 128 == sums, count
        assert count["UTMALDG"] == 4 * variant.d // 64 and count["USETMAXREG"] >= 2, count
        return
    of_q = variant.d // 64  # a box of TMA has 128 bytes of a row
    if isinstance(
        variant, RowScores
    ):  # one tile of 64 rows and 64 keys for each warpgroup; packed keys go by registers
        assert (count["HGMMA"], count["WARPGROUP.ARRIVE"], count["UTMALDG"]) == (2 * variant.d // 16, 4, of_q), count
        assert (count["LDGSTS"] > 0) == (not variant.packing), count
        return
    if isinstance(variant, RowColumns):  # a tile of keys by TMA, its scores by a bulk copy
        assert (count["HGMMA"], count["WARPGROUP.ARRIVE"], count["UTMALDG"]) == (24, 6, 1), count
        assert sum(o.startswith("UBLKCP") for o in opcodes) == 1, count
        return
    if variant.shares_tiles:  # scores of all queries; then half of O, of all at once or of one after the other
        queries, of_half = 64 // variant.max_heads, variant.d // 64 // 2 * 4
        assert count["HGMMA"] == variant.d // 16 + of_half * (1 + queries) and count["USETMAXREG"] == 3, count
        assert count["UTMALDG"] == 2 * of_q and count["LDGSTS"] == 0, count
        assert 4 * count["WARPGROUP.ARRIVE"] < count["HGMMA"], count
        return
    row = next(row for row in library.manifest()["variants"] if row["key"] == key)
    packed = variant.sources[0] in PACKED  # whose keys go through registers, and to the other CTA of a cluster
    if variant.moves_rows:  # TMA loads a CTA's columns of the keys, and nothing else
        loads = 0 if packed else len(variant.sources) * of_q // row["cluster"]
        assert count["UTMALDG"] == loads and count["LDGSTS"] == 0, count
        assert count["USETMAXREG"] == 4 * packed, count  # who holds keys gets registers of others
    else:
        assert (count["UTMALDG"] == of_q) if variant.gathers else (count["UTMALDG"] > of_q), count
    long_odd = variant.name == "mla_span_fwd" and variant.max_heads < ANY
    if variant.arch == "sm_90a":
        assert (count["LDGSTS"] > 0) == ((variant.gathers and not packed) or long_odd), count
        assert (count["STAS"] > 0) == (row["cluster"] > 1), count
    a_tile = (variant.d + row["tile_n"]) // 16  # an MMA has k = 16: those of Q K', and those of P V
    if variant.arch == "sm_100f" and variant.shared_kv:
        of_s, of_o = variant.d // 2 // 16, row["tile_n"] // 16 * 2  # two rails of half the depth; halves of O
        scores = 1 if row["cluster"] == 1 else 2  # before P V; a pair issues them with P V, too
        assert count["UTCHMMA"] == scores * of_s + 3 * of_o, count  # P V in the loop, before Q's next rows, at the end
        assert count["LDTM"] >= 4 and count["STTM"] >= 4 and count["UTCATOMSWS"] >= 2, count
        return
    if variant.arch == "sm_100f":
        tiles = -(-row["tile_m"] // 128)  # of rows
        of_v = row["tile_n"] * row["cluster"] // 16  # of which each CTA loads as many keys
        of_k = 2 * variant.d // 16  # of the first tile, and of the others
        assert count["UTCHMMA"] == tiles * (of_k + of_v), count
        assert count["LDTM"] >= 3 and count["STTM"] >= 2, count  # S, O to rescale, O to write; O, and P
        assert count["USETMAXREG"] == 3, count  # the softmax takes what the others give up
        assert count["UTCATOMSWS"] >= 2 and count["HGMMA"] == 0, count  # TMEM is allocated, and freed
        return
    assert count["USETMAXREG"] >= 2, count  # a producer gives registers up, consumers take them
    if variant.module == MLA_FEW_HEADS:  # keys are rows: K Q', and V' P' by 64 rows of V'
        assert count["HGMMA"] == variant.d // 16 + variant.d // 64 * row["tile_n"] // 16, count
    else:
        assert 2 * a_tile <= count["HGMMA"] <= 8 * a_tile, count
    assert 4 * count["WARPGROUP.ARRIVE"] < count["HGMMA"], count  # serialised products would have one for each
    if variant.module == MHA:
        softmax = opcodes[: opcodes.index("NANOSLEEP")]  # of wait_after, whose wait must not come before this one
        waits = [i for i, opcode in enumerate(softmax) if opcode.startswith("WARPGROUP.DEPBAR")]
        assert softmax[waits[-1] :].count("MUFU.EX2") >= row["tile_n"] // 2  # a thread's scores of a tile
