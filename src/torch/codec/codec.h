// SPDX-License-Identifier: Apache-2.0
//
// Every codec on torch tensors: memory from torch's allocator, work on the current stream.
//
// Most codecs are the core's and work on raw memory. Each one that needs torch itself (project.h)
// is a further alternative of Format.

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

// What a codec remembers about a place from step to step.
struct CodecMemory {
  double decay = 0;    // of running ranges
  at::Tensor ranges;   // channels x {low, high}, running; undefined before the first step
  at::Tensor weights;  // of the samples of the next packet; undefined if all weigh the same
  at::Tensor scores;   // of the samples of the last packet, if they were requested
  at::Tensor norms;    // of the gradients that samples of the data set last had here
  bool wants_scores = false;
};

// Raises ValueError or RuntimeError for a status that is not ok.
void check(const Status& status);

// The core's name for a type; nullopt if it has no codec for that type.
std::optional<ElementType> element_type(at::ScalarType type);

// The inverse, for floating-point types.
at::ScalarType scalar_type(ElementType type);

// Where the core runs for tensors on a device.
Execution execution_on(const at::Device& device);

// Whether this build can pack tensors on this device.
bool supports(const at::Device& device);

std::int64_t packed_bytes(const Format& format);

// Elements in a tensor of this format.
void set_count(Format& format, std::int64_t count);

// Whether readers get back bit for bit what they need.
bool is_lossless(const Format& format);

// Bits of one element's code; for per-sample widths their mean, rounded.
int code_bits(const Format& format);

// An uninitialised tensor straight from torch's allocator for the current device, bypassing the
// dispatcher.
at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                    const at::Device& device);

// Packs the elements at `source`, in memory of `device`, on its current stream. Codecs that round
// use the key; some read and write `memory`, if given.
at::Tensor pack_payload(const void* source, const at::Device& device, const Format& format,
                        const Key& key, CodecMemory* memory = nullptr);

// Packs a dense tensor, in the order of its memory.
at::Tensor pack_payload(const at::Tensor& source, const Format& format, const Key& key,
                        CodecMemory* memory = nullptr);

// Packs the normalised values of a dense tensor instead of its own. The format is the tensor's.
at::Tensor pack_payload(const at::Tensor& source, const GroupFormat& format,
                        const Normalisation& by, const Key& key);
// Restores the tensor from them, with one dimension.
at::Tensor unpack_payload(const at::Tensor& payload, const GroupFormat& format,
                          const Normalisation& by, at::ScalarType type);

// Restores a payload to a new tensor of these sizes and strides, on the current stream.
at::Tensor unpack_payload(const at::Tensor& payload, const Format& format, at::IntArrayRef sizes,
                          at::IntArrayRef strides, at::ScalarType type);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_CODEC_CODEC_H_
