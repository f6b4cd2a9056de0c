// SPDX-License-Identifier: Apache-2.0

#include "base/threads.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace backfold::core {

void split_over_threads(std::int64_t items, std::int64_t grain, int threads,
                        const std::function<void(std::int64_t, std::int64_t)>& work) {
  if (items <= 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, items / std::max<std::int64_t>(1, grain));
  const std::int64_t parts = std::clamp<std::int64_t>(threads, 1, most);
  const auto border = [&](std::int64_t part) {
    return items / parts * part + std::min(part, items % parts);
  };

  std::vector<std::thread> others;
  std::int64_t started = 1;  // part 0 is this thread's
  try {
    others.reserve(static_cast<std::size_t>(parts - 1));
    for (; started < parts; ++started)
      others.emplace_back([&, part = started] { work(border(part), border(part + 1)); });
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  work(border(0), border(1));
  if (started < parts) work(border(started), items);
  for (std::thread& other : others) other.join();
}

}  // namespace backfold::core
