// SPDX-License-Identifier: Apache-2.0
//
// Codecs by name, and the places that they are for.
//
//   backfold::Controller fold(*model, {.codec = {{{.path = "encoder.*"}, codecs::Pool{4}},
//                                                {{.op = "aten::addmm"}, codecs::Project{8, 2}}}});
//
// The first rule whose selector matches a saved tensor says how it is kept; everything else stays
// with the plan. Codecs are for tensors whose values backward reads: what is enough as signs, bits
// or indices stays that, and exact, whatever the codec.

#ifndef BACKFOLD_CODECS_H_
#define BACKFOLD_CODECS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

namespace backfold {

namespace codecs {

// The group quantizer at one width: unbiased. With `per_sample` samples (of the first dimension)
// get widths of their own, `bits` on average, the widest those with the largest ranges (ActNN).
struct Quantize {
  int bits = 4;
  bool per_sample = false;
};

// Averages of blocks of positions, and nothing else: BIASED.
struct Pool {
  int block = 4;
};

// Averages of blocks, and what is left in a few bits: unbiased (DIVISION).
struct PoolResidual {
  int block = 8;
  int bits = 2;
};

// A random projection of the last dimension to a `ratio`th, in a few bits: unbiased (EXACT).
struct Project {
  int ratio = 8;
  int bits = 2;
};

// One range for each channel that follows the tensor from step to step, widened where a step goes
// beyond it: unbiased (Mesa).
struct RunningRange {
  int bits = 8;
  double decay = 0.9;
};

// The derivative of GELU or SiLU as one of a few constants: BIASED.
struct FewBit {
  int bits = 3;
};

// Only what stays exact.
struct Exact {};

// By reference, as without Backfold.
struct Keep {};

}  // namespace codecs

using Codec = std::variant<codecs::Quantize, codecs::Pool, codecs::PoolResidual, codecs::Project,
                           codecs::RunningRange, codecs::FewBit, codecs::Exact, codecs::Keep>;

// "Pool(block=4)", as Python writes it.
std::string describe(const Codec& codec);

bool is_biased(const Codec& codec);

// Raises ValueError naming the argument, its value and what is allowed.
void check_codec(const Codec& codec);

// Which saved tensors a rule is for; what is left out matches everything.
struct Selector {
  std::string path = {};  // of the part of the model, a shell pattern
  // Operator or autograd.Function that saves it, a shell pattern: "aten::gelu", "FlashAttnFunc".
  std::string op = {};
  std::optional<at::ScalarType> type = {};  // of its elements
  std::int64_t min_bytes = 0;               // that autograd would keep for it
};

// Raises ValueError naming the part, its value and what is allowed.
void check_selector(const Selector& where);

struct CodecRule {
  Selector where = {};
  Codec codec = {};
  // Whether a tensor that the codec is not for raises ValueError. If not, and where the selector
  // matches everything, such a tensor stays with the plan.
  bool strict = true;
};

}  // namespace backfold

#endif  // BACKFOLD_CODECS_H_
