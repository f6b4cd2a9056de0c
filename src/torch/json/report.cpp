// SPDX-License-Identifier: Apache-2.0

#include "backfold/report.h"

#include <limits>

#include "torch/json/fields.h"

namespace backfold {
namespace {

using torch_layer::as_number;
using torch_layer::Fields;
using torch_layer::Json;

Json row_as_json(const ReportRow& row) {
  return {{"module", row.module},
          {"op", row.op},
          {"slot", row.slot},
          {"occurrence", row.occurrence},
          {"saves", row.saves},
          {"saved_bytes", row.saved_bytes},
          {"unique_bytes", row.unique_bytes},
          {"held_bytes", row.held_bytes},
          {"offloaded_bytes", row.offloaded_bytes},
          {"duplicate_bytes", row.duplicate_bytes},
          {"kind", row.kind},
          {"elements", row.elements},
          {"bits", row.bits},
          {"stored_bits", row.stored_bits},
          {"layout", row.layout},
          {"estimate", row.estimate},
          {"error", row.error},
          {"sensitivity", row.sensitivity},
          {"reason", row.reason},
          {"recipe", row.recipe},
          {"source", row.source},
          {"moved_bytes", row.moved_bytes},
          {"transient_bytes", row.transient_bytes},
          {"spared_bytes", row.spared_bytes},
          {"spared_ms", row.spared_ms}};
}

Json plan_as_json(const ReportPlan& plan) {
  return {{"step", plan.step},
          {"sites", plan.sites},
          {"held_bytes", plan.held_bytes},
          {"sent_bytes", plan.sent_bytes},
          {"mean_bits", plan.mean_bits},
          {"error", plan.error},
          {"uniform_error", plan.uniform_error},
          {"raised", plan.raised},
          {"kept", plan.kept},
          {"peak_bytes", plan.peak_bytes ? Json(*plan.peak_bytes) : Json()}};
}

const char* phase_of(const ReportTimeline::Event& event) {
  return event.backward ? "backward" : "forward";
}

Json site_as_json(const ReportTimeline::Event& event) {
  return event.site < 0 ? Json() : Json(event.site);
}

Json phases_as_json(const std::vector<ReportTimeline::Event>& events) {
  Json phases = Json::array();
  for (std::size_t i = 0; i < events.size(); ++i)
    if (i == 0 || events[i].backward != events[i - 1].backward)
      phases.push_back({{"phase", phase_of(events[i])}, {"from", i}});
  return phases;
}

Json peak_as_json(const ReportTimeline& timeline, std::size_t index, std::int64_t bytes) {
  const ReportTimeline::Event& event = timeline.events[index];
  return {{"event", index},
          {"site", site_as_json(event)},
          {"phase", phase_of(event)},
          {"bytes", bytes}};
}

// By columns, as events are many.
Json timeline_as_json(const ReportTimeline& timeline) {
  const auto& events = timeline.events;
  Json sites = Json::array(), plain = Json::array(), held = Json::array(), made = Json::array();
  for (const ReportTimeline::Event& event : events) {
    sites.push_back(site_as_json(event));
    plain.push_back(event.plain_bytes);
    held.push_back(event.held_bytes);
    made.push_back(event.made_bytes);
  }
  const auto& folded = events[timeline.folded_peak];
  return {
      {"events_seen", timeline.events_seen},
      {"carried",
       {{"plain_bytes", timeline.carried_plain_bytes},
        {"held_bytes", timeline.carried_held_bytes}}},
      {"peak",
       {{"plain",
         peak_as_json(timeline, timeline.plain_peak, events[timeline.plain_peak].plain_bytes)},
        {"held", peak_as_json(timeline, timeline.held_peak, events[timeline.held_peak].held_bytes)},
        {"folded",
         peak_as_json(timeline, timeline.folded_peak, folded.held_bytes + folded.made_bytes)}}},
      {"phases", phases_as_json(events)},
      {"site", sites},
      {"plain_bytes", plain},
      {"held_bytes", held},
      {"made_bytes", made}};
}

Json history_as_json(const ReportHistory& history) {
  Json plans = Json::array(), noise = Json::array();
  for (const ReportHistory::Plan& plan : history.plans)
    plans.push_back(
        {{"step", plan.step},
         {"held_bytes", plan.held_bytes},
         {"mean_bits", plan.mean_bits},
         {"error", plan.error},
         {"uniform_error", plan.uniform_error},
         {"gradient_energy", plan.gradient_energy ? Json(*plan.gradient_energy) : Json()}});
  for (const ReportHistory::Noise& one : history.noise)
    noise.push_back({{"step", one.step}, {"noise", one.ratio}});
  return {{"plans", plans}, {"noise", noise}};
}

constexpr const char* kReport = "report";

// json() writes null for what is not finite.
double number_in(const Fields& fields, const char* name) {
  const Json& value = fields[name];
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : as_number(value, kReport);
}

ReportRow row_from_json(const Fields& fields) {
  const auto text = [&](const char* name) { return fields.get<std::string>(name); };
  const auto integer = [&](const char* name) { return fields.get<std::int64_t>(name); };
  return {.module = text("module"),
          .op = text("op"),
          .slot = text("slot"),
          .occurrence = fields.get<int>("occurrence"),
          .saves = integer("saves"),
          .saved_bytes = integer("saved_bytes"),
          .unique_bytes = integer("unique_bytes"),
          .held_bytes = integer("held_bytes"),
          .offloaded_bytes = integer("offloaded_bytes"),
          .duplicate_bytes = integer("duplicate_bytes"),
          .kind = text("kind"),
          .bits = fields.get<int>("bits"),
          .stored_bits = number_in(fields, "stored_bits"),
          .layout = text("layout"),
          .estimate = text("estimate"),
          .error = number_in(fields, "error"),
          .reason = text("reason"),
          .recipe = text("recipe"),
          .source = text("source"),
          .moved_bytes = integer("moved_bytes"),
          .transient_bytes = integer("transient_bytes"),
          .spared_bytes = integer("spared_bytes"),
          .spared_ms = number_in(fields, "spared_ms")};
}

ReportPlan plan_from_json(const Fields& fields) {
  std::optional<std::int64_t> peak;  // earlier reports have none of these
  if (fields.object.contains("peak_bytes") && !fields["peak_bytes"].is_null())
    peak = fields.get<std::int64_t>("peak_bytes");
  const std::int64_t sent =
      fields.object.contains("sent_bytes") ? fields.get<std::int64_t>("sent_bytes") : 0;
  return {.step = fields.get<std::int64_t>("step"),
          .sites = fields.get<std::int64_t>("sites"),
          .held_bytes = fields.get<std::int64_t>("held_bytes"),
          .sent_bytes = sent,
          .mean_bits = number_in(fields, "mean_bits"),
          .error = number_in(fields, "error"),
          .uniform_error = number_in(fields, "uniform_error"),
          .raised = fields.get<bool>("raised"),
          .kept = fields.get<std::vector<std::string>>("kept"),
          .peak_bytes = peak};
}

Json remade_as_json(const ReportRemade& remade) {
  return {{"places", remade.places},
          {"bytes", remade.bytes},
          {"held_bytes", remade.held_bytes},
          {"sent_bytes", remade.sent_bytes},
          {"ms", remade.ms}};
}

}  // namespace

std::string Report::json() const {
  Json json;
  json["format"] = kReportFormat;
  json["step"] = step;
  json["folded"] = folded;
  json["saved_bytes"] = saved_bytes;
  json["unique_bytes"] = unique_bytes;
  json["held_bytes"] = held_bytes;
  json["offloaded_bytes"] = offloaded_bytes;
  json["alive_bytes"] = alive_bytes;
  json["spared_bytes"] = spared_bytes;
  json["spared_ms"] = spared_ms;
  json["unseen_bytes"] = unseen_bytes ? Json(*unseen_bytes) : Json();
  json["device_peak_bytes"] = device_peak_bytes ? Json(*device_peak_bytes) : Json();
  json["noise"] = noise ? Json(*noise) : Json();
  json["plan"] = plan ? plan_as_json(*plan) : Json();
  json["remade"] = remade ? remade_as_json(*remade) : Json();
  json["sites"] = Json::array();
  for (const ReportRow& row : rows) json["sites"].push_back(row_as_json(row));
  json["history"] = history_as_json(history);
  json["timeline"] = timeline ? timeline_as_json(*timeline) : Json();
  return json.dump(2);
}

Report Report::from_json(std::string_view text) {
  const Json json = torch_layer::parse_object(text, kReport);
  const Fields fields{json, kReport};
  const auto format = fields.get<std::int64_t>("format");
  TORCH_CHECK_VALUE(format == kReportFormat, "report must be of format ", kReportFormat,
                    ", which this version of Backfold reads, got format ", format);
  Report report;
  report.step = fields.get<std::int64_t>("step");
  report.folded = fields.get<bool>("folded");
  report.saved_bytes = fields.get<std::int64_t>("saved_bytes");
  report.unique_bytes = fields.get<std::int64_t>("unique_bytes");
  report.held_bytes = fields.get<std::int64_t>("held_bytes");
  report.offloaded_bytes = fields.get<std::int64_t>("offloaded_bytes");
  report.alive_bytes = fields.get<std::int64_t>("alive_bytes");
  report.spared_bytes = fields.get<std::int64_t>("spared_bytes");
  report.spared_ms = number_in(fields, "spared_ms");
  if (!fields["unseen_bytes"].is_null())
    report.unseen_bytes = fields.get<std::int64_t>("unseen_bytes");
  if (!fields["device_peak_bytes"].is_null())
    report.device_peak_bytes = fields.get<std::int64_t>("device_peak_bytes");
  if (!fields["noise"].is_null()) report.noise = number_in(fields, "noise");
  if (!fields["plan"].is_null()) report.plan = plan_from_json(fields.within("plan"));
  TORCH_CHECK_VALUE(fields["sites"].is_array(), "report: sites must be a list, got ",
                    fields["sites"].type_name());
  for (const Json& row : fields["sites"]) report.rows.push_back(row_from_json({row, kReport}));
  return report;
}

}  // namespace backfold
