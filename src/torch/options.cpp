// SPDX-License-Identifier: Apache-2.0

#include "torch/options.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include "torch/json/state.h"
#include "torch/levels.h"
#include "torch/segments.h"
#include "torch/state.h"

namespace backfold {
namespace {

struct Unit {
  const char* name;
  double size;
};
constexpr Unit kUnits[] = {{"B", 1},           {"kB", 1e3},        {"MB", 1e6},
                           {"GB", 1e9},        {"TB", 1e12},       {"KiB", 1LL << 10},
                           {"MiB", 1LL << 20}, {"GiB", 1LL << 30}, {"TiB", 1LL << 40}};

std::string folded(std::string_view text) {
  std::string lower;
  for (const char c : text)
    if (!std::isspace(static_cast<unsigned char>(c)))
      lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

std::optional<double> size_of_unit(const std::string& name) {
  if (name.empty()) return 1;
  for (const Unit& unit : kUnits)
    if (folded(unit.name) == name) return unit.size;
  return std::nullopt;
}

}  // namespace

std::int64_t parse_bytes(std::string_view text, std::string_view argument) {
  const std::string plain = folded(text);
  double number = 0;
  const auto [end, error] = std::from_chars(plain.data(), plain.data() + plain.size(), number);
  const bool starts = !plain.empty() && (std::isdigit(plain[0]) || plain[0] == '.');
  const auto unit = size_of_unit(std::string(end, plain.data() + plain.size()));
  std::string units;
  for (const Unit& one : kUnits) units += (units.empty() ? "" : ", ") + std::string(one.name);
  TORCH_CHECK_VALUE(starts && error != std::errc::invalid_argument && unit, argument,
                    " must be a number, optionally with one of the units ", units, ", got '", text,
                    "'");
  const double bytes = error == std::errc() ? std::trunc(number * *unit) : 0;
  TORCH_CHECK_VALUE(bytes >= 1 && bytes < 9223372036854775808.0, argument,
                    " must be at least one byte and below 2**63, got '", text, "'");
  return static_cast<std::int64_t>(bytes);
}

namespace torch_layer {
namespace {

void check_target(const ControllerOptions& options) {
  const int given = options.ratio.has_value() + options.budget.has_value() +
                    options.peak.has_value() + !options.level.empty();
  TORCH_CHECK_VALUE(
      given <= 1,
      "ratio, budget, peak and level cannot be given together: each sets how much is kept");
  TORCH_CHECK_VALUE(!options.ratio || (*options.ratio > 1 && std::isfinite(*options.ratio)),
                    "ratio must be above 1 and finite, got ", *options.ratio);
  TORCH_CHECK_VALUE(!options.budget || *options.budget >= 1,
                    "budget must be at least one byte and below 2**63, got ", *options.budget);
  TORCH_CHECK_VALUE(!options.peak || *options.peak >= 1,
                    "peak must be at least one byte and below 2**63, got ", *options.peak);
  constexpr const char* kNeedsPlan =
      " needs a plan, which adaptive=False rules out; use bits instead";
  TORCH_CHECK_VALUE(options.adaptive || !options.ratio, "ratio=", *options.ratio, kNeedsPlan);
  TORCH_CHECK_VALUE(options.adaptive || !options.budget, "budget=", *options.budget, kNeedsPlan);
  TORCH_CHECK_VALUE(options.adaptive || !options.peak, "peak=", *options.peak, kNeedsPlan);
}

Wanted wanted_by_bits(const std::optional<double>& bits, bool adaptive) {
  if (!bits) return {};
  TORCH_CHECK_VALUE(adaptive || is_width(*bits), "bits must be one of ", list_code_widths(),
                    " with adaptive=False, got ", *bits,
                    "; adaptive=True allows any mean from 1 to 16");
  TORCH_CHECK_VALUE(*bits >= 1 && *bits <= 16, "bits must be from 1 to 16, got ", *bits);
  return {Target{Target::Kind::kBits, *bits}, adaptive};
}

}  // namespace

Wanted wanted_by(const ControllerOptions& options) {
  check_target(options);
  const bool rounds = options.bits.has_value();
  if (options.ratio) return {Target{Target::Kind::kRatio, *options.ratio}, rounds};
  if (options.budget)
    return {Target{Target::Kind::kBudget, static_cast<double>(*options.budget)}, rounds};
  if (options.peak)
    return {Target{Target::Kind::kPeak, static_cast<double>(*options.peak)}, rounds};
  if (options.level.empty()) return wanted_by_bits(options.bits, options.adaptive);
  const Level& level = level_named(options.level);
  TORCH_CHECK_VALUE(options.adaptive || !level.adaptive, "level='", options.level,
                    "' plans widths, which adaptive=False rules out; 'L1', 'L1.1', 'L1.2' and "
                    "'actnn-L2' use one width everywhere");
  return wanted_by_bits(level.bits, level.adaptive);
}

std::shared_ptr<State> state_for(const ControllerOptions& options) {
  const Wanted wanted = wanted_by(options);
  TORCH_CHECK_VALUE(options.min_bytes >= 0, "min_bytes must be 0 or more, got ", options.min_bytes);
  TORCH_CHECK_VALUE(options.probe_fraction > 0 && options.probe_fraction <= 1,
                    "probe_fraction must be above 0 and at most 1, got ", options.probe_fraction);
  auto state = std::make_shared<State>();
  const bool bytes = wanted.target && wanted.target->kind != Target::Kind::kBits;
  if (wanted.adaptive) {
    state->planning.target = wanted.target;
  } else if (bytes) {
    TORCH_CHECK_VALUE(options.derive, name_of(wanted.target->kind),
                      " with bits=None is kept by making tensors again, which derive=False rules "
                      "out");
    state->planning.exact = wanted.target;
  } else if (wanted.target) {
    state->options.bits = static_cast<int>(wanted.target->value);
  }
  state->options.adaptive = wanted.adaptive;
  state->options.min_bytes = options.min_bytes;
  state->options.seed = options.seed;
  state->options.derive = options.derive && options.level.empty();
  if (bytes && state->options.derive) state->planning.products = Planning::Products::kWanted;
  state->model.keep = options.keep;
  state->turns.schedule = make_schedule(options.probe_steps, options.probe_every);
  state->turns.fraction = options.probe_fraction;
  state->turns.replays = options.replay;
  state->turns.on_noise = options.on_noise;
  join(*state, options.rank, options.world_size, options.gather);
  bool defragment = options.defragment;
  std::optional<bool> offload = options.offload;
  if (!options.level.empty()) {
    const Level& level = level_named(options.level);
    if (level.offload) offload = true;
    defragment |= level.defragment;
    TORCH_CHECK_VALUE(level.codecs.empty() || options.codec.empty(), "level='", options.level,
                      "' sets its own codec, so codec cannot be given as well");
    for (const CodecRule& rule : level.codecs) state->policy.add(rule);
    if (level.checkpoints) state->blocks.wants_checkpoints = level.name;
  }
  using Offloading = State::Offloading;
  if (offload) state->offloading = *offload ? Offloading::kEverything : Offloading::kNothing;
  if (defragment && at::hasCUDA()) make_segments_expandable();
  for (const CodecRule& rule : options.codec) state->policy.add(rule);
  for (const Codec& codec : options.menu) state->policy.offer(codec);
  return state;
}

}  // namespace torch_layer
}  // namespace backfold
