// SPDX-License-Identifier: Apache-2.0
//
// Sites: stable names of the places that save tensors.
//
// A site is (landmark, operator, slot, occurrence). The landmark is the parameter that was used
// last; occurrences count the saves of one operator and slot since. So an early exit, a branch, or
// a cell that is called more often than yesterday leaves the names of all other sites as they are,
// and finding a site takes no call into Python. The module that a site belongs to is watched at the
// first steps, and when new sites appear, and is what users see. What is learned about a site
// steers how its tensors are kept; a wrong name costs bytes, never correctness.

#ifndef BACKFOLD_TORCH_SITE_H_
#define BACKFOLD_TORCH_SITE_H_

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch/calls.h"

namespace backfold::torch_layer {

// How saves of a site were served.
enum class Kind : std::uint8_t {
  kLossy,          // the group quantizer
  kZeroExact,      // the same, with zeros and signs exact
  kPredicate,      // one comparison per element, exact for its reader
  kBits,           // bools
  kMask,           // floats of two values
  kIndices,        // narrowed integers
  kGeometry,       // sizes and strides
  kAlive,          // by reference: somebody else keeps the tensor anyway
  kShared,         // by what an earlier save of the same memory made
  kParameter,      // by reference
  kParameterCopy,  // made again from its parameter
  kRaw,            // by reference, because its backward needs it exactly
  kPassed,         // by reference, because it cannot be packed
};

const char* name_of(Kind kind);

// What the saves of a site were, in one step.
struct Ledger {
  std::int64_t step = -1;
  std::int64_t saves = 0;
  std::int64_t saved_bytes = 0;      // autograd alone, save by save
  std::int64_t unique_bytes = 0;     // memory that no earlier save of the step kept
  std::int64_t held_bytes = 0;       // kept now, by autograd alone
  std::int64_t duplicate_bytes = 0;  // saved again and served by what was there
  std::int64_t elements = 0;         // of packets
  Kind kind = Kind::kPassed;         // of the save that holds most
  std::int64_t kind_bytes = -1;
  int bits = 0;
  const char* reason = "";
};

struct Site {
  std::uint32_t path = 0;  // of the module, as last seen
  bool placed = false;     // whether a module was seen
  const Operator* op = nullptr;
  std::string slot;
  int occurrence = 0;
  std::uint64_t hash = 0;  // of the name; the same in every run

  // Learned. Written by backward, whose threads are autograd's.
  std::atomic<bool> alive{false};  // at the last backward somebody else had the tensor, too
  enum class Sign : std::uint8_t { kUnknown, kOnlySign, kAlsoValues };
  std::atomic<Sign> sign{Sign::kUnknown};  // who reads a tensor whose sign is enough here

  std::uint64_t draws = 0;  // packets made in the current step: each has its own random numbers
  std::int64_t draws_step = -1;
  Ledger ledger;
};

// A part of the model.
struct Path {
  std::string name;
  bool keep = false;
};

// A parameter, as a place in the forward pass.
struct Landmark {
  std::string name;
  std::uint32_t path = 0;  // of the module that owns it
};

class SiteTable {
 public:
  SiteTable();

  // Path 0 is the whole program.
  std::uint32_t add_path(std::string name, bool keep);
  // The path of the `ordinal`th part named `name` inside `parent`, made at first sight.
  std::uint32_t path_within(std::uint32_t parent, const std::string& name, int ordinal);
  const Path& path(std::uint32_t id) const { return paths_[id]; }
  void keep_path(std::uint32_t id) { paths_[id].keep = true; }

  // Landmark 0 is the beginning. The same name gives the same landmark.
  std::uint32_t landmark(const std::string& name, std::uint32_t path);
  // A landmark for a parameter without a name, by its storage: parameters in the order in which
  // they are first used. At most 4096 of them, so that parameters that move leave no trail.
  std::uint32_t nameless_landmark(const void* storage);

  // `slot` is a position of the operator's arguments, or past them the ordinal of a result.
  Site& site(std::uint32_t landmark, const Operator& op, int slot, int occurrence);
  bool keeps(const Site& site) const { return paths_[site.path].keep; }
  const std::deque<Site>& sites() const { return sites_; }

 private:
  std::deque<Path> paths_;
  std::unordered_map<std::string, std::uint32_t> within_;
  std::vector<Landmark> landmarks_;
  std::unordered_map<std::string, std::uint32_t> landmark_names_;
  ska::flat_hash_map<const void*, std::uint32_t> nameless_;
  std::deque<Site> sites_;
  ska::flat_hash_map<std::uint64_t, Site*> index_;
};

// How often something happened, by kind. For few kinds at a time.
class Counts {
 public:
  // How often `key` was counted before. Stops at 63, so that a loop of any length has a bounded
  // number of names.
  int next(std::uint64_t key);
  void clear() { counts_.clear(); }

 private:
  c10::SmallVector<std::pair<std::uint64_t, int>, 8> counts_;
};

// The modules that are running, innermost last.
class ModuleStack {
 public:
  ModuleStack() { frames_.emplace_back(); }

  void enter(std::uint32_t path);
  // Ends the innermost frame of that path, and frames inside that an exception left behind.
  void leave(std::uint32_t path);
  std::uint32_t path() const { return frames_.back().path; }
  // Calls of a class of modules by the module that runs now.
  Counts& children() { return frames_.back().children; }

 private:
  struct Frame {
    std::uint32_t path = 0;
    Counts children;
  };
  std::vector<Frame> frames_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_SITE_H_
