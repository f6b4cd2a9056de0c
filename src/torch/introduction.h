// SPDX-License-Identifier: Apache-2.0
//
// What a process says of its model and options to the others that train with it, and how to tell
// what differs.

#ifndef BACKFOLD_TORCH_INTRODUCTION_H_
#define BACKFOLD_TORCH_INTRODUCTION_H_

#include <cstddef>
#include <string>

#include "torch/json/fields.h"

namespace backfold::torch_layer {

struct State;

Json introduction_of(const State& state);

// One clause that names the first difference between rank 0 and another; empty if there is none.
std::string difference_between(const Json& first, const Json& other, std::size_t rank);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_INTRODUCTION_H_
