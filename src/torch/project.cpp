// SPDX-License-Identifier: Apache-2.0

#include "torch/project.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>

#include "torch/codec.h"

namespace backfold::torch_layer {
namespace {

// Neither autograd nor autocast has a say in how a packet is made.
struct Undisturbed {
  const at::AutoGradMode no_grad{false};
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Integers alone, so that every device finds the same signs. (Shifts of torch's int64 bring in
// copies of the sign bit; the masks take them out.)
at::Tensor hashed(const at::Tensor& index, std::uint64_t seed) {
  const auto constant = [](std::uint64_t value) {
    return at::Scalar(static_cast<std::int64_t>(value));
  };
  const auto mixed = [&](at::Tensor x, std::int64_t shift) {
    const std::uint64_t mask = (std::uint64_t{1} << (64 - shift)) - 1;
    return x.__rshift__(at::Scalar(shift)).bitwise_and_(constant(mask)).bitwise_xor_(x);
  };
  at::Tensor x = index.add(constant(seed)).mul_(constant(0x9e37'79b9'7f4a'7c15));
  x = mixed(x, 30).mul_(constant(0xbf58'476d'1ce4'e5b9));
  return mixed(x, 27).mul_(constant(0x94d0'49bb'1331'11eb));
}

}  // namespace

std::size_t packed_bytes(const ProjectFormat& format) {
  return backfold::packed_bytes(format.codes);
}

at::Tensor projection(const ProjectFormat& format, at::ScalarType type, const at::Device& device) {
  const Undisturbed undisturbed;
  const at::Tensor index =
      at::arange(format.columns * format.kept, at::TensorOptions(at::kLong).device(device));
  const at::Tensor hash =
      hashed(index, format.key.seed * 0x2545'f491'4f6c'dd1d + format.key.stream);
  const double size = 1 / std::sqrt(static_cast<double>(format.kept));
  return at::where(hash.lt(0), at::Scalar(-size), at::Scalar(size))
      .to(type)
      .view({format.columns, format.kept});
}

at::Tensor project(const ProjectFormat& format, const void* source, const at::Device& device) {
  const Undisturbed undisturbed;
  const at::ScalarType type = scalar_type(format.codes.type);
  const at::Tensor rows = at::from_blob(const_cast<void*>(source), {format.rows, format.columns},
                                        at::TensorOptions(type).device(device));
  return at::mm(rows, projection(format, type, device));
}

void project_back(const ProjectFormat& format, const at::Tensor& projected,
                  const at::Tensor& result) {
  const Undisturbed undisturbed;
  at::Tensor rows = result.as_strided({format.rows, format.columns}, {format.columns, 1});
  at::mm_out(rows, projected, projection(format, result.scalar_type(), result.device()).t());
}

}  // namespace backfold::torch_layer
