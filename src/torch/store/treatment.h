// SPDX-License-Identifier: Apache-2.0
//
// How one tensor is best kept, seen by itself: by what it is, what its backward reads, and what was
// learned about its site. That other nodes may save it, too, is the store's business.

#ifndef BACKFOLD_TORCH_STORE_TREATMENT_H_
#define BACKFOLD_TORCH_STORE_TREATMENT_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch/capture/site.h"
#include "torch/reads/demand.h"
#include "torch/store/shared_packet.h"

namespace backfold::torch_layer {

struct Treatment {
  Kind kind = Kind::kPassed;
  const char* reason = "";
  std::optional<Format> format;  // without a count; none: by reference
  bool by_choice = false;        // whether other widths could have been chosen
};

// Why a tensor cannot be packed, whatever its site; null where it can.
const char* obstacle_in(const at::Tensor& tensor);

// What autograd keeps alive for one save, as far as it can be told.
std::int64_t saved_bytes(const at::Tensor& tensor);

// Whether a packet answers a demand of `site` for at least `bits` bits, where values are read. A
// packet of a codec that the user named answers only those that the same rule is for.
bool serves(const SharedPacket& packet, const Site& site, const Demand& demand, int bits);

// Whether rounding lent no row the noise of another.
bool keeps_rows(const SharedPacket& packet, const NormRows& rows);

// Whether it answers a norm without lending rows each other's noise.
bool serves_norm(const SharedPacket& packet, const Demand& demand, const at::Tensor& tensor);

// The rows by which a norm's input is normalised before it is packed; none where groups do not mix
// them. Groups are not rotated then. `planned`: a plan has chosen the format.
std::optional<NormRows> rows_to_normalise(Format& format, const Demand& demand,
                                          const at::Tensor& dense, bool planned);

// For a tensor without obstacles, of a type that has a codec. No `choice`: only what is exact.
Treatment choose(const at::Tensor& tensor, const Demand& demand, Site::Sign sign,
                 const std::optional<Choice>& choice);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_TREATMENT_H_
