// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/rankings.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cmath>

#include "torch/codec/coding.h"
#include "torch/probe/gains.h"
#include "torch/store/geometry.h"

namespace backfold::torch_layer {

const Site& root_of(const Site& site) { return site.root ? *site.root : site; }

GroupFormat format_with(const Site& site, const at::Tensor& tensor, const Choice& choice) {
  return group_format(tensor, *element_type(tensor.scalar_type()), choice,
                      root_of(site).zero_exact);
}

at::Tensor difference(const at::Tensor& a, const at::Tensor& b) {
  return as_float(a) - as_float(b);
}

void Rankings::rank(const at::Tensor& tensor, const Site& site, int bits, const NextKey& next_key,
                    const std::optional<Normalisation>& by) {
  const auto [found, first] = rankings_.try_emplace(&root_of(site));
  if (!first) return;
  Ranking& ranking = found->second;
  ranking.bits = bits;
  ranking.device = tensor.device().type();
  const bool zero_exact = root_of(site).zero_exact;
  const auto groups = groups_of(tensor);
  std::vector<at::Tensor> errors;
  const bool scaled = by && tensor.is_non_overlapping_and_dense();
  const auto error_of = [&](const at::Tensor& folded) {
    at::Tensor error = difference(folded, tensor);
    if (scaled) scale_errors(*by, error);
    return error;
  };
  for (std::size_t i = 0; i < kGroupings.size(); ++i) {
    if (groups[i] == 0 || (kGroupings[i].layout == Layout::kRotated && zero_exact)) continue;
    const GroupFormat format = format_with(site, tensor, {bits, kGroupings[i]});
    // Normalised values are not rotated.
    if (format.layout == Layout::kRotated && by && mixes(format, by->rows)) continue;
    ranking.groupings.push_back(kGroupings[i]);
    errors.push_back(error_of(round_trip(tensor, format, next_key(), by)));
  }
  // Tensors that are read finely, or for their signs, are not offered other codecs.
  const bool open = site.floor == 0 && !zero_exact && fills_its_span(tensor, span_of(tensor));
  for (std::size_t i = 0; open && i < menu_.size(); ++i) {
    const Key key = next_key();
    const Coding coding = coding_for(menu_[i], tensor, {site.op->name}, key);
    const auto* format = std::get_if<Format>(&coding);
    if (!format) continue;
    const double stored =
        8.0 * static_cast<double>(packed_bytes(*format)) / static_cast<double>(tensor.numel());
    ranking.offers.push_back({static_cast<int>(i), stored, 0});
    errors.push_back(error_of(round_trip(tensor, *format, key)));
  }
  ranking.errors = at::_foreach_norm(errors, 2);
}

void Rankings::settle() {
  std::vector<at::Tensor> all;
  for (const auto& [site, ranking] : rankings_)
    all.insert(all.end(), ranking.errors.begin(), ranking.errors.end());
  if (all.empty()) return;
  const std::vector<double> values = read_energies(all);
  std::size_t i = 0;
  for (auto& [site, ranking] : rankings_) {
    double least = INFINITY, best = 0;
    for (const Grouping& grouping : ranking.groupings) {
      // One that takes twice the time must halve the error's energy, as half a bit more would.
      const double cost = values[i] * relative_time(grouping.layout, ranking.device);
      if (cost < least) {
        least = cost;
        best = values[i];
        ranking.best = grouping;
      }
      ++i;
    }
    for (Sensitivity::Offer& offer : ranking.offers) {
      offer.error = best > 0 ? values[i] / best : 1;
      ++i;
    }
    ranking.errors.clear();
  }
}

Grouping Rankings::best(const Site& root) const {
  const auto found = rankings_.find(&root);
  return found == rankings_.end() ? Grouping{} : found->second.best;
}

Sensitivity Rankings::table(const Site& root) const {
  const Ranking& ranking = rankings_.at(&root);
  Sensitivity sensitivity;
  sensitivity.grouping = ranking.best;
  sensitivity.offers_at = ranking.bits;
  sensitivity.offers = ranking.offers;
  return sensitivity;
}

}  // namespace backfold::torch_layer
