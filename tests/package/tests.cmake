# SPDX-License-Identifier: Apache-2.0
#
# Installs this build, then builds and runs the project beside this file with what is there. The layout of the
# Python package is tested where pip has put it (tests/python/test_package.py).

set(programs core)
if(BACKFOLD_TORCH)
  list(APPEND programs torch)
endif()
set(folder ${CMAKE_CURRENT_BINARY_DIR}/tests/package)
string(TOUPPER "CMAKE_CXX_FLAGS_${CMAKE_BUILD_TYPE}" flags)

add_test(NAME package_install COMMAND ${CMAKE_COMMAND} --install ${CMAKE_BINARY_DIR} --prefix ${folder}/prefix)
set_tests_properties(package_install PROPERTIES FIXTURES_SETUP installed_package)
foreach(program IN LISTS programs)
  add_test(NAME package_${program}
    COMMAND ${CMAKE_CTEST_COMMAND}
      --build-and-test ${PROJECT_SOURCE_DIR}/tests/package ${folder}/${program}
      --build-generator ${CMAKE_GENERATOR} --build-makeprogram ${CMAKE_MAKE_PROGRAM}
      --build-options
        -DCMAKE_PREFIX_PATH=${folder}/prefix -Dhwy_DIR=${hwy_DIR} -DPROGRAMS=${program}
        -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
        -DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE} "-D${flags}=${${flags}}"
      --test-command ${CMAKE_CTEST_COMMAND} --output-on-failure --no-tests=error)
  set_tests_properties(package_${program} PROPERTIES FIXTURES_REQUIRED installed_package)
endforeach()
