// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/worker.h"

#include <signal.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

namespace backfold::torch_layer {
namespace {

// While one lives, threads begin with all signals blocked: those are the program's business.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::start() {
  if (alive_) return;
  if (thread_.joinable()) thread_.join();  // it died, and waits for nobody
  try {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { loop(); });
    alive_ = true;
  } catch (const std::system_error&) {  // jobs are done by whoever waits for them
  }
}

std::shared_ptr<Worker::Job> Worker::add(std::function<void()> work) {
  const auto job = std::make_shared<Job>();
  job->work = std::move(work);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
    start();
  }
  changed_.notify_all();
  return job;
}

void Worker::run(Job& job, std::unique_lock<std::mutex>& lock) {
  // Also where the thread ends in the middle of the job, by no exception that can be caught.
  struct Ending {
    Job& job;
    std::unique_lock<std::mutex>& lock;
    std::condition_variable& changed;
    std::string failure = "the thread that copies has died";
    ~Ending() {
      job.work = nullptr;
      lock.lock();
      job.failure = std::move(failure);
      job.state = Job::State::kEnded;
      changed.notify_all();
    }
  };
  job.state = Job::State::kRunning;
  lock.unlock();
  Ending ending{job, lock, changed_};
  try {
    job.work();
    ending.failure.clear();
  } catch (const std::exception& error) {
    ending.failure = error.what();
  }
}

void Worker::loop() {
  struct Death {
    bool& alive;
    ~Death() { alive = false; }
  };
  std::unique_lock lock(mutex_);
  const Death death{alive_};  // under the lock
  while (true) {
    changed_.wait(lock, [&] { return stops_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::shared_ptr<Job> job = std::move(jobs_.front());
    jobs_.pop_front();
    run(*job, lock);
  }
}

bool Worker::has_ended(const Job& job) {
  const std::lock_guard lock(mutex_);
  return job.state == Job::State::kEnded;
}

void Worker::wait(Job& job) {
  std::unique_lock lock(mutex_);
  if (job.state == Job::State::kWaiting) {
    std::erase_if(jobs_, [&](const auto& one) { return one.get() == &job; });
    run(job, lock);
    return;
  }
  changed_.wait(lock, [&] { return job.state == Job::State::kEnded; });
}

std::string Worker::failure(const Job& job) {
  const std::lock_guard lock(mutex_);
  return job.failure;
}

}  // namespace backfold::torch_layer
