// SPDX-License-Identifier: Apache-2.0
//
// Every codec on torch tensors: memory from torch's allocator, work on the current stream.
//
// Most are the core's, on raw memory. Those that need torch itself (project.h) are one more
// alternative of Format each.

#ifndef BACKFOLD_TORCH_CODEC_CODEC_H_
#define BACKFOLD_TORCH_CODEC_CODEC_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <variant>

#include "backfold/group.h"
#include "backfold/mask.h"
#include "backfold/narrow.h"
#include "backfold/pool.h"
#include "backfold/predicate.h"
#include "backfold/ranged.h"
#include "backfold/samples.h"
#include "backfold/table.h"
#include "torch/codec/project.h"
#include "torch/reads/norms.h"

namespace backfold::torch_layer {

using Format = std::variant<GroupFormat, PredicateFormat, MaskFormat, NarrowFormat, PoolFormat,
                            SampleFormat, RangedFormat, TableFormat, ProjectFormat>;

// What a codec remembers of a place from step to step.
struct CodecMemory {
  double decay = 0;    // of running ranges
  at::Tensor ranges;   // channels x {low, high}, running; undefined before the first step
  at::Tensor weights;  // of the samples of the next packet; undefined for all alike
  at::Tensor scores;   // of the samples of the last packet, where they were asked for
  at::Tensor norms;    // of the gradients that samples of the data set last had here
  bool wants_scores = false;
};

// Raises ValueError or RuntimeError for a status that is not ok.
void check(const Status& status);

// The core's name of a type; nullopt for a type that it has no codec for.
std::optional<ElementType> element_type(at::ScalarType type);

// And back, of a floating-point type.
at::ScalarType scalar_type(ElementType type);

// Whether tensors of this device can be packed by this build.
bool supports(const at::Device& device);

std::int64_t packed_bytes(const Format& format);

// Elements of a tensor of this format, as far as a format says.
void set_count(Format& format, std::int64_t count);

// Whether readers get back what they ask for to the bit.
bool is_lossless(const Format& format);

// Bits of one element's code; of samples the mean, rounded.
int code_bits(const Format& format);

// An uninitialised tensor straight from torch's allocator of the current device, without a trip
// through the dispatcher.
at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                    const at::Device& device);

// Packs the elements at `source`, memory of `device`, on its current stream. Codecs that round read
// the key; some read and write `memory`, if there is one.
at::Tensor pack_payload(const void* source, const at::Device& device, const Format& format,
                        const Key& key, CodecMemory* memory = nullptr);

// Packs a dense tensor, in the order of its memory.
at::Tensor pack_payload(const at::Tensor& source, const Format& format, const Key& key,
                        CodecMemory* memory = nullptr);

// Packs the normalised values of a dense tensor in place of its own. The format is the tensor's.
at::Tensor pack_payload(const at::Tensor& source, const GroupFormat& format,
                        const Normalisation& by, const Key& key);
// And the tensor again, in one dimension.
at::Tensor unpack_payload(const at::Tensor& payload, const GroupFormat& format,
                          const Normalisation& by, at::ScalarType type);

// Restores a payload into a new tensor of these sizes and strides, on the current stream.
at::Tensor unpack_payload(const at::Tensor& payload, const Format& format, at::IntArrayRef sizes,
                          at::IntArrayRef strides, at::ScalarType type);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_CODEC_H_
