// SPDX-License-Identifier: Apache-2.0
//
// Packet: one tensor, folded.
//
// A packet owns its payload, a tensor of bytes from torch's allocator on the source's device, and
// what it takes to restore the source: sizes, strides, type and format. It does not keep the
// source.

#ifndef BACKFOLD_TORCH_PACKET_H_
#define BACKFOLD_TORCH_PACKET_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backfold/codecs.h"
#include "torch/codec/codec.h"

namespace backfold::torch_layer {

// What a caller asks of the group quantizer.
struct PackOptions {
  std::int64_t bits = 4;
  std::string_view layout = "flat";
  std::int64_t group = 128;
  bool zero_exact = false;
  Key key;
};

// The format that serves a tensor of these sizes and strides. Groups follow the order of memory;
// columns of a strided layout are the elements of the dimension that memory runs along. Raises
// ValueError or TypeError naming the argument.
GroupFormat format_for(at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef strides,
                       const PackOptions& options);

class Packet {
 public:
  // Folds a tensor. One that is not dense (expanded, or with gaps) is copied into a dense one
  // first; one whose packet would not be smaller is kept as it is.
  Packet(const at::Tensor& source, const PackOptions& options);
  // The same with a codec that keeps packets. `op` is who would have saved the tensor, if anybody.
  // Raises ValueError for a tensor that the codec is not for.
  Packet(const at::Tensor& source, const Codec& codec, std::string_view op, const Key& key);

  at::Tensor unpack() const;

  const at::Tensor& payload() const { return payload_; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(payload_.nbytes()); }
  std::int64_t source_bytes() const { return source_bytes_; }
  at::IntArrayRef sizes() const { return sizes_; }
  at::ScalarType type() const { return type_; }
  bool exact() const { return exact_; }
  std::string describe() const;

 private:
  // Checks the source, and makes it dense.
  explicit Packet(const at::Tensor& source);
  void pack(const Key& key);

  at::Tensor dense_;  // until it is packed
  at::Tensor payload_;
  std::vector<std::int64_t> sizes_, strides_;
  at::ScalarType type_;
  Format format_;
  std::string how_;  // "4 bits, flat"
  std::int64_t source_bytes_;
  bool exact_ = false;  // the payload is the tensor itself
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PACKET_H_
