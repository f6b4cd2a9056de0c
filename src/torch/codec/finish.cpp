// SPDX-License-Identifier: Apache-2.0

#include "torch/codec/finish.h"

#include <c10/core/DeviceGuard.h>

namespace backfold::torch_layer {
namespace {

bool is_floating(const std::optional<ElementType>& type) {
  return type && *type < ElementType::kF64;
}

RowAffine table_of(const Normalisation& by) {
  return {by.mean.defined() ? by.mean.const_data_ptr<float>() : nullptr,
          by.rstd.const_data_ptr<float>(), by.rows.run, by.rows.count};
}

bool is_regular(const Normalisation& by) {
  return by.rows.run > 0 && by.rstd.scalar_type() == at::kFloat;
}

bool same_statistics(const Normalisation& a, const Normalisation& b) {
  return a.rstd.is_alias_of(b.rstd) && a.mean.defined() == b.mean.defined() &&
         a.rows.run == b.rows.run && a.rows.count == b.rows.count;
}

std::optional<std::vector<Step>> steps_of(const Finish& finish) {
  std::vector<Step> steps;
  for (const auto& [operation, tensor] : finish.steps) {
    Step& step = steps.emplace_back(operation);
    if (step.kind == Step::Kind::kMask) {
      step.mask = {tensor.const_data_ptr(), static_cast<std::size_t>(tensor.nbytes())};
    } else if (step.from == Step::From::kTensor) {
      const auto type = element_type(tensor.scalar_type());
      if (!is_floating(type)) return std::nullopt;
      step.tensor = tensor.const_data_ptr();
      step.type = *type;
    }
  }
  return steps;
}

}  // namespace

std::optional<at::Tensor> unpack_finished(const at::Tensor& payload, const GroupFormat& format,
                                          const std::optional<Normalisation>& packed_by,
                                          const Finish& finish, at::ScalarType type) {
  const auto result_type = element_type(type);
  if (!is_floating(result_type) || (finish.norm && !is_regular(*finish.norm)) ||
      (packed_by && !is_regular(*packed_by)))
    return std::nullopt;
  GroupFormat from = format;
  Epilogue epilogue;
  epilogue.result_type = *result_type;
  if (packed_by && finish.norm && same_statistics(*packed_by, *finish.norm)) {
    from.type = ElementType::kF32;  // it holds normalised values, which is what is wanted
  } else {
    if (packed_by) epilogue.packed_rows = table_of(*packed_by);
    if (finish.norm) epilogue.rows = table_of(*finish.norm);
  }
  if (finish.weight.defined())
    epilogue.columns = {finish.weight.const_data_ptr<float>(),
                        finish.bias.defined() ? finish.bias.const_data_ptr<float>() : nullptr,
                        finish.run, finish.columns};
  const auto steps = steps_of(finish);
  if (!steps) return std::nullopt;
  epilogue.steps = *steps;
  if (!validate(from, epilogue).ok()) return std::nullopt;
  const c10::DeviceGuard guard(payload.device());
  at::Tensor result = allocate({format.count}, {1}, type, payload.device());
  check(unpack(from, epilogue,
               {payload.const_data_ptr(), static_cast<std::size_t>(payload.nbytes())},
               result.mutable_data_ptr(), execution_on(payload.device())));
  return result;
}

}  // namespace backfold::torch_layer
