// SPDX-License-Identifier: Apache-2.0

#include "torch/store/shared_packet.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <utility>

#include "torch/codec/shares.h"

namespace backfold::torch_layer {
namespace {

// Before a payload is made on the current stream. The source may be freed before the kernel has
// run, and may come from another stream: its memory must wait for this one.
void prepare(const at::Tensor& source, const std::optional<c10::Stream>& stream, bool draws,
             const Key& key) {
  if (!stream) return;
  TORCH_CHECK(!draws || key.turn || !is_captured(*stream),
              "backfold: nothing can be rounded where the capture of a CUDA graph began inside of "
              "the controller's block: every replay would round with the same random numbers. "
              "Enter the block inside of the capture.");
  c10::impl::VirtualGuardImpl(source.device().type())
      .recordDataPtrOnStream(source.storage().data_ptr(), *stream);
}

at::Tensor pack_span(const at::Tensor& source, const Span& span, const at::Tensor* dense_copy,
                     const Format& format, const Key& key, CodecMemory* memory) {
  const auto* begin = dense_copy
                          ? static_cast<const char*>(dense_copy->const_data_ptr())
                          : static_cast<const char*>(source.storage().data()) +
                                span.begin * static_cast<std::int64_t>(source.element_size());
  return pack_payload(begin, source.device(), format, key, memory);
}

}  // namespace

std::optional<c10::Storage> DecodedOnce::get(const std::optional<c10::Stream>& stream) const {
  if (!storage_ || stream != stream_) return std::nullopt;
  auto storage = storage_->lock();
  if (!storage) return std::nullopt;
  return c10::Storage(std::move(storage));
}

void DecodedOnce::set(const c10::Storage& storage, const std::optional<c10::Stream>& stream) {
  storage_.emplace(storage.getWeakStorageImpl());
  stream_ = stream;
}

SharedPacket::SharedPacket(const at::Tensor& source, const Span& span, const at::Tensor* dense_copy,
                           const Format& format, Site& site, int rule)
    : site_(site),
      rule_(rule),
      format_(format),
      type_(source.scalar_type()),
      span_(dense_copy ? Span{0, dense_copy->numel()} : span),
      original_(dense_copy ? std::optional(view_in_span(source, 0)) : std::nullopt),
      packed_view_(dense_copy ? view_in_copy(source, *dense_copy)
                              : view_in_span(source, span.begin)),
      source_(source.storage().getWeakStorageImpl()),
      source_bytes_(source.storage().nbytes()),
      counter_(source),
      stream_(current_stream(source.device())),
      device_(source.device()) {}

void SharedPacket::pack(const at::Tensor& source, const at::Tensor* dense_copy, const Key& key,
                        std::optional<Normalisation> by) {
  prepare(source, stream_, !is_lossless(format_), key);
  if (!by) {
    payload_ = pack_span(source, span_, dense_copy, format_, key, site_.memory.get());
    return;
  }
  payload_ =
      pack_payload(dense_copy ? *dense_copy : source, std::get<GroupFormat>(format_), *by, key);
  rows_ = by->rows;
  by_ = std::move(by);
}

void SharedPacket::wait(const at::Tensor& dense, const Key& key, const NormCall& call,
                        const NormRows& rows) {
  waiting_ = {dense.tensor_data(), key, call};
  rows_ = rows;
}

void SharedPacket::complete(c10::ArrayRef<c10::IValue> results) {
  const std::lock_guard lock(mutex_);
  if (!waiting_ || results.empty()) return;
  auto by = normalisation_of(waiting_->call, *rows_, results);
  TORCH_CHECK(by, "backfold: ", waiting_->call.norm->op, " did not hand over its statistics");
  // What cannot be packed stays held.
  pack(waiting_->dense, nullptr, waiting_->key, std::move(by));
  waiting_.reset();
  if (passage_) depart(*std::exchange(passage_, std::nullopt));
}

void SharedPacket::leave(Passage passage) {
  const std::lock_guard lock(mutex_);
  if (waiting_) {
    passage_ = std::move(passage);
  } else {
    depart(passage);
  }
}

void SharedPacket::depart(const Passage& passage) {
  parcel_ = passage.send(payload_, stream_);
  if (!parcel_) return;
  payload_.reset();
  charge_.end();
}

SharedPacket::~SharedPacket() {
  if (learns_sign_) site_.sign = values_read_ ? Site::Sign::kAlsoValues : Site::Sign::kOnlySign;
}

at::Tensor SharedPacket::unpacked(const at::Tensor& payload) const {
  if (by_) return unpack_payload(payload, std::get<GroupFormat>(format_), *by_, type_);
  const at::Tensor values = unpack_payload(payload, format_, {span_.count}, {1}, type_);
  if (shares_along_) restore_sums(tensor_at(values.storage(), packed_view_, type_), *shares_along_);
  return values;
}

at::Tensor SharedPacket::fetch() const {
  at::Tensor payload = parcel_ ? parcel_->get() : payload_;
  const std::optional<c10::Stream> now = current_stream(device_);
  if (now && *now != *stream_) {
    if (!parcel_) hand_over(payload.storage().data_ptr(), *stream_, *now);
    for (const at::Tensor& statistic :
         by_ ? std::array{by_->mean, by_->rstd} : std::array<at::Tensor, 2>{})
      if (statistic.defined()) hand_over(statistic.storage().data_ptr(), *stream_, *now);
  }
  return payload;
}

std::optional<at::Tensor> SharedPacket::finish(const Finish& finish, at::ScalarType type) {
  const std::lock_guard lock(mutex_);
  const auto* group = std::get_if<GroupFormat>(&format_);
  if (waiting_ || !group || has_source()) return std::nullopt;
  return unpack_finished(fetch(), *group, by_, finish, type);
}

std::optional<at::Tensor> SharedPacket::bits() {
  const std::lock_guard lock(mutex_);
  const auto* predicate = std::get_if<PredicateFormat>(&format_);
  if (!predicate || !(predicate->if_true > 0) || predicate->if_false > 0) return std::nullopt;
  return fetch();
}

c10::Storage SharedPacket::decode(bool share) {
  const std::optional<c10::Stream> now = current_stream(device_);
  if (share)
    if (auto earlier = decoded_.get(now)) return *earlier;
  const at::Tensor decoded = unpacked(fetch());
  if (share) decoded_.set(decoded.storage(), now);
  return decoded.storage();
}

bool SharedPacket::has_source() const {
  const auto source = source_.lock();
  // A derived tensor reads packets of values that are no longer in their memory.
  return source && source->nbytes() == source_bytes_ && !overwritten_ && !counter_.moved();
}

at::Tensor SharedPacket::restore(const View& view, bool share) {
  const std::lock_guard lock(mutex_);
  if (waiting_) {
    View held = view;
    if (!original_) held.offset += span_.begin;
    return tensor_at(waiting_->dense.storage(), held, type_);
  }
  const bool alive = has_source();
  if (!judged_ && alive) site_.alive = true;
  judged_ = true;
  if (alive) {
    View in_storage = original_ ? *original_ : view;
    if (!original_) in_storage.offset += span_.begin;
    return tensor_at(c10::Storage(source_.lock()), in_storage, type_);
  }
  return tensor_at(decode(share), view, type_);
}

std::optional<View> SharedPacket::view_of(const View& in_storage) const {
  if (original_) return in_storage == *original_ ? std::optional(packed_view_) : std::nullopt;
  if (!span_.contains(span_of(in_storage))) return std::nullopt;
  View inside = in_storage;
  inside.offset -= span_.begin;
  return inside;
}

void SharedPacket::forget_source() {
  const std::lock_guard lock(mutex_);
  overwritten_ = true;
}

c10::Storage Hold::storage() {
  if (site_ && !judged_.exchange(true) && !pinned_) site_->alive = alive_elsewhere();
  const std::lock_guard lock(mutex_);
  return parcel_ ? parcel_->get().storage() : storage_;
}

bool Hold::alive_elsewhere() const {
  const std::lock_guard lock(mutex_);
  return storage_ && storage_.use_count() > 1;
}

bool Hold::leave(const Passage& passage) {
  const std::lock_guard lock(mutex_);
  if (storage_.use_count() > 1) return false;
  parcel_ = passage.send(bytes_in(storage_), stream_);
  if (parcel_) {
    storage_ = {};
    charge_.end();
  }
  return true;
}

ParameterCopy::ParameterCopy(const at::Tensor& parameter, const at::Tensor& copy)
    : parameter_(parameter.tensor_data()),
      version_(parameter._version()),
      type_(copy.scalar_type()),
      copy_(copy.storage().getWeakStorageImpl()) {}

c10::Storage ParameterCopy::again() const {
  TORCH_CHECK(!lost_ && parameter_._version() == version_, "backfold: a parameter of type ",
              parameter_.scalar_type(), " and sizes ", parameter_.sizes(),
              " was modified in place before backward (version ", parameter_._version(),
              ", expected ", version_, "). Its copy in ", type_,
              " was not kept, and backward would have made it again from the parameter. Run "
              "backward first, or name the module in keep=.");
  const at::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(parameter_.device());
  at::Tensor again = allocate(parameter_.sizes(), parameter_.strides(), type_, parameter_.device());
  again.copy_(parameter_);
  return again.storage();
}

void ParameterCopy::keep() {
  const std::lock_guard lock(mutex_);
  if (kept_) return;
  kept_on_ = current_stream(parameter_.device());
  try {
    auto copy = copy_.lock();
    kept_ = copy ? c10::Storage(std::move(copy)) : again();
  } catch (const std::exception&) {
    lost_ = true;  // for who reads it; the write goes on
  }
}

c10::Storage ParameterCopy::storage() {
  const std::lock_guard lock(mutex_);
  const std::optional<c10::Stream> now = current_stream(parameter_.device());
  if (kept_) {
    if (now && *now != *kept_on_) hand_over(kept_->data_ptr(), *kept_on_, *now);
    return *kept_;
  }
  if (auto copy = copy_.lock()) return c10::Storage(std::move(copy));
  if (auto earlier = decoded_.get(now)) return *earlier;
  const c10::Storage made = again();
  decoded_.set(made, now);
  return made;
}

}  // namespace backfold::torch_layer
