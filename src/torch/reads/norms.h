// SPDX-License-Identifier: Apache-2.0
//
// Norms: what their backward reads of an input, and how that is packed.
//
// The backward of layer, RMS, group, batch and instance norm reads (x - mean) * rstd, with the
// exact statistics kept beside it. A group of the quantizer that spans several rows lends a nearly
// constant row the noise of its neighbours, and rstd multiplies it: a class token of zeros with an
// epsilon of 1e-12 had 7e13 times its gradient as error. So where groups mix rows, the normalised
// values are packed, which have one scale whatever the row, and packed / rstd + mean comes back.
// "Row" stands for the elements that share a statistic: a channel, for batch norm.
//
// A norm that is written out by hand hands no statistics over: rows are scaled by their largest
// element then, so that each keeps its own scale.

#ifndef BACKFOLD_TORCH_READS_NORMS_H_
#define BACKFOLD_TORCH_READS_NORMS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>

#include "backfold/group.h"
#include "torch/reads/exact_ops.h"

namespace backfold::torch_layer {

// An operator that is a norm of one of its arguments, or a part of one.
struct Norm {
  enum class Rows : std::uint8_t {
    kNormalizedShape,  // the dimensions of that argument are the last ones of a row
    kChannels,         // all elements of a channel, while training
    kGroups,           // all elements of some channels of a sample
    kLast,             // the last dimension; the operator has no statistics
  };
  std::string_view op, slot;
  Rows rows = Rows::kLast;
  int mean = -1, rstd = -1;  // among the operator's results, where they are
  // Not a norm, but the gradient that arrives may be a norm's: as large for a row as the row is
  // small. What that does is measured by the first plan; until then rows keep their own scale (not
  // where one width is asked for everywhere: Swin-T's step took 1.61 of plain's so, 1.25 without).
  bool until_planned = false;
};

// The norm that an operator is of this argument, or null.
const Norm* norm_of(std::string_view op, std::string_view slot);

// What a call makes of a norm.
struct NormCall {
  const Norm* norm = nullptr;
  std::int64_t count = 1;  // dimensions of a row, or groups

  bool has_statistics() const { return norm->rstd >= 0; }
};
// None where a norm takes its statistics from elsewhere, as batch norm does outside of training.
std::optional<NormCall> norm_call(const Norm& norm, const Call& call);

// How the rows of a norm lie in the memory of a tensor.
struct NormRows {
  struct Axis {
    std::int64_t size = 1, stride = 0;
    bool shared = false;            // by elements of one row
    std::int64_t table_stride = 0;  // of statistics, which stand in the order of memory
  };
  c10::SmallVector<Axis, 6> axes;
  std::int64_t count = 0;  // of rows
  // Where rows are regular, element i of the memory is in row i / run % count; else run is 0.
  std::int64_t run = 0;
};
// None for a tensor whose elements share memory.
std::optional<NormRows> rows_of(const NormCall& call, const at::Tensor& dense);

// Whether so few values share a statistic that backward subtracts almost all of the gradient again:
// noise is what would be left, so the input stays as it is.
bool has_few_values(const NormCall& call, const at::Tensor& tensor);

// Whether some group of a format holds elements of several rows.
bool mixes(const GroupFormat& format, const NormRows& rows);

// Statistics of one call.
struct Normalisation {
  NormRows rows;
  at::Tensor mean, rstd;  // by row, in fp32 (fp64 for that type); no mean: 0
};

// From an operator's results; none where they do not hold the statistics.
std::optional<Normalisation> normalisation_of(const NormCall& call, const NormRows& rows,
                                              c10::ArrayRef<c10::IValue> results);
// Of a norm without statistics: 1 / the largest magnitude of each row.
Normalisation scale_of(const NormRows& rows, const at::Tensor& dense);

// (x - mean) * rstd in fp32, in the memory order of the tensor.
at::Tensor normalised(const Normalisation& by, const at::Tensor& dense);
// Errors of a tensor, as its norm sees them: times rstd. For errors in the memory order of the
// tensor, which are overwritten.
void scale_errors(const Normalisation& by, at::Tensor& errors);
// And back: `values` is fp32 and is used up; what comes back has one dimension.
at::Tensor denormalised(const Normalisation& by, at::Tensor values, at::ScalarType type);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_NORMS_H_
