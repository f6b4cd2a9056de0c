// SPDX-License-Identifier: Apache-2.0
//
// The plan at the stop lies on a line of falling error: with the split step's slope, no plan of b
// bytes has less error than (plan at the stop) - slope * (b - stop.bytes). How far a plan lies
// above the line is its excess, the sum of the excesses of its candidates. The budgets between the
// stop and the end of the split step are the window.
//
// Sites are taken in the order of their least excess off the plan at the stop. After each, the
// frontier holds the undominated plans that differ from it in the sites taken so far. A plan whose
// excess is above that of the frontier at its worst budget in the window, the limit, improves
// nothing, so it is dropped; when all that remains lies above the limit, the frontier is optimal at
// every budget of the window (Pisinger 1995, "A minimal algorithm for the multiple-choice knapsack
// problem", for one budget).
//
// Two bounds keep the work finite: a frontier over its capacity is thinned to the plan of least
// excess per slice of bytes, and the search stops when its work is spent. So after 1, 2, 4, ...
// sites and at the end the sites left follow the order of the hulls' steps, forward or backward,
// from each plan of the frontier. One site a million times the smallest among 3,000 of up to a
// hundred times it needs this: slices of its window alone end 1% above the bound.

#include "planner/search.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace backfold::core {
namespace {

// Plans that a search may generate: about 0.2 s.
constexpr std::size_t kWork = std::size_t{1} << 24;
constexpr std::size_t kLeastCapacity = 1'024;
constexpr std::size_t kMostCapacity = 65'536;

struct State {
  std::int64_t bytes;  // of the whole plan
  double error;        // of the sites taken so far
  double excess;
  std::uint32_t parent;  // index into the frontier before
  int choice;            // of the site last taken
};

struct Link {
  std::uint32_t parent;
  int choice;
};

// Steps of the sites left, from the plan at the stop: sums over the first k of them.
struct Chain {
  std::vector<std::size_t> steps;
  std::vector<std::int64_t> bytes = {0};
  std::vector<double> error = {0};

  void add(std::span<const HullStep> all, std::size_t step) {
    steps.push_back(step);
    bytes.push_back(bytes.back() + all[step].bytes);
    error.push_back(error.back() + all[step].saved);
  }
};

// A plan of the frontier and how many steps of the chains it adds (length > 0) or takes back.
struct Pick {
  std::size_t state = 0;
  std::ptrdiff_t length = 0;
  double error = HUGE_VAL;
};

class Search {
 public:
  Search(const Menu& menu, const Stop& stop, std::int64_t budget, const std::vector<int>& base)
      : menu_(menu), stop_(stop), budget_(budget), base_(base), split_(stop.steps[stop.split]) {}

  // Returns whether choice() is proven to be optimal.
  bool run();
  const std::vector<int>& choice() const { return choice_; }

 private:
  bool exhaust();
  double excess(std::size_t site, const Candidate& candidate) const;
  void order_sites();
  void expand(std::size_t site);
  void merge_runs();
  void drop_dominated();
  void thin();
  void lower_limit();
  void offer();
  Pick best_of(const Chain& forward, const Chain& backward) const;

  const Menu& menu_;
  const Stop& stop_;
  const std::int64_t budget_;
  const std::vector<int>& base_;
  const HullStep& split_;

  std::vector<double> nearest_;     // per site: the least excess of a candidate not in the base
  std::vector<std::size_t> order_;  // sites with more than one candidate, by that
  std::size_t taken_ = 0;           // of order_
  std::size_t capacity_ = 0;
  std::size_t work_ = 0;
  double limit_ = 0;
  bool thinned_ = false;
  std::vector<State> frontier_;
  std::vector<State> scratch_;
  std::vector<std::size_t> runs_;         // starts of sorted runs in the frontier, and its end
  std::vector<std::vector<Link>> links_;  // of each site taken
  std::vector<int> choice_;               // the best plan offered so far
  double error_ = HUGE_VAL;               // of its sites with more than one candidate
};

double Search::excess(std::size_t site, const Candidate& candidate) const {
  const Candidate& base = menu_.of(site)[base_[site]];
  const double bytes = static_cast<double>(candidate.bytes - base.bytes);
  return std::max(0.0, candidate.error - base.error + split_.slope * bytes);
}

void Search::order_sites() {
  std::size_t candidates = 0;
  nearest_.assign(menu_.sites(), HUGE_VAL);
  for (std::size_t site = 0; site < menu_.sites(); ++site) {
    const std::span<const Candidate> options = menu_.of(site);
    if (options.size() < 2) continue;
    for (int i = 0; i < static_cast<int>(options.size()); ++i) {
      if (i != base_[site]) nearest_[site] = std::min(nearest_[site], excess(site, options[i]));
    }
    candidates += options.size();
    order_.push_back(site);
  }
  std::stable_sort(order_.begin(), order_.end(),
                   [&](std::size_t a, std::size_t b) { return nearest_[a] < nearest_[b]; });
  capacity_ = std::clamp(kWork / candidates, kLeastCapacity, kMostCapacity);
}

bool Search::run() {
  order_sites();
  const bool optimal = exhaust();
  if (optimal) error_ = HUGE_VAL;  // so that rounding does not prefer an earlier plan
  offer();
  return optimal;
}

// Returns whether nothing was left out.
bool Search::exhaust() {
  limit_ = split_.slope * static_cast<double>(split_.bytes);
  frontier_.push_back({stop_.bytes, 0, 0, 0, 0});
  while (taken_ < order_.size()) {
    const std::size_t site = order_[taken_];
    if (nearest_[site] > limit_) break;
    if (frontier_.size() * menu_.of(site).size() > kWork - work_) return false;
    expand(site);
    merge_runs();
    drop_dominated();
    if (frontier_.size() > capacity_) thin();
    lower_limit();
    std::vector<Link>& links = links_.emplace_back();
    links.reserve(frontier_.size());
    for (const State& state : frontier_) links.push_back({state.parent, state.choice});
    if (std::has_single_bit(++taken_)) offer();
  }
  return !thinned_;
}

// One sorted run per candidate.
void Search::expand(std::size_t site) {
  const std::span<const Candidate> options = menu_.of(site);
  scratch_.clear();
  runs_.assign(1, 0);
  for (int i = 0; i < static_cast<int>(options.size()); ++i) {
    const double more = excess(site, options[i]);
    if (more > limit_) continue;
    const std::int64_t bytes = options[i].bytes - options[base_[site]].bytes;
    for (std::size_t parent = 0; parent < frontier_.size(); ++parent) {
      const State& from = frontier_[parent];
      if (from.excess + more > limit_) continue;
      scratch_.push_back({from.bytes + bytes, from.error + options[i].error, from.excess + more,
                          static_cast<std::uint32_t>(parent), i});
    }
    if (scratch_.size() > runs_.back()) runs_.push_back(scratch_.size());
  }
  frontier_.swap(scratch_);
  work_ += frontier_.size();
}

void Search::merge_runs() {
  const auto before = [](const State& a, const State& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.error < b.error;
  };
  while (runs_.size() > 2) {
    scratch_.resize(frontier_.size());
    std::vector<std::size_t> merged = {0};
    for (std::size_t run = 0; run + 1 < runs_.size(); run += 2) {
      const std::size_t middle = runs_[run + 1];
      const std::size_t end = run + 2 < runs_.size() ? runs_[run + 2] : middle;
      const auto at = [&](std::size_t index) {
        return frontier_.begin() + static_cast<std::ptrdiff_t>(index);
      };
      std::merge(at(runs_[run]), at(middle), at(middle), at(end),
                 scratch_.begin() + static_cast<std::ptrdiff_t>(runs_[run]), before);
      merged.push_back(end);
    }
    frontier_.swap(scratch_);
    runs_.swap(merged);
  }
}

void Search::drop_dominated() {
  std::size_t kept = 0;
  for (const State& state : frontier_) {
    if (kept == 0 || state.error < frontier_[kept - 1].error) frontier_[kept++] = state;
  }
  frontier_.resize(kept);
}

// Three quarters of the slices lie in the window and as far again on either side of it, one eighth
// on each side beyond. The plan at the stop starts a slice and has no excess, so it stays.
void Search::thin() {
  const double width = static_cast<double>(split_.bytes);
  const double fine = 4 * width / static_cast<double>(capacity_);
  const auto offset = [&](const State& state) {
    return static_cast<double>(state.bytes - stop_.bytes);
  };
  const double below = std::max(0.0, -width - offset(frontier_.front()));
  const double above = std::max(0.0, offset(frontier_.back()) - 2 * width);
  const double sides = 8 / static_cast<double>(capacity_);
  const auto slice = [&](const State& state) {
    const double bytes = offset(state);
    if (bytes < -width) return std::floor((bytes + width) / (below * sides)) - 1e9;
    if (bytes > 2 * width) return std::floor((bytes - 2 * width) / (above * sides)) + 1e9;
    return std::floor(bytes / fine);
  };
  std::size_t kept = 0;
  double last = 0;
  for (const State& state : frontier_) {
    const double now = slice(state);
    if (kept == 0 || now != last) {
      frontier_[kept++] = state;
    } else if (state.excess < frontier_[kept - 1].excess) {
      frontier_[kept - 1] = state;
    }
    last = now;
  }
  thinned_ = thinned_ || kept < frontier_.size();
  frontier_.resize(kept);
}

// At a budget just short of the next plan of the frontier, a plan leaves the bytes up to it unused.
void Search::lower_limit() {
  const std::int64_t end = stop_.bytes + split_.bytes;
  double worst = 0;
  for (std::size_t i = 0; i < frontier_.size() && frontier_[i].bytes < end; ++i) {
    const std::int64_t next = i + 1 < frontier_.size() ? frontier_[i + 1].bytes : end;
    if (next <= stop_.bytes) continue;
    const double unused = static_cast<double>(std::min(next, end) - frontier_[i].bytes);
    worst = std::max(worst, frontier_[i].excess + split_.slope * unused);
  }
  limit_ = std::min(limit_, worst);
}

Pick Search::best_of(const Chain& forward, const Chain& backward) const {
  Pick best;
  for (std::size_t state = 0; state < frontier_.size(); ++state) {
    const std::int64_t spare = budget_ - frontier_[state].bytes;
    Pick pick{state, 0, frontier_[state].error};
    if (spare >= 0) {
      const auto end = std::upper_bound(forward.bytes.begin(), forward.bytes.end(), spare);
      pick.length = end - forward.bytes.begin() - 1;
      pick.error -= forward.error[pick.length];
    } else {
      const auto end = std::lower_bound(backward.bytes.begin(), backward.bytes.end(), -spare);
      if (end == backward.bytes.end()) continue;
      pick.length = backward.bytes.begin() - end;
      pick.error += backward.error[-pick.length];
    }
    if (pick.error < best.error) best = pick;
  }
  return best;
}

// Keeps the best plan within the budget that the frontier and the chains of the sites left give,
// if it is better than the one before.
void Search::offer() {
  std::vector<char> left(menu_.sites(), 0);
  double left_error = 0;
  for (std::size_t i = taken_; i < order_.size(); ++i) {
    left[order_[i]] = 1;
    left_error += menu_.of(order_[i])[base_[order_[i]]].error;
  }
  Chain forward, backward;
  for (std::size_t i = stop_.split + 1; i < stop_.steps.size(); ++i) {
    if (left[stop_.steps[i].site]) forward.add(stop_.steps, i);
  }
  for (std::size_t i = stop_.split; i-- > 0;) {
    if (left[stop_.steps[i].site]) backward.add(stop_.steps, i);
  }
  const Pick best = best_of(forward, backward);
  if (!(best.error + left_error < error_)) return;

  error_ = best.error + left_error;
  choice_ = base_;
  for (std::ptrdiff_t i = 0; i < best.length; ++i) {
    const HullStep& step = stop_.steps[forward.steps[i]];
    choice_[step.site] = step.to;
  }
  for (std::ptrdiff_t i = 0; i < -best.length; ++i) {
    const HullStep& step = stop_.steps[backward.steps[i]];
    choice_[step.site] = step.from;
  }
  std::size_t state = best.state;
  for (std::size_t i = links_.size(); i-- > 0;) {
    choice_[order_[i]] = links_[i][state].choice;
    state = links_[i][state].parent;
  }
}

}  // namespace

bool improve(const Menu& menu, const Stop& stop, std::int64_t budget, std::vector<int>& choice) {
  const std::vector<int> base = choice;
  Search search(menu, stop, budget, base);
  const bool optimal = search.run();
  choice = search.choice();
  return optimal;
}

}  // namespace backfold::core
