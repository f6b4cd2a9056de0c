// SPDX-License-Identifier: Apache-2.0
//
// What several processes measured, as one measurement.

#include "torch/plan/combine.h"

#include <gtest/gtest.h>

namespace backfold::torch_layer {
namespace {

constexpr Grouping kFlat{Layout::kFlat, 0}, kRotated{Layout::kRotated, 0};

Sensitivity table(std::vector<std::pair<int, double>> errors, Grouping grouping = kFlat) {
  Sensitivity made;
  made.estimate = Sensitivity::Estimate::kRerun;
  made.grouping = grouping;
  made.errors.assign(errors.begin(), errors.end());
  return made;
}

SiteRecord site(std::string name, Sensitivity sensitivity, std::int64_t elements = 1000) {
  SiteRecord record;
  record.name = std::move(name);
  record.last_step = 7;
  record.sensitivity = std::move(sensitivity);
  record.reference.elements = elements;
  return record;
}

Tables process(std::vector<SiteRecord> sites, std::int64_t bytes = 100) {
  return {.sites = std::move(sites),
          .reference = {.saved_bytes = bytes, .fixed_bytes = bytes / 2, .unique_bytes = bytes},
          .gradient_energy = 4,
          .steps = 7};
}

using Errors = std::vector<std::pair<int, double>>;
Errors errors_of(const SiteRecord& record) {
  return {record.sensitivity.errors.begin(), record.sensitivity.errors.end()};
}

TEST(Combine, TakesTheMeanOfErrorsAndEnergies) {
  Tables first = process({site("a", table({{2, 1}, {4, 0.25}}))});
  Tables second = process({site("a", table({{2, 3}, {4, 0.75}}))});
  second.gradient_energy = 8;
  const Combined combined = combine({first, second});
  ASSERT_EQ(combined.tables.sites.size(), 1U);
  EXPECT_EQ(errors_of(combined.tables.sites[0]), (Errors{{2, 2}, {4, 0.5}}));
  EXPECT_EQ(combined.tables.gradient_energy, 6);
  first.gradient_energy.reset();
  EXPECT_EQ(combine({first, second}).tables.gradient_energy, 8);
}

TEST(Combine, CountsASiteOnlyWhereItIs) {
  // Rank 1 was told of "b" by an earlier plan, and has "c" but did not measure it.
  SiteRecord told = site("b", table({{2, 5}}));
  told.own = false;
  const Combined combined =
      combine({process({site("b", table({{2, 6}})), site("c", table({{2, 8}}))}),
               process({told, site("c", {})})});
  ASSERT_EQ(combined.tables.sites.size(), 2U);
  EXPECT_EQ(errors_of(combined.tables.sites[0]), (Errors{{2, 6}}));
  EXPECT_EQ(combined.shares, (std::vector<double>{0.5, 1}));
  EXPECT_EQ(errors_of(combined.weighted()[0]), (Errors{{2, 3}}));
  EXPECT_EQ(errors_of(combined.weighted()[1]), (Errors{{2, 8}}));
}

TEST(Combine, DoesNotWeighAgainWhatItHasCombinedBefore) {
  // Plan after plan without a new measurement, in both processes.
  std::vector<Tables> ranks = {process({site("b", table({{2, 6}}))}), process({})};
  for (int plan = 0; plan < 4; ++plan) {
    const Combined combined = combine(ranks);
    EXPECT_EQ(errors_of(combined.weighted()[0]), (Errors{{2, 3}})) << plan;
    ranks[0].sites = ranks[1].sites = combined.tables.sites;
    ranks[1].sites[0].own = false;
  }
}

TEST(Combine, AveragesOnlyWhatWasMeasuredInTheCommonLayout) {
  const Combined combined = combine({process({site("a", table({{2, 9}}, kRotated))}),
                                     process({site("a", table({{2, 1}}, kFlat))}),
                                     process({site("a", table({{2, 3}}, kFlat))})});
  EXPECT_EQ(combined.tables.sites[0].sensitivity.grouping, kFlat);
  EXPECT_EQ(errors_of(combined.tables.sites[0]), (Errors{{2, 2}}));
}

TEST(Combine, KnowsNothingBelowTheNarrowestWidthThatAllMeasured) {
  const Combined combined = combine({process({site("a", table({{1, 9}, {2, 1}, {4, 0.25}}))}),
                                     process({site("a", table({{2, 3}, {4, 0.75}}))})});
  EXPECT_EQ(errors_of(combined.tables.sites[0]), (Errors{{2, 2}, {4, 0.5}}));
}

TEST(Combine, PlansForTheProcessWithTheLargestStep) {
  const Combined combined =
      combine({process({site("a", table({{2, 1}}), 1000), site("b", table({{2, 1}}), 50)}, 100),
               process({site("a", table({{2, 1}}), 400)}, 300)});
  EXPECT_EQ(combined.tables.reference.saved_bytes, 300);
  EXPECT_EQ(combined.tables.reference.fixed_bytes, 150);
  EXPECT_EQ(combined.tables.sites[0].reference.elements, 400);
  EXPECT_EQ(combined.tables.sites[1].reference.elements, 50);  // which it does not have
}

TEST(Combine, PlansForTheProcessThatTakesMostBesides) {
  Tables first = process({site("a", table({{2, 1}}))});
  Tables second = process({site("a", table({{2, 1}}))});
  first.reference.moments = {10, 30};
  first.reference.margin = 7;
  second.reference.moments = {40};
  second.sites[0].stay = {0, 1, 1};
  const Tables combined = combine({first, second}).tables;
  EXPECT_EQ(combined.reference.moments, (std::vector<std::int64_t>{40}));
  EXPECT_EQ(combined.reference.margin, 7);
  EXPECT_EQ(combined.sites[0].stay.until, 1);
}

TEST(Combine, BytesLeaveAsSlowlyAsWhereTheyTakeLongestOrNotAtAll) {
  Tables first = process({site("a", table({{2, 1}}))});
  Tables second = process({site("a", table({{2, 1}}))});
  first.reference.ms_per_sent_byte = 2;
  EXPECT_FALSE(combine({first, second}).tables.reference.ms_per_sent_byte);
  second.reference.ms_per_sent_byte = 3;
  EXPECT_EQ(combine({first, second}).tables.reference.ms_per_sent_byte, 3);
}

TEST(Combine, WhatIsStuckInOneProcessIsStuck) {
  const Tables first = process({site("a", table({{2, 1}}))});
  Tables second = process({site("a", table({{2, 1}}))});
  EXPECT_FALSE(combine({first, second}).tables.sites[0].stuck);
  second.sites[0].stuck = true;
  EXPECT_TRUE(combine({first, second}).tables.sites[0].stuck);
}

TEST(Combine, KeepsTheOrderOfForwardOfTheLargestStep) {
  // What is saved first leaves first.
  Tables large = process({site("z", table({{2, 1}})), site("b", table({{2, 1}}))}, 300);
  large.holdings = {{.site = "z", .saves = 1, .held_bytes = 5}};
  const Tables combined =
      combine({process({site("c", table({{2, 1}})), site("b", table({{2, 1}}))}), large}).tables;
  std::string order;
  for (const SiteRecord& record : combined.sites) order += record.name;
  EXPECT_EQ(order, "zbc");
  ASSERT_EQ(combined.holdings.size(), 1U);
  EXPECT_EQ(combined.holdings[0].held_bytes, 5);
}

SiteRecord remade(std::string name, std::int64_t product, double ms, bool exact = false) {
  SiteRecord record = site(std::move(name), table({{2, 1}}));
  record.remade = true;
  record.remaking = Remaking{.bytes = 1000, .exact = exact, .ms = ms, .product = product};
  record.made_from = {"source"};
  return record;
}

TEST(Combine, TakesProductsThatAllProcessesCanRunAgainAsSlowAsTheSlowest) {
  // "b" is in one process alone, "c" cannot be made again in one, and "d" is exact, but no part of
  // the largest step.
  SiteRecord other = site("c", table({{2, 1}}));
  const Tables large = process({remade("a", 1, 2), remade("c", 2, 1)}, 300);
  const Tables small =
      process({remade("a", 5, 3), remade("b", 1, 4), other, remade("d", 6, 1, true)}, 100);
  const Tables combined = combine({small, large}).tables;
  ASSERT_EQ(combined.sites.size(), 4U);
  const SiteRecord &a = combined.sites[0], &c = combined.sites[1], &b = combined.sites[2],
                   &d = combined.sites[3];
  ASSERT_TRUE(a.remaking && b.remaking);
  EXPECT_EQ(a.remaking->ms, 3);
  EXPECT_EQ(a.remaking->product, 1);
  EXPECT_EQ(a.made_from, std::vector<std::string>{"source"});
  EXPECT_TRUE(a.remade);
  // Both are the first product of their process, and not the same one.
  EXPECT_NE(b.remaking->product, a.remaking->product);
  EXPECT_FALSE(c.remaking);
  EXPECT_FALSE(c.remade);
  EXPECT_TRUE(c.made_from.empty());
  EXPECT_FALSE(d.remaking);
}

TEST(Combine, KeepsTablesOfOneSiteForDifferentPacketsApart) {
  SiteRecord product = site("p", table({{2, 1}}));
  product.root = "a";
  product.derived = true;
  product.last_step = -1;
  product.also = {{"b", table({{2, 10}})}};
  SiteRecord other = product;
  std::swap(other.root, other.also[0].first);
  std::swap(other.sensitivity, other.also[0].second);
  other.sensitivity.errors[0].second = 30;
  const Combined combined = combine({process({product}), process({other})});
  const SiteRecord& record = combined.tables.sites[0];
  EXPECT_EQ(record.root, "a");
  EXPECT_EQ(errors_of(record), (Errors{{2, 1}}));
  EXPECT_EQ(record.also[0].second.errors[0].second, 20);
  EXPECT_EQ(record.last_step, -1);
}

TEST(Combine, CountsAgesInStepsOfEachProcess) {
  Tables slow = process({site("a", table({{2, 1}}))});
  slow.steps = 9;  // two steps ago
  Tables fast = process({site("a", table({{2, 1}}))});
  fast.steps = 2000;
  EXPECT_EQ(combine({slow, fast}).tables.sites[0].last_step, 1998);
}

}  // namespace
}  // namespace backfold::torch_layer
