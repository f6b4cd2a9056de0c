// SPDX-License-Identifier: Apache-2.0

#include "python/state.h"

#include <ATen/Functions.h>
#include <pybind11/stl.h>

#include <cstring>

namespace backfold::python {
namespace {

namespace py = pybind11;
using torch_layer::Choice;
using torch_layer::Footprint;
using torch_layer::kRawBits;
using torch_layer::kWidths;
using torch_layer::Policy;
using torch_layer::Sensitivity;
using torch_layer::Site;
using torch_layer::SiteRecord;

py::object as_object(const std::optional<Choice>& choice, const Policy& policy) {
  if (!choice) return py::none();
  const py::object bits =
      choice->bits == kRawBits ? py::object(py::str("raw")) : py::object(py::int_(choice->bits));
  py::dict dict(py::arg("bits") = bits, py::arg("layout") = name_of(choice->grouping));
  if (choice->codec >= 0)
    dict["codec"] = policy.menu()[static_cast<std::size_t>(choice->codec)].reason;
  return dict;
}

// Of the menu, by the way it is written; -1 where there is none.
int as_codec(const std::string& site, const py::handle& object, const Policy& policy) {
  if (!object.contains("codec")) return -1;
  const auto name = object["codec"].cast<std::string>();
  std::string offered;
  for (std::size_t i = 0; i < policy.menu().size(); ++i) {
    if (policy.menu()[i].reason == name) return static_cast<int>(i);
    offered += (i ? ", " : "") + policy.menu()[i].reason;
  }
  TORCH_CHECK_VALUE(false, "plan: the codec of \"", site, "\" must be one of menu=[", offered,
                    "], got ", name);
}

Choice as_choice(const std::string& site, const py::handle& object, const Policy& policy) {
  const int codec = as_codec(site, object, policy);
  const py::object bits = object["bits"];
  const auto layout = object["layout"].cast<std::string>();
  const auto grouping = torch_layer::grouping_named(layout);
  TORCH_CHECK_VALUE(grouping, "plan: the layout of \"", site,
                    "\" must be flat, rotated, strided 1 or strided 2, got ", layout);
  if (py::isinstance<py::str>(bits)) {
    TORCH_CHECK_VALUE(bits.cast<std::string>() == "raw", "plan: the bits of \"", site,
                      "\" must be a width or \"raw\", got ", bits.cast<std::string>());
    return {kRawBits, *grouping, codec};
  }
  const int width = bits.cast<int>();
  TORCH_CHECK_VALUE(std::find(kWidths.begin(), kWidths.end(), width) != kWidths.end(),
                    "plan: the bits of \"", site,
                    "\" must be \"raw\" or one of 1, 2, 3, 4, 5, 6, 8, 16, got ", width);
  return {width, *grouping, codec};
}

py::dict as_dict(const Sensitivity& sensitivity) {
  py::dict errors;
  for (const auto& [bits, error] : sensitivity.errors)
    errors[py::str(std::to_string(bits))] = error;
  py::list offers;
  for (const auto& offer : sensitivity.offers)
    offers.append(py::make_tuple(offer.codec, offer.bits, offer.error));
  return py::dict(py::arg("estimate") = name_of(sensitivity.estimate),
                  py::arg("layout") = name_of(sensitivity.grouping), py::arg("errors") = errors,
                  py::arg("offers_at") = sensitivity.offers_at, py::arg("offers") = offers);
}

Sensitivity as_sensitivity(const py::handle& object) {
  Sensitivity sensitivity;
  const auto estimate = object["estimate"].cast<std::string>();
  for (int i = 0; i <= static_cast<int>(Sensitivity::Estimate::kExact); ++i)
    if (estimate == name_of(static_cast<Sensitivity::Estimate>(i)))
      sensitivity.estimate = static_cast<Sensitivity::Estimate>(i);
  sensitivity.grouping = torch_layer::grouping_named(object["layout"].cast<std::string>())
                             .value_or(torch_layer::Grouping{});
  for (const auto& [bits, error] : object["errors"].cast<py::dict>())
    sensitivity.errors.emplace_back(std::stoi(bits.cast<std::string>()), error.cast<double>());
  std::sort(sensitivity.errors.begin(), sensitivity.errors.end());
  sensitivity.offers_at = object["offers_at"].cast<int>();
  for (const auto& [codec, bits, error] :
       object["offers"].cast<std::vector<std::tuple<int, double, double>>>())
    sensitivity.offers.push_back({codec, bits, error});
  return sensitivity;
}

// Numbers of a tensor as JSON can hold them, bit for bit and in little space: a data set has as
// many norms as samples, and that at every site.
py::object as_object(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  const at::Tensor values = tensor.to(at::kCPU, at::kFloat).contiguous();
  const py::bytes bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  return py::dict(
      py::arg("shape") = values.sizes().vec(),
      py::arg("float32") = py::module_::import("base64").attr("b64encode")(bytes).attr("decode")());
}

at::Tensor as_tensor(const std::string& site, const py::handle& object) {
  if (object.is_none()) return {};
  const auto bytes =
      py::module_::import("base64").attr("b64decode")(object["float32"]).cast<std::string>();
  const at::Tensor values =
      at::empty(object["shape"].cast<std::vector<std::int64_t>>(), at::kFloat);
  TORCH_CHECK_VALUE(bytes.size() == values.nbytes(), "state: a tensor of \"", site, "\" has ",
                    values.sizes(), " numbers in ", bytes.size(), " bytes");
  std::memcpy(values.mutable_data_ptr(), bytes.data(), bytes.size());
  return values;
}

py::dict as_dict(const SiteRecord& record, const Policy& policy) {
  py::dict dict;
  dict["name"] = record.name;
  dict["alive"] = record.alive;
  dict["sign"] = static_cast<int>(record.sign);
  dict["root"] = record.root;
  dict["floor"] = record.floor;
  dict["served_floor"] = record.served_floor;
  dict["tried"] = record.tried;
  dict["zero_exact"] = record.zero_exact;
  dict["last_step"] = record.last_step;
  dict["lossy_step"] = record.lossy_step;
  dict["choice"] = as_object(record.choice, policy);
  dict["sensitivity"] = as_dict(record.sensitivity);
  dict["elements"] = record.reference.elements;
  dict["packets"] = record.reference.packets;
  dict["element_bytes"] = record.reference.element_bytes;
  dict["groups"] = record.reference.groups;
  dict["rule"] = record.rule;
  dict["shares"] = record.shares;
  dict["ranges"] = as_object(record.ranges);
  dict["norms"] = as_object(record.norms);
  dict["scores"] = as_object(record.scores);
  return dict;
}

SiteRecord as_record(const py::handle& object, const Policy& policy) {
  SiteRecord record;
  record.name = object["name"].cast<std::string>();
  record.alive = object["alive"].cast<bool>();
  record.sign = static_cast<Site::Sign>(object["sign"].cast<int>());
  record.root = object["root"].cast<std::string>();
  record.floor = object["floor"].cast<int>();
  record.served_floor = object["served_floor"].cast<int>();
  record.tried = object["tried"].cast<bool>();
  record.zero_exact = object["zero_exact"].cast<bool>();
  record.last_step = object["last_step"].cast<std::int64_t>();
  record.lossy_step = object["lossy_step"].cast<std::int64_t>();
  if (!object["choice"].is_none()) record.choice = as_choice(record.name, object["choice"], policy);
  record.sensitivity = as_sensitivity(object["sensitivity"]);
  record.reference.elements = object["elements"].cast<std::int64_t>();
  record.reference.packets = object["packets"].cast<std::int64_t>();
  record.reference.element_bytes = object["element_bytes"].cast<std::int64_t>();
  record.reference.groups = object["groups"].cast<decltype(Footprint::groups)>();
  record.rule = object["rule"].cast<int>();
  record.shares = object["shares"].cast<decltype(SiteRecord::shares)>();
  record.ranges = as_tensor(record.name, object["ranges"]);
  record.norms = as_tensor(record.name, object["norms"]);
  record.scores = as_tensor(record.name, object["scores"]);
  return record;
}

}  // namespace

py::dict summary_as_dict(const ReportPlan& plan) {
  py::dict dict;
  dict["step"] = plan.step;
  dict["sites"] = plan.sites;
  dict["held_bytes"] = plan.held_bytes;
  dict["mean_bits"] = plan.mean_bits;
  dict["error"] = plan.error;
  dict["uniform_error"] = plan.uniform_error;
  dict["kept"] = plan.kept;
  return dict;
}

py::dict state_as_dict(torch_layer::State& state) {
  settle_scores(state);  // what a step took for it is not written
  py::dict dict;
  dict["steps"] = state.blocks.steps;
  dict["seed"] = state.options.seed;
  dict["bits"] = state.options.bits;
  dict["saved_bytes"] = state.planning.reference.saved_bytes;
  dict["fixed_bytes"] = state.planning.reference.fixed_bytes;
  dict["unique_bytes"] = state.planning.reference.unique_bytes;
  dict["plan"] = py::none();
  if (state.planning.plan) dict["plan"] = summary_as_dict(*state.planning.plan);
  dict["gradient_energy"] = state.planning.gradient_energy;
  dict["outgrown"] = state.planning.outgrown;
  dict["wants_scores"] = state.planning.scores == torch_layer::Planning::Scores::kWanted;
  dict["guard"] = py::none();
  if (state.guarding.guard) {
    const torch_layer::SketchState sketch = state.guarding.guard->state();
    dict["guard"] =
        py::dict(py::arg("counters") = sketch.counters, py::arg("values") = sketch.values);
  }
  py::list sites;
  for (const SiteRecord& record : state.sites->records())
    sites.append(as_dict(record, state.policy));
  dict["sites"] = sites;
  return dict;
}

void combine_tables_by(torch_layer::State& state, py::handle combine) {
  state.planning.combine_tables = [combine,
                                   &policy = state.policy](std::vector<SiteRecord>& records) {
    py::list sites;
    for (const SiteRecord& record : records) sites.append(as_dict(record, policy));
    records.clear();
    for (const py::handle& site : combine(sites)) records.push_back(as_record(site, policy));
  };
}

void take_state(torch_layer::State& state, const py::dict& dict) {
  std::vector<SiteRecord> records;
  for (const py::handle& site : dict["sites"]) records.push_back(as_record(site, state.policy));
  const auto steps = dict["steps"].cast<std::int64_t>();
  const auto seed = dict["seed"].cast<std::uint64_t>();
  const auto bits = dict["bits"].cast<std::optional<int>>();
  const auto wants_scores = dict["wants_scores"].cast<bool>();
  const auto outgrown = dict["outgrown"].cast<bool>();
  const auto gradient_energy = dict["gradient_energy"].cast<std::optional<double>>();
  const torch_layer::StepReference reference{dict["saved_bytes"].cast<std::int64_t>(),
                                             dict["fixed_bytes"].cast<std::int64_t>(),
                                             dict["unique_bytes"].cast<std::int64_t>()};
  std::optional<torch_layer::PlanSummary> plan;
  if (const py::object given = dict["plan"]; !given.is_none())
    plan = {given["step"].cast<std::int64_t>(),
            given["sites"].cast<std::int64_t>(),
            given["held_bytes"].cast<std::int64_t>(),
            given["mean_bits"].cast<double>(),
            given["error"].cast<double>(),
            given["uniform_error"].cast<double>(),
            given["kept"].cast<std::vector<std::string>>()};
  state.sites->check(records);
  std::unique_ptr<torch_layer::Guard> guard = torch_layer::guard_for(state, seed);
  if (const py::object given = dict["guard"]; !given.is_none() && guard)
    guard->load({given["counters"].cast<std::vector<std::int64_t>>(),
                 given["values"].cast<std::vector<double>>()});
  state.sites->take(records);
  state.guarding.guard = std::move(guard);
  state.blocks.steps = steps;
  state.options.seed = seed;
  state.planning.outgrown = outgrown;
  state.planning.gradient_energy = gradient_energy;
  state.probing.waiting.reset();
  using Scores = torch_layer::Planning::Scores;
  state.planning.scores = wants_scores ? Scores::kWanted : Scores::kKnown;
  state.options.bits = bits;
  state.planning.reference = reference;
  state.planning.plan = plan;
}

py::dict plan_as_dict(const torch_layer::State& state) {
  py::dict sites;
  for (const SiteRecord& record : state.sites->records_by_name()) {
    if (!record.choice || !record.root.empty()) continue;
    py::dict site = as_object(record.choice, state.policy);
    site["elements"] = record.reference.elements;
    site["estimate"] = name_of(record.sensitivity.estimate);
    site["error"] = error_at(record.sensitivity, record.choice->bits);
    sites[py::str(record.name)] = site;
  }
  py::dict dict;
  dict["bits"] = state.options.bits;  // of sites that are not listed
  dict["sites"] = sites;
  return dict;
}

void take_plan(torch_layer::State& state, const py::dict& dict) {
  std::vector<std::pair<std::string, Choice>> choices;
  for (const auto& [name, site] : dict["sites"].cast<py::dict>())
    choices.emplace_back(name.cast<std::string>(),
                         as_choice(name.cast<std::string>(), site, state.policy));
  const auto bits = dict["bits"].cast<int>();
  TORCH_CHECK_VALUE(std::find(kWidths.begin(), kWidths.end(), bits) != kWidths.end(),
                    "plan: bits must be one of 1, 2, 3, 4, 5, 6, 8, 16, got ", bits);
  state.sites->take_choices(std::move(choices));
  state.options.bits = bits;
  state.options.adaptive = true;
  state.planning.target.reset();
}

}  // namespace backfold::python
