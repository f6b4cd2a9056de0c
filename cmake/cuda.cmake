# SPDX-License-Identifier: Apache-2.0
#
# Decides whether the CUDA sources are compiled: BACKFOLD_HAS_CUDA.

set(BACKFOLD_HAS_CUDA OFF)
if(NOT BACKFOLD_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      # The kernels use nothing newer than Ampere's instructions; the PTX serves later chips.
      set(CMAKE_CUDA_ARCHITECTURES 90)
    endif()
    enable_language(CUDA)
    # CMake 3.25 does not know nvcc's spelling of C++20.
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    set(BACKFOLD_HAS_CUDA ON)
  elseif(BACKFOLD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BACKFOLD_CUDA=ON, but no CUDA compiler was found; set CMAKE_CUDA_COMPILER "
                        "to the path of nvcc, or leave BACKFOLD_CUDA at AUTO to build for the CPU.")
  endif()
endif()
message(STATUS "Backfold: CUDA kernels ${BACKFOLD_HAS_CUDA}")
