// SPDX-License-Identifier: Apache-2.0
//
// The core's codecs on torch tensors: memory from torch's allocator, work on the current stream.

#ifndef BACKFOLD_TORCH_CODEC_H_
#define BACKFOLD_TORCH_CODEC_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <variant>

#include "backfold/group.h"
#include "backfold/mask.h"
#include "backfold/narrow.h"
#include "backfold/predicate.h"

namespace backfold::torch_layer {

using Format = std::variant<GroupFormat, PredicateFormat, MaskFormat, NarrowFormat>;

// Raises ValueError or RuntimeError for a status that is not ok.
void check(const Status& status);

// The core's name of a type; nullopt for a type that it has no codec for.
std::optional<ElementType> element_type(at::ScalarType type);

// Whether tensors of this device can be packed by this build.
bool supports(const at::Device& device);

std::int64_t packed_bytes(const Format& format);

// Bits of one element's code.
int code_bits(const Format& format);

// An uninitialised tensor straight from torch's allocator of the current device, without a trip
// through the dispatcher.
at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                    const at::Device& device);

// Packs the elements at `source`, memory of `device`, on its current stream. Only the group
// quantizer reads the key.
at::Tensor pack_payload(const void* source, const at::Device& device, const Format& format,
                        const Key& key);

// Packs a dense tensor, in the order of its memory.
at::Tensor pack_payload(const at::Tensor& source, const Format& format, const Key& key);

// Restores a payload into a new tensor of these sizes and strides, on the current stream.
at::Tensor unpack_payload(const at::Tensor& payload, const Format& format, at::IntArrayRef sizes,
                          at::IntArrayRef strides, at::ScalarType type);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_H_
