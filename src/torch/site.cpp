// SPDX-License-Identifier: Apache-2.0

#include "torch/site.h"

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
    case Kind::kRaw:
      return "raw";
    case Kind::kPassed:
      return "passed";
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

std::uint32_t SiteTable::add_path(std::string name, bool keep) {
  paths_.push_back({std::move(name), keep});
  return static_cast<std::uint32_t>(paths_.size() - 1);
}

std::uint32_t SiteTable::path_within(std::uint32_t parent, const std::string& name, int ordinal) {
  std::string full = paths_[parent].name;
  if (!full.empty()) full += '.';
  full += name;
  if (ordinal > 0) full += '#' + std::to_string(ordinal);
  const auto [entry, added] = within_.try_emplace(full, 0);
  if (added) entry->second = add_path(full, paths_[parent].keep);
  return entry->second;
}

Site& SiteTable::site(std::uint32_t landmark, const Operator& op, int slot, int occurrence) {
  const std::uint64_t key = std::uint64_t{landmark} << 40 | std::uint64_t{op.id} << 16 |
                            static_cast<std::uint64_t>(slot & 0xff) << 8 |
                            static_cast<std::uint64_t>(occurrence & 0xff);
  Site*& site = index_[key];
  if (!site) {
    site = &sites_.emplace_back();
    site->path = landmarks_[landmark].path;
    site->op = &op;
    const int arguments = static_cast<int>(op.slots.size());
    site->slot = slot < arguments ? op.slots[slot] : "result." + std::to_string(slot - arguments);
    site->occurrence = occurrence;
    site->hash = hash_of(landmarks_[landmark].name + '/' + op.name + '/' + site->slot + '/' +
                         std::to_string(occurrence));
  }
  return *site;
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
