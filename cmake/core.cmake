# SPDX-License-Identifier: Apache-2.0
#
# backfold_core: codecs on raw memory. No torch.

find_package(hwy CONFIG QUIET)
if(NOT TARGET hwy::hwy)
  message(FATAL_ERROR "Google Highway was not found. On Debian or Ubuntu: apt-get install libhwy-dev")
endif()
find_package(Threads REQUIRED)

add_library(backfold_core
  src/core/checks.cpp
  src/core/copy.cpp
  src/core/dispatch.cpp
  src/core/group.cpp
  src/core/group_reference.cpp
  src/core/lossless_reference.cpp
  src/core/mask.cpp
  src/core/narrow.cpp
  src/core/planner.cpp
  src/core/planner_search.cpp
  src/core/pool.cpp
  src/core/pool_reference.cpp
  src/core/predicate.cpp
  src/core/ranged.cpp
  src/core/ranged_reference.cpp
  src/core/samples.cpp
  src/core/samples_reference.cpp
  src/core/signs.cpp
  src/core/status.cpp
  src/core/table.cpp
  src/core/table_reference.cpp
  src/core/threads.cpp
  src/cpu/bits.cpp
  src/cpu/group.cpp
  src/cpu/narrow.cpp
  src/cpu/pool.cpp
  src/cpu/ranged.cpp
  src/cpu/samples.cpp
  src/cpu/table.cpp
  src/cpu/targets.cpp)
target_include_directories(backfold_core
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  PRIVATE src)
target_compile_features(backfold_core PUBLIC cxx_std_20)
# Every backend must round alike: no contraction of a * b + c beyond what arithmetic.h writes as fused.
target_compile_options(backfold_core PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>)
target_compile_definitions(backfold_core PRIVATE "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4)")
target_link_libraries(backfold_core PRIVATE hwy::hwy Threads::Threads)

if(BACKFOLD_HAS_CUDA)
  target_sources(backfold_core PRIVATE
    src/cuda/bits.cu
    src/cuda/copy.cu
    src/cuda/group.cu
    src/cuda/group_flat.cu
    src/cuda/group_flat_scaled.cu
    src/cuda/group_rotated.cu
    src/cuda/group_strided.cu
    src/cuda/group_strided_scaled.cu
    src/cuda/narrow.cu
    src/cuda/pool.cu
    src/cuda/pool_pack.cu
    src/cuda/pool_unpack.cu
    src/cuda/ranged.cu
    src/cuda/samples.cu
    src/cuda/signs.cu
    src/cuda/table.cu
    src/cuda/widen.cu)
  target_compile_definitions(backfold_core PRIVATE BACKFOLD_WITH_CUDA)
  target_compile_options(backfold_core PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
  target_link_libraries(backfold_core PRIVATE CUDA::cudart_static)
endif()
