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

#ifndef BACKFOLD_TORCH_CAPTURE_SITE_H_
#define BACKFOLD_TORCH_CAPTURE_SITE_H_

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/codec/grouping.h"
#include "torch/offload/away_bytes.h"

namespace backfold::torch_layer {

// How saves of a site were served.
enum class Kind : std::uint8_t {
  kLossy,          // the group quantizer
  kPerSample,      // the same, with widths that differ from sample to sample
  kPooled,         // averages of blocks: biased
  kPoolResidual,   // averages of blocks and, in a few bits, the residual
  kProjected,      // a random projection
  kRunningRange,   // quantized over ranges that follow the tensor from step to step
  kFewBit,         // the derivative, as one of a few values: biased
  kZeroExact,      // the group quantizer, with zeros and signs exact
  kPredicate,      // one comparison per element, exact for its reader
  kBits,           // bools
  kMask,           // floats of two values
  kIndices,        // narrowed integers
  kGeometry,       // sizes and strides
  kAlive,          // by reference: the program keeps the tensor alive anyway
  kShared,         // by the packet or reference of an earlier save of the same memory
  kParameter,      // by reference
  kParameterCopy,  // made again from its parameter
  kDerived,        // made again, by a recipe
  kRaw,            // by reference, because its backward needs it exactly
  kPassed,         // by reference, because it cannot be packed
};

const char* name_of(Kind kind);

// What packets of the group quantizer take, whatever their width.
struct Footprint {
  std::int64_t elements = 0;
  std::int64_t packets = 0;
  std::int64_t element_bytes = 0;  // of the source
  // For each of kGroupings; flat ones where a grouping is not for this shape.
  std::array<std::int64_t, kGroupings.size()> groups{};
};

struct Site;

// What the saves of a site were, in one step.
struct Ledger {
  std::int64_t step = -1;
  std::int64_t saves = 0;
  std::int64_t saved_bytes = 0;      // autograd alone, save by save
  std::int64_t unique_bytes = 0;     // memory that no earlier save of the step kept
  std::int64_t held_bytes = 0;       // kept now, by autograd alone, wherever it is
  std::shared_ptr<AwayBytes> away;   // what of it leaves its device
  std::int64_t remade_bytes = 0;     // not kept, as products make them again
  std::int64_t duplicate_bytes = 0;  // saved again and served by what was there
  std::int64_t elements = 0;         // of packets
  Kind kind = Kind::kPassed;         // of the save that holds most
  std::int64_t kind_bytes = -1;
  int bits = 0;
  Grouping grouping;
  const char* reason = "";
  // Of a tensor that is made again, or could be: by which operators, the last one first, from what
  // was saved where, moving how many bytes.
  c10::SmallVector<const Operator*, 4> recipe;
  const Site* source = nullptr;
  std::int64_t moved_bytes = 0;
  std::int64_t transient_bytes = 0;  // beside the tensor while it is made, at most
  // Of a tensor that is made again: what packets of its own would hold beyond what is held for it
  // now, the bytes that packing and unpacking them would move, and where.
  std::int64_t spared_bytes = 0;
  std::int64_t spared_moves = 0;
  std::optional<at::Device> device;
  Footprint lossy;  // of the packets whose width is a matter of choice
  Footprint apart;  // of packets that tensors made from rounded ones would have
};

// The error energy that folding a site adds to the gradient of all parameters, by width.
struct Sensitivity {
  enum class Estimate : std::uint8_t {
    kNone,
    kRerun,       // the node was run again with a folded tensor, against forward tangents
    kClosedForm,  // the same for the product with a weight, from row norms
    kSignalGain,  // relative error times what the gradient itself does further on
    kRecomputed,  // a checkpoint was run again from the folded tensor
    kDerivative,  // that of a compiled backward graph by the tensor, along a random direction
    kExact,       // whole passes with this tensor alone folded
  };
  // What another codec makes of the tensor, in its own squared error.
  struct Offer {
    int codec = 0;     // of the menu
    double bits = 0;   // stored, per element
    double error = 0;  // / error of the group quantizer at `offers_at` bits
  };
  Estimate estimate = Estimate::kNone;
  int offers_at = 0;
  c10::SmallVector<Offer, 1> offers;
  Grouping grouping;                                   // that it was measured with
  c10::SmallVector<std::pair<int, double>, 4> errors;  // width and energy, widths rising
};

const char* name_of(Sensitivity::Estimate estimate);

// How the memory that a site was the first to save could be made again by running products, as the
// last step that timed them has seen it.
struct Remaking {
  std::int64_t step = -1;
  std::int64_t bytes = 0;                  // of that memory
  bool exact = false;                      // it would be held unrounded
  std::vector<std::shared_ptr<Lap>> laps;  // of the products
  c10::SmallVector<Site*, 3> from;         // that keep what it would be made from
  // Once the laps were read: what they took, and the number of the first product among them, which
  // tensors that one product makes have in common.
  double ms = 0;
  std::int64_t product = 0;
};

struct Site {
  std::uint32_t path = 0;        // of the module, as last seen
  bool placed = false;           // whether a module was seen
  const Operator* op = nullptr;  // null while a record alone knows of the site
  std::string slot;
  int occurrence = 0;
  std::string name;        // landmark/op/slot/occurrence; the same in every run
  std::uint64_t hash = 0;  // of the name

  // Learned. Written by backward, whose threads are autograd's.
  std::atomic<bool> alive{false};  // at the last backward the program still had the tensor
  enum class Sign : std::uint8_t { kUnknown, kOnlySign, kAlsoValues };
  std::atomic<Sign> sign{Sign::kUnknown};  // who reads a tensor whose sign is enough here

  // Whose packet served the last save, if another's did.
  Site* root = nullptr;
  // Or was what the tensor is made again from. A product is made from several packets: those of
  // the others, with the error that each brings to the gradient here.
  bool derived = false;
  bool packs_copied = false;  // its packet holds what the tensor is a copy of
  // Its tensors could be made again, but less is held if they are stored, since larger ones are
  // made of them then; and the steps in which this site looked for such tensors.
  bool stored_for_others = false;
  int looks_for_cut = 0;
  struct Also {
    Site* root = nullptr;
    Sensitivity sensitivity;
  };
  c10::SmallVector<Also, 1> also;
  // Who saved the memory of the last save first. What products can make again is decided there:
  // whether the plan says so; and whether the last save here was served so.
  Site* first_saver = nullptr;
  std::optional<Remaking> remaking;
  bool remade = false;
  bool runs_products = false;
  // Who first saved what products made again and the last save here was made from exactly. While
  // the plan marks all of them, nothing is kept here; else there is a packet of its own.
  c10::SmallVector<Site*, 2> exact_by;
  // Whether the plan has what is kept here leave its device; and whether not all of it could when
  // it was to, as something else has the memory, say.
  bool sent = false, stuck = false;
  // A checkpoint runs again from its tensors. Never rounded to a width that was not measured, nor
  // below `safe`, which the last measurement says is enough; kRawBits: no width is.
  bool starts = false;
  int safe = kRawBits;
  // Whose packet of the same memory was there before, too narrow for it.
  Site* beside = nullptr;
  // Values decide what runs there, so that a rounded start could make tensors of other shapes.
  bool decides = false;
  // Fewest bits that this site, and those that its packets serve, can do with where nothing was
  // measured.
  int floor = 0, served_floor = 0;

  bool own = false;              // this process saved here; of other sites it was told
  std::optional<Choice> choice;  // the plan's
  Sensitivity sensitivity;
  Footprint reference;  // of the largest step seen; of a derived site what it would take
  // Moments of that step, as StepReference counts them, in [from, until) find its tensors there;
  // the first reader asks at `read`.
  struct Stay {
    static constexpr int kAlways = std::numeric_limits<int>::max();
    int from = 0, read = kAlways, until = kAlways;
  };
  Stay stay;
  bool tried = false;           // a plan was made that knew of this site
  bool zero_exact = false;      // its packets keep zeros and signs
  std::int64_t last_step = -1;  // that packed something here
  // As last_step, for packets whose width was a matter of choice; of a step that another run made.
  std::int64_t lossy_step = -1;

  // Of a codec that the user named.
  int rule = -1;  // that the last packet was made by
  std::shared_ptr<CodecMemory> memory;
  std::array<double, 8> shares{};  // of samples at each of kSampleWidths, as planned

  std::uint64_t draws = 0;  // packets made in the current step: each has its own random numbers
  std::int64_t draws_step = -1;
  Ledger ledger;
};

// A part of the model.
struct Path {
  std::string name;
  bool keep = false;
  std::uint64_t rules = 0;  // of the policy, that are for this part: bits
};

// A parameter, as a place in the forward pass.
struct Landmark {
  std::string name;
  std::uint32_t path = 0;  // of the module that owns it
};

// What a controller knows of a site and a later one may take over.
struct SiteRecord {
  std::string name;
  bool own = true;  // of the process that tells of it
  bool alive = false;
  Site::Sign sign = Site::Sign::kUnknown;
  std::string root;  // its name; empty for a site that packs
  bool derived = false;
  std::vector<std::pair<std::string, Sensitivity>> also;
  int floor = 0, served_floor = 0;
  bool tried = false, zero_exact = false, starts = false, stored_for_others = false;
  int looks_for_cut = 0;
  std::int64_t last_step = -1, lossy_step = -1;
  std::optional<Choice> choice;
  Sensitivity sensitivity;
  Footprint reference;
  int rule = -1;
  std::array<double, 8> shares{};
  at::Tensor ranges, norms, scores;  // what codecs remember, where they do
  std::string first_saver;
  bool remade = false, runs_products = false, sent = false, stuck = false;
  std::optional<Remaking> remaking;  // without laps, and without what it is made from:
  std::vector<std::string> made_from;
  Site::Stay stay = {};
  std::vector<std::string> exact_by = {};
};

class SiteTable {
 public:
  SiteTable();

  // Path 0 is the whole program.
  std::uint32_t add_path(std::string name, bool keep, std::uint64_t rules = 0);
  // The path of the `ordinal`th part named `name` inside `parent`, made at first sight.
  std::uint32_t path_within(std::uint32_t parent, const std::string& name, int ordinal);
  const Path& path(std::uint32_t id) const { return paths_[id]; }
  void keep_path(std::uint32_t id) { paths_[id].keep = true; }
  void add_rules(std::uint32_t id, std::uint64_t rules) { paths_[id].rules |= rules; }

  // Landmark 0 is the beginning. The same name gives the same landmark.
  std::uint32_t landmark(const std::string& name, std::uint32_t path);
  const std::string& landmark_name(std::uint32_t id) const { return landmarks_[id].name; }
  // A landmark for a parameter without a name, by its storage: parameters in the order in which
  // they are first used. At most 4096 of them, so that parameters that move leave no trail.
  std::uint32_t nameless_landmark(const void* storage);

  // `slot` is a position of the operator's arguments, or past them the ordinal of a result.
  Site& site(std::uint32_t landmark, const Operator& op, int slot, int occurrence);
  // The site of a tensor that a compiled graph saves, by its name there. Slashes in it are
  // replaced. `run` counts those of the graph in a step.
  Site& graph_site(std::uint32_t path, std::string_view module, std::string_view name, int run);
  bool keeps(const Site& site) const { return paths_[site.path].keep; }
  const Path& path_of(const Site& site) const { return paths_[site.path]; }
  // In the order in which sites were found, which plans follow.
  std::vector<SiteRecord> records() const;
  // Raises ValueError for a record of a site at a parameter that this model does not have.
  void check(const std::vector<SiteRecord>& records) const;
  // Makes sites what records that were checked know of them, and those that are not there. Of other
  // sites nothing is known afterwards.
  void take(const std::vector<SiteRecord>& records);
  // What several processes agreed on. Of sites that this process has, the tables, footprints and
  // choices alone; of others all that there is to know.
  void take_agreed(const std::vector<SiteRecord>& records);
  // Gives sites their choices, and marks those that products make again and those that leave their
  // device, now or when they are first seen. Raises as check(), having changed nothing.
  void take_choices(std::vector<std::pair<std::string, Choice>> choices,
                    const std::vector<std::string>& remade, const std::vector<std::string>& sent);
  std::deque<Site>& sites() { return sites_; }
  const std::deque<Site>& sites() const { return sites_; }

 private:
  std::deque<Path> paths_;
  std::unordered_map<std::string, std::uint32_t> within_;
  std::vector<Landmark> landmarks_;
  std::unordered_map<std::string, std::uint32_t> landmark_names_;
  ska::flat_hash_map<const void*, std::uint32_t> nameless_;
  std::deque<Site> sites_;
  ska::flat_hash_map<std::uint64_t, Site*> index_;
  std::unordered_map<std::string, Site*> by_name_;
  std::unordered_map<std::string, Choice> expected_choices_;
  std::unordered_set<std::string> expected_remade_, expected_sent_;

  Site& named(const std::string& name);  // makes one that is not there
  // What a plan that was loaded says of a site that is seen for the first time.
  void take_expected(Site& site) const;
  void check_landmark(const std::string& site) const;
  void apply(const SiteRecord& record, Site& site);
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

#endif  // BACKFOLD_TORCH_CAPTURE_SITE_H_
