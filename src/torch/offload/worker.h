// SPDX-License-Identifier: Apache-2.0
//
// A thread that does jobs one after the other, in the order in which they came.
//
// It begins with the first job and ends with its owner. Whoever waits for a job that has not begun
// does it instead: nobody waits for the jobs before it, and a thread that could not be started, or
// that died, leaves no job undone. It never touches Python, nor frees what a job works on.

#ifndef BACKFOLD_TORCH_OFFLOAD_WORKER_H_
#define BACKFOLD_TORCH_OFFLOAD_WORKER_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace backfold::torch_layer {

class Worker {
 public:
  class Job {
   private:
    friend class Worker;
    std::function<void()> work;
    enum class State { kWaiting, kRunning, kEnded } state = State::kWaiting;
    std::string failure;
  };

  Worker() = default;
  // Ends the thread after the jobs that it was given.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::shared_ptr<Job> add(std::function<void()> work);
  bool has_ended(const Job& job);
  void wait(Job& job);
  // What a job that has ended raised; empty where it did not.
  std::string failure(const Job& job);

 private:
  void start();  // a thread, if there is none; called under the lock
  void loop();
  void run(Job& job, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::thread thread_;
  bool alive_ = false, stops_ = false;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_WORKER_H_
