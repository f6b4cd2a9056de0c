// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/measurements.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace backfold::torch_layer {

void Measurements::drop_relative(const std::set<const Site*>& sites) {
  std::erase_if(relative_, [&](const RelativeError& one) { return sites.contains(one.site); });
}

// Energies of all measurements, then pairs of energies of the relative errors.
std::vector<double> Measurements::read() {
  // The norms of small tensors are taken here, all at once.
  std::map<std::string, std::vector<Measurement*>> open;
  for (Measurement& one : measured_)
    if (!one.summed) open[one.values.device().str()].push_back(&one);
  for (const auto& [device, measurements] : open) {
    std::vector<at::Tensor> values;
    for (const Measurement* one : measurements) values.push_back(one->values);
    const std::vector<at::Tensor> norms = at::_foreach_norm(values, 2);
    for (std::size_t k = 0; k < norms.size(); ++k) measurements[k]->values = norms[k];
  }
  std::vector<at::Tensor> all;
  for (const Measurement& one : measured_) all.push_back(one.values);
  for (const RelativeError& one : relative_) {
    all.push_back(one.norm);
    all.push_back(one.of_error);
  }
  return all.empty() ? std::vector<double>() : read_energies(all);
}

int Measurements::write_tables(const Gains& gains, const Rankings& rankings, double scale) {
  const std::vector<double> values = read();
  std::map<std::pair<Site*, const Site*>, Sensitivity> tables;  // by site and root
  const auto enter = [&](Site* site, const Site* root, int bits, Sensitivity::Estimate estimate,
                         double energy) {
    Sensitivity& table = tables[{site, root ? root : &root_of(*site)}];
    table.estimate = std::max(table.estimate, estimate);
    auto at = std::find_if(table.errors.begin(), table.errors.end(),
                           [&](const auto& entry) { return entry.first == bits; });
    if (at == table.errors.end()) {
      table.errors.emplace_back(bits, 0.0);
      at = table.errors.end() - 1;
    }
    at->second += energy * scale;
  };
  std::size_t i = 0;
  for (const Measurement& one : measured_) {
    const double gain = one.via ? gains.of(one.via) : one.into ? gains.amplification(one.into) : 1;
    for (const int bits : one.bits)
      enter(one.site, one.root, bits, one.via ? Sensitivity::Estimate::kSignalGain : one.estimate,
            values[i++] * gain * one.factor * one.factor);
  }
  for (const RelativeError& one : relative_) {
    const double energy = values[i++], of_error = values[i++];
    if (one.call->node && energy > 0)
      enter(one.site, nullptr, one.bits, Sensitivity::Estimate::kSignalGain,
            of_error / energy * gains.sent_by(one.call->node));
  }
  std::set<const Site*> written;
  for (auto& [place, table] : tables) {
    const auto [site, root] = place;
    // An infinite or NaN error says nothing, so the site keeps the table it has.
    if (std::any_of(table.errors.begin(), table.errors.end(),
                    [](const auto& entry) { return !std::isfinite(entry.second); }))
      continue;
    std::sort(table.errors.begin(), table.errors.end());
    if (rankings.knows(*root)) {
      auto [estimate, errors] = std::pair(table.estimate, std::move(table.errors));
      table = rankings.table(*root);
      table.estimate = estimate;
      table.errors = std::move(errors);
    }
    written.insert(site);
    if (root == &root_of(*site)) site->sensitivity = table;
    for (Site::Also& other : site->also)
      if (other.root == root) other.sensitivity = table;
  }
  measured_.clear();
  relative_.clear();
  return static_cast<int>(written.size());
}

}  // namespace backfold::torch_layer
