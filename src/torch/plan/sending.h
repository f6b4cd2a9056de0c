// SPDX-License-Identifier: Apache-2.0
//
// What a plan has leave its device, so that a budget is kept.
//
// Places leave as a whole, in the order of forward: what is saved first is read last, and has most
// time to come back. What leaves is no part of the budget, so a packet that leaves has no reason to
// be narrow, but for the time that it takes; and a narrow one may be too small to be worth sending.

#ifndef BACKFOLD_TORCH_PLAN_SENDING_H_
#define BACKFOLD_TORCH_PLAN_SENDING_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "torch/capture/site.h"
#include "torch/plan/bundles.h"

namespace backfold::torch_layer {

// Places of which something could leave, in the order in which they were first seen: what they keep
// is in pieces that are worth sending, and nothing of it was stuck before.
std::vector<const Site*> sendable(const SiteTable& sites, std::int64_t step);

// Bytes of exact tensors that leave a place if it is sent, or all that are.
std::int64_t exact_leaving(const Site& site, const Marked& marked, std::int64_t step);
std::int64_t exact_leaving(const SiteTable& sites, const Remedies& remedies, std::int64_t step);

// The narrowest width, from `least` up, at which a bundle's packets are worth sending; none if they
// never are.
std::optional<int> width_to_send(const Target& target, const Bundle& bundle, int least);

// Leaves those options of a bundle whose packets leave, none much wider than need be, and what they
// cost then. Where there are none, all stay as they are.
void have_leave(const Bundle& bundle, std::vector<Option>& options);

// Marks these sites, and no others.
void send(SiteTable& sites, const Marked& sent);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PLAN_SENDING_H_
