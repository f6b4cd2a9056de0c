// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/bundles.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace backfold::torch_layer {
namespace {

// Steps after which a site that none of them saved to is forgotten.
constexpr std::int64_t kForgotten = 1000;

bool is_current(const Site& site, std::int64_t step) {
  return site.reference.elements > 0 && !site.alive && site.last_step > step - kForgotten;
}

// What one width costs, in the unit of the target.
std::int64_t cost_at(const Target& target, const Footprint& reference, int bits,
                     const Grouping& grouping) {
  if (target.kind != Target::Kind::kBits) return bytes_at(reference, bits, grouping);
  return reference.elements * bits;
}

std::vector<int> widths_for(const Target& target, const Bundle& bundle) {
  if (bundle.raw) return {kRawBits};
  std::vector<int> widths;
  for (const int width : kCodeWidths)
    if (width >= bundle.floor && width < 8 * bundle.root->reference.element_bytes)
      widths.push_back(width);
  // Unfolded tensors have no codes, so a mean width of codes cannot count them.
  if (target.kind != Target::Kind::kBits || widths.empty()) widths.push_back(kRawBits);
  return widths;
}

}  // namespace

void Bundle::add(const Site& site, const Sensitivity& sensitivity) {
  // Nothing is known of widths below the narrowest one measured. If none was, the floor applies.
  const auto& errors = sensitivity.errors;
  measured |= !errors.empty();
  floor = std::max(
      {floor, errors.empty() ? site.floor : errors.front().first, site.zero_exact ? 2 : 1});
  if (!site.starts) return;
  starts = true;
  raw |= errors.empty() || site.safe == kRawBits;
  floor = std::max(floor, site.safe);
}

Bundle Bundle::without(const Site& site) const {
  Bundle rest;
  rest.root = root;
  rest.add(*root, root->sensitivity);
  for (const Rider& rider : riders) {
    if (rider.site == &site) continue;
    rest.riders.push_back(rider);
    rest.add(*rider.site, *rider.sensitivity);
  }
  return rest;
}

double Bundle::error(int bits) const {
  double sum = error_at(root->sensitivity, bits);
  for (const Rider& rider : riders) sum += error_at(*rider.sensitivity, bits);
  return sum;
}

const Sensitivity& Bundle::ranked() const {
  for (const Rider& rider : riders)
    if (root->sensitivity.errors.empty() && !rider.sensitivity->errors.empty())
      return *rider.sensitivity;
  return root->sensitivity;
}

const c10::SmallVector<Sensitivity::Offer, 1>& Bundle::offers() const {
  static const c10::SmallVector<Sensitivity::Offer, 1> none;
  const auto fine = [](const Site& site) { return site.floor > 0 || site.zero_exact; };
  const bool open = measured && !starts && !fine(*root) &&
                    std::none_of(riders.begin(), riders.end(),
                                 [&](const Rider& rider) { return fine(*rider.site); });
  return open ? ranked().offers : none;
}

Marked marked_now(const SiteTable& sites) {
  Marked marked;
  for (const Site& site : sites.sites())
    if (site.remade) marked.insert(&site);
  return marked;
}

Remedies remedies_now(const SiteTable& sites, const Target& target) {
  Remedies remedies{.marked = marked_now(sites)};
  if (target.kind == Target::Kind::kBudget)
    for (const Site& site : sites.sites())
      if (site.sent) remedies.sent.insert(&site);
  return remedies;
}

namespace {

// What keeps the values of sites if products make again what is marked.
class Keepers {
 public:
  explicit Keepers(const Marked& marked) : marked_(marked) {}

  bool is_marked(const Site& site) const {
    return site.first_saver && marked_.contains(site.first_saver);
  }
  // Whether it has a packet of its own.
  bool packs(const Site& site) {
    return !is_marked(site) && !is_spared(site) && (!site.root || site.runs_products);
  }
  // The site itself, or what its values are made from. None where that is exact.
  void add(Site& site, std::vector<Site*>& keepers) {
    if (packs(site)) {
      if (std::find(keepers.begin(), keepers.end(), &site) == keepers.end())
        keepers.push_back(&site);
    } else if (is_marked(site) && !site.runs_products) {
      if (site.first_saver->remaking)
        for (Site* source : site.first_saver->remaking->from) add(*source, keepers);
    } else {
      if (site.root) add(*site.root, keepers);
      for (const Site::Also& other : site.also)
        if (site.derived) add(*other.root, keepers);
    }
  }

 private:
  // Whether its tensors are made exactly by what is marked.
  bool is_spared(const Site& site) {
    if (site.exact_by.empty()) return false;
    const auto [known, first] = spared_.try_emplace(&site, false);
    if (first)
      known->second = std::all_of(site.exact_by.begin(), site.exact_by.end(),
                                  [this](const Site* product) { return makes_exactly(*product); });
    return known->second;
  }
  // Whether a product is marked, and nothing that it reads has a packet.
  bool makes_exactly(const Site& product) {
    return marked_.contains(&product) && product.remaking &&
           std::all_of(product.remaking->from.begin(), product.remaking->from.end(),
                       [this](const Site* source) {
                         return source->alive || source->reference.elements == 0 ||
                                is_spared(*source);
                       });
  }

  const Marked& marked_;
  std::map<const Site*, bool> spared_;
};

}  // namespace

std::vector<Bundle> bundles_of(SiteTable& sites, std::int64_t step, const Marked& marked) {
  Keepers all(marked);
  std::map<const Site*, std::size_t> index;
  std::vector<Bundle> bundles;
  for (Site& site : sites.sites()) {
    if (!all.packs(site) || site.rule != -1 || !is_current(site, step)) continue;
    index.emplace(&site, bundles.size());
    Bundle bundle;
    bundle.root = &site;
    bundle.add(site, site.sensitivity);
    bundles.push_back(std::move(bundle));
  }
  const auto ride = [&](Site& site, Site& from, const Sensitivity& sensitivity) {
    std::vector<Site*> keepers;
    all.add(from, keepers);
    for (const Site* keeper : keepers) {
      const auto found = index.find(keeper);
      if (found == index.end() || keeper == &site) continue;
      Bundle& bundle = bundles[found->second];
      bundle.riders.push_back({&site, &sensitivity});
      bundle.add(site, sensitivity);
    }
  };
  for (Site& site : sites.sites()) {
    if (all.packs(site)) continue;
    if (all.is_marked(site) && !site.runs_products) {
      if (is_current(site, step)) ride(site, site, site.sensitivity);
      continue;
    }
    if (site.root) ride(site, *site.root, site.sensitivity);
    for (const Site::Also& other : site.also)
      if (site.derived) ride(site, *other.root, other.sensitivity);
  }
  // The order in which sites were first seen must not matter.
  std::sort(bundles.begin(), bundles.end(),
            [](const Bundle& a, const Bundle& b) { return a.root->name < b.root->name; });
  return bundles;
}

std::int64_t bytes_at(const Footprint& reference, int bits, const Grouping& grouping) {
  if (bits == kRawBits) return reference.elements * reference.element_bytes;
  const auto which = std::find(kGroupings.begin(), kGroupings.end(), grouping) - kGroupings.begin();
  return bytes_of_groups(bits, reference.groups[static_cast<std::size_t>(which)],
                         reference.packets);
}

int width_from(const Target& target, const Bundle& bundle, int least) {
  const std::vector<int> widths = widths_for(target, bundle);
  return *std::find_if(widths.begin(), widths.end() - 1,
                       [least](int width) { return width >= least; });
}

namespace {

// The sites of a bundle that could have packets of their own: derived from its packet alone,
// measured, and smaller than it.
std::vector<const Bundle::Rider*> separable(const Bundle& bundle) {
  std::vector<const Bundle::Rider*> found;
  for (const Bundle::Rider& rider : bundle.riders) {
    const Footprint& own = rider.site->reference;
    if (rider.site->derived && rider.site->also.empty() && own.elements > 0 &&
        own.elements < bundle.root->reference.elements && !rider.sensitivity->errors.empty())
      found.push_back(&rider);
  }
  return found;
}

std::vector<Option> by_width(const Target& target, const Bundle& bundle, int uniform) {
  const Footprint& reference = bundle.root->reference;
  std::vector<int> widths = widths_for(target, bundle);
  if (!bundle.measured && !bundle.raw) widths = {uniform};
  std::vector<Option> options;
  for (const int width : widths)
    options.push_back({{width, bundle.grouping()},
                       bytes_at(reference, width, bundle.grouping()),
                       bundle.raw && target.kind == Target::Kind::kBits
                           ? 0
                           : cost_at(target, reference, width, bundle.grouping()),
                       bundle.error(width)});
  return options;
}

void add_cuts(const Target& target, const Bundle& bundle, int uniform,
              std::vector<Option>& options) {
  for (const Bundle::Rider* rider : separable(bundle)) {
    const Footprint& own = rider->site->reference;
    for (const Option& rest : by_width(target, bundle.without(*rider->site), uniform))
      for (const int width : kCodeWidths) {
        if (width <= rest.choice.bits || width >= 8 * own.element_bytes) continue;
        Option cut = rest;
        cut.bytes += bytes_at(own, width, {});
        cut.cost += cost_at(target, own, width, {});
        cut.error += error_at(*rider->sensitivity, width);
        cut.apart = {{rider->site, {width, {}}}};
        options.push_back(std::move(cut));
      }
  }
}

}  // namespace

std::vector<Option> options_for(const Target& target, const Bundle& bundle, int uniform) {
  const Footprint& reference = bundle.root->reference;
  std::vector<Option> options = by_width(target, bundle, uniform);
  if (bundle.measured && !bundle.raw) add_cuts(target, bundle, uniform, options);
  for (const Sensitivity::Offer& offer : bundle.offers()) {
    const auto elements = static_cast<double>(reference.elements);
    const auto bytes = static_cast<std::int64_t>(std::ceil(elements * offer.bits / 8));
    // A target of code widths counts an offer as groups that take the same bytes.
    const double width = std::max(0.0, offer.bits - kHeaderBits);
    options.push_back({{uniform, bundle.grouping(), offer.codec},
                       bytes,
                       target.kind == Target::Kind::kBits
                           ? static_cast<std::int64_t>(std::ceil(elements * width))
                           : bytes,
                       bundle.error(bundle.ranked().offers_at) * offer.error});
  }
  return options;
}

Option kept_option(const Target& target, const Bundle& bundle) {
  const std::int64_t bytes = bytes_at(bundle.root->reference, kRawBits, {});
  return {{kRawBits, {}}, bytes, is_of_bytes(target) ? bytes : 0, 0};
}

std::int64_t allowance(const Target& target, const StepReference& reference,
                       const std::vector<Bundle>& bundles) {
  switch (target.kind) {
    case Target::Kind::kBits: {
      double bits = 0;
      for (const Bundle& bundle : bundles) {
        if (bundle.raw) continue;
        // What a checkpoint or an operation needs beyond the mean is not taken from other tensors:
        // one width everywhere stays among the plans. (Zero-exact packets need 2 bits at most.)
        const bool apart = bundle.starts || bundle.floor > 2;
        const double width = apart ? std::max<double>(target.value, bundle.floor) : target.value;
        bits += width * static_cast<double>(bundle.root->reference.elements);
      }
      return static_cast<std::int64_t>(bits);
    }
    case Target::Kind::kRatio:
      return static_cast<std::int64_t>(static_cast<double>(reference.unique_bytes) / target.value) -
             reference.fixed_bytes;
    case Target::Kind::kBudget:
    case Target::Kind::kPeak:
      return static_cast<std::int64_t>(target.value) - reference.fixed_bytes - reference.margin;
  }
  return 0;
}

}  // namespace backfold::torch_layer
