# SPDX-License-Identifier: Apache-2.0
#
# backfold_torch: codecs on torch tensors; _C: its Python binding.
#
# torch is found through the Python that imports it, by its folder alone. Its own CMake package would
# require a full CUDA installation, which the sources here do not need: they compile once for CPU and
# CUDA builds of torch.

set(BACKFOLD_TORCH OFF CACHE STRING "torch layer and Python binding: ON or OFF")
if(NOT BACKFOLD_TORCH)
  return()
endif()

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, sep=';')"
  OUTPUT_VARIABLE found RESULT_VARIABLE failed ERROR_VARIABLE reason OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  message(FATAL_ERROR "BACKFOLD_TORCH=ON, but ${Python_EXECUTABLE} cannot import torch:\n${reason}")
endif()
list(GET found 0 BACKFOLD_TORCH_FOLDER)
list(GET found 1 BACKFOLD_TORCH_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" BACKFOLD_TORCH_RELEASE ${BACKFOLD_TORCH_VERSION})

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cmake/torch_versions.txt)
file(STRINGS cmake/torch_versions.txt torch_versions REGEX "^[a-z]+ [0-9.]+$")
foreach(line IN LISTS torch_versions)
  if(line MATCHES "^(oldest|newest) (.*)$")
    string(TOUPPER BACKFOLD_${CMAKE_MATCH_1}_TORCH name)
    set(${name} ${CMAKE_MATCH_2})
  endif()
endforeach()
set(works "Backfold works with torch ${BACKFOLD_OLDEST_TORCH} to ${BACKFOLD_NEWEST_TORCH}, found \
${BACKFOLD_TORCH_VERSION}")
if(BACKFOLD_TORCH_RELEASE VERSION_LESS BACKFOLD_OLDEST_TORCH)
  message(FATAL_ERROR "${works}.")
elseif(BACKFOLD_TORCH_RELEASE VERSION_GREATER BACKFOLD_NEWEST_TORCH)
  if(NOT "$ENV{BACKFOLD_ANY_TORCH}" STREQUAL "1")
    message(FATAL_ERROR "${works}, which is newer than any version Backfold was tested with. To try it, set \
BACKFOLD_ANY_TORCH=1 in the environment, when building and when importing.")
  endif()
  message(WARNING "${works}, which is newer; continuing because of BACKFOLD_ANY_TORCH=1.")
endif()
message(STATUS "Backfold: torch ${BACKFOLD_TORCH_VERSION}")

# Headers alone: nothing of it is left for whoever links backfold_torch.
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  find_path(BACKFOLD_JSON_INCLUDE nlohmann/json.hpp)
  if(NOT BACKFOLD_JSON_INCLUDE)
    message(FATAL_ERROR "nlohmann/json.hpp was not found, JSON for Modern C++ from 3.10 on. "
                        "On Debian or Ubuntu: apt-get install nlohmann-json3-dev")
  endif()
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${BACKFOLD_JSON_INCLUDE})
endif()

add_library(backfold_torch SHARED
  src/torch/bandwidth.cpp
  src/torch/calibrate.cpp
  src/torch/controller.cpp
  src/torch/introduction.cpp
  src/torch/graph_ops.cpp
  src/torch/levels.cpp
  src/torch/listing.cpp
  src/torch/ops.cpp
  src/torch/options.cpp
  src/torch/packet.cpp
  src/torch/report.cpp
  src/torch/state.cpp
  src/torch/step.cpp
  src/torch/together.cpp
  src/torch/streams.cpp
  src/torch/turns.cpp
  src/torch/capture/calls.cpp
  src/torch/capture/entry.cpp
  src/torch/capture/graph.cpp
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
  src/torch/codec/policy.cpp
  src/torch/codec/project.cpp
  src/torch/codec/reused_memory.cpp
  src/torch/codec/shares.cpp
  src/torch/codec/threads.cpp
  src/torch/json/report.cpp
  src/torch/json/site.cpp
  src/torch/json/state.cpp
  src/torch/offload/arena.cpp
  src/torch/offload/backing.cpp
  src/torch/offload/file_backing.cpp
  src/torch/offload/offloader.cpp
  src/torch/offload/order.cpp
  src/torch/offload/pinned_backing.cpp
  src/torch/offload/worker.cpp
  src/torch/plan/bundles.cpp
  src/torch/plan/combine.cpp
  src/torch/plan/gradient_sketch.cpp
  src/torch/plan/guard.cpp
  src/torch/plan/noise.cpp
  src/torch/plan/plan.cpp
  src/torch/plan/remaking.cpp
  src/torch/plan/sample_norms.cpp
  src/torch/plan/sample_plan.cpp
  src/torch/plan/starts.cpp
  src/torch/probe/blocks.cpp
  src/torch/probe/closed_form.cpp
  src/torch/probe/comeback.cpp
  src/torch/probe/effect.cpp
  src/torch/probe/gains.cpp
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
# Compiled with OpenMP, not linked with it: the one that runs is the one that torch brings along. It has
# the entry points of g++.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  set_source_files_properties(src/torch/codec/threads.cpp PROPERTIES
    COMPILE_OPTIONS -fopenmp SKIP_PRECOMPILE_HEADERS ON)
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
  src/python/hooks.cpp
  src/python/options.cpp
  src/python/saved.cpp)
target_compile_options(_C PRIVATE -Wall -Wextra)
target_precompile_headers(_C PRIVATE <torch/csrc/utils/pybind.h>)
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)
target_link_libraries(_C PRIVATE backfold_torch ${BACKFOLD_TORCH_FOLDER}/lib/libtorch_python.so)

configure_file(cmake/build_info.py.in ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py @ONLY)
