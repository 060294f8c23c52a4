"""A warpgroup's product has a part for each of its warps, in the interpreter: who may write over what it reads."""

import pytest

from interpreter.machine.handwritten import Handwritten
from interpreter.machine.hazards import Race

A_OF_FIRST, A_OF_SECOND, B = 0, 512, 2048  # bytes: rows 0 to 15 of A, rows 16 to 31, and B
MET = "bar.sync 1, 128;"


def product_and_store(place: int, met: str = "") -> Handwritten:
    """D = A B' of 64 x 8 numbers, all from shared memory; then, after its own wait, the first warp stores over some."""
    descriptor = 128 >> 4 << 16 | 256 >> 4 << 32  # 8 rows of 16 bytes in a row, without a swizzle
    body = f"""
  mov.b32 %r8, 0;
  {" ".join(f"st.shared.b32 [%r4+{at}], %r8;" for at in range(0, 2560, 512))}
  fence.proxy.async.shared::cta;
  bar.sync 0;
  cvt.u64.u32 %rd7, %r3;
  shr.u64 %rd7, %rd7, 4;
  and.b64 %rd7, %rd7, 0x3fff;
  add.s64 %rd8, %rd7, {descriptor};
  add.s64 %rd9, %rd8, {B >> 4};
  setp.ne.b32 %p1, %r8, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r10, %r11, %r12, %r13}}, %rd8, %rd9, %p1, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  {met}
  setp.ge.s32 %p2, %r1, 32;
  @%p2 bra STORED;
  st.shared.b32 [%r4+{place}], %r8;
STORED:
  st.global.b32 [%rd5], %r10;
"""
    return Handwritten(body, threads=128)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", [A_OF_SECOND, B])
def test_a_warp_s_wait_is_for_its_own_part(place, seed):
    with pytest.raises(Race, match=r"overwrites SMEM.*nothing orders this and the read by wgmma"):
        product_and_store(place).interpret(seed)
    assert not product_and_store(place, MET).interpret(seed).any()


def test_only_a_warp_reads_its_rows_of_a():
    assert not product_and_store(A_OF_FIRST).interpret().any()
