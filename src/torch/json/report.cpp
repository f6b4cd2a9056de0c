// SPDX-License-Identifier: Apache-2.0

#include "backfold/report.h"
#include "torch/json/fields.h"

namespace backfold {
namespace {

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

Json remade_as_json(const ReportRemade& remade) {
  return {{"places", remade.places},
          {"bytes", remade.bytes},
          {"held_bytes", remade.held_bytes},
          {"ms", remade.ms}};
}

}  // namespace

std::string Report::json() const {
  Json json;
  json["step"] = step;
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
  json["remade"] = remade ? remade_as_json(*remade) : Json();
  json["sites"] = Json::array();
  for (const ReportRow& row : rows) json["sites"].push_back(row_as_json(row));
  return json.dump(2);
}

}  // namespace backfold
