// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend of builds without one, in place of every .cu file. check_execution() refuses the
// backend before a codec gets here.

#include "base/checks.h"
#include "base/cuda/capture.h"
#include "group/cuda/epilogue.h"
#include "group/cuda/group.h"
#include "lossless/cuda/bits.h"
#include "lossless/cuda/copy.h"
#include "lossless/cuda/narrow.h"
#include "pool/cuda/pool.h"
#include "ranged/cuda/ranged.h"
#include "samples/cuda/samples.h"
#include "shares/cuda/shares.h"
#include "signs/cuda/signs.h"
#include "table/cuda/table.h"

namespace backfold::cuda {

using core::no_cuda_kernels;

bool is_capturing(void*) { return false; }

Status pack_group(const GroupFormat&, const void*, core::MixedKey, void*, void*, const RowAffine*) {
  return no_cuda_kernels();
}
Status unpack_group(const GroupFormat&, const void*, void*, void*, const RowAffine*) {
  return no_cuda_kernels();
}
Status unpack_group(const GroupFormat&, const Epilogue&, const void*, void*, void*) {
  return no_cuda_kernels();
}
Status find_negative(const GroupFormat&, const void*, void*, std::int64_t*) {
  return no_cuda_kernels();
}

Status pack_samples(const SampleFormat&, const void*, const float*, core::MixedKey, void*, void*) {
  return no_cuda_kernels();
}
Status unpack_samples(const SampleFormat&, const void*, void*, void*) { return no_cuda_kernels(); }

Status pack_pool(const core::PoolShape&, ElementType, const void*, core::MixedKey, void*, void*) {
  return no_cuda_kernels();
}
Status unpack_pool(const core::PoolShape&, ElementType, const void*, void*, void*) {
  return no_cuda_kernels();
}

Status pack_ranged(const RangedFormat&, const void*, const float*, core::MixedKey, void*, void*) {
  return no_cuda_kernels();
}
Status unpack_ranged(const RangedFormat&, const void*, void*, void*) { return no_cuda_kernels(); }
Status widen_ranges(const RangedFormat&, const void*, const float*, float*, void*) {
  return no_cuda_kernels();
}

Status pack_table(const core::TableCode&, ElementType, const void*, std::int64_t, void*, void*) {
  return no_cuda_kernels();
}
Status unpack_table(const core::TableCode&, ElementType, const void*, std::int64_t, void*, void*) {
  return no_cuda_kernels();
}

Status restore_sums(ElementType, std::int64_t, std::int64_t, void*, void*) {
  return no_cuda_kernels();
}

Status fill_signs(std::uint64_t, std::size_t, std::int64_t, core::MixedKey, void*, void*) {
  return no_cuda_kernels();
}

Status copy(const void*, void*, std::size_t, void*) { return no_cuda_kernels(); }

Status encode(const core::NarrowCode&, std::size_t, const void*, std::int64_t, void*, void*) {
  return no_cuda_kernels();
}
Status decode(const core::NarrowCode&, std::size_t, const void*, std::int64_t, void*, void*) {
  return no_cuda_kernels();
}
Status find_broken_bound(const core::NarrowCode&, std::size_t, const void*, std::int64_t, void*,
                         std::int64_t*, std::int64_t*) {
  return no_cuda_kernels();
}

Status pack_bits(const core::BitTest&, std::size_t, const void*, std::int64_t, void*, void*,
                 void*) {
  return no_cuda_kernels();
}
Status unpack_bits(const core::BitValues&, std::size_t, const void*, std::int64_t, void*,
                   const void*, void*) {
  return no_cuda_kernels();
}
Status find_odd_one(std::size_t, const void*, std::int64_t, void*, std::int64_t*) {
  return no_cuda_kernels();
}

}  // namespace backfold::cuda
