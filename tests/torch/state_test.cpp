// SPDX-License-Identifier: Apache-2.0
//
// Options, levels, states and plans of a C++ program.

#include <c10/core/AllocatorConfig.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "backfold/controller.h"
#include "torch/json/base64.h"
#include "torch/json/fields.h"
#include "torch/segments.h"
#include "torch/state.h"

namespace backfold {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "nothing was raised";
}

ControllerOptions level(const char* name) {
  ControllerOptions options;
  options.level = name;
  return options;
}

TEST(History, KeepsTheNewestAndThinsOutTheRest) {
  std::vector<int> history;
  for (int i = 0; i < 10'000; ++i) torch_layer::remember(history, i);
  EXPECT_LE(history.size(), 256u);
  EXPECT_GT(history.size(), 128u);
  EXPECT_EQ(history.back(), 9'999);
  EXPECT_LT(history.front(), 9'300);  // 9,744 if the oldest were dropped
  EXPECT_TRUE(std::is_sorted(history.begin(), history.end()));
}

TEST(Options, LevelsNameTargetsAndCodecs) {
  EXPECT_FALSE(Controller(level("L0")).state().options.bits);
  EXPECT_EQ(Controller(level("L1.1")).state().options.bits, 8);
  EXPECT_EQ(Controller(level("L2.1")).state().planning.target->value, 3);
  using Offloading = torch_layer::State::Offloading;
  EXPECT_EQ(Controller(level("L2")).state().offloading, Offloading::kByPlan);
  for (const char* name : {"L3", "paper-L2", "actnn-L4", "actnn-L5"})
    EXPECT_EQ(Controller(level(name)).state().offloading, Offloading::kEverything) << name;
  Controller division(level("division"));
  ASSERT_EQ(division.state().policy.rules().size(), 1U);
  EXPECT_EQ(division.state().policy.rules()[0].reason, "PoolResidual(block=8, bits=2)");
}

TEST(Options, SegmentsGrowBesideOtherSettings) {
  namespace allocator = c10::CachingAllocator;
  using Settings = allocator::AcceleratorAllocatorConfig;
  allocator::setAllocatorSettings("max_split_size_mb:256,expandable_segments:False");
  torch_layer::make_segments_expandable();
  EXPECT_TRUE(Settings::use_expandable_segments());
  EXPECT_EQ(Settings::max_split_size(), std::size_t{256} << 20);  // unlimited if it was forgotten
  allocator::setAllocatorSettings("expandable_segments:False");
}

TEST(Options, WhatIsNotAllowedIsNamed) {
  EXPECT_NE(message_of([] { Controller fold(level("l2")); }).find("got 'l2'"), std::string::npos);
  ControllerOptions both = level("L2");
  both.ratio = 8;
  EXPECT_NE(message_of([&] { Controller fold(both); }).find("cannot be given together"),
            std::string::npos);
  ControllerOptions early;
  early.probe_steps = {2, 0};
  EXPECT_EQ(message_of([&] { Controller fold(early); }),
            "probe_steps must be 1 (the first step) or more, got 0");
  ControllerOptions part;
  part.probe_fraction = 0;
  EXPECT_EQ(message_of([&] { Controller fold(part); }),
            "probe_fraction must be above 0 and at most 1, got 0");
}

TEST(Options, BytesHaveUnits) {
  EXPECT_EQ(parse_bytes("6GiB"), std::int64_t{6} << 30);
  EXPECT_EQ(parse_bytes(" .5 kib "), 512);
  EXPECT_EQ(parse_bytes("1.5e9"), 1'500'000'000);
  for (const char* bad : {"", "GiB", "-6GiB", "6 gigs", "1e999", "0.1B", "inf", "nan"})
    EXPECT_NE(message_of([&] { parse_bytes(bad); }).find("got '" + std::string(bad) + "'"),
              std::string::npos)
        << bad;
}

TEST(Base64, BringsBackEveryLength) {
  std::string bytes;
  for (int i = 0; i < 70; ++i) {
    const std::string text = torch_layer::base64(bytes);
    EXPECT_EQ(text.size() % 4, 0U);
    EXPECT_EQ(torch_layer::from_base64(text), bytes);
    bytes += static_cast<char>(37 * i + 255);
  }
  EXPECT_EQ(torch_layer::base64("fooba"), "Zm9vYmE=");  // of RFC 4648
  for (const char* bad : {"Zm9", "Zm9*", "=m9v", "Zg=v"})
    EXPECT_FALSE(torch_layer::from_base64(bad));
}

TEST(Json, KeepsNumbersBitForBit) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double value : {0.1, 1e-300, -3.25, kInfinity, -kInfinity}) {
    const auto text = torch_layer::as_json(value).dump();
    EXPECT_EQ(torch_layer::as_number(torch_layer::Json::parse(text), "it"), value);
  }
  EXPECT_TRUE(std::isnan(torch_layer::as_number(torch_layer::as_json(NAN), "it")));
  EXPECT_THROW(torch_layer::as_number("many", "it"), c10::ValueError);
}

// A controller that has planned.
struct Planned {
  Planned() : model(64, 64), fold(*model, options()) {
    for (int i = 0; i < 3; ++i) fold.step([&] { return loss(); });
  }
  static ControllerOptions options() {
    ControllerOptions options;
    options.bits = 3;
    options.min_bytes = 0;
    return options;
  }
  at::Tensor loss() { return model(torch::randn({64, 64})).tanh().square().mean(); }

  torch::nn::Linear model;
  Controller fold;
};

TEST(Plan, IsSavedAndGivenToAnother) {
  Planned planned;
  std::stringstream plan;
  planned.fold.save_plan(plan);
  Controller other(*planned.model, Planned::options());
  other.load_plan(plan);
  for (int i = 0; i < 3; ++i) other.step([&] { return planned.loss(); });
  EXPECT_FALSE(other.report().plan);  // nothing was measured
  EXPECT_EQ(other.report().held_bytes, planned.fold.report().held_bytes);
  std::stringstream again;
  other.save_plan(again);
  const auto bits = [](const std::string& text) {
    std::vector<std::string> found;
    const auto json = torch_layer::Json::parse(text);
    for (const auto& [name, site] : json["sites"].items())
      found.push_back(name + site["bits"].dump());
    return found;
  };
  EXPECT_EQ(bits(again.str()), bits(plan.str()));
}

TEST(State, ThatIsNoneIsRefusedAndChangesNothing) {
  Planned planned;
  std::stringstream before, after;
  planned.fold.save(before);
  for (const char* bad : {"", "{", "[]", "{}", R"({"sites": [{"name": 3}]})"}) {
    std::stringstream stream(bad);
    EXPECT_NE(message_of([&] { planned.fold.load(stream); }), "nothing was raised") << bad;
  }
  planned.fold.save(after);
  EXPECT_EQ(before.str(), after.str());
  std::stringstream closed;
  closed.setstate(std::ios::badbit);
  EXPECT_THROW(planned.fold.save(closed), c10::Error);
}

TEST(Report, IsJson) {
  Planned planned;
  const auto json = torch_layer::Json::parse(planned.fold.report().json());
  EXPECT_EQ(json["step"], 3);
  EXPECT_EQ(json["held_bytes"], planned.fold.report().held_bytes);
  EXPECT_EQ(json["sites"].size(), planned.fold.report().rows.size());
  EXPECT_EQ(json["plan"]["step"], 2);
}

}  // namespace
}  // namespace backfold
