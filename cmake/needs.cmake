# SPDX-License-Identifier: Apache-2.0
#
# What a build cannot do without, looked for before anything is compiled: a torch that Backfold works with, and
# a C++ compiler. Each failure says what to install and how.
#
# torch is found through the Python that imports it, by its folder alone. Its own CMake package would
# require a full CUDA installation, which the sources here do not need.

set(BACKFOLD_TORCH OFF CACHE STRING "torch layer and Python binding: ON or OFF")

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cmake/torch_versions.txt)
file(STRINGS cmake/torch_versions.txt torch_versions REGEX "^[a-z]+ [0-9.]+$")
foreach(line IN LISTS torch_versions)
  if(line MATCHES "^(oldest|newest|installed) (.*)$")
    string(TOUPPER BACKFOLD_${CMAKE_MATCH_1}_TORCH name)
    set(${name} ${CMAKE_MATCH_2})
  endif()
endforeach()
set(BACKFOLD_WORKS "Backfold works with torch ${BACKFOLD_OLDEST_TORCH} to ${BACKFOLD_NEWEST_TORCH}")

if(BACKFOLD_TORCH)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, torch.version.cuda, sep=';')"
    OUTPUT_VARIABLE found RESULT_VARIABLE failed ERROR_VARIABLE reason OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed AND reason MATCHES "No module named 'torch'")
    message(FATAL_ERROR "${BACKFOLD_WORKS}, and ${Python_EXECUTABLE} has none. It is compiled for the torch that is \
there, so install one first, and let pip build where it is:\n\
  pip install torch==${BACKFOLD_INSTALLED_TORCH} \"scikit-build-core>=0.11\"\n\
  pip install --no-build-isolation .\n")
  elseif(failed)
    message(FATAL_ERROR "BACKFOLD_TORCH=ON, but ${Python_EXECUTABLE} cannot import torch:\n${reason}")
  endif()
  list(GET found 0 BACKFOLD_TORCH_FOLDER)
  list(GET found 1 BACKFOLD_TORCH_VERSION)
  list(GET found 2 BACKFOLD_TORCH_CUDA)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" BACKFOLD_TORCH_RELEASE ${BACKFOLD_TORCH_VERSION})
  set(works "${BACKFOLD_WORKS}, found ${BACKFOLD_TORCH_VERSION}")
  if(BACKFOLD_TORCH_RELEASE VERSION_LESS BACKFOLD_OLDEST_TORCH)
    message(FATAL_ERROR "${works}. Install a newer one: pip install torch==${BACKFOLD_INSTALLED_TORCH}")
  elseif(BACKFOLD_TORCH_RELEASE VERSION_GREATER BACKFOLD_NEWEST_TORCH)
    if(NOT "$ENV{BACKFOLD_ANY_TORCH}" STREQUAL "1")
      message(FATAL_ERROR "${works}, which is newer than any version Backfold was tested with. To try it, set \
BACKFOLD_ANY_TORCH=1 in the environment, when building and when importing.")
    endif()
    message(WARNING "${works}, which is newer; continuing because of BACKFOLD_ANY_TORCH=1.")
  endif()
  message(STATUS "Backfold: torch ${BACKFOLD_TORCH_VERSION}")
endif()

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "No C++ compiler was found. On Debian or Ubuntu: apt-get install g++. Then run the command again.")
endif()
enable_language(CXX)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "g++ 12 or newer is needed, found ${CMAKE_CXX_COMPILER_VERSION}. On Debian or Ubuntu: apt-get \
install g++-12, then run the command again with CXX=g++-12 in the environment.")
endif()
