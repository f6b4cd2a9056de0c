// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/moments.h"

#include <algorithm>
#include <limits>

#include "torch/plan/remaking.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();

// What was taken at a moment, with what the operation that follows it needs. Where that is not
// known because an earlier one needed more, it is taken to need as much as the one at the peak.
std::vector<std::int64_t> levels_of(const std::vector<Timeline::Moment>& moments) {
  const auto highest = std::max_element(
      moments.begin(), moments.end(), [](const auto& a, const auto& b) { return a.most < b.most; });
  const std::int64_t needed = highest->most - highest->now;
  std::vector<std::int64_t> levels;
  for (const Timeline::Moment& moment : moments)
    levels.push_back(std::max(moment.most, std::min(moment.so_far, moment.now + needed)));
  return levels;
}

// Bytes that a site held in a step and that a plan decides on.
std::int64_t decided_bytes(const Site& site, std::int64_t step) {
  const Ledger& ledger = site.ledger;
  if (ledger.step != step || ledger.kind == Kind::kParameter) return 0;
  const bool packs = ledger.lossy.elements > 0 && site.rule == -1;
  if (!packs && !(site.remaking && site.remaking->exact)) return 0;
  return ledger.held_bytes - (ledger.away ? ledger.away->left.load() : 0);
}

// Adds to all moments of [from, until).
void add_between(std::vector<std::int64_t>& sums, int from, int until, std::int64_t bytes) {
  const int end = std::min<int>(until, static_cast<int>(sums.size()));
  for (int i = from; i < end; ++i) sums[static_cast<std::size_t>(i)] += bytes;
}

// What is there while products make the marked tensors, at the moments of their readers.
std::vector<std::int64_t> made_again(const SiteTable& sites, const Marked& marked,
                                     std::size_t moments) {
  std::vector<std::int64_t> most(moments, 0);
  for (const Site& site : sites.sites()) {
    if (!marked.contains(&site) || !site.remaking) continue;
    const std::int64_t bytes = made_on_the_way(site, marked);
    const auto end = std::min(static_cast<std::size_t>(site.stay.until), moments);
    for (auto i = static_cast<std::size_t>(site.stay.read); i < end; ++i)
      most[i] = std::max(most[i], bytes);
  }
  return most;
}

// Which moments to keep: none at which nothing is there that another one does not have, read or
// not, and no more is taken besides.
std::vector<bool> worth_keeping(const SiteTable& sites, const std::vector<std::int64_t>& rest) {
  std::vector<bool> begins(rest.size() + 1), ends(rest.size() + 1), keeps(rest.size(), true);
  for (const Site& site : sites.sites()) {
    begins[std::min(static_cast<std::size_t>(site.stay.from), rest.size())] = true;
    ends[std::min(static_cast<std::size_t>(site.stay.until), rest.size())] = true;
    ends[std::min(static_cast<std::size_t>(site.stay.read), rest.size())] = true;
  }
  std::int64_t most = kLeast;
  for (std::size_t i = 0; i < rest.size(); ++i) {
    if (begins[i]) most = kLeast;
    keeps[i] = rest[i] > most;
    most = std::max(most, rest[i]);
  }
  most = kLeast;
  for (std::size_t i = rest.size(); i-- > 0;) {
    if (ends[i + 1]) most = kLeast;
    if (!keeps[i]) continue;
    keeps[i] = rest[i] > most;
    most = std::max(most, rest[i]);
  }
  return keeps;
}

// Moments are counted anew.
void keep_only(const std::vector<bool>& keeps, SiteTable& sites, std::vector<std::int64_t>& rest) {
  std::vector<int> before(keeps.size() + 1, 0);
  std::vector<std::int64_t> kept;
  for (std::size_t i = 0; i < keeps.size(); ++i) {
    before[i + 1] = before[i] + keeps[i];
    if (keeps[i]) kept.push_back(rest[i]);
  }
  const auto moved = [&](int& moment) {
    if (moment != Site::Stay::kAlways) moment = before[static_cast<std::size_t>(moment)];
  };
  for (Site& site : sites.sites()) {
    moved(site.stay.from);
    moved(site.stay.read);
    moved(site.stay.until);
  }
  rest = std::move(kept);
}

}  // namespace

void note_moments(SiteTable& sites, const Timeline::Watched& watched, StepReference& reference) {
  const std::vector<Timeline::Moment>& moments = watched.moments;
  const auto moment_at = [&](std::int64_t event) {
    if (event == Timeline::Stay::kNever) return Site::Stay::kAlways;
    const auto found = std::lower_bound(moments.begin(), moments.end(), event,
                                        [](const auto& a, std::int64_t b) { return a.event < b; });
    return static_cast<int>(found - moments.begin());
  };
  for (Site& site : sites.sites()) {
    const auto seen = watched.stays.find(&site);
    site.stay = {};
    if (seen == watched.stays.end()) continue;
    site.stay = {moment_at(seen->second.from), moment_at(seen->second.read),
                 moment_at(seen->second.until)};
  }
  // Who saved the same memory later reads it earlier, and is given as much.
  for (const Site& site : sites.sites())
    if (site.first_saver && site.ledger.step == watched.step &&
        (site.ledger.kind == Kind::kGeometry || site.ledger.kind == Kind::kShared))
      site.first_saver->stay.read = std::min(site.first_saver->stay.read, site.stay.read);
  std::vector<std::int64_t> rest = levels_of(moments);
  // A tensor that is unfolded by choice counts as made once it is read, as if it had a packet.
  for (const Site& site : sites.sites()) {
    const bool unfolded = site.ledger.lossy.elements > 0 && site.ledger.kind == Kind::kRaw;
    add_between(rest, site.stay.from,
                unfolded ? std::min(site.stay.read, site.stay.until) : site.stay.until,
                -decided_bytes(site, watched.step));
  }
  const std::vector<std::int64_t> made = made_again(sites, marked_now(sites), rest.size());
  for (std::size_t i = 0; i < rest.size(); ++i)
    rest[i] = std::max<std::int64_t>(0, rest[i] - made[i]);
  keep_only(worth_keeping(sites, rest), sites, rest);
  reference.moments = std::move(rest);
}

bool has_moments(const StepReference& reference, const Target& target) {
  return target.kind == Target::Kind::kPeak && !reference.moments.empty();
}

std::int64_t headroom(const StepReference& reference, const Target& target) {
  const auto value = static_cast<std::int64_t>(target.value);
  if (!has_moments(reference, target)) return value - reference.margin;
  const std::int64_t rest = *std::max_element(reference.moments.begin(), reference.moments.end());
  return std::max<std::int64_t>(0, value - reference.margin - rest);
}

std::vector<std::int64_t> left_for_packets(const SiteTable& sites, const StepReference& reference,
                                           const Target& target, const Marked& marked) {
  std::vector<std::int64_t> left;
  const std::vector<std::int64_t> made = made_again(sites, marked, reference.moments.size());
  for (std::size_t i = 0; i < made.size(); ++i)
    left.push_back(static_cast<std::int64_t>(target.value) - reference.margin -
                   reference.moments[i] - made[i]);
  for (const Site& site : sites.sites())
    if (site.remaking && site.remaking->exact && !marked.contains(&site))
      add_between(left, site.stay.from, site.stay.until, -site.remaking->bytes);
  return left;
}

}  // namespace backfold::torch_layer
