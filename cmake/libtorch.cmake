# SPDX-License-Identifier: Apache-2.0
#
# backfold::libtorch, what to compile and link with beside backfold_torch. The build makes it, and so does
# backfoldConfig.cmake in programs that link backfold::torch.

# Makes the target from a folder with torch's include and lib: that of a Python package or of a LibTorch archive.
function(backfold_add_libtorch folder)
  if(TARGET backfold::libtorch)
    return()
  endif()
  add_library(backfold::libtorch INTERFACE IMPORTED)
  target_include_directories(backfold::libtorch INTERFACE
    ${folder}/include ${folder}/include/torch/csrc/api/include)
  # libtorch.so is empty, but brings the CUDA libraries of a torch that has them. Ubuntu's linker would drop it.
  target_link_libraries(backfold::libtorch INTERFACE
    "-Wl,--push-state,--no-as-needed,${folder}/lib/libtorch.so,--pop-state"
    ${folder}/lib/libtorch_cpu.so ${folder}/lib/libc10.so)

  # Seen with g++ 13 on Ubuntu 24.04: the link took members of libstdc++.a, a second copy beside the one that
  # torch uses, and the first number written to a stream crashed. Named here, the shared one is taken.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
    OUTPUT_VARIABLE shared_libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(IS_ABSOLUTE "${shared_libstdcxx}")
    target_link_libraries(backfold::libtorch INTERFACE ${shared_libstdcxx})
  endif()
endfunction()

# Sets `folder` to that of a torch of `release`, such as 2.13, or `reason` to why there is none. A torch that the
# program has found, or that Torch_DIR names, is the only candidate; else `hints` are looked at, then Python.
function(backfold_find_libtorch release hints folder reason)
  if(TARGET torch)
    get_target_property(library torch LOCATION)
    get_filename_component(candidates ${library}/../.. ABSOLUTE)
  elseif(Torch_DIR)
    get_filename_component(candidates ${Torch_DIR}/../../.. ABSOLUTE)
  else()
    if(NOT Python_EXECUTABLE)
      find_program(Python_EXECUTABLE python3 NO_CACHE)
    endif()
    set(of_python "import importlib.util; print(*importlib.util.find_spec('torch').submodule_search_locations)")
    execute_process(COMMAND ${Python_EXECUTABLE} -c "${of_python}"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(candidates ${hints} ${found})
  endif()

  set(seen)
  foreach(candidate IN LISTS candidates)
    set(version_file ${candidate}/share/cmake/Torch/TorchConfigVersion.cmake)
    if(EXISTS ${version_file} AND EXISTS ${candidate}/lib/libtorch_cpu.so)
      file(STRINGS ${version_file} version REGEX "PACKAGE_VERSION \"" LIMIT_COUNT 1)
      string(REGEX MATCH "[0-9]+\\.[0-9]+" found_release "${version}")
      if(found_release STREQUAL release)
        set(${folder} ${candidate} PARENT_SCOPE)
        return()
      endif()
      list(APPEND seen "${candidate} has torch ${found_release}")
    else()
      list(APPEND seen "${candidate} has none")
    endif()
  endforeach()
  list(JOIN seen ", " seen)
  set(${reason} "it was compiled for torch ${release}, which was not found (${seen}). Set Torch_DIR to the folder \
share/cmake/Torch of a torch ${release}, or build Backfold for the torch that is there." PARENT_SCOPE)
endfunction()
