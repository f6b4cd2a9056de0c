// SPDX-License-Identifier: Apache-2.0
//
// What is known about sites, as JSON.

#ifndef BACKFOLD_TORCH_JSON_SITE_H_
#define BACKFOLD_TORCH_JSON_SITE_H_

#include <string>
#include <vector>

#include "torch/capture/site.h"
#include "torch/codec/policy.h"
#include "torch/json/fields.h"

namespace backfold::torch_layer {

// What messages about a state that is read call it.
inline constexpr const char* kState = "state";

// {"bits": 4 or "raw", "layout": "flat"}, and "codec" if the plan chose one of the menu.
Json choice_as_json(const Choice& choice, const Policy& policy);
// Raises ValueError, naming the site.
Choice choice_from_json(const std::string& site, const Json& json, const Policy& policy);

Json records_as_json(const std::vector<SiteRecord>& records, const Policy& policy);
std::vector<SiteRecord> records_from_json(const Json& json, const Policy& policy);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_JSON_SITE_H_
