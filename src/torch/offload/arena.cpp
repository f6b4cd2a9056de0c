// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/arena.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

namespace backfold::torch_layer {
namespace {

std::size_t in_pages(std::size_t bytes) { return (bytes + Arena::kPage - 1) & ~(Arena::kPage - 1); }

}  // namespace

Arena::Arena(MakeSlab make, std::size_t most_bytes)
    : make_(std::move(make)), most_bytes_(most_bytes) {}

std::optional<Extent> Arena::take(std::size_t bytes, bool whole) {
  Owned* from = nullptr;
  std::map<std::size_t, std::size_t>::iterator hole;
  for (Owned& one : slabs_) {
    for (auto at = one.free.begin(); at != one.free.end(); ++at) {
      if (whole && at->second < bytes) continue;
      if (from && (whole || at->second <= hole->second)) continue;
      from = &one;
      hole = at;
    }
    if (from && whole) break;  // the first that fits, so that later slabs empty
  }
  if (!from) return std::nullopt;
  const auto [begin, size] = *hole;
  const std::size_t taken = std::min(bytes, size);
  from->free.erase(hole);
  if (taken < size) from->free.emplace(begin + taken, size - taken);
  from->used += taken;
  from->touched = true;
  used_ += taken;
  return Extent{from->slab.get(), begin, taken};
}

bool Arena::grow(std::size_t bytes) {
  if (!why_full_.empty()) return false;
  // As much again as there is, in powers of two: torch's allocator of pinned memory rounds to them.
  const std::size_t ample =
      std::clamp(std::bit_ceil(std::max(total_, bytes)), kLeastSlab, kMostSlab);
  for (const std::size_t size : {ample, bytes}) {
    if (size == bytes && ample == bytes && !why_full_.empty()) break;
    if (total_ + size > most_bytes_) {
      why_full_ = c10::str("it may take no more than ", most_bytes_, " bytes");
      continue;
    }
    try {
      Owned& made = slabs_.emplace_back();
      made.slab = make_(size);
      made.free.emplace(0, size);
      total_ += size;
      why_full_.clear();
      return true;
    } catch (const c10::Error& error) {
      slabs_.pop_back();
      why_full_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      slabs_.pop_back();
      why_full_ = error.what();
    }
  }
  return false;
}

std::optional<Room> Arena::reserve(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Room room;
  std::size_t left = in_pages(bytes);
  while (left > 0) {
    const std::size_t piece = std::min(left, kMostSlab);
    auto extent = take(piece, true);
    if (!extent && grow(piece)) extent = take(piece, true);
    if (!extent) extent = take(piece, false);
    if (!extent) {
      give_back(room);
      return std::nullopt;
    }
    left -= extent->bytes;
    room.push_back(*extent);
  }
  return room;
}

void Arena::release(const Room& room) {
  const std::lock_guard lock(mutex_);
  give_back(room);
}

void Arena::give_back(const Room& room) {
  for (const Extent& extent : room) {
    const auto owned = std::find_if(slabs_.begin(), slabs_.end(), [&](const Owned& one) {
      return one.slab.get() == extent.slab;
    });
    TORCH_INTERNAL_ASSERT(owned != slabs_.end());
    owned->used -= extent.bytes;
    used_ -= extent.bytes;
    auto [at, added] = owned->free.emplace(extent.begin, extent.bytes);
    TORCH_INTERNAL_ASSERT(added);
    if (const auto next = std::next(at);
        next != owned->free.end() && at->first + at->second == next->first) {
      at->second += next->second;
      owned->free.erase(next);
    }
    if (at != owned->free.begin()) {
      const auto before = std::prev(at);
      if (before->first + before->second == at->first) {
        before->second += at->second;
        owned->free.erase(at);
      }
    }
  }
}

void Arena::trim() {
  const std::lock_guard lock(mutex_);
  why_full_.clear();
  std::erase_if(slabs_, [&](Owned& one) {
    const bool idle = one.used == 0 && !std::exchange(one.touched, one.used > 0);
    if (idle) total_ -= one.slab->bytes();
    return idle;
  });
}

std::size_t Arena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::size_t Arena::slab_bytes() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

std::string Arena::why_full() const {
  const std::lock_guard lock(mutex_);
  return why_full_;
}

}  // namespace backfold::torch_layer
