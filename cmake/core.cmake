# SPDX-License-Identifier: Apache-2.0
#
# backfold_core: codecs on raw memory. No torch.

find_package(hwy CONFIG QUIET)
if(NOT TARGET hwy::hwy)
  message(FATAL_ERROR "Google Highway was not found. On Debian or Ubuntu: apt-get install libhwy-dev. "
                      "Then run the command again.")
endif()
find_package(Threads REQUIRED)

add_library(backfold_core
  src/base/caches.cpp
  src/base/checks.cpp
  src/base/dispatch.cpp
  src/base/status.cpp
  src/base/targets.cpp
  src/base/threads.cpp
  src/group/closed_form.cpp
  src/group/epilogue.cpp
  src/group/group.cpp
  src/group/reference.cpp
  src/group/simd/epilogue.cpp
  src/group/simd/pack.cpp
  src/group/simd/unpack.cpp
  src/lossless/copy.cpp
  src/lossless/mask.cpp
  src/lossless/narrow.cpp
  src/lossless/predicate.cpp
  src/lossless/reference.cpp
  src/lossless/simd/bits.cpp
  src/lossless/simd/narrow.cpp
  src/planner/batch_search.cpp
  src/planner/planner.cpp
  src/planner/search.cpp
  src/pool/pool.cpp
  src/pool/reference.cpp
  src/pool/simd/pool.cpp
  src/ranged/ranged.cpp
  src/ranged/reference.cpp
  src/ranged/simd/ranged.cpp
  src/samples/reference.cpp
  src/samples/samples.cpp
  src/samples/simd/samples.cpp
  src/shares/shares.cpp
  src/signs/signs.cpp
  src/table/reference.cpp
  src/table/simd/table.cpp
  src/table/table.cpp)
target_include_directories(backfold_core
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  PRIVATE src)
target_compile_features(backfold_core PUBLIC cxx_std_20)
# Every backend must round alike: no contraction of a * b + c beyond what arithmetic.h writes as fused.
target_compile_options(backfold_core PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>)
# Kernels are compiled once for each target: a build that is about other code may do with fewer.
option(BACKFOLD_AVX512 "Build the kernels for AVX-512 too" ON)
mark_as_advanced(BACKFOLD_AVX512)
target_compile_definitions(backfold_core PRIVATE
  "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4$<$<NOT:$<BOOL:${BACKFOLD_AVX512}>>:|HWY_AVX3>)")
target_link_libraries(backfold_core PRIVATE hwy::hwy Threads::Threads)

set_property(SOURCE src/base/dispatch.cpp APPEND PROPERTY
  COMPILE_DEFINITIONS BACKFOLD_WITH_CUDA=$<BOOL:${BACKFOLD_HAS_CUDA}>)
if(BACKFOLD_HAS_CUDA)
  target_sources(backfold_core PRIVATE
    src/base/cuda/capture.cu
    src/group/cuda/epilogue.cu
    src/group/cuda/epilogue_flat.cu
    src/group/cuda/epilogue_strided.cu
    src/group/cuda/flat.cu
    src/group/cuda/flat_scaled.cu
    src/group/cuda/group.cu
    src/group/cuda/rotated.cu
    src/group/cuda/strided.cu
    src/group/cuda/strided_scaled.cu
    src/lossless/cuda/bits.cu
    src/lossless/cuda/copy.cu
    src/lossless/cuda/narrow.cu
    src/pool/cuda/pack.cu
    src/pool/cuda/pool.cu
    src/pool/cuda/unpack.cu
    src/ranged/cuda/ranged.cu
    src/ranged/cuda/widen.cu
    src/samples/cuda/samples.cu
    src/shares/cuda/shares.cu
    src/signs/cuda/signs.cu
    src/table/cuda/table.cu)
  target_compile_options(backfold_core PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
  target_link_libraries(backfold_core PRIVATE CUDA::cudart_static)
else()
  target_sources(backfold_core PRIVATE src/without_cuda.cpp)
endif()
