// SPDX-License-Identifier: Apache-2.0
//
// Where the groups of a tensor lie, in the source and in the payload. Shared by every backend.

#ifndef BACKFOLD_GROUP_GEOMETRY_H_
#define BACKFOLD_GROUP_GEOMETRY_H_

#include <cstddef>
#include <cstdint>

#include "backfold/group.h"
#include "base/checks.h"
#include "base/host_device.h"

namespace backfold::core {

// Groups that are worth another thread: about 20 us of work, as long as a thread takes to start.
inline constexpr std::int64_t kGroupGrain = 512;

// Elements of one group: offset, offset + stride, ... `count` of them.
struct GroupSpan {
  std::int64_t offset;
  std::int64_t stride;
  int count;
};

// A valid format, with its sizes worked out.
struct GroupGeometry {
  std::int64_t groups;
  std::size_t header_bytes;  // of all groups, padded
  std::size_t code_bytes;    // of one group

  explicit GroupGeometry(const GroupFormat& format)
      : groups(group_count(format)),
        header_bytes(padded(static_cast<std::size_t>(groups) * 4)),
        code_bytes(static_cast<std::size_t>(format.group * format.bits / 8)) {}

  std::size_t bytes() const { return header_bytes + static_cast<std::size_t>(groups) * code_bytes; }

 private:
  static std::int64_t group_count(const GroupFormat& format) {
    if (format.layout != Layout::kStrided) return (format.count + format.group - 1) / format.group;
    if (format.count == 0) return 0;
    const std::int64_t rows = format.count / format.columns;
    return (rows + format.group - 1) / format.group * format.columns;
  }
};

inline GroupSpan span_of(const GroupFormat& format, std::int64_t group) {
  const auto shorter = [&](std::int64_t left) {
    return static_cast<int>(left < format.group ? left : format.group);
  };
  if (format.layout != Layout::kStrided) {
    const std::int64_t offset = group * format.group;
    return {offset, 1, shorter(format.count - offset)};
  }
  const std::int64_t row = group / format.columns * format.group;
  return {row * format.columns + group % format.columns, format.columns,
          shorter(format.count / format.columns - row)};
}

// The planes that a code is cut into.
struct Planes {
  int low;   // width of the plane of the low bits
  int high;  // width of the plane that follows, 0 if there is none
};

BACKFOLD_HD constexpr Planes planes_of(int bits) {
  return bits == 3   ? Planes{2, 1}
         : bits == 5 ? Planes{4, 1}
         : bits == 6 ? Planes{4, 2}
                     : Planes{bits, 0};
}

// Where element i of a group has its code and its random number.
BACKFOLD_HD constexpr int position_of(int i, int group) {
  const int quarter = group / 4;
  return 4 * (i % quarter) + i / quarter;
}

}  // namespace backfold::core

#endif  // BACKFOLD_GROUP_GEOMETRY_H_
