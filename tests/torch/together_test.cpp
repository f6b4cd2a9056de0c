// SPDX-License-Identifier: Apache-2.0
//
// Several controllers that plan together, each on a thread that stands for a process.

#include "torch/together.h"

#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/nn/modules/linear.h>
#include <torch/csrc/api/include/torch/utils.h>

#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>

#include "backfold/controller.h"
#include "torch/state.h"

namespace backfold {
namespace {

// An all-gather between threads. One that leaves for good ends the waiting of the others.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), sent_(static_cast<std::size_t>(size)) {}

  std::vector<std::string> gather(int rank, const std::string& bytes) {
    std::unique_lock lock(mutex_);
    sent_[static_cast<std::size_t>(rank)] = bytes;
    const int round = round_;
    if (++arrived_ == size_) {
      heard_ = sent_;
      arrived_ = 0;
      ++round_;
      ++rounds;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round || left_; });
      TORCH_CHECK(round_ != round, "connection closed by peer");
    }
    return heard_;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    left_ = true;
    changed_.notify_all();
  }

  int rounds = 0;

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> sent_, heard_;
  int arrived_ = 0, round_ = 0;
  bool left_ = false;
};

ControllerOptions options_of(Meeting& meeting, int rank, int size) {
  ControllerOptions options;
  options.bits = 3;
  options.min_bytes = 0;
  options.probe_steps = {2};
  options.probe_every.reset();
  options.rank = rank;
  options.world_size = size;
  options.gather = [&meeting, rank](const std::string& bytes) {
    return meeting.gather(rank, bytes);
  };
  return options;
}

// Runs `process(rank)` on threads, and returns what each raised.
std::vector<std::string> in_processes(Meeting& meeting, int size,
                                      const std::function<void(int)>& process) {
  std::vector<std::string> raised(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        process(rank);
      } catch (const c10::Error& error) {
        raised[static_cast<std::size_t>(rank)] = error.what_without_backtrace();
      }
      meeting.leave();
    });
  for (std::thread& thread : threads) thread.join();
  return raised;
}

torch::nn::Linear model_of(std::int64_t outputs = 48) {
  torch::manual_seed(0);
  torch::nn::Linear model(32, outputs);
  return model;
}

std::string plan_of(const Controller& fold) {
  std::stringstream text;
  fold.save_plan(text);
  return text.str();
}

TEST(Together, ProcessesHaveOnePlanAndTalkOnlyAtItsSteps) {
  constexpr int kSize = 3;
  Meeting meeting(kSize);
  std::vector<std::vector<std::string>> plans(kSize);
  std::vector<at::Tensor> data;
  std::vector<torch::nn::Linear> models;
  for (int rank = 0; rank < kSize; ++rank) {
    data.push_back(torch::randn({64, 32}) * (1 + rank));
    models.push_back(model_of());
  }
  std::vector<int> rounds;
  const auto raised = in_processes(meeting, kSize, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Controller fold(*models[index], options_of(meeting, rank, kSize));
    for (int step = 0; step < 6; ++step) {
      fold.step([&] { return models[index](data[index]).tanh().square().mean(); });
      plans[index].push_back(plan_of(fold));
      if (rank == 0) rounds.push_back(meeting.rounds);
    }
  });
  EXPECT_EQ(raised, std::vector<std::string>(kSize));
  EXPECT_EQ(plans[1], plans[0]);
  EXPECT_EQ(plans[2], plans[0]);
  EXPECT_NE(plans[0][0], plans[0][1]);
  // The introduction; whether all can run again, and what they measured.
  EXPECT_EQ(rounds, (std::vector<int>{1, 3, 3, 3, 3, 3}));
}

TEST(Together, AProcessThatCannotBeMeasuredTellsTheOthers) {
  Meeting meeting(2);
  std::vector<torch::nn::Linear> models = {model_of(), model_of()};
  const at::Tensor x = torch::randn({64, 32});
  const auto raised = in_processes(meeting, 2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Controller fold(*models[index], options_of(meeting, rank, 2));
    int runs = 0;
    for (int step = 0; step < 4; ++step)
      fold.step([&] {
        TORCH_CHECK(rank == 0 || ++runs != 3, "no second time");
        return models[index](x).tanh().square().mean();
      });
  });
  EXPECT_EQ(raised[1], "no second time");
  EXPECT_NE(raised[0].find("could not be measured by rank 1: no second time"), std::string::npos)
      << raised[0];
}

TEST(Together, DifferentModelsAreNamed) {
  Meeting meeting(2);
  std::vector<torch::nn::Linear> models = {model_of(48), model_of(40)};
  const at::Tensor x = torch::randn({64, 32});
  const auto raised = in_processes(meeting, 2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Controller fold(*models[index], options_of(meeting, rank, 2));
    fold.step([&] { return models[index](x).tanh().square().mean(); });
  });
  for (const std::string& message : raised) {
    EXPECT_NE(message.find("the parameter weight is"), std::string::npos) << message;
    EXPECT_NE(message.find("on rank 1"), std::string::npos) << message;
  }
}

TEST(Together, ProcessesThatAreOutOfStepAreToldSo) {
  Meeting meeting(2);
  std::vector<torch::nn::Linear> models = {model_of(), model_of()};
  const at::Tensor x = torch::randn({64, 32});
  const auto raised = in_processes(meeting, 2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    ControllerOptions options = options_of(meeting, rank, 2);
    options.probe_steps = {2, 4};
    Controller fold(*models[index], options);
    const auto step = [&] { fold.step([&] { return models[index](x).tanh().square().mean(); }); };
    for (int i = 0; i < 3; ++i) step();
    if (rank == 0) return step();
    fold.calibrate([&] { models[index](x).tanh().square().mean().backward(); });
  });
  for (const std::string& message : raised)
    EXPECT_NE(message.find("out of step"), std::string::npos) << message;
}

TEST(Together, RanksRoundDifferentlyAndTheFirstAsIfItWereAlone) {
  const auto gradient = [](int rank, int size) {
    ControllerOptions options;
    options.bits = 2;
    options.adaptive = false;
    options.min_bytes = 0;
    options.rank = rank;
    options.world_size = size;
    torch::nn::Linear model = model_of();
    Controller fold(*model, options);
    torch::manual_seed(1);
    fold.step([&] { return model(torch::randn({64, 32})).tanh().square().mean(); });
    return model->weight.grad();
  };
  EXPECT_TRUE(gradient(0, 2).equal(gradient(0, 1)));
  EXPECT_FALSE(gradient(1, 2).equal(gradient(0, 1)));
}

TEST(Together, ARankMustExist) {
  ControllerOptions options;
  options.rank = 2;
  options.world_size = 2;
  EXPECT_THROW(Controller{options}, c10::ValueError);
}

}  // namespace
}  // namespace backfold
