// SPDX-License-Identifier: Apache-2.0
//
// Norms: what their backward reads of the input, and how the input is packed.
//
// The backward of layer, RMS, group, batch and instance norm reads (x - mean) * rstd, with the
// exact statistics saved beside x. A quantizer group that spans several rows gives a nearly
// constant row the noise of its neighbours, and rstd multiplies it: for a class token of zeros with
// an epsilon of 1e-12, the error was 7e13 times its gradient. So if groups mix rows, the normalised
// values are packed, which have the same scale in every row, and come back as
// packed / rstd + mean. A "row" is the set of elements that share a statistic: for batch norm, a
// channel.
//
// A norm written out by hand provides no statistics. Its rows are scaled by their largest element
// instead, so that each keeps its own scale.

#ifndef BACKFOLD_TORCH_READS_NORMS_H_
#define BACKFOLD_TORCH_READS_NORMS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>

#include "backfold/group.h"
#include "torch/reads/exact_ops.h"

namespace backfold::torch_layer {

// An operator that is a norm of one of its arguments, or part of one.
struct Norm {
  enum class Rows : std::uint8_t {
    kNormalizedShape,  // the last dimensions, as many as normalized_shape has
    kChannels,         // all elements of a channel, while training
    kGroups,           // all elements of some channels of a sample
    kLast,             // the last dimension; the operator returns no statistics
  };
  std::string_view op, slot;
  Rows rows = Rows::kLast;
  int mean = -1, rstd = -1;  // indices of the operator's results; -1 if it has none
  // Not a norm, but its gradient may come from one, and then the smaller a row, the larger its
  // gradient. The first plan measures that effect; until then rows keep their own scale. Not with
  // one width everywhere: Swin-T's step took 1.61 times the plain one with it, 1.25 without.
  bool until_planned = false;
};

// The norm that an operator computes of this argument, or null.
const Norm* norm_of(std::string_view op, std::string_view slot);

// A norm with the arguments of one call.
struct NormCall {
  const Norm* norm = nullptr;
  std::int64_t count = 1;  // dimensions of a row, or groups

  bool has_statistics() const { return norm->rstd >= 0; }
};
// None if the norm takes its statistics from elsewhere, as batch norm does outside of training.
std::optional<NormCall> norm_call(const Norm& norm, const Call& call);

// How the rows of a norm are laid out in the memory of a tensor.
struct NormRows {
  struct Axis {
    std::int64_t size = 1, stride = 0;
    bool shared = false;            // runs within a row
    std::int64_t table_stride = 0;  // in the statistics, which are in memory order
  };
  c10::SmallVector<Axis, 6> axes;
  std::int64_t count = 0;  // of rows
  // If rows are regular, element i in memory belongs to row i / run % count; otherwise run is 0.
  std::int64_t run = 0;
};
// None for a tensor whose elements share memory.
std::optional<NormRows> rows_of(const NormCall& call, const at::Tensor& dense);
// Of a dense tensor that has these.
NormRows rows_of(const NormCall& call, at::IntArrayRef sizes, at::IntArrayRef strides);

// Whether so few values share a statistic that backward cancels almost all of the gradient. Mostly
// noise would remain, so the input is kept unfolded.
bool has_few_values(const NormCall& call, const at::Tensor& tensor);

// Whether some group of a format holds elements of several rows.
bool mixes(const GroupFormat& format, const NormRows& rows);

// Statistics of one call.
struct Normalisation {
  NormRows rows;
  at::Tensor mean, rstd;  // by row, in fp32 (fp64 for that type); no mean: 0
};

// From an operator's results; none if they do not contain the statistics.
std::optional<Normalisation> normalisation_of(const NormCall& call, const NormRows& rows,
                                              c10::ArrayRef<c10::IValue> results);
// For a norm without statistics: 1 / the largest magnitude of each row.
Normalisation scale_of(const NormRows& rows, const at::Tensor& dense);

// (x - mean) * rstd in fp32, in the memory order of the tensor.
at::Tensor normalised(const Normalisation& by, const at::Tensor& dense);
// Multiplies errors of a tensor by rstd, in place, as its norm does. They are in the memory order
// of the tensor.
void scale_errors(const Normalisation& by, at::Tensor& errors);
// The inverse of normalised(). `values` is fp32 and may be overwritten; the result has one
// dimension.
at::Tensor denormalised(const Normalisation& by, at::Tensor values, at::ScalarType type);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_NORMS_H_
