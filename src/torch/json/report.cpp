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
          {"bits", row.bits},
          {"stored_bits", row.stored_bits},
          {"layout", row.layout},
          {"estimate", row.estimate},
          {"error", row.error},
          {"reason", row.reason},
          {"recipe", row.recipe},
          {"source", row.source},
          {"moved_bytes", row.moved_bytes},
          {"transient_bytes", row.transient_bytes},
          {"spared_bytes", row.spared_bytes},
          {"spared_ms", row.spared_ms}};
}

Json plan_as_json(const ReportPlan& plan) {
  return {
      {"step", plan.step},           {"sites", plan.sites}, {"held_bytes", plan.held_bytes},
      {"mean_bits", plan.mean_bits}, {"error", plan.error}, {"uniform_error", plan.uniform_error},
      {"raised", plan.raised},       {"kept", plan.kept}};
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
  return {.step = fields.get<std::int64_t>("step"),
          .sites = fields.get<std::int64_t>("sites"),
          .held_bytes = fields.get<std::int64_t>("held_bytes"),
          .mean_bits = number_in(fields, "mean_bits"),
          .error = number_in(fields, "error"),
          .uniform_error = number_in(fields, "uniform_error"),
          .raised = fields.get<bool>("raised"),
          .kept = fields.get<std::vector<std::string>>("kept")};
}

}  // namespace

std::string Report::json() const {
  Json json;
  json["format"] = kReportVersion;
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
  json["noise"] = noise ? Json(*noise) : Json();
  json["plan"] = plan ? plan_as_json(*plan) : Json();
  json["sites"] = Json::array();
  for (const ReportRow& row : rows) json["sites"].push_back(row_as_json(row));
  return json.dump(2);
}

Report Report::from_json(std::string_view text) {
  const Json json = torch_layer::parse_object(text, kReport);
  const Fields fields{json, kReport};
  const auto format = fields.get<std::int64_t>("format");
  TORCH_CHECK_VALUE(format == kReportVersion, "report must be of format ", kReportVersion,
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
  if (!fields["noise"].is_null()) report.noise = number_in(fields, "noise");
  if (!fields["plan"].is_null()) report.plan = plan_from_json(fields.within("plan"));
  TORCH_CHECK_VALUE(fields["sites"].is_array(), "report: sites must be a list, got ",
                    fields["sites"].type_name());
  for (const Json& row : fields["sites"]) report.rows.push_back(row_from_json({row, kReport}));
  return report;
}

}  // namespace backfold
