// SPDX-License-Identifier: Apache-2.0

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "fake_backing.h"
#include "torch/offload/arena.h"
#include "torch/offload/file_backing.h"
#include "torch/offload/offloader.h"
#include "torch/offload/order.h"
#include "torch/offload/worker.h"

namespace backfold::torch_layer {
namespace {

constexpr std::size_t kMiB = 1 << 20;

std::size_t bytes_of(const Room& room) {
  std::size_t bytes = 0;
  for (const Extent& extent : room) bytes += extent.bytes;
  return bytes;
}

TEST(Arena, GivesEachByteToOneAtATime) {
  Arena arena(heap(), 512 * kMiB);
  std::mt19937 random(1);
  std::vector<Room> rooms;
  for (int i = 0; i < 2'000; ++i) {
    if (!rooms.empty() && random() % 3 == 0) {
      std::swap(rooms[random() % rooms.size()], rooms.back());
      arena.release(rooms.back());
      rooms.pop_back();
    } else {
      const std::size_t bytes = 1 + random() % (i % 50 == 0 ? 90 * kMiB : 300'000);
      if (const auto room = arena.reserve(bytes)) {
        EXPECT_GE(bytes_of(*room), bytes);
        EXPECT_LT(bytes_of(*room), bytes + Arena::kPage);
        rooms.push_back(*room);
      }
    }
  }
  std::map<const char*, std::size_t> taken;
  for (const Room& room : rooms)
    for (const Extent& extent : room) taken[extent.data()] = extent.bytes;
  const char* end = nullptr;
  for (const auto& [begin, bytes] : taken) {
    EXPECT_GE(begin, end);
    end = begin + bytes;
  }
  for (const Room& room : rooms) arena.release(room);
  EXPECT_EQ(arena.used_bytes(), 0u);
  // Holes have grown together: all of it can be had without one slab more.
  const std::size_t slabs = arena.slab_bytes();
  EXPECT_TRUE(arena.reserve(slabs));
  EXPECT_EQ(arena.slab_bytes(), slabs);
}

TEST(Arena, RoundsNoPayloadUpToAPowerOfTwo) {
  Arena arena(heap(), 1024 * kMiB);
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(arena.reserve(kMiB + 100'000));
  EXPECT_LT(arena.slab_bytes(), 1.25 * 300 * (kMiB + 100'000));  // 600 MiB, 1.83 times, if it did
}

TEST(Arena, KeepsItsBoundAndUsesEveryHole) {
  Arena arena(heap(), 8 * kMiB);
  std::vector<Room> rooms;
  while (auto room = arena.reserve(100'000)) rooms.push_back(*room);
  EXPECT_EQ(rooms.size(), 8 * kMiB / 102'400);
  EXPECT_LE(arena.slab_bytes(), 8 * kMiB);
  EXPECT_NE(arena.why_full().find("no more than 8388608 bytes"), std::string::npos);
  for (std::size_t i = 0; i < rooms.size(); i += 2) arena.release(rooms[i]);
  const auto pieces = arena.reserve(3 * kMiB);  // no hole has more than 100 kB
  ASSERT_TRUE(pieces);
  EXPECT_GT(pieces->size(), 20u);
}

TEST(Arena, GivesBackWhatAWholeStepDidNotNeed) {
  Arena arena(heap(), 1024 * kMiB);
  const auto large = arena.reserve(200 * kMiB);
  arena.release(*large);
  arena.trim();
  EXPECT_GE(arena.slab_bytes(), 200 * kMiB);  // the step before this one used it
  const auto small = arena.reserve(kMiB);
  arena.trim();
  EXPECT_LE(arena.slab_bytes(), 64 * kMiB);
  arena.release(*small);
  arena.trim();
  arena.trim();
  EXPECT_EQ(arena.slab_bytes(), 0u);
}

TEST(Worker, DoesJobsAlsoAfterItsThreadDied) {
  Worker worker;
  const auto deadly = worker.add([] { pthread_exit(nullptr); });
  while (!worker.has_ended(*deadly)) std::this_thread::yield();  // or whoever waits would die of it
  EXPECT_EQ(worker.failure(*deadly), "the thread that copies has died");
  int done = 0;
  for (int i = 0; i < 100; ++i) worker.wait(*worker.add([&] { ++done; }));
  EXPECT_EQ(done, 100);
  const auto raising = worker.add([] { throw std::runtime_error("no"); });
  worker.wait(*raising);
  EXPECT_EQ(worker.failure(*raising), "no");
}

TEST(Worker, LetsWhoWaitsGoFirst) {
  Worker worker;
  std::mutex gate;
  std::unique_lock closed(gate);
  const auto slow = worker.add([&] { const std::lock_guard open(gate); });
  std::thread::id by;
  const auto urgent = worker.add([&] { by = std::this_thread::get_id(); });
  worker.wait(*urgent);  // waits for ever if it has to come second
  EXPECT_EQ(by, std::this_thread::get_id());
  closed.unlock();
  worker.wait(*slow);
}

TEST(Order, FindsWhatComesNext) {
  Order order;
  for (const auto& [key, bytes] : {std::pair{1, 10}, {2, 30}, {1, 10}, {3, 20}})
    order.add(static_cast<ParcelKey>(key), bytes);
  EXPECT_EQ(order.find(1, 0), 0u);
  EXPECT_EQ(order.find(1, 1), 2u);
  EXPECT_EQ(order.find(1, 3), std::nullopt);
  EXPECT_EQ(order.find(7, 0), std::nullopt);
  EXPECT_EQ(order.bytes_between(1, 3), 40);
  EXPECT_EQ(order.bytes_between(0, 4), 70);
  EXPECT_EQ(order.window(), 60);  // two of the largest
}

constexpr std::int64_t kBytes = 100'001;

at::Tensor payload(int value, std::int64_t bytes = kBytes) {
  at::Tensor tensor = at::empty({bytes}, at::kByte);
  auto* const at = tensor.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < bytes; ++i) at[i] = static_cast<std::uint8_t>(i * 31 + value * 7);
  return tensor;
}

class OffloaderTest : public testing::Test {
 protected:
  void open(std::size_t most = 256 * kMiB) {
    offloader_ = std::make_shared<Offloader>([&, most](const at::Device&) {
      auto made = std::make_unique<FakeBacking>(most);
      backing_ = made.get();
      return made;
    });
    offloader_->require(at::kCPU);
  }
  std::shared_ptr<Parcel> send(const std::shared_ptr<Trip>& trip, int value,
                               std::int64_t bytes = kBytes) {
    return offloader_->send(trip, static_cast<std::uint64_t>(value), payload(value, bytes),
                            std::nullopt, away_);
  }
  // Forward and backward of a chain of layers. Returns how many reads there were before each ask.
  std::vector<std::size_t> step(int layers) {
    const auto trip = offloader_->begin();
    std::vector<std::shared_ptr<Parcel>> parcels;
    for (int i = 0; i < layers; ++i) parcels.push_back(send(trip, i));
    backing_->end_all();
    offloader_->settle();
    std::vector<std::size_t> reads;
    for (int i = layers; i-- > 0;) {
      reads.push_back(backing_->reads());
      EXPECT_TRUE(at::equal(parcels[static_cast<std::size_t>(i)]->get(), payload(i)));
      parcels.pop_back();
    }
    return reads;
  }

  std::shared_ptr<AwayBytes> away_ = std::make_shared<AwayBytes>();
  FakeBacking* backing_ = nullptr;
  std::shared_ptr<Offloader> offloader_;
};

TEST_F(OffloaderTest, GivesUpMemoryOnceTheCopyHasEndedAndNotBefore) {
  open();
  const auto trip = offloader_->begin();
  at::Tensor sent = payload(3);
  const auto weak = sent.storage().getWeakStorageImpl();
  const auto parcel = offloader_->send(trip, 1, std::move(sent), std::nullopt, away_);
  offloader_->settle();
  EXPECT_EQ(weak.use_count(), 1u);
  EXPECT_EQ(away_->left, 0);
  backing_->end_all();
  offloader_->settle();
  EXPECT_EQ(weak.use_count(), 0u);
  EXPECT_EQ(away_->left, kBytes);
  EXPECT_EQ(away_->sent, kBytes);
  EXPECT_EQ(trip->away_bytes(), kBytes);
  for (int i = 0; i < 3; ++i) {  // a graph that is kept is read again
    const at::Tensor back = parcel->get();
    EXPECT_TRUE(at::equal(back, payload(3)));
    EXPECT_EQ(back.use_count(), 1u);  // and costs nothing in between
    EXPECT_EQ(backing_->reads(), static_cast<std::size_t>(i) + 1);
  }
  const at::Tensor one = parcel->get(), other = parcel->get();
  EXPECT_EQ(one.const_data_ptr(), other.const_data_ptr());  // readers at the same time share
}

TEST_F(OffloaderTest, ReadsWhatIsLeavingWhereItIs) {
  open();
  const auto trip = offloader_->begin();
  const auto parcel = send(trip, 1);
  EXPECT_TRUE(at::equal(parcel->get(), payload(1)));
  EXPECT_EQ(backing_->reads(), 0u);
  EXPECT_EQ(backing_->under_way(), 1u);
}

TEST_F(OffloaderTest, LeavesSmallPayloadsToTheirOwner) {
  open();
  EXPECT_EQ(send(offloader_->begin(), 1, Offloader::kLeastBytes - 1), nullptr);
  EXPECT_NE(send(offloader_->begin(), 1, Offloader::kLeastBytes), nullptr);
}

TEST_F(OffloaderTest, StaysWhereACopyFails) {
  for (const int kind : {0, 1, 2}) {
    open(kind == 0 ? kBytes - 1 : 256 * kMiB);
    away_->left = 0;
    away_->sent = 0;
    backing_->refuses = kind == 1;
    backing_->fails_to_write = kind == 2;
    const auto trip = offloader_->begin();
    std::vector<std::shared_ptr<Parcel>> parcels;
    for (int i = 0; i < 5; ++i) parcels.push_back(send(trip, i));
    backing_->end_all();
    offloader_->settle();
    for (int i = 0; i < 5; ++i)
      EXPECT_TRUE(at::equal(parcels[static_cast<std::size_t>(i)]->get(), payload(i)));
    EXPECT_EQ(away_->left, 0);
    EXPECT_EQ(away_->sent, 0);  // a budget counts them as held
    EXPECT_EQ(backing_->reads(), 0u);
    EXPECT_EQ(backing_->arena().used_bytes(), 0u);
    // The next step works.
    parcels.clear();
    backing_->refuses = backing_->fails_to_write = false;
    if (kind > 0) step(5);
  }
}

// What is warned of while one lives.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { said.push_back(warning.msg()); }
  std::vector<std::string> said;

 private:
  const c10::WarningUtils::WarningHandlerGuard guard_{this};
};

TEST(Offloader, SaysWhereThereIsNowhereToSendTo) {
  const auto offloader = std::make_shared<Offloader>(
      [](const at::Device&) -> std::unique_ptr<Backing> { TORCH_CHECK(false, "no memory"); });
  try {
    offloader->require(at::kCPU);
    ADD_FAILURE() << "there is something to send to";
  } catch (const c10::Error& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "no memory");
  }
  const Warnings warnings;
  const auto away = std::make_shared<AwayBytes>();
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(offloader->send(offloader->begin(), 1, payload(1), std::nullopt, away), nullptr);
  EXPECT_EQ(warnings.said,
            (std::vector<std::string>{"backfold: nothing is offloaded from cpu: no memory"}));
}

TEST_F(OffloaderTest, RaisesWhereBytesCannotBeReadAndMayBeAskedAgain) {
  open();
  const auto parcel = send(offloader_->begin(), 1);
  backing_->end_all();
  offloader_->settle();
  backing_->fails_to_read = true;
  for (int i = 0; i < 2; ++i) {
    try {
      parcel->get();
      ADD_FAILURE() << "a read that failed gave a tensor";
    } catch (const c10::Error& error) {
      EXPECT_STREQ(error.what_without_backtrace(),
                   "backfold: 100001 bytes that backward needs could not be read back from a test: "
                   "it was told to");
    }
  }
  backing_->fails_to_read = false;
  EXPECT_TRUE(at::equal(parcel->get(), payload(1)));
}

// As where there is no memory to read into.
TEST_F(OffloaderTest, RaisesWhereAReadCannotBeginAndMayBeAskedAgain) {
  open();
  const auto trip = offloader_->begin();
  std::vector<std::shared_ptr<Parcel>> parcels;
  for (int i = 0; i < 4; ++i) parcels.push_back(send(trip, i));
  backing_->end_all();
  offloader_->settle();
  EXPECT_TRUE(at::equal(parcels[3]->get(), payload(3)));
  const std::size_t ahead = backing_->reads() - 1;
  EXPECT_EQ(ahead, 2u);
  backing_->refuses = true;
  EXPECT_TRUE(at::equal(parcels[2]->get(), payload(2)));  // is back, and nothing more comes ahead
  EXPECT_TRUE(at::equal(parcels[1]->get(), payload(1)));
  for (int i = 0; i < 2; ++i) EXPECT_THROW(parcels[0]->get(), c10::Error);
  backing_->refuses = false;
  EXPECT_TRUE(at::equal(parcels[0]->get(), payload(0)));
  parcels.clear();
  EXPECT_EQ(backing_->arena().used_bytes(), 0u);
  step(4);
}

TEST_F(OffloaderTest, BoundsWhatIsLeaving) {
  open();
  const auto trip = offloader_->begin();
  std::vector<std::shared_ptr<Parcel>> parcels;
  std::size_t most = 0;
  for (int i = 0; i < 50; ++i) {
    parcels.push_back(send(trip, i));
    most = std::max(most, backing_->under_way());
  }
  EXPECT_EQ(most, 2u);  // 50 without back-pressure
}

TEST_F(OffloaderTest, WaitsForTheOldestCopiesAndForNoMoreThanItMust) {
  open();
  const auto trip = offloader_->begin();
  const std::vector<std::shared_ptr<Parcel>> parcels = {send(trip, 0), send(trip, 1)};
  offloader_->make_way(0, 2 * kBytes);
  EXPECT_EQ(away_->left, 0);
  offloader_->make_way(0, 2 * kBytes - 1);
  EXPECT_EQ(away_->left, kBytes);
  EXPECT_TRUE(backing_->copies[0]->ended);
  EXPECT_FALSE(backing_->copies[1]->ended);
  offloader_->make_way(0, 0);
  EXPECT_EQ(away_->left, 2 * kBytes);
}

TEST_F(OffloaderTest, HasTheNextOnesBackBeforeTheyAreAskedFor) {
  open();
  constexpr int kLayers = 20;
  for (int i = 0; i < 3; ++i) {
    const std::size_t before = backing_->reads();
    const std::vector<std::size_t> reads = step(kLayers);
    // The window is two payloads: in the first step all leave, then the last two stay.
    const std::size_t away = i == 0 ? kLayers : kLayers - 2;
    EXPECT_EQ(backing_->reads() - before, away) << "step " << i;
    for (std::size_t asked = 1; asked + 2 < kLayers; ++asked) {
      const std::size_t ahead = reads[asked] - before - (asked - (kLayers - away));
      if (asked < 3) continue;
      EXPECT_GE(ahead, 1u) << asked;  // 0 without look-ahead
      EXPECT_LE(ahead, 2u) << asked;  // more without a bound
    }
  }
}

TEST_F(OffloaderTest, FollowsAnOrderThatIsNotTheReverse) {
  open();
  std::mt19937 random(3);
  std::vector<int> order(12);
  for (int i = 0; i < 12; ++i) order[static_cast<std::size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto trip = offloader_->begin();
    std::map<int, std::shared_ptr<Parcel>> parcels;
    for (int i = 0; i < 12; ++i) parcels[i] = send(trip, i);
    backing_->end_all();
    offloader_->settle();
    int not_ahead = 0;
    for (const int i : order) {
      const std::size_t reads = backing_->reads();
      const bool was_under_way = backing_->under_way() > 0;
      EXPECT_TRUE(at::equal(parcels[i]->get(), payload(i)));
      not_ahead += backing_->reads() > reads && !was_under_way;
      parcels.erase(i);
    }
    if (repeat > 0) {
      EXPECT_LE(not_ahead, 1);  // the first that is away
    }
  }
}

TEST_F(OffloaderTest, LosesNothingOfStepsThatAreAborted) {
  open();
  std::mt19937 random(5);
  for (int i = 0; i < 1'000; ++i) {
    const auto trip = offloader_->begin();
    std::vector<std::shared_ptr<Parcel>> parcels;
    for (int j = 0; j < 6; ++j) parcels.push_back(send(trip, j));
    if (i % 3 == 0) backing_->end_all();
    if (i % 2 == 0) static_cast<void>(parcels[random() % 6]->get());
    parcels.clear();  // with copies under way, both out and in
    std::shuffle(backing_->copies.begin(), backing_->copies.end(), random);
    if (backing_->copies.size() > 4) backing_->copies[0]->end();
    std::erase_if(backing_->copies, [](const auto& one) { return one->ended; });
  }
  backing_->end_all();
  offloader_->settle();
  EXPECT_EQ(backing_->arena().used_bytes(), 0u);
  EXPECT_LE(backing_->arena().slab_bytes(), 4 * kMiB);
  backing_->copies.clear();
  step(6);
}

TEST_F(OffloaderTest, OutlivesItsControllerWhileSomethingIsAway) {
  open();
  const auto parcel = send(offloader_->begin(), 1);
  backing_->end_all();
  offloader_->settle();
  offloader_.reset();
  EXPECT_TRUE(at::equal(parcel->get(), payload(1)));
}

TEST(FileBacking, BringsEveryByteBack) {
  const auto offloader = std::make_shared<Offloader>();
  const auto away = std::make_shared<AwayBytes>();
  const auto trip = offloader->begin();
  const std::int64_t sizes[] = {65'536, 65'537, 4'194'304, 70'000'003};
  std::vector<std::shared_ptr<Parcel>> parcels;
  for (const std::int64_t bytes : sizes)
    parcels.push_back(offloader->send(trip, 1, payload(2, bytes), std::nullopt, away));
  while (away->left < 65'536 + 65'537 + 4'194'304 + 70'000'003) {
    std::this_thread::yield();
    offloader->settle();
  }
  for (std::size_t i = 0; i < parcels.size(); ++i)
    EXPECT_TRUE(at::equal(parcels[i]->get(), payload(2, sizes[i]))) << sizes[i];
}

// Memory is freed, taken again and overwritten all the time, by several threads that share one
// offloader: a copy that outlives its memory shows as a wrong byte.
TEST(FileBacking, SurvivesChurnOfThreads) {
  const auto offloader = std::make_shared<Offloader>();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto away = std::make_shared<AwayBytes>();
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 40; ++i) {
        const auto trip = offloader->begin();
        std::vector<std::pair<int, std::shared_ptr<Parcel>>> parcels;
        for (int j = 0; j < 12; ++j) {
          const int value = t * 1'000 + i * 12 + j;
          parcels.emplace_back(value, offloader->send(trip, static_cast<std::uint64_t>(j),
                                                      payload(value, 70'000), std::nullopt, away));
          static_cast<void>(at::zeros({70'000}, at::kByte));
        }
        std::shuffle(parcels.begin(), parcels.end(), random);
        parcels.resize(9);
        for (const auto& [value, parcel] : parcels)
          wrong += !at::equal(parcel->get(), payload(value, 70'000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace backfold::torch_layer
