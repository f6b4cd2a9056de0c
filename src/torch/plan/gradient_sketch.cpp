// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/gradient_sketch.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.h"
#include "torch/codec/codec.h"
#include "torch/store/shared_packet.h"
#include "torch/store/treatment.h"

namespace backfold::torch_layer {
namespace {

constexpr std::int64_t kRowsOfAGroup = 16;
constexpr std::int64_t kCoordinates = 256;
constexpr double kLeastWeight = 1e-9;  // a row below it has had no turn, or one long faded

// The number of steps in which a turn's weight falls to 1/e. Gradients change fastest at first.
double fading_steps(std::int64_t step) {
  return std::clamp(static_cast<double>(step) / 4, 16.0, 256.0);
}

}  // namespace

// Hides operators from autograd, autocast and the user's dispatch modes.
struct GradientSketch::Quiet {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard modes{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// What any work on the tensors of a sketch needs: hidden operators, the current device, and the
// order of streams.
struct GradientSketch::Work {
  explicit Work(GradientSketch& sketch) : device(sketch.device_) { sketch.follow_earlier_work(); }
  Quiet quiet;
  c10::DeviceGuard device;
};

// The same, with the lock.
struct GradientSketch::Access {
  explicit Access(GradientSketch& sketch) : lock(sketch.mutex_), work(sketch) {}
  std::lock_guard<std::mutex> lock;
  Work work;
};

GradientSketch::Row GradientSketch::row_of(const at::Tensor& parameter) {
  Row row;
  row.numel = parameter.numel();
  row.stride = (row.numel + kCoordinates - 1) / kCoordinates;
  const std::int64_t slice = parameter.dim() == 0 ? 1 : row.numel / parameter.size(0);
  if (slice <= row.stride) {
    // Stepping by the golden section of a slice spreads even a few draws evenly over the columns.
    const auto section = static_cast<std::int64_t>(0.618 * static_cast<double>(slice));
    row.stride += (section + slice - row.stride % slice) % slice;
  }
  while (std::gcd(row.stride, slice) != 1) ++row.stride;
  return row;
}

GradientSketch::GradientSketch(at::Device device, std::vector<Row> rows, std::uint64_t seed)
    : device_(device),
      seed_(seed),
      rows_(std::move(rows)),
      groups_((count() + kRowsOfAGroup - 1) / kRowsOfAGroup),
      last_turns_(groups_),
      stream_(current_stream(device)) {
  const Quiet quiet;
  const c10::DeviceGuard guard(device_);
  const std::int64_t in_group = std::min(count(), kRowsOfAGroup);
  const std::int64_t sums = 3 * count(), samples = 2 * in_group * kCoordinates;
  memory_ = allocate({sums + samples}, {1}, at::kDouble, device_).zero_();
  sums_ = memory_.narrow(0, 0, sums).view({3, count()});
  samples_ = memory_.narrow(0, sums, samples).view({2, in_group, kCoordinates});
}

void GradientSketch::start_pair(std::int64_t pair) {
  const Access access(*this);
  pair_ = pair;
  void_rows_ = 0;
  samples_.zero_();
}

void GradientSketch::watch(int phase) {
  const std::lock_guard lock(mutex_);
  phase_ = phase;
}

void GradientSketch::add(std::int64_t row, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  if (const auto stream = current_stream(device_))
    if (is_captured(*stream)) return;  // a graph would write to the sketch at every replay
  if (phase_ < 0) return;
  arrived_ = true;
  if (!has_turn(row)) return;
  rows_[row].left_out =
      obstacle_in(gradient) || gradient.device() != device_ || gradient.numel() != rows_[row].numel;
  try {
    if (!rows_[row].left_out) return add_sample(row, gradient);
  } catch (const std::exception&) {  // must not end the user's backward
  }
  void_rows_ |= std::int64_t{1} << (row - first_row());
}

void GradientSketch::add_sample(std::int64_t row, const at::Tensor& gradient) {
  const Work work(*this);
  const auto [numel, stride, left_out] = rows_[row];
  const core::MixedKey random =
      core::mixed({.seed = seed_, .stream = static_cast<std::uint64_t>(pair_ * count() + row)});
  const std::int64_t start = random.first % stride;
  const std::int64_t length = (numel - start + stride - 1) / stride;
  const std::int64_t place = samples_.storage_offset() + phase_ * samples_.stride(0) +
                             (row - first_row()) * samples_.stride(1);
  const at::Tensor sample = samples_.as_strided({length}, {1}, place);
  if (gradient.is_contiguous()) {
    sample.add_(gradient.as_strided({length}, {stride}, gradient.storage_offset() + start));
  } else {  // the same coordinates, whatever their order in memory
    const auto options = gradient.options().dtype(at::kLong);
    sample.add_(gradient.take(at::arange(start, numel, stride, options)));
  }
}

void GradientSketch::finish_pair(std::int64_t step) {
  const Access access(*this);
  const std::int64_t in_group = end_row() - first_row();
  for (std::int64_t row = 0; row < in_group; ++row)
    if (void_rows_ >> row & 1)
      samples_.select(1, row).fill_(std::numeric_limits<double>::quiet_NaN());
  const at::Tensor pair = samples_.narrow(1, 0, in_group);
  const at::Tensor differences = at::sub(pair[0], pair[1]).square_().sum(1);
  const at::Tensor squares = at::square(pair).sum(at::IntArrayRef({0, 2}));
  const at::Tensor finite = squares.lt(std::numeric_limits<double>::infinity());
  const at::Tensor found = at::stack({finite.to(at::kDouble), at::where(finite, differences, 0.0),
                                      at::where(finite, squares, 0.0)});
  std::int64_t& last_turn = last_turns_[pair_ % groups_];
  const double kept = std::exp(static_cast<double>(last_turn - step) / fading_steps(step));
  sums_.narrow(1, first_row(), in_group).mul_(kept).add_(found, 1 - kept);
  last_turn = step;
}

void GradientSketch::add_to(SketchTotals& totals) {
  const std::vector<double> sums = host_copy(sums_);
  for (std::int64_t row = 0; row < count(); ++row) {
    if (rows_[row].left_out) continue;
    const auto numel = static_cast<double>(rows_[row].numel);
    totals.watchable += numel;
    if (sums[row] < kLeastWeight) continue;
    totals.seen += numel;
    const double scale = static_cast<double>(rows_[row].stride) / (2 * sums[row]);
    totals.moments.variance += scale * sums[count() + row];
    totals.moments.energy += scale * sums[2 * count() + row];
  }
}

void GradientSketch::append_to(SketchState& state) {
  state.counters.push_back(void_rows_);
  state.counters.push_back(arrived_);
  state.counters.insert(state.counters.end(), last_turns_.begin(), last_turns_.end());
  for (const Row& row : rows_) state.counters.push_back(row.left_out);
  const std::vector<double> values = host_copy(memory_);
  state.values.insert(state.values.end(), values.begin(), values.end());
}

void GradientSketch::load(std::int64_t pair, const std::int64_t*& counter, const double*& value) {
  const Access access(*this);
  pair_ = pair;
  void_rows_ = *counter++;
  arrived_ = *counter++ != 0;
  for (std::int64_t& last_turn : last_turns_) last_turn = *counter++;
  for (Row& row : rows_) row.left_out = *counter++ != 0;
  memory_.copy_(at::from_blob(const_cast<double*>(value), memory_.sizes(), at::kDouble));
  value += memory_.numel();
}

// Makes the current stream wait for the last work on the sketch, if that was on another stream.
void GradientSketch::follow_earlier_work() {
  const std::optional<c10::Stream> now = current_stream(device_);
  if (now == stream_) return;
  c10::Event done(device_.type());
  done.record(*stream_);
  done.block(*now);
  c10::impl::VirtualGuardImpl(device_.type())
      .recordDataPtrOnStream(memory_.storage().data_ptr(), *now);
  stream_ = now;
}

std::vector<double> GradientSketch::host_copy(const at::Tensor& numbers) {
  const Access access(*this);
  const at::Tensor copy = numbers.cpu();
  const auto* begin = copy.const_data_ptr<double>();
  return {begin, begin + copy.numel()};
}

}  // namespace backfold::torch_layer
