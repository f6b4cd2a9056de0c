// SPDX-License-Identifier: Apache-2.0
//
// One exact plan for several processes.

#include "torch/plan/exact_agreement.h"

#include <gtest/gtest.h>

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kStep = 3, kBytes = 1 << 20;

// What a process knows of places that each hold exact tensors of a megabyte, or of more.
Tables process(const std::vector<double>& ms, std::int64_t bytes = kBytes) {
  Tables tables;
  tables.steps = kStep;
  for (std::size_t i = 0; i < ms.size(); ++i) {
    SiteRecord record;
    record.name = "/aten::mul/self/" + std::to_string(i);
    record.first_saver = record.name;
    if (ms[i] > 0) {
      record.remaking.emplace();
      record.remaking->step = kStep;
      record.remaking->bytes = bytes;
      record.remaking->exact = true;
      record.remaking->ms = ms[i];
      record.remaking->product = static_cast<std::int64_t>(i) + 1;
    }
    tables.holdings.push_back(
        {.site = record.name, .saves = 1, .held_bytes = bytes, .kind = Kind::kRaw});
    tables.sites.push_back(std::move(record));
  }
  StepReference& reference = tables.reference;
  reference.saved_bytes = reference.fixed_bytes = static_cast<std::int64_t>(ms.size()) * bytes;
  reference.unique_bytes = 8 * reference.saved_bytes;  // an eighth may be made at once
  return tables;
}

ExactAgreement agree(const std::vector<Tables>& ranks, std::int64_t budget) {
  return agree_exactly(ranks, {Target::Kind::kBudget, static_cast<double>(budget)});
}

std::string places(const std::set<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += name.back();
  return all;
}

TEST(ExactAgreement, AProductTakesAsLongAsWhereItTakesLongest) {
  const std::vector<Tables> ranks = {process({1, 9, 2, 3}), process({9, 1, 3, 2})};
  const ExactAgreement agreed = agree(ranks, 2 * kBytes);
  EXPECT_EQ(places(agreed.remade), "23");
  EXPECT_EQ(agreed.plan.places, 2);
  EXPECT_EQ(agreed.plan.held_bytes, 2 * kBytes);
  EXPECT_EQ(agreed.plan.ms, 6);
  EXPECT_EQ(places(agree({ranks[0]}, 2 * kBytes).remade), "02");  // alone
}

TEST(ExactAgreement, TheSlowestLinkDecidesAndOneThatHasNoneRulesOutAll) {
  std::vector<Tables> ranks = {process({3, 3, 3, 3}), process({3, 3, 3, 3})};
  ranks[0].reference.ms_per_sent_byte = 1.0 / kBytes;
  EXPECT_EQ(places(agree(ranks, 3 * kBytes).remade), "0");
  ranks[1].reference.ms_per_sent_byte = 2.0 / kBytes;
  ExactAgreement agreed = agree(ranks, 3 * kBytes);
  EXPECT_EQ(places(agreed.sent), "0");
  EXPECT_EQ(places(agreed.remade), "");
  EXPECT_EQ(agreed.plan.sent_bytes, kBytes);
  ranks[1].reference.ms_per_sent_byte = 4.0 / kBytes;
  agreed = agree(ranks, 3 * kBytes);
  EXPECT_EQ(places(agreed.sent), "");
  EXPECT_EQ(agreed.ms_per_sent_byte, 4.0 / kBytes);
}

TEST(ExactAgreement, WhatIsStuckInOneProcessStaysInAll) {
  std::vector<Tables> ranks = {process({0, 0, 0}), process({0, 0, 0})};
  for (Tables& rank : ranks) rank.reference.ms_per_sent_byte = 1.0 / kBytes;
  ranks[1].sites[0].stuck = true;
  const ExactAgreement agreed = agree(ranks, 2 * kBytes);
  EXPECT_EQ(places(agreed.stuck), "0");
  EXPECT_EQ(places(agreed.sent), "1");
}

TEST(ExactAgreement, EachProcessKeepsToTheTarget) {
  // Rank 0 holds most, but nothing that rank 1 has: an expert of its own.
  std::vector<Tables> ranks = {process({1, 1, 1}, 2 * kBytes), process({2, 2, 2, 2})};
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string name = "/aten::add/self/" + std::to_string(5 + i);
    ranks[0].sites[i].name = ranks[0].sites[i].first_saver = ranks[0].holdings[i].site = name;
  }
  const ExactAgreement agreed = agree(ranks, 3 * kBytes);
  EXPECT_EQ(places(agreed.remade), "560");
  EXPECT_EQ(agreed.plan.held_bytes, 2 * kBytes);  // of rank 0
}

TEST(ExactAgreement, ATargetThatOneProcessCannotKeepIsAnErrorInAll) {
  const std::vector<Tables> ranks = {process({1, 1}), process({0, 0})};
  EXPECT_NO_THROW(agree({ranks[0]}, kBytes));
  EXPECT_THROW(agree(ranks, kBytes), c10::ValueError);
}

}  // namespace
}  // namespace backfold::torch_layer
