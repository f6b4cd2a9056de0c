// SPDX-License-Identifier: Apache-2.0
//
// The parts of the table in exact_ops.h, one file each.

#ifndef BACKFOLD_TORCH_READS_EXACT_OPS_ROWS_H_
#define BACKFOLD_TORCH_READS_EXACT_OPS_ROWS_H_

#include <c10/util/ArrayRef.h>

#include <vector>

#include "torch/reads/exact_ops.h"

namespace backfold::torch_layer {

c10::ArrayRef<Rule> predicate_rules();
c10::ArrayRef<Rule> index_rules();
c10::ArrayRef<Rule> geometry_rules();
c10::ArrayRef<Rule> function_rules();
std::vector<Rule> value_rules();

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_READS_EXACT_OPS_ROWS_H_
