# SPDX-License-Identifier: Apache-2.0
# The install tree: library, headers, CMake package, pkg-config file, and the tool where it was built. No file in it
# names the prefix, so it can be moved.
include(CMakePackageConfigHelpers)

install(TARGETS sagebwd EXPORT sagebwdTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/sagebwd DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sagebwd)
install(EXPORT sagebwdTargets NAMESPACE sagebwd:: DESTINATION ${_package_dir})
configure_package_config_file(cmake/sagebwdConfig.cmake.in ${PROJECT_BINARY_DIR}/cmake/sagebwdConfig.cmake
  INSTALL_DESTINATION ${_package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/sagebwdConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/sagebwdConfig.cmake ${PROJECT_BINARY_DIR}/cmake/sagebwdConfigVersion.cmake
  DESTINATION ${_package_dir})

# From the .pc file up to the prefix, however deep the library directory is ("lib", "lib/x86_64-linux-gnu", "lib64").
file(RELATIVE_PATH SAGEBWD_PC_TO_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" SAGEBWD_PC_TO_PREFIX "${SAGEBWD_PC_TO_PREFIX}")
configure_file(cmake/sagebwd.pc.in ${PROJECT_BINARY_DIR}/cmake/sagebwd.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/sagebwd.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET sagebwd_program)
  install(TARGETS sagebwd_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(SKBUILD)  # a wheel: the program lies inside the package, and a script on the PATH (pyproject.toml) starts it
  install(FILES tools/package/sagebwd_program.py DESTINATION ${SKBUILD_PLATLIB_DIR})
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
