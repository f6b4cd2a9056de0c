// SPDX-License-Identifier: Apache-2.0

#include "base/threads.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace backfold::core {
namespace {

void on_started_threads(int parts, void (*work)(void* context, int part), void* context) {
  std::vector<std::thread> others;
  int started = 1;  // part 0 is this thread's
  try {
    others.reserve(static_cast<std::size_t>(parts - 1));
    for (; started < parts; ++started) others.emplace_back(work, context, started);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  work(context, 0);
  for (int part = started; part < parts; ++part) work(context, part);
  for (std::thread& other : others) other.join();
}

}  // namespace

void split_over_threads(std::int64_t items, std::int64_t grain, const Execution& execution,
                        const std::function<void(std::int64_t, std::int64_t)>& work) {
  if (items <= 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, items / std::max<std::int64_t>(1, grain));
  const std::int64_t parts = std::clamp<std::int64_t>(execution.threads, 1, most);
  if (parts == 1) return work(0, items);
  const auto share = [&](std::int64_t part) {
    const auto border = [&](std::int64_t of) {
      return items / parts * of + std::min(of, items % parts);
    };
    work(border(part), border(part + 1));
  };
  const Executor execute = execution.executor != nullptr ? execution.executor : on_started_threads;
  execute(
      static_cast<int>(parts),
      [](void* context, int part) { (*static_cast<decltype(share)*>(context))(part); },
      const_cast<void*>(static_cast<const void*>(&share)));
}

}  // namespace backfold::core
