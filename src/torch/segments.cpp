// SPDX-License-Identifier: Apache-2.0

#include "torch/segments.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include <string>

namespace backfold::torch_layer {

void make_segments_expandable() {
  namespace allocator = c10::CachingAllocator;
  if (allocator::AcceleratorAllocatorConfig::use_expandable_segments()) return;
  // torch forgets what is not named again; of one name the last counts.
  std::string settings = allocator::getAllocatorSettings();
  if (settings.find("cudaMallocAsync") != std::string::npos) {
    TORCH_WARN("backfold: defragment=True changes nothing: the allocator's settings (", settings,
               ") choose cudaMallocAsync, which has no segments.");
    return;
  }
  if (!settings.empty()) settings += ',';
  allocator::setAllocatorSettings(settings + "expandable_segments:True");
}

}  // namespace backfold::torch_layer
