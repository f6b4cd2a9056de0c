// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/host_target.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

#include "backfold/predicate.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {
namespace {

struct HostTarget {
  Backend backend = Backend::kCpu;
  std::string_view simd_target;
  std::string_view ran;
};

thread_local HostTarget chosen;

}  // namespace

void use_host_target(const std::string& name) {
  if (name.empty() || name == "reference") {
    chosen = {name.empty() ? Backend::kCpu : Backend::kReference, {}, {}};
    return;
  }
  const auto known = simd_targets();
  const auto found = std::find(known.begin(), known.end(), name);
  std::string names = "reference";
  for (const std::string_view one : known) names += ", " + std::string(one);
  TORCH_CHECK_VALUE(found != known.end(), "backfold: target must be one of ", names, ", got '",
                    name, "'");
  chosen = {Backend::kSimd, *found, {}};
}

std::string_view host_target_that_ran() { return chosen.ran; }

std::string_view usual_host_target() {
  const PredicateFormat format{.count = 1};
  alignas(kPayloadAlignment) std::array<std::byte, kPayloadAlignment> payload;
  const float source = 0;
  std::string_view ran;
  check(pack(format, &source, {payload.data(), payload.size()}, {.ran = &ran}));
  return ran;
}

void follow_host_target(Execution& execution) {
  if (chosen.backend == Backend::kCpu) return;
  execution.backend = chosen.backend;
  execution.simd_target = chosen.simd_target;
  execution.ran = &chosen.ran;
}

}  // namespace backfold::torch_layer
