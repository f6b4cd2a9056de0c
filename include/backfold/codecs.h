// SPDX-License-Identifier: Apache-2.0
//
// Codecs by name, and the places they apply to.
//
//   backfold::Controller fold(*model, {.codec = {{{.path = "encoder.*"}, codecs::Pool{4}},
//                                                {{.op = "aten::addmm"}, codecs::Project{8, 2}}}});
//
// The first rule whose selector matches a saved tensor decides how it is kept; the plan decides on
// all others. Codecs apply to tensors whose values backward reads. A tensor that is needed only as
// signs, bits or indices is kept as those, exactly, whatever the codec.

#ifndef BACKFOLD_CODECS_H_
#define BACKFOLD_CODECS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

namespace backfold {

namespace codecs {

// The group quantizer at one width: unbiased. With `per_sample`, each sample (of the first
// dimension) gets its own width, `bits` on average; larger ranges get more bits (ActNN).
struct Quantize {
  int bits = 4;
  bool per_sample = false;
};

// Averages of blocks of positions, and nothing else: BIASED.
struct Pool {
  int block = 4;
};

// Averages of blocks, and the residual in a few bits: unbiased (DIVISION).
struct PoolResidual {
  int block = 8;
  int bits = 2;
};

// A random projection of the last dimension to 1 / `ratio` of its size, in a few bits: unbiased
// (EXACT).
struct Project {
  int ratio = 8;
  int bits = 2;
};

// One range per channel that follows the tensor from step to step, widened for a step that exceeds
// it: unbiased (Mesa).
struct RunningRange {
  int bits = 8;
  double decay = 0.9;
};

// The derivative of GELU or SiLU as one of a few constants: BIASED.
struct FewBit {
  int bits = 3;
};

// Folds only what can be folded exactly.
struct Exact {};

// Keeps the tensor by reference, as without Backfold.
struct Keep {};

}  // namespace codecs

using Codec = std::variant<codecs::Quantize, codecs::Pool, codecs::PoolResidual, codecs::Project,
                           codecs::RunningRange, codecs::FewBit, codecs::Exact, codecs::Keep>;

// "Pool(block=4)", as in Python.
std::string describe(const Codec& codec);

bool is_biased(const Codec& codec);

// Raises ValueError naming the argument, its value and what is allowed.
void check_codec(const Codec& codec);

// Which saved tensors a rule applies to. A field that is left out matches everything.
struct Selector {
  std::string path = {};  // of the part of the model, a shell pattern
  // Operator or autograd.Function that saves the tensor, a shell pattern: "aten::gelu",
  // "FlashAttnFunc".
  std::string op = {};
  std::optional<at::ScalarType> type = {};  // of the elements
  std::int64_t min_bytes = 0;               // that autograd alone would keep for the tensor
};

// Raises ValueError naming the field, its value and what is allowed.
void check_selector(const Selector& where);

struct CodecRule {
  Selector where = {};
  Codec codec = {};
  // Whether a tensor that the codec does not fit raises ValueError. If not, or if the selector
  // matches everything, the plan decides on such a tensor.
  bool strict = true;
};

}  // namespace backfold

#endif  // BACKFOLD_CODECS_H_
