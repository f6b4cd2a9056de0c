// SPDX-License-Identifier: Apache-2.0
//
// Where a tensor lies in its storage, and how it is found again in a decoded copy of that stretch.
//
// What is packed is a stretch of memory, in its own order. So a transposed, expanded or overlapping
// view costs no copy, gets its strides back, and finds the packet of another view of the stretch.

#ifndef BACKFOLD_TORCH_STORE_GEOMETRY_H_
#define BACKFOLD_TORCH_STORE_GEOMETRY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace backfold::torch_layer {

// Consecutive elements of a storage.
struct Span {
  std::int64_t begin = 0, count = 0;

  bool contains(const Span& other) const {
    return begin <= other.begin && other.begin + other.count <= begin + count;
  }
};

// A tensor inside memory that it is a view of.
struct View {
  c10::SmallVector<std::int64_t, 5> sizes, strides;
  std::int64_t offset = 0;  // elements before the first

  bool operator==(const View& other) const {
    return offset == other.offset && sizes == other.sizes && strides == other.strides;
  }
};

// The least span that holds every element of a view.
Span span_of(const View& view);

// Bytes of the elements of a view, counting repeated ones each time.
std::int64_t bytes_of(const View& view, at::ScalarType type);

// A view without the dimensions that repeat memory.
View without_repeats(View view);

// The least span that holds every element of a strided tensor.
Span span_of(const at::Tensor& tensor);

// Whether a tensor fills its span, which then is what to pack. Otherwise (a slice of columns, say)
// it is copied first: what lies between its elements is none of its business, may never have been
// written, and could spoil the range of their groups.
bool fills_its_span(const at::Tensor& tensor, const Span& span);

// A copy without gaps, in the same order of dimensions; dimensions of stride 0 have size 1 in it.
at::Tensor without_gaps(const at::Tensor& tensor);

// Whether two tensors are the same elements of the same memory, in the same order.
bool same_elements(const at::Tensor& a, const at::Tensor& b);

// How a tensor lies in the span that begins at `begin`.
View view_in_span(const at::Tensor& tensor, std::int64_t begin);

// How a tensor lies in without_gaps() of it.
View view_in_copy(const at::Tensor& tensor, const at::Tensor& copy);

// The tensor at `view` of a storage, without history. The element type and device are given.
at::Tensor tensor_at(c10::Storage storage, const View& view, at::ScalarType type);

// All bytes of a storage, in one dimension.
at::Tensor bytes_in(c10::Storage storage);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_GEOMETRY_H_
