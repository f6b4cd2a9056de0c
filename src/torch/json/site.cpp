// SPDX-License-Identifier: Apache-2.0

#include "torch/json/site.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

#include "torch/json/base64.h"

namespace backfold::torch_layer {
namespace {

Fields fields_of_site(const std::string& site, const Json& json) {
  const bool complete = json.is_object() && json.contains("bits") && json.contains("layout") &&
                        (json["bits"].is_number_integer() || json["bits"].is_string()) &&
                        json["layout"].is_string();
  TORCH_CHECK_VALUE(complete, "plan: '", site, "' must hold 'bits' and 'layout', got ",
                    json.dump());
  return {json, "plan"};
}

// The index of the codec in the menu, by its description; -1 if none is named.
int codec_from_json(const std::string& site, const Json& json, const Policy& policy) {
  if (!json.contains("codec")) return -1;
  const auto name = Fields{json, "plan"}.get<std::string>("codec");
  std::string offered;
  for (std::size_t i = 0; i < policy.menu().size(); ++i) {
    if (policy.menu()[i].reason == name) return static_cast<int>(i);
    offered += (i ? ", " : "") + policy.menu()[i].reason;
  }
  TORCH_CHECK_VALUE(false, "plan: the codec of \"", site, "\" must be one of menu=[", offered,
                    "], got ", name);
}

Json sensitivity_as_json(const Sensitivity& sensitivity) {
  Json errors = Json::object(), offers = Json::array();
  for (const auto& [bits, error] : sensitivity.errors)
    errors[std::to_string(bits)] = as_json(error);
  for (const auto& offer : sensitivity.offers)
    offers.push_back({offer.codec, as_json(offer.bits), as_json(offer.error)});
  return {{"estimate", name_of(sensitivity.estimate)},
          {"layout", name_of(sensitivity.grouping)},
          {"errors", errors},
          {"offers_at", sensitivity.offers_at},
          {"offers", offers}};
}

Sensitivity sensitivity_from_json(const Fields& fields) {
  Sensitivity sensitivity;
  const auto estimate = fields.get<std::string>("estimate");
  for (int i = 0; i <= static_cast<int>(Sensitivity::Estimate::kExact); ++i)
    if (estimate == name_of(static_cast<Sensitivity::Estimate>(i)))
      sensitivity.estimate = static_cast<Sensitivity::Estimate>(i);
  sensitivity.grouping = grouping_named(fields.get<std::string>("layout")).value_or(Grouping{});
  for (const auto& [bits, error] : fields["errors"].items())
    sensitivity.errors.emplace_back(std::atoi(bits.c_str()), as_number(error, kState));
  std::sort(sensitivity.errors.begin(), sensitivity.errors.end());
  sensitivity.offers_at = fields.get<int>("offers_at");
  for (const Json& offer : fields["offers"])
    sensitivity.offers.push_back(
        {offer.at(0).get<int>(), as_number(offer.at(1), kState), as_number(offer.at(2), kState)});
  return sensitivity;
}

// The numbers of a tensor, bit for bit and compact: each site may have a norm for every sample of
// the data set.
Json tensor_as_json(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const at::Tensor values = tensor.to(at::kCPU, at::kFloat).contiguous();
  return {
      {"shape", values.sizes().vec()},
      {"float32", base64({static_cast<const char*>(values.const_data_ptr()), values.nbytes()})}};
}

at::Tensor tensor_from_json(const std::string& site, const Json& json) {
  if (json.is_null()) return {};
  const Fields fields{json, kState};
  const auto bytes = from_base64(fields.get<std::string>("float32"));
  TORCH_CHECK_VALUE(bytes, "state: a tensor of \"", site, "\" must be valid base64");
  const at::Tensor values = at::empty(fields.get<std::vector<std::int64_t>>("shape"), at::kFloat);
  TORCH_CHECK_VALUE(bytes->size() == values.nbytes(), "state: a tensor of \"", site,
                    "\" with shape ", values.sizes(), " must take ", values.nbytes(),
                    " bytes, got ", bytes->size());
  std::memcpy(values.mutable_data_ptr(), bytes->data(), bytes->size());
  return values;
}

Json remaking_as_json(const SiteRecord& record) {
  if (!record.remaking) return nullptr;
  return {{"step", record.remaking->step},       {"bytes", record.remaking->bytes},
          {"exact", record.remaking->exact},     {"ms", as_json(record.remaking->ms)},
          {"product", record.remaking->product}, {"from", record.made_from}};
}

void take_remaking(const Fields& fields, SiteRecord& record) {
  record.first_saver = fields.get<std::string>("first_saver");
  record.remade = fields.get<bool>("remade");
  record.runs_products = fields.get<bool>("runs_products");
  record.sent = fields.get<bool>("sent");
  record.stuck = fields.get<bool>("stuck");
  record.exact_by = fields.get<std::vector<std::string>>("exact_by");
  if (fields["remaking"].is_null()) return;
  const Fields remaking = fields.within("remaking");
  record.remaking.emplace();
  record.remaking->step = remaking.get<std::int64_t>("step");
  record.remaking->bytes = remaking.get<std::int64_t>("bytes");
  record.remaking->exact = remaking.get<bool>("exact");
  record.remaking->ms = as_number(remaking["ms"], kState);
  record.remaking->product = remaking.get<std::int64_t>("product");
  record.made_from = remaking.get<std::vector<std::string>>("from");
}

Json record_as_json(const SiteRecord& record, const Policy& policy) {
  Json also = Json::array();
  for (const auto& [root, sensitivity] : record.also)
    also.push_back({{"root", root}, {"sensitivity", sensitivity_as_json(sensitivity)}});
  return {{"name", record.name},
          {"own", record.own},
          {"alive", record.alive},
          {"sign", static_cast<int>(record.sign)},
          {"root", record.root},
          {"derived", record.derived},
          {"also", also},
          {"floor", record.floor},
          {"served_floor", record.served_floor},
          {"tried", record.tried},
          {"zero_exact", record.zero_exact},
          {"starts", record.starts},
          {"stored_for_others", record.stored_for_others},
          {"looks_for_cut", record.looks_for_cut},
          {"last_step", record.last_step},
          {"lossy_step", record.lossy_step},
          {"choice", record.choice ? choice_as_json(*record.choice, policy) : Json()},
          {"sensitivity", sensitivity_as_json(record.sensitivity)},
          {"elements", record.reference.elements},
          {"packets", record.reference.packets},
          {"element_bytes", record.reference.element_bytes},
          {"groups", record.reference.groups},
          {"rule", record.rule},
          {"shares", record.shares},
          {"first_saver", record.first_saver},
          {"remade", record.remade},
          {"runs_products", record.runs_products},
          {"sent", record.sent},
          {"stuck", record.stuck},
          {"remaking", remaking_as_json(record)},
          {"exact_by", record.exact_by},
          {"stay", {record.stay.from, record.stay.read, record.stay.until}},
          {"ranges", tensor_as_json(record.ranges)},
          {"norms", tensor_as_json(record.norms)},
          {"scores", tensor_as_json(record.scores)}};
}

SiteRecord record_from_json(const Fields& fields, const Policy& policy) {
  SiteRecord record;
  record.name = fields.get<std::string>("name");
  record.own = fields.get<bool>("own");
  record.alive = fields.get<bool>("alive");
  record.sign = static_cast<Site::Sign>(fields.get<int>("sign"));
  record.root = fields.get<std::string>("root");
  record.derived = fields.get<bool>("derived");
  for (const Json& other : fields["also"]) {
    const Fields one{other, kState};
    record.also.emplace_back(one.get<std::string>("root"),
                             sensitivity_from_json(one.within("sensitivity")));
  }
  record.floor = fields.get<int>("floor");
  record.served_floor = fields.get<int>("served_floor");
  record.tried = fields.get<bool>("tried");
  record.zero_exact = fields.get<bool>("zero_exact");
  record.starts = fields.get<bool>("starts");
  record.stored_for_others = fields.get<bool>("stored_for_others");
  record.looks_for_cut = fields.get<int>("looks_for_cut");
  take_remaking(fields, record);
  record.last_step = fields.get<std::int64_t>("last_step");
  record.lossy_step = fields.get<std::int64_t>("lossy_step");
  if (!fields["choice"].is_null())
    record.choice = choice_from_json(record.name, fields["choice"], policy);
  record.sensitivity = sensitivity_from_json(fields.within("sensitivity"));
  record.reference.elements = fields.get<std::int64_t>("elements");
  record.reference.packets = fields.get<std::int64_t>("packets");
  record.reference.element_bytes = fields.get<std::int64_t>("element_bytes");
  record.reference.groups = fields.get<decltype(Footprint::groups)>("groups");
  const auto stay = fields.get<std::array<int, 3>>("stay");
  record.stay = {stay[0], stay[1], stay[2]};
  record.rule = fields.get<int>("rule");
  record.shares = fields.get<decltype(SiteRecord::shares)>("shares");
  record.ranges = tensor_from_json(record.name, fields["ranges"]);
  record.norms = tensor_from_json(record.name, fields["norms"]);
  record.scores = tensor_from_json(record.name, fields["scores"]);
  return record;
}

}  // namespace

Json choice_as_json(const Choice& choice, const Policy& policy) {
  Json json = {{"bits", choice.bits == kRawBits ? Json("raw") : Json(choice.bits)},
               {"layout", name_of(choice.grouping)}};
  if (choice.codec >= 0)
    json["codec"] = policy.menu()[static_cast<std::size_t>(choice.codec)].reason;
  return json;
}

Choice choice_from_json(const std::string& site, const Json& json, const Policy& policy) {
  const Fields fields = fields_of_site(site, json);
  const int codec = codec_from_json(site, json, policy);
  const auto layout = fields.get<std::string>("layout");
  const auto grouping = grouping_named(layout);
  TORCH_CHECK_VALUE(grouping, "plan: the layout of \"", site,
                    "\" must be flat, rotated, strided 1 or strided 2, got ", layout);
  const Json& bits = fields["bits"];
  if (bits.is_string()) {
    TORCH_CHECK_VALUE(bits == "raw", "plan: the bits of \"", site,
                      "\" must be a width or \"raw\", got ", bits.get<std::string>());
    return {kRawBits, *grouping, codec};
  }
  const int width = bits.get<int>();
  TORCH_CHECK_VALUE(is_width(width), "plan: the bits of \"", site, "\" must be \"raw\" or one of ",
                    list_code_widths(), ", got ", width);
  return {width, *grouping, codec};
}

Json records_as_json(const std::vector<SiteRecord>& records, const Policy& policy) {
  Json sites = Json::array();
  for (const SiteRecord& record : records) sites.push_back(record_as_json(record, policy));
  return sites;
}

std::vector<SiteRecord> records_from_json(const Json& json, const Policy& policy) {
  std::vector<SiteRecord> records;
  for (const Json& site : json) records.push_back(record_from_json({site, kState}, policy));
  return records;
}

}  // namespace backfold::torch_layer
