# SPDX-License-Identifier: Apache-2.0
#
# backfold_torch: codecs on torch tensors; _C: its Python binding.
#
# The sources compile once for CPU and CUDA builds of torch.

if(NOT BACKFOLD_TORCH)
  return()
endif()

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

# Headers alone: nothing of it is left for whoever links backfold_torch.
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  find_path(BACKFOLD_JSON_INCLUDE nlohmann/json.hpp)
  if(NOT BACKFOLD_JSON_INCLUDE)
    message(FATAL_ERROR "nlohmann/json.hpp was not found, JSON for Modern C++ from 3.10 on. "
                        "On Debian or Ubuntu: apt-get install nlohmann-json3-dev. Then run the command again.")
  endif()
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${BACKFOLD_JSON_INCLUDE})
endif()

add_library(backfold_torch SHARED
  src/torch/bandwidth.cpp
  src/torch/calibrate.cpp
  src/torch/controller.cpp
  src/torch/device_memory.cpp
  src/torch/exact_together.cpp
  src/torch/introduction.cpp
  src/torch/graph_ops.cpp
  src/torch/levels.cpp
  src/torch/listing.cpp
  src/torch/meeting.cpp
  src/torch/ops.cpp
  src/torch/options.cpp
  src/torch/packet.cpp
  src/torch/replays.cpp
  src/torch/report.cpp
  src/torch/segments.cpp
  src/torch/state.cpp
  src/torch/step.cpp
  src/torch/timeline.cpp
  src/torch/together.cpp
  src/torch/streams.cpp
  src/torch/turns.cpp
  src/torch/capture/calls.cpp
  src/torch/capture/entry.cpp
  src/torch/capture/graph.cpp
  src/torch/capture/graph_packet.cpp
  src/torch/capture/hooks.cpp
  src/torch/capture/lap.cpp
  src/torch/capture/node_name.cpp
  src/torch/capture/operators.cpp
  src/torch/capture/site.cpp
  src/torch/codec/codec.cpp
  src/torch/codec/codecs.cpp
  src/torch/codec/coding.cpp
  src/torch/codec/finish.cpp
  src/torch/codec/grouping.cpp
  src/torch/codec/host_target.cpp
  src/torch/codec/policy.cpp
  src/torch/codec/project.cpp
  src/torch/codec/reused_memory.cpp
  src/torch/codec/shares.cpp
  src/torch/codec/threads.cpp
  src/torch/json/plan.cpp
  src/torch/json/report.cpp
  src/torch/json/site.cpp
  src/torch/json/state.cpp
  src/torch/offload/arena.cpp
  src/torch/offload/backing.cpp
  src/torch/offload/file_backing.cpp
  src/torch/offload/link.cpp
  src/torch/offload/offloader.cpp
  src/torch/offload/order.cpp
  src/torch/offload/pinned_backing.cpp
  src/torch/offload/worker.cpp
  src/torch/peak.cpp
  src/torch/plan/bundles.cpp
  src/torch/plan/combine.cpp
  src/torch/plan/exact_agreement.cpp
  src/torch/plan/exact_plan.cpp
  src/torch/plan/gradient_sketch.cpp
  src/torch/plan/guard.cpp
  src/torch/plan/holdings.cpp
  src/torch/plan/limits.cpp
  src/torch/plan/moments.cpp
  src/torch/plan/noise.cpp
  src/torch/plan/plan.cpp
  src/torch/plan/refusal.cpp
  src/torch/plan/remaking.cpp
  src/torch/plan/remedies.cpp
  src/torch/plan/sample_norms.cpp
  src/torch/plan/sample_plan.cpp
  src/torch/plan/sending.cpp
  src/torch/plan/solve.cpp
  src/torch/plan/starts.cpp
  src/torch/plan/wording.cpp
  src/torch/probe/blocks.cpp
  src/torch/probe/closed_form.cpp
  src/torch/probe/comeback.cpp
  src/torch/probe/effect.cpp
  src/torch/probe/gains.cpp
  src/torch/probe/graphs.cpp
  src/torch/probe/leaf_weights.cpp
  src/torch/probe/measurements.cpp
  src/torch/probe/originals.cpp
  src/torch/probe/outside.cpp
  src/torch/probe/probe.cpp
  src/torch/probe/probed.cpp
  src/torch/probe/rankings.cpp
  src/torch/probe/starts.cpp
  src/torch/probe/tangents.cpp
  src/torch/reads/demand.cpp
  src/torch/reads/exact_ops.cpp
  src/torch/reads/exact_ops_functions.cpp
  src/torch/reads/exact_ops_geometry.cpp
  src/torch/reads/exact_ops_in_place.cpp
  src/torch/reads/exact_ops_indices.cpp
  src/torch/reads/exact_ops_predicates.cpp
  src/torch/reads/exact_ops_values.cpp
  src/torch/reads/norms.cpp
  src/torch/reads/recipes.cpp
  src/torch/store/awaited.cpp
  src/torch/store/geometry.cpp
  src/torch/store/derive.cpp
  src/torch/store/derived.cpp
  src/torch/store/keep.cpp
  src/torch/store/leave.cpp
  src/torch/store/one_pass.cpp
  src/torch/store/recent.cpp
  src/torch/store/record.cpp
  src/torch/store/saved.cpp
  src/torch/store/shared_packet.cpp
  src/torch/store/small_objects.cpp
  src/torch/store/sources.cpp
  src/torch/store/step_memory.cpp
  src/torch/store/store.cpp
  src/torch/store/treatment.cpp
  src/torch/store/width.cpp)
target_include_directories(backfold_torch PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
target_compile_features(backfold_torch PUBLIC cxx_std_20)
target_compile_options(backfold_torch PRIVATE -Wall -Wextra)
# Most of a file's compile time is torch's headers. Sources still include what they use.
# (With no compile definition of its own, the library compiles like its tests, which can share them.)
set_target_properties(backfold_torch PROPERTIES DEFINE_SYMBOL "")
target_precompile_headers(backfold_torch PRIVATE
  <ATen/Functions.h> <ATen/TensorOperators.h> <torch/csrc/autograd/function.h>)
# Files that are compiled together share what torch's templates and headers take.
option(BACKFOLD_UNITY "Compile the torch layer several files at a time: a third of the time in all" ON)
mark_as_advanced(BACKFOLD_UNITY)
set_target_properties(backfold_torch PROPERTIES UNITY_BUILD ${BACKFOLD_UNITY} UNITY_BUILD_BATCH_SIZE 10)
# Compiled with OpenMP, not linked with it: the one that runs is the one that torch brings along. It has
# the entry points of g++.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  set_source_files_properties(src/torch/codec/threads.cpp PROPERTIES
    COMPILE_OPTIONS -fopenmp SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
endif()
# When Python has imported torch its libraries are loaded already, and the linker finds them by name.
include(cmake/libtorch.cmake)
backfold_add_libtorch(${BACKFOLD_TORCH_FOLDER})
target_link_libraries(backfold_torch
  PUBLIC backfold::libtorch
  # All of the core, so that programs that link this library have what its headers promise.
  PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,backfold_core> nlohmann_json::nlohmann_json)

# torch has loaded its own CUDA runtime with global symbols: without this, half of the symbols of the one
# in backfold_core would resolve to it.
target_link_options(backfold_torch PRIVATE -Wl,--exclude-libs,libcudart_static.a)

Python_add_library(_C MODULE WITH_SOABI
  src/python/binding.cpp
  src/python/codecs.cpp
  src/python/controller.cpp
  src/python/graphs.cpp
  src/python/hooks.cpp
  src/python/options.cpp
  src/python/saved.cpp)
target_compile_options(_C PRIVATE -Wall -Wextra)
target_precompile_headers(_C PRIVATE <torch/csrc/utils/pybind.h>)
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)
set_target_properties(_C PROPERTIES UNITY_BUILD ${BACKFOLD_UNITY} UNITY_BUILD_BATCH_SIZE 4)
target_link_libraries(_C PRIVATE backfold_torch ${BACKFOLD_TORCH_FOLDER}/lib/libtorch_python.so)

configure_file(cmake/build_info.py.in ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py @ONLY)
