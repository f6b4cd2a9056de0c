// SPDX-License-Identifier: Apache-2.0

#include "torch/capture/site.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace backfold::torch_layer {
namespace {

// FNV-1a: short, and the same on every machine.
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kLossy:
      return "lossy";
    case Kind::kPerSample:
      return "per sample";
    case Kind::kPooled:
      return "pooled";
    case Kind::kPoolResidual:
      return "pooled and residual";
    case Kind::kProjected:
      return "projected";
    case Kind::kRunningRange:
      return "running range";
    case Kind::kFewBit:
      return "few bit";
    case Kind::kZeroExact:
      return "zero-exact";
    case Kind::kPredicate:
      return "predicate";
    case Kind::kBits:
      return "bits";
    case Kind::kMask:
      return "mask";
    case Kind::kIndices:
      return "indices";
    case Kind::kGeometry:
      return "geometry";
    case Kind::kAlive:
      return "alive";
    case Kind::kShared:
      return "shared";
    case Kind::kParameter:
      return "parameter";
    case Kind::kParameterCopy:
      return "parameter copy";
    case Kind::kDerived:
      return "derived";
    case Kind::kRaw:
      return "raw";
    case Kind::kPassed:
      return "passed";
  }
  return "unknown";
}

const char* name_of(Sensitivity::Estimate estimate) {
  switch (estimate) {
    case Sensitivity::Estimate::kNone:
      return "none";
    case Sensitivity::Estimate::kRerun:
      return "re-run";
    case Sensitivity::Estimate::kClosedForm:
      return "closed form";
    case Sensitivity::Estimate::kSignalGain:
      return "signal gain";
    case Sensitivity::Estimate::kRecomputed:
      return "recomputed";
    case Sensitivity::Estimate::kDerivative:
      return "derivative";
    case Sensitivity::Estimate::kExact:
      return "exact";
  }
  return "unknown";
}

SiteTable::SiteTable() {
  add_path("", false);
  landmark("", 0);
}

std::uint32_t SiteTable::landmark(const std::string& name, std::uint32_t path) {
  const auto [entry, added] = landmark_names_.try_emplace(name, landmarks_.size());
  if (added) landmarks_.push_back({name, path});
  landmarks_[entry->second].path = path;
  return entry->second;
}

std::uint32_t SiteTable::nameless_landmark(const void* storage) {
  const auto known = nameless_.find(storage);
  if (known != nameless_.end()) return known->second;
  if (nameless_.size() == 4096) return 0;
  const std::uint32_t id = landmark("parameter " + std::to_string(nameless_.size()), 0);
  nameless_.emplace(storage, id);
  return id;
}

std::uint32_t SiteTable::add_path(std::string name, bool keep, std::uint64_t rules) {
  paths_.push_back({std::move(name), keep, rules});
  return static_cast<std::uint32_t>(paths_.size() - 1);
}

std::uint32_t SiteTable::path_within(std::uint32_t parent, const std::string& name, int ordinal) {
  std::string full = paths_[parent].name;
  if (!full.empty()) full += '.';
  full += name;
  if (ordinal > 0) full += '#' + std::to_string(ordinal);
  const auto [entry, added] = within_.try_emplace(full, 0);
  if (added) entry->second = add_path(full, paths_[parent].keep, paths_[parent].rules);
  return entry->second;
}

Site& SiteTable::site(std::uint32_t landmark, const Operator& op, int slot, int occurrence) {
  const std::uint64_t key = std::uint64_t{landmark} << 40 | std::uint64_t{op.id} << 16 |
                            static_cast<std::uint64_t>(slot & 0xff) << 8 |
                            static_cast<std::uint64_t>(occurrence & 0xff);
  Site*& site = index_[key];
  if (!site) {
    const int arguments = static_cast<int>(op.slots.size());
    const std::string name =
        slot < arguments ? op.slots[slot] : "result." + std::to_string(slot - arguments);
    site = &named(landmarks_[landmark].name + '/' + op.name + '/' + name + '/' +
                  std::to_string(occurrence));
    site->path = landmarks_[landmark].path;
    site->op = &op;
    site->slot = name;
    site->occurrence = occurrence;
    take_expected(*site);
  }
  site->own = true;
  return *site;
}

Site& SiteTable::graph_site(std::uint32_t path, std::string_view module, std::string_view name,
                            int run) {
  static const Operator& op = *[] {
    auto* made = new Operator;
    made->name = "compiled graph";
    made->id = 0xfffffe;
    made->opaque = made->compiled = true;
    return made;
  }();
  std::string slot(module);
  if (!slot.empty()) slot += ' ';
  slot += name;
  std::replace(slot.begin(), slot.end(), '/', '|');
  Site& site = named('/' + op.name + '/' + slot + '/' + std::to_string(run));
  if (!site.op) take_expected(site);
  site.op = &op;
  site.path = path;
  site.slot = name;
  site.occurrence = run;
  site.own = true;
  return site;
}

void SiteTable::take_expected(Site& site) const {
  if (const auto found = expected_choices_.find(site.name); found != expected_choices_.end())
    site.choice = found->second;
  site.remade |= expected_remade_.contains(site.name);
  site.sent |= expected_sent_.contains(site.name);
}

Site& SiteTable::named(const std::string& name) {
  const auto [entry, added] = by_name_.try_emplace(name, nullptr);
  if (added) {
    entry->second = &sites_.emplace_back();
    entry->second->name = name;
    entry->second->hash = hash_of(name);
  }
  return *entry->second;
}

void SiteTable::check_landmark(const std::string& site) const {
  // Operators have no slash in their names, parameters may.
  std::size_t end = site.rfind('/');
  for (int i = 0; i < 2 && end != std::string::npos && end > 0; ++i) end = site.rfind('/', end - 1);
  TORCH_CHECK_VALUE(end != std::string::npos, "\"", site, "\" is not the name of a site");
  const std::string landmark = site.substr(0, end);
  TORCH_CHECK_VALUE(landmark_names_.contains(landmark) || landmark.starts_with("parameter "),
                    "the site \"", site,
                    "\" belongs to another model: this one has no parameter \"", landmark, "\"");
}

void SiteTable::apply(const SiteRecord& record, Site& site) {
  site.own = record.own;
  site.alive = record.alive;
  site.sign = record.sign;
  const auto root = by_name_.find(record.root);
  site.root = root == by_name_.end() ? nullptr : root->second;
  site.derived = record.derived;
  site.also.clear();
  for (const auto& [name, sensitivity] : record.also)
    if (const auto other = by_name_.find(name); other != by_name_.end())
      site.also.push_back({other->second, sensitivity});
  site.floor = record.floor;
  site.served_floor = record.served_floor;
  site.tried = record.tried;
  site.zero_exact = record.zero_exact;
  site.starts = record.starts;
  site.stored_for_others = record.stored_for_others;
  site.looks_for_cut = record.looks_for_cut;
  site.last_step = record.last_step;
  site.lossy_step = record.lossy_step;
  site.choice = record.choice;
  site.sensitivity = record.sensitivity;
  site.reference = record.reference;
  site.rule = record.rule;
  site.shares = record.shares;
  const auto first = by_name_.find(record.first_saver);
  site.first_saver = first == by_name_.end() ? nullptr : first->second;
  site.remade = record.remade;
  site.runs_products = record.runs_products;
  site.sent = record.sent;
  site.stuck = record.stuck;
  site.remaking = record.remaking;
  site.stay = record.stay;
  for (const std::string& name : record.made_from)
    if (const auto source = by_name_.find(name); source != by_name_.end())
      site.remaking->from.push_back(source->second);
  site.exact_by.clear();
  for (const std::string& name : record.exact_by)
    if (const auto source = by_name_.find(name); source != by_name_.end())
      site.exact_by.push_back(source->second);
  site.memory.reset();
  if (record.ranges.defined() || record.norms.defined() || record.scores.defined()) {
    site.memory = std::make_shared<CodecMemory>();
    site.memory->ranges = record.ranges;
    site.memory->norms = record.norms;
    site.memory->scores = record.scores;
  }
}

std::vector<SiteRecord> SiteTable::records() const {
  std::vector<SiteRecord> records;
  for (const Site& site : sites_) {
    std::vector<std::pair<std::string, Sensitivity>> also;
    for (const Site::Also& other : site.also)
      also.emplace_back(other.root->name, other.sensitivity);
    records.push_back({site.name,
                       site.own,
                       site.alive,
                       site.sign,
                       site.root ? site.root->name : "",
                       site.derived,
                       std::move(also),
                       site.floor,
                       site.served_floor,
                       site.tried,
                       site.zero_exact,
                       site.starts,
                       site.stored_for_others,
                       site.looks_for_cut,
                       site.last_step,
                       site.ledger.lossy.elements > 0 ? site.ledger.step : site.lossy_step,
                       site.choice,
                       site.sensitivity,
                       site.reference,
                       site.rule,
                       site.shares,
                       site.memory ? site.memory->ranges : at::Tensor(),
                       site.memory ? site.memory->norms : at::Tensor(),
                       site.memory ? site.memory->scores : at::Tensor(),
                       site.first_saver ? site.first_saver->name : "",
                       site.remade,
                       site.runs_products,
                       site.sent,
                       site.stuck,
                       site.remaking,
                       {},
                       site.stay});
    SiteRecord& record = records.back();
    for (const Site* source : site.exact_by) record.exact_by.push_back(source->name);
    if (!site.remaking) continue;
    for (const Site* source : site.remaking->from) record.made_from.push_back(source->name);
    record.remaking->from.clear();
    record.remaking->laps.clear();
  }
  return records;
}

void SiteTable::check(const std::vector<SiteRecord>& records) const {
  for (const SiteRecord& record : records) check_landmark(record.name);
}

void SiteTable::take(const std::vector<SiteRecord>& records) {
  for (Site& site : sites_) {
    apply({}, site);
    site.own = site.op != nullptr;
    // Steps that were made have not happened: their numbers come again.
    site.ledger = {};
    site.draws_step = -1;
  }
  for (const SiteRecord& record : records) named(record.name);
  for (const SiteRecord& record : records) apply(record, *by_name_.at(record.name));
}

void SiteTable::take_agreed(const std::vector<SiteRecord>& records) {
  for (const SiteRecord& record : records) named(record.name);
  for (const SiteRecord& record : records) {
    Site& site = *by_name_.at(record.name);
    if (!site.own) {
      apply(record, site);
      site.own = false;
      continue;
    }
    site.sensitivity = record.sensitivity;
    for (Site::Also& other : site.also)
      for (const auto& [name, sensitivity] : record.also)
        if (other.root->name == name) other.sensitivity = sensitivity;
    site.reference = record.reference;
    site.choice = record.choice;
    site.tried |= record.tried;
    site.shares = record.shares;
    site.remade = record.remade;
    site.sent = record.sent;
    site.stuck = record.stuck;
  }
}

void SiteTable::take_choices(std::vector<std::pair<std::string, Choice>> choices,
                             const std::vector<std::string>& remade,
                             const std::vector<std::string>& sent) {
  for (const auto& [name, choice] : choices) check_landmark(name);
  for (const auto* names : {&remade, &sent})
    for (const std::string& name : *names) check_landmark(name);
  expected_remade_ = {remade.begin(), remade.end()};
  expected_sent_ = {sent.begin(), sent.end()};
  for (Site& site : sites_) {
    site.remade = expected_remade_.contains(site.name);
    site.sent = expected_sent_.contains(site.name);
  }
  for (const auto& [name, choice] : choices) {
    if (const auto found = by_name_.find(name); found != by_name_.end())
      found->second->choice = choice;
    expected_choices_[name] = choice;
  }
}

int Counts::next(std::uint64_t key) {
  for (auto& [known, count] : counts_)
    if (known == key) return count < 63 ? count++ : count;
  counts_.emplace_back(key, 1);
  return 0;
}

void ModuleStack::enter(std::uint32_t path) { frames_.emplace_back().path = path; }

void ModuleStack::leave(std::uint32_t path) {
  for (std::size_t i = frames_.size(); i-- > 1;) {
    if (frames_[i].path != path) continue;
    frames_.resize(i);
    return;
  }
}

}  // namespace backfold::torch_layer
