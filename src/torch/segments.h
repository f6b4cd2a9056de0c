// SPDX-License-Identifier: Apache-2.0
//
// Memory of a GPU without fragments.
//
// torch's allocator takes segments of fixed sizes from the driver. A packet that is put into what a
// large tensor left keeps the segment from serving another one as large; near the end of the memory
// that is what runs out. Expandable segments are stretches of addresses: torch maps memory to them
// page by page, and gives back the pages between packets.

#ifndef BACKFOLD_TORCH_SEGMENTS_H_
#define BACKFOLD_TORCH_SEGMENTS_H_

namespace backfold::torch_layer {

// Segments that torch takes from now on grow and shrink. A setting of the process, which stays;
// others that it has are kept. Memory that is allocated stays where it is. Warns where torch was
// told to use an allocator without segments.
void make_segments_expandable();

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_SEGMENTS_H_
