// SPDX-License-Identifier: Apache-2.0

#include "core/epilogue_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

#include "backfold/predicate.h"
#include "group/epilogue.h"

namespace backfold::testing {
namespace {

std::vector<float> table(const std::optional<Runs>& runs, float first, float step) {
  std::vector<float> values;
  for (std::int64_t i = 0; runs && i < runs->entries; ++i)
    values.push_back(first + step * static_cast<float>(i % 11));
  return values;
}

}  // namespace

Given::Given(const GroupFormat& format_in, const Stages& stages_in, std::int64_t count,
             std::int64_t columns, Kind kind)
    : format(format_in), stages(stages_in) {
  format.count = count;
  format.columns = format.layout == Layout::kStrided ? columns : 0;
  packed_shift = table(stages.packed_rows, -1.0f, 0.375f);
  packed_scale = table(stages.packed_rows, 0.5f, 0.3f);
  mean = table(stages.rows, 0.3f, -0.11f);
  scale = table(stages.rows, 2.1f, -0.17f);
  weight = table(stages.columns, -0.7f, 0.23f);
  bias = table(stages.columns, -0.4f, 0.13f);
  if (stages.product) product = make_elements(Kind::kNormal, *stages.product, count, false, 77);

  const Elements source = make_elements(kind, format.type, count, format.zero_exact);
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(source.at(i)));
  pack_values(values);

  Random random(9);
  for (std::int64_t i = 0; i < count; ++i)
    keep.push_back(static_cast<std::byte>(random.below(10) < 7));
  mask = packed(PredicateFormat{.type = ElementType::kBool, .count = count}, keep, reference());
}

void Given::pack_values(const std::vector<float>& values) {
  const GroupFormat of_values = core::format_of_values(format);
  payload = packed(of_values, bytes_of(values), Key{5, 6}, reference());
  const Bytes bytes = unpacked(of_values, payload, reference());
  decoded.resize(values.size());
  if (!values.empty()) std::memcpy(decoded.data(), bytes.data(), bytes.size());
}

float entry(const std::vector<float>& table, const Runs& runs, std::int64_t i) {
  return table[static_cast<std::size_t>(i / runs.run % runs.entries)];
}

float Given::before_activation(std::int64_t i) const {
  float x = decoded[static_cast<std::size_t>(i)];
  if (core::raises(format)) x = core::raised(x);
  if (const auto& runs = stages.packed_rows) {
    const float inverse = 1.0f / entry(packed_scale, *runs, i);
    const float scaled = x * inverse;
    x = scaled + entry(packed_shift, *runs, i);
  }
  if (const auto& runs = stages.rows) {
    const float centred = x - entry(mean, *runs, i);
    x = centred * entry(scale, *runs, i);
  }
  if (const auto& runs = stages.columns) {
    const float weighted = x * entry(weight, *runs, i);
    x = weighted + (stages.bias ? entry(bias, *runs, i) : 0.0f);
  }
  return x;
}

float Given::product_at(std::int64_t i) const {
  return stages.product ? static_cast<float>(product.at(i)) : 1.0f;
}

bool Given::keeps(std::int64_t i) const {
  return !stages.mask || keep[static_cast<std::size_t>(i)] != std::byte{0};
}

const char* name_of(Activation activation) {
  constexpr const char* kNames[] = {"none", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "relu"};
  return kNames[static_cast<std::size_t>(activation)];
}

double exact(Activation activation, double x) {
  switch (activation) {
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    default:
      return x;
  }
}

bool is_exact(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu;
}

double allowed(Activation activation, double value) {
  return is_exact(activation) ? 0.0 : 2e-6 * std::fabs(value) + 1e-7;
}

Elements finished(const Given& given, const Place& place, std::size_t offset,
                  std::span<const Step> more) {
  const Stages& stages = given.stages;
  const Backend backend = place.execution.backend;
  const auto moved = [&](std::span<const std::byte> bytes, std::size_t past = 0) {
    auto memory = std::make_unique<Memory>(backend, bytes.size(), past);
    memory->write(bytes);
    return memory;
  };
  const auto payload = moved(given.payload), mask = moved(given.mask);
  const auto packed_shift = moved(bytes_of(given.packed_shift));
  const auto packed_scale = moved(bytes_of(given.packed_scale));
  const auto mean = moved(bytes_of(given.mean)), scale = moved(bytes_of(given.scale));
  const auto weight = moved(bytes_of(given.weight)), bias = moved(bytes_of(given.bias));
  const auto product = moved(given.product.bytes, offset * size_of(given.product.type));
  const auto floats = [](const auto& memory) { return static_cast<const float*>(memory->data()); };

  Epilogue epilogue;
  if (const auto& run = stages.packed_rows)
    epilogue.packed_rows = {floats(packed_shift), floats(packed_scale), run->run, run->entries};
  if (const auto& run = stages.rows)
    epilogue.rows = {floats(mean), floats(scale), run->run, run->entries};
  if (const auto& run = stages.columns)
    epilogue.columns = {floats(weight), stages.bias ? floats(bias) : nullptr, run->run,
                        run->entries};
  std::vector<Step> steps;
  if (stages.activation != Activation::kNone)
    steps.push_back({.kind = Step::Kind::kActivate, .activation = stages.activation});
  if (stages.product)
    steps.push_back({.kind = Step::Kind::kMultiply,
                     .from = Step::From::kTensor,
                     .tensor = product->data(),
                     .type = *stages.product,
                     .entries = std::max<std::int64_t>(given.format.count, 1)});
  if (stages.mask)
    steps.push_back({.kind = Step::Kind::kMask,
                     .factor = given.mask_factor,
                     .mask = {mask->data(), mask->bytes()}});
  steps.insert(steps.end(), more.begin(), more.end());
  epilogue.steps = steps;
  epilogue.result_type = stages.result;

  std::string_view ran;
  Execution execution = place.execution;
  execution.ran = &ran;
  const std::size_t size = size_of(stages.result);
  Memory to(backend, given.decoded.size() * size, offset * size);
  const Status status =
      unpack(given.format, epilogue, {payload->data(), payload->bytes()}, to.data(), execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ran, expected_runner(execution));
  EXPECT_TRUE(to.guards_intact()) << "written out of bounds";
  return {stages.result, to.read()};
}

}  // namespace backfold::testing
