# SPDX-License-Identifier: Apache-2.0
#
# What `cmake --install` and the Python wheel hold: headers, library, and a package for find_package.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
if(SKBUILD)
  # One place inside the wheel, whatever the distribution calls its library directory.
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
set(BACKFOLD_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/backfold)

set_target_properties(backfold_core PROPERTIES EXPORT_NAME core)
add_library(backfold::core ALIAS backfold_core)

install(TARGETS backfold_core EXPORT backfold
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/backfold DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT backfold NAMESPACE backfold:: DESTINATION ${BACKFOLD_CMAKE_DIR}
  FILE backfoldTargets.cmake)

configure_package_config_file(cmake/backfoldConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/backfoldConfig.cmake INSTALL_DESTINATION ${BACKFOLD_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/backfoldConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/backfoldConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/backfoldConfigVersion.cmake
  DESTINATION ${BACKFOLD_CMAKE_DIR})
