// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/combine.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

namespace backfold::torch_layer {
namespace {

// What a process that has the site says about it.
struct Voice {
  const SiteRecord* record = nullptr;
  std::int64_t steps = 0;  // of that process
  std::size_t rank = 0;
};

// The table of a site for packets of `root`; null if the process sees the site otherwise.
const Sensitivity* table_for(const SiteRecord& record, const std::string& root) {
  if (record.root == root) return &record.sensitivity;
  for (const auto& [name, sensitivity] : record.also)
    if (name == root) return &sensitivity;
  return nullptr;
}

bool is_measured(const Sensitivity* table) { return table && !table->errors.empty(); }

// The layout that most processes measured with, the first of them if several are equally common.
Grouping common_grouping(const std::vector<const Sensitivity*>& tables) {
  const Sensitivity* best = nullptr;
  std::ptrdiff_t most = 0;
  for (const Sensitivity* table : tables) {
    const auto count = std::count_if(tables.begin(), tables.end(), [&](const Sensitivity* other) {
      return other->grouping == table->grouping;
    });
    if (count > most) {
      most = count;
      best = table;
    }
  }
  return best->grouping;
}

// What the menu's codecs make of the tensor, over the processes that tried them.
c10::SmallVector<Sensitivity::Offer, 1> common_offers(
    const std::vector<const Sensitivity*>& tables) {
  std::map<int, std::vector<Sensitivity::Offer>> by_codec;
  for (const Sensitivity* table : tables)
    if (table->offers_at == tables.front()->offers_at)
      for (const Sensitivity::Offer& offer : table->offers) by_codec[offer.codec].push_back(offer);
  c10::SmallVector<Sensitivity::Offer, 1> offers;
  for (const auto& [codec, given] : by_codec) {
    Sensitivity::Offer offer{codec, 0, 0};
    for (const Sensitivity::Offer& one : given) {
      offer.bits = std::max(offer.bits, one.bits);
      offer.error += one.error / static_cast<double>(given.size());
    }
    offers.push_back(offer);
  }
  return offers;
}

Sensitivity mean_of(std::vector<const Sensitivity*> tables) {
  Sensitivity mean;
  std::erase_if(tables, [](const Sensitivity* table) { return !is_measured(table); });
  if (tables.empty()) return mean;
  mean.grouping = common_grouping(tables);
  std::erase_if(tables,
                [&](const Sensitivity* table) { return !(table->grouping == mean.grouping); });
  mean.estimate = tables.front()->estimate;
  mean.offers_at = tables.front()->offers_at;
  mean.offers = common_offers(tables);
  // Below the narrowest width that a process measured it knows nothing.
  int least = 0;
  std::set<int> widths;
  for (const Sensitivity* table : tables) {
    least = std::max(least, table->errors.front().first);
    for (const auto& [bits, error] : table->errors) widths.insert(bits);
  }
  for (const int bits : widths) {
    if (bits < least) continue;
    double sum = 0;
    for (const Sensitivity* table : tables) {
      const auto known = std::find_if(table->errors.begin(), table->errors.end(),
                                      [&](const auto& entry) { return entry.first == bits; });
      sum += known != table->errors.end() ? known->second : error_at(*table, bits);
    }
    mean.errors.emplace_back(bits, sum / static_cast<double>(tables.size()));
  }
  return mean;
}

at::Tensor all_scores(const std::vector<Voice>& voices) {
  std::vector<at::Tensor> scores;
  for (const Voice& voice : voices)
    if (voice.record->scores.defined()) scores.push_back(voice.record->scores.flatten().cpu());
  return scores.empty() ? at::Tensor() : at::cat(scores);
}

// How products make the tensor again, which takes as long as where it takes longest; nothing if one
// process cannot. The bytes of the largest step are those that a plan counts, so what only others
// keep exactly is none of its business.
void combine_remaking(const std::vector<Voice>& voices, const SiteRecord* largest,
                      SiteRecord& record) {
  record.remaking.reset();
  record.made_from.clear();
  const bool all = std::all_of(voices.begin(), voices.end(), [](const Voice& voice) {
    return voice.record->remaking.has_value();
  });
  const bool of_largest = largest && largest->own;
  const Voice& first = voices.front();
  if (!all || (!of_largest && first.record->remaking->exact)) return;
  const SiteRecord& known = of_largest ? *largest : *first.record;
  record.remaking = known.remaking;
  record.made_from = known.made_from;
  // Products are counted by each process for itself.
  if (!of_largest) record.remaking->product += static_cast<std::int64_t>(first.rank + 1) << 32;
  for (const Voice& voice : voices)
    record.remaking->ms = std::max(record.remaking->ms, voice.record->remaking->ms);
}

// `voices` are in the order of ranks, `largest` is what the process with the largest step knows.
SiteRecord combined(const std::vector<Voice>& voices, const SiteRecord* largest,
                    std::int64_t steps) {
  // What the site is, if they differ, is said by the first that measured it.
  const auto leader = std::find_if(voices.begin(), voices.end(), [](const Voice& voice) {
    return is_measured(&voice.record->sensitivity);
  });
  const SiteRecord& first = *(leader == voices.end() ? voices.front() : *leader).record;
  SiteRecord record = first;
  record.ranges = record.norms = at::Tensor();
  combine_remaking(voices, largest, record);
  record.scores = all_scores(voices);
  record.last_step = -1;
  const auto mean_for = [&](const std::string& root) {
    std::vector<const Sensitivity*> tables;
    for (const Voice& voice : voices) tables.push_back(table_for(*voice.record, root));
    return mean_of(std::move(tables));
  };
  for (const Voice& voice : voices) {
    if (voice.record->last_step >= 0)  // as long ago as in the process that did so last
      record.last_step =
          std::max(record.last_step, steps - (voice.steps - voice.record->last_step));
    record.alive &= voice.record->alive;
    record.floor = std::max(record.floor, voice.record->floor);
    record.served_floor = std::max(record.served_floor, voice.record->served_floor);
    record.zero_exact |= voice.record->zero_exact;
    record.tried &= voice.record->tried;
    record.remade &= voice.record->remade && record.remaking.has_value();
    record.stuck |= voice.record->stuck;
    if (voice.record->exact_by.empty()) record.exact_by.clear();
    if (record.reference.elements == 0) record.reference = voice.record->reference;
  }
  if (largest && largest->reference.elements > 0) record.reference = largest->reference;
  if (largest) record.stay = largest->stay;
  record.sensitivity = mean_for(record.root);
  for (auto& [root, sensitivity] : record.also) sensitivity = mean_for(root);
  return record;
}

std::int64_t most_of(const std::vector<std::int64_t>& moments) {
  return moments.empty() ? 0 : *std::max_element(moments.begin(), moments.end());
}

}  // namespace

bool is_larger(const StepReference& one, const StepReference& other) {
  if (one.saved_bytes != other.saved_bytes) return one.saved_bytes > other.saved_bytes;
  return most_of(one.moments) > most_of(other.moments);
}

std::optional<double> slowest_link(const std::vector<Tables>& ranks) {
  double slowest = 0;
  for (const Tables& rank : ranks) {
    if (!rank.reference.ms_per_sent_byte) return std::nullopt;
    slowest = std::max(slowest, *rank.reference.ms_per_sent_byte);
  }
  return slowest;
}

std::vector<SiteRecord> Combined::weighted() const {
  std::vector<SiteRecord> sites = tables.sites;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    for (auto& [bits, error] : sites[i].sensitivity.errors) error *= shares[i];
    for (auto& [root, sensitivity] : sites[i].also)
      for (auto& [bits, error] : sensitivity.errors) error *= shares[i];
  }
  return sites;
}

Combined combine(const std::vector<Tables>& ranks) {
  Combined result;
  Tables& tables = result.tables;
  std::size_t largest = 0, known = 0;
  std::int64_t margin = 0;
  double energy = 0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    tables.steps = std::max(tables.steps, ranks[rank].steps);
    if (is_larger(ranks[rank].reference, ranks[largest].reference)) largest = rank;
    margin = std::max(margin, ranks[rank].reference.margin);
    if (!ranks[rank].gradient_energy) continue;
    energy += *ranks[rank].gradient_energy;
    ++known;
  }
  tables.reference = ranks[largest].reference;
  tables.reference.margin = margin;
  tables.reference.ms_per_sent_byte = slowest_link(ranks);
  tables.holdings = ranks[largest].holdings;
  if (known > 0) tables.gradient_energy = energy / static_cast<double>(known);
  std::map<std::string, std::vector<Voice>> sites;
  std::map<std::string, const SiteRecord*> of_largest;
  std::vector<const std::string*> order;
  for (const SiteRecord& record : ranks[largest].sites) {
    of_largest.emplace(record.name, &record);
    order.push_back(&record.name);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (const SiteRecord& record : ranks[rank].sites) {
      if (!record.own) continue;
      std::vector<Voice>& voices = sites[record.name];
      if (voices.empty() && !of_largest.contains(record.name)) order.push_back(&record.name);
      voices.push_back({&record, ranks[rank].steps, rank});
    }
  for (const std::string* name : order) {
    const auto found = sites.find(*name);
    if (found == sites.end()) continue;  // of a process that is no more
    const std::vector<Voice>& voices = found->second;
    const auto largest_has = of_largest.find(*name);
    tables.sites.push_back(combined(
        voices, largest_has == of_largest.end() ? nullptr : largest_has->second, tables.steps));
    result.shares.push_back(static_cast<double>(voices.size()) / static_cast<double>(ranks.size()));
  }
  return result;
}

}  // namespace backfold::torch_layer
