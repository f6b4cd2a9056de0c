// SPDX-License-Identifier: Apache-2.0
//
// What a saved tensor is kept as: the objects that the readers of one stretch of memory share.
//
// A SharedPacket is packed bytes, a Hold a reference, a ParameterCopy a recipe. Each gives its
// memory back on demand. They are owned by what autograd saved, never by a table, so that they go
// when the graph goes, whether backward ran or not. Backward's threads are autograd's: everything
// here may be called from any thread.

#ifndef BACKFOLD_TORCH_STORE_SHARED_PACKET_H_
#define BACKFOLD_TORCH_STORE_SHARED_PACKET_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "torch/capture/site.h"
#include "torch/codec/codec.h"
#include "torch/codec/finish.h"
#include "torch/codec/policy.h"
#include "torch/offload/offloader.h"
#include "torch/store/counter.h"
#include "torch/store/geometry.h"
#include "torch/streams.h"
#include "torch/timeline.h"

namespace backfold::torch_layer {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Decoded memory that readers share while one of them still has it.
class DecodedOnce {
 public:
  // The earlier decode, if it lives and was made on this stream.
  std::optional<c10::Storage> get(const std::optional<c10::Stream>& stream) const;
  void set(const c10::Storage& storage, const std::optional<c10::Stream>& stream);

 private:
  std::optional<WeakStorage> storage_;
  std::optional<c10::Stream> stream_;
};

// How what is kept leaves its device: with which block, from which place.
struct Passage {
  std::shared_ptr<Offloader> offloader;
  std::shared_ptr<Trip> trip;
  std::uint64_t place = 0;
  std::shared_ptr<AwayBytes> away;
  bool in_any_case = false;  // also if backward asks for it first

  // Null where it stays the caller's.
  std::shared_ptr<Parcel> send(const at::Tensor& bytes,
                               const std::optional<c10::Stream>& written_on) const {
    return offloader->send(trip, place, bytes, written_on, away, in_any_case);
  }
};

class SharedPacket {
 public:
  // `source` is to be packed if it is dense; otherwise `dense_copy` of it is, and only that view of
  // the storage can be restored. `rule` is that of the policy. pack() or wait() follows.
  SharedPacket(const at::Tensor& source, const Span& span, const at::Tensor* dense_copy,
               const Format& format, Site& site, int rule);
  ~SharedPacket();
  SharedPacket(const SharedPacket&) = delete;
  SharedPacket& operator=(const SharedPacket&) = delete;

  // Packs the tensors of the constructor. `by`, if any, is how their values are normalised first.
  void pack(const at::Tensor& source, const at::Tensor* dense_copy, const Key& key,
            std::optional<Normalisation> by);
  // Holds `dense`, which is the source or the copy, until complete() packs it: the input of a norm
  // is saved before its statistics exist.
  void wait(const at::Tensor& dense, const Key& key, const NormCall& call, const NormRows& rows);
  // What is decoded are logarithms whose shares add up to 1 along this dimension of the source
  // (codec/shares.h). For their own reader alone: others expect values without a bias.
  void shares_add_up(std::int64_t dim) { shares_along_ = dim; }
  bool is_of_shares() const { return shares_along_.has_value(); }
  // With what the norm's call made. Where that is nothing, the call has failed, and the tensor goes
  // on being held.
  void complete(c10::ArrayRef<c10::IValue> results);

  // Its payload leaves the device, now or when it is packed.
  void leave(Passage passage);

  // The tensor of that view: the source's own memory where it is still alive, else decoded. With
  // `share`, decoded memory may be that of another reader.
  at::Tensor restore(const View& view, bool share);

  // The values of all its elements, finished, in memory order; none where there is no kernel for
  // it, or the source is at hand.
  std::optional<at::Tensor> finish(const Finish& finish, at::ScalarType type);
  // The bytes of a predicate, on the current stream.
  std::optional<at::Tensor> bits();

  // The source's own memory is about to change.
  void forget_source();

  Site& site() const { return site_; }
  int rule() const { return rule_; }
  // Whether its width or codec is a matter of the plan.
  bool is_planned() const { return Policy::is_planned(rule_) && !is_lossless(format_); }
  const Format& format() const { return format_; }
  const Span& span() const { return span_; }
  bool is_copy() const { return original_.has_value(); }
  const View* original() const { return original_ ? &*original_ : nullptr; }
  // Where a dense copy was packed: how the source's view lies in it.
  const View& packed_view() const { return packed_view_; }
  // Where a view of the source's storage lies in what is packed; none where not all of it is.
  std::optional<View> view_of(const View& in_storage) const;
  at::ScalarType type() const { return type_; }
  std::uint32_t version() const { return counter_.stood_at; }
  const std::optional<c10::Stream>& stream() const { return stream_; }
  // The rows that its values are, or will be, normalised by; null where they are packed as they
  // are.
  const NormRows* rows() const { return rows_ ? &*rows_ : nullptr; }

  // What it takes of the memory that is held, until it leaves its device or goes.
  void charge(Charge charge) { charge_ = std::move(charge); }

  // This packet was made for a reader of signs; when it goes, its site learns whether another node
  // also read values.
  void learn_sign() { learns_sign_ = true; }
  void values_are_read() { values_read_ = true; }

 private:
  struct Waiting {
    at::Tensor dense;  // without history
    Key key;
    NormCall call;
  };

  c10::Storage decode(bool share);
  bool has_source() const;
  void depart(const Passage& passage);
  // The payload, for the current stream.
  at::Tensor fetch() const;
  at::Tensor unpacked(const at::Tensor& payload) const;

  Site& site_;
  const int rule_;
  const Format format_;
  const at::ScalarType type_;
  const Span span_;
  const std::optional<View> original_;  // of the source, where a dense copy was packed
  const View packed_view_;
  const WeakStorage source_;
  const std::size_t source_bytes_;
  const Counter counter_;
  const std::optional<c10::Stream> stream_;
  const at::Device device_;
  at::Tensor payload_;  // undefined while it is a parcel
  std::shared_ptr<Parcel> parcel_;
  std::optional<Passage> passage_;  // of a packet that waits
  std::optional<Waiting> waiting_;
  std::optional<NormRows> rows_;
  std::optional<Normalisation> by_;
  std::optional<std::int64_t> shares_along_;
  bool learns_sign_ = false;
  std::atomic<bool> values_read_{false};
  std::mutex mutex_;
  bool judged_ = false, overwritten_ = false;
  DecodedOnce decoded_;
  Charge charge_;
};

// A storage held by reference. One Hold serves all saves of a storage in an entry, so that a use
// count of 1 means that only autograd has it: it may then leave its device.
class Hold {
 public:
  // `site`, if any, chose this because the program still had the storage at the last backward.
  Hold(c10::Storage storage, std::uint32_t version, Site* site)
      : version_(version),
        site_(site),
        stream_(current_stream(storage.device())),
        storage_(std::move(storage)) {}

  // A reader needs it in any case. True for the first.
  bool pin() { return !pinned_.exchange(true); }
  // As of a packet.
  void charge(Charge charge) { charge_ = std::move(charge); }
  c10::Storage storage();
  std::uint32_t version() const { return version_; }
  bool alive_elsewhere() const;
  // Lets it leave. False while something else has it.
  bool leave(const Passage& passage);

 private:
  const std::uint32_t version_;
  Site* const site_;
  const std::optional<c10::Stream> stream_;  // that had written it
  std::atomic<bool> pinned_{false}, judged_{false};
  mutable std::mutex mutex_;
  c10::Storage storage_;  // null while it is a parcel
  std::shared_ptr<Parcel> parcel_;
  Charge charge_;
};

// A copy of a parameter in another type, made again when it is read.
class ParameterCopy {
 public:
  ParameterCopy(const at::Tensor& parameter, const at::Tensor& copy);

  // The copy's memory; its own if it still lives. Raises if the parameter has changed since and
  // nobody said so before.
  c10::Storage storage();
  // The parameter is about to change: from now on the copy is held.
  void keep();

 private:
  c10::Storage again() const;

  const at::Tensor parameter_;  // without history
  const std::uint32_t version_;
  const at::ScalarType type_;
  const WeakStorage copy_;
  std::mutex mutex_;
  DecodedOnce decoded_;
  std::optional<c10::Storage> kept_;
  std::optional<c10::Stream> kept_on_;
  bool lost_ = false;  // could not be kept
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_SHARED_PACKET_H_
