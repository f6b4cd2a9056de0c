# SPDX-License-Identifier: Apache-2.0
#
# Decides whether the CUDA sources are compiled: BACKFOLD_HAS_CUDA.

set(BACKFOLD_HAS_CUDA OFF)
if(NOT BACKFOLD_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # The GPUs of this machine, if their compute capability is at least 8.0, which the kernels need
    # (NaN-propagating minima, warp reductions). Without a GPU, code that runs on all such GPUs.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
      execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE capabilities RESULT_VARIABLE no_gpu ERROR_QUIET)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
      foreach(capability IN LISTS capabilities)
        if(capability VERSION_GREATER_EQUAL 8.0)
          string(REPLACE "." "" architecture ${capability})
          list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
        endif()
      endforeach()
      list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
      if(NOT CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
      endif()
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
if(NOT BACKFOLD_HAS_CUDA AND NOT BACKFOLD_CUDA STREQUAL "OFF" AND BACKFOLD_TORCH_CUDA MATCHES "^[0-9]")
  message(WARNING "torch ${BACKFOLD_TORCH_VERSION} has CUDA ${BACKFOLD_TORCH_CUDA}, but nvcc was not found: Backfold is \
built for CPUs alone, and refuses models on a GPU. Install NVIDIA's CUDA toolkit ${BACKFOLD_TORCH_CUDA}, put its \
folder bin on PATH, and run the command again.")
endif()
message(STATUS "Backfold: CUDA kernels ${BACKFOLD_HAS_CUDA} ${CMAKE_CUDA_ARCHITECTURES}")
