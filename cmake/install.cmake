# SPDX-License-Identifier: Apache-2.0
#
# What `cmake --install` and the Python wheel hold: headers, libraries, and a package for find_package.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
if(SKBUILD)
  # One place inside the wheel, whatever the distribution calls its library directory.
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
set(BACKFOLD_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/backfold)

# backfold::NAME here, and with `targets`.cmake in the tree that is installed.
function(backfold_install name targets)
  set_target_properties(backfold_${name} PROPERTIES EXPORT_NAME ${name})
  add_library(backfold::${name} ALIAS backfold_${name})
  install(TARGETS backfold_${name} EXPORT ${targets}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ${targets} NAMESPACE backfold:: DESTINATION ${BACKFOLD_CMAKE_DIR})
endfunction()

backfold_install(core backfoldTargets)
if(BACKFOLD_TORCH)
  backfold_install(torch backfoldTorchTargets)
  install(FILES cmake/libtorch.cmake DESTINATION ${BACKFOLD_CMAKE_DIR} RENAME backfoldLibTorch.cmake)
  # torch's libraries are found by whoever loads this one.
  set_target_properties(backfold_torch PROPERTIES INSTALL_RPATH "" INSTALL_RPATH_USE_LINK_PATH OFF)

  set_target_properties(_C PROPERTIES
    INSTALL_RPATH "$ORIGIN/${CMAKE_INSTALL_LIBDIR}" INSTALL_RPATH_USE_LINK_PATH OFF)
  install(TARGETS _C LIBRARY DESTINATION .)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py DESTINATION .)
endif()
install(DIRECTORY include/backfold DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

configure_package_config_file(cmake/backfoldConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/backfoldConfig.cmake INSTALL_DESTINATION ${BACKFOLD_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/backfoldConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/backfoldConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/backfoldConfigVersion.cmake
  DESTINATION ${BACKFOLD_CMAKE_DIR})
