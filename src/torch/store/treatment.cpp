// SPDX-License-Identifier: Apache-2.0

#include "torch/store/treatment.h"

#include <algorithm>

namespace backfold::torch_layer {
namespace {

constexpr const char* kPlanned = "the plan keeps it";

Treatment for_integers(ElementType type, const Demand& demand) {
  const NarrowFormat format{.type = type,
                            .low = demand.bound.low,
                            .high = demand.bound.high,
                            .has_sentinel = demand.bound.has_sentinel,
                            .sentinel = demand.bound.sentinel};
  if (demand.reads == Reads::kIndices && validate(format).ok())
    return {Kind::kIndices, demand.reason, format};
  return {Kind::kPassed, "integers without a proven bound", {}};
}

// One comparison per element is all that is read here. Where that is the sign and another node
// reads the values, one zero-exact packet serves both; until that is known, it is assumed.
Treatment for_predicate(const at::Tensor& tensor, ElementType type, const Demand& demand,
                        Site::Sign sign, const std::optional<Choice>& choice) {
  if (demand.rule->sign_of_nonnegative) {
    if (choice && choice->bits == kRawBits && sign == Site::Sign::kAlsoValues)
      return {Kind::kRaw, kPlanned, {}, true};
    if (sign != Site::Sign::kOnlySign && choice && choice->bits >= 2 && choice->bits <= 16) {
      const char* reason = sign == Site::Sign::kUnknown ? "sign and values, until known better"
                                                        : "sign and values in one packet";
      return {Kind::kZeroExact, reason, group_format(tensor, type, *choice, true)};
    }
    if (sign == Site::Sign::kAlsoValues && !choice)
      return {Kind::kRaw, "its values are kept anyway", {}};
  }
  PredicateFormat format = demand.predicate;
  format.type = type;
  return {Kind::kPredicate, demand.reason, format};
}

// On the CPU a look costs next to nothing: the second value other than zero ends it.
bool is_two_valued(ElementType type, const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) return false;
  bool two_valued = false;
  double value = 0;
  check(find_mask_value({.type = type, .count = tensor.numel()}, tensor.const_data_ptr(),
                        &two_valued, &value));
  return two_valued;
}

}  // namespace

const char* obstacle_in(const at::Tensor& tensor) {
  if (tensor.layout() == at::kJagged || tensor.is_nested()) return "nested tensor";
  if (tensor.layout() != at::kStrided) return "sparse tensor";
  if (tensor.is_quantized()) return "quantized tensor";
  if (tensor.is_meta()) return "meta tensor";
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrappers(
      {DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchGradWrapper, DispatchKey::ZeroTensor, DispatchKey::Negative});
  if (tensor.key_set().has_any(kWrappers)) return "tensor subclass";
  if (tensor.is_complex()) return "complex numbers";
  if (!tensor.has_storage() || !tensor.storage().data()) return "tensor without memory";
  if (!supports(tensor.device())) {
    return tensor.is_cuda() ? "this build has no CUDA kernels" : "device without kernels";
  }
  return nullptr;
}

std::int64_t saved_bytes(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return 0;
  const auto storage = static_cast<std::int64_t>(tensor.storage().nbytes());
  if (tensor.is_nested()) return storage;
  return std::min(storage, tensor.numel() * static_cast<std::int64_t>(tensor.element_size()));
}

bool serves(const SharedPacket& packet, const Site& site, const Demand& demand, int bits) {
  if (packet.is_of_shares() && !demand.shares_along) return false;
  if (packet.rule() != Policy::kNone) {
    if (const auto* group = std::get_if<GroupFormat>(&packet.format()))
      return group->bits >= demand.bits;
    return !std::holds_alternative<TableFormat>(packet.format()) || packet.site().op == site.op;
  }
  if (std::holds_alternative<MaskFormat>(packet.format())) return true;
  if (const auto* group = std::get_if<GroupFormat>(&packet.format())) {
    if (demand.reads == Reads::kPredicate)
      return group->zero_exact && demand.rule->sign_of_nonnegative;
    return demand.reads != Reads::kExactly && bits > 0 && group->bits >= bits;
  }
  const auto* known = std::get_if<PredicateFormat>(&packet.format());
  if (!known || known->type == ElementType::kBool) return true;  // exact
  // Predicates are told apart by everything that decides them.
  const PredicateFormat& wanted = demand.predicate;
  return demand.reads == Reads::kPredicate && known->comparison == wanted.comparison &&
         known->low == wanted.low && known->high == wanted.high && known->nan == wanted.nan &&
         known->if_true == wanted.if_true && known->if_false == wanted.if_false;
}

bool keeps_rows(const SharedPacket& packet, const NormRows& rows) {
  const auto* group = std::get_if<GroupFormat>(&packet.format());
  if (!group) return false;
  if (!mixes(*group, rows)) return true;
  const NormRows* known = packet.rows();
  return known && known->run == rows.run && known->count == rows.count;
}

bool serves_norm(const SharedPacket& packet, const Demand& demand, const at::Tensor& tensor) {
  const auto* group = std::get_if<GroupFormat>(&packet.format());
  if (!demand.norm || !group || demand.norm->norm->until_planned) return true;
  if (has_few_values(*demand.norm, tensor)) return false;
  const auto rows = rows_of(*demand.norm, tensor);
  const Span span = span_of(tensor);
  if (!rows || packet.is_copy() || packet.span().begin != span.begin ||
      packet.span().count != span.count)
    return false;
  return keeps_rows(packet, *rows);
}

std::optional<NormRows> rows_to_normalise(Format& format, const Demand& demand,
                                          const at::Tensor& dense, bool planned) {
  auto* group = std::get_if<GroupFormat>(&format);
  if (!demand.norm || !group || group->zero_exact) return std::nullopt;
  if (planned && demand.norm->norm->until_planned) return std::nullopt;
  auto rows = rows_of(*demand.norm, dense);
  if (!rows || !mixes(*group, *rows)) return std::nullopt;
  if (group->layout == Layout::kRotated) group->layout = Layout::kFlat;
  return rows;
}

Treatment choose(const at::Tensor& tensor, const Demand& demand, Site::Sign sign,
                 const std::optional<Choice>& choice) {
  const ElementType type = *element_type(tensor.scalar_type());
  if (type == ElementType::kBool)
    return {Kind::kBits, demand.reason, PredicateFormat{.type = type}};
  if (type > ElementType::kF64) return for_integers(type, demand);
  if (demand.reads == Reads::kPredicate) return for_predicate(tensor, type, demand, sign, choice);
  if (demand.reads == Reads::kExactly || (demand.reads == Reads::kStart && !choice))
    return {Kind::kRaw, demand.reason, {}};
  if (is_two_valued(type, tensor))
    return {Kind::kMask, "it holds zero and one other value", MaskFormat{.type = type}};
  if (!choice) return {Kind::kRaw, "bits=None folds only what is exact", {}};
  if (demand.norm && has_few_values(*demand.norm, tensor))
    return {Kind::kRaw, "a norm over so few values cancels all but noise", {}};
  if (choice->bits == kRawBits) return {Kind::kRaw, kPlanned, {}, true};
  return {Kind::kLossy, demand.reason, group_format(tensor, type, *choice, false)};
}

}  // namespace backfold::torch_layer
