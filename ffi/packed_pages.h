// Packed keys as a call has them: pages of u8.
#pragma once

#include "calls.h"

namespace dsv4_fmha {

// Entries of a page of this many bytes, or 0 if no page has this size.
inline int64_t PackedEntries(const Packing& packing, int64_t page_bytes) {
  const int64_t entries = page_bytes / packing.entry;
  const int64_t needed = (entries * packing.entry + packing.multiple - 1) / packing.multiple * packing.multiple;
  return needed == page_bytes ? entries : 0;
}

inline std::string Show(const Packing& packing) {
  std::string page = "U8[pages, " + std::to_string(packing.entry) + " bytes an entry";
  if (packing.multiple > 1) page += ", padded up to a multiple of " + std::to_string(packing.multiple);
  return page + "], as " + packing.name + " has them";
}

// Keys are packed as the call says, or like q, or codes of e4m3.
template <typename Call>
ffi::Error CheckPacking(const Call& call, AttentionShape* shape) {
  const PackedSources* packed = nullptr;
  for (const PackedSources& known : kPackedSources) {
    if (known.name == call.packing) packed = &known;
  }
  if (packed == nullptr && !call.packing.empty()) {
    return ffi::Error::InvalidArgument("packing: got " + std::string(call.packing));
  }
  Expectations expect;
  for (int64_t i = 0; i < shape->source_count; ++i) {
    const Operand& k = call.sources[i].k;
    if (packed == nullptr) {
      if (k.dtype != ffi::F8E4M3FN) expect.DtypeOf(call.q, k);  // which only calls that say so take
      continue;
    }
    const Packing& packing = packed->sources[i];
    const int64_t entries = k.dtype == ffi::U8 ? PackedEntries(packing, k.dimensions[1]) : 0;
    if (entries == 0) return Refuse(k, Show(k.dtype) + Show(k.dimensions), Show(packing));
    SourceShape& source = shape->sources[i];
    source.kind = kPacked, source.s_batch = entries, source.s_kv = k.dimensions[0] * entries;
  }
  return expect.error();
}

}  // namespace dsv4_fmha
