"""TMA that gathers rows by their numbers: four rows of one slab's columns at a time (`tile::gather4`)."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm, nvvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from cutlass.cutlass_dsl import dsl_user_op

from kernels.lib.wgmma import SLAB, slab_layout

TOGETHER = 4  # rows of a copy
EVICT_NORMAL = 0x1000000000000000  # a cache policy, which other copies by TMA have too
LEADER = 0xFEFFFFFF  # of an address in a pair's shared memory: the same place in the CTA that leads


def gathering_atom(rows: cute.Tensor, tile_n: int, cluster: int) -> cute.CopyAtom:
    """Copies of rows of an array (rows, columns)."""
    op = cpasync.CopyBulkTensor2DGather4G2SOp(CtaGroup.TWO if cluster == 2 else CtaGroup.ONE)
    numbers = cute.make_tensor(
        cute.recast_ptr(rows.iterator, dtype=Int32), cute.make_layout(rows.layout.shape, stride=(1, 0))
    )
    layout = slab_layout(rows.element_type, tile_n, SLAB)
    atom, _ = cpasync.make_tiled_tma_atom(op, rows, layout, (tile_n, SLAB), gmem_coord_tensor=numbers)
    return atom


@dsl_user_op
def gather_rows(
    atom: cute.CopyAtom,
    place: Int32,
    column: Int32,
    rows: tuple[Int32, ...],
    full: cute.Pointer,
    cluster: int,
    *,
    loc=None,
    ip=None,
) -> None:
    """One thread copies 64 columns of four rows to this place of its CTA's shared memory; a row that does not exist,
    such as -1, becomes zeros. The barrier of the CTA that leads counts the bytes."""

    def pointer(x: Int32, space: cute.AddressSpace):
        kind = llvm.PointerType.get(space.value)
        return llvm.inttoptr(kind, x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)

    of_map = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    address = cute_nvgpu.get_tma_desc_addr(
        of_map, cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip), loc=loc, ip=ip
    )
    descriptor = address.to_llvm_ptr(loc=loc, ip=ip)
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        pointer(place, cute.AddressSpace.dsmem if cluster == 2 else cute.AddressSpace.smem),
        descriptor,
        [x.ir_value(loc=loc, ip=ip) for x in (column, *rows)],
        pointer(full.toint() & LEADER if cluster == 2 else full.toint(), cute.AddressSpace.smem),
        [],
        is_cta_only=None if cluster == 2 else True,
        l2_cache_hint=Int64(EVICT_NORMAL).ir_value(loc=loc, ip=ip),
        mode=nvvm.TMALoadMode.TILE_GATHER4,
        group=nvvm.CTAGroupKind.CTA_2 if cluster == 2 else None,
        loc=loc,
        ip=ip,
    )
