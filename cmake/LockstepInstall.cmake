# What is installed: the program, the public headers (include/lockstep), a shared library for each component, and what
# find_package(lockstep COMPONENTS …) and pkg-config read.

option(LOCKSTEP_INSTALL "Make install rules, and the shared libraries that they install" ${PROJECT_IS_TOP_LEVEL})

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# lockstep_component(NAME DESCRIPTION text MODULES modules… [NEEDS components…]): liblockstep_NAME.so, with everything of these
# modules, and lockstep::NAME for those who find the package. A consumer needs its headers and that library alone: what it
# is made with stays inside. MODULES are those that none of the components which it NEEDS has.
function(lockstep_component name)
  if(NOT LOCKSTEP_INSTALL)
    return()
  endif()
  cmake_parse_arguments(C "" "DESCRIPTION" "MODULES;NEEDS" ${ARGN})
  set(target lockstep_${name}_shared)
  add_library(${target} SHARED)
  # First: what they have is not taken from the static libraries below.
  foreach(needed IN LISTS C_NEEDS)
    target_link_libraries(${target} PUBLIC lockstep_${needed}_shared)
  endforeach()
  foreach(module IN LISTS C_MODULES)
    foreach(part lockstep_${module} lockstep_${module}_cuda)
      if(TARGET ${part})
        target_sources(${target} PRIVATE $<TARGET_OBJECTS:${part}>)
        target_link_libraries(${target} PRIVATE ${part})  # for the libraries that it needs
      endif()
    endforeach()
  endforeach()
  # Other libraries that a program uses may bring copies of ours, of other versions: none is seen outside.
  set(exported ${PROJECT_SOURCE_DIR}/cmake/exported.map)
  target_link_options(${target} PRIVATE -Wl,--version-script=${exported} -Wl,--no-undefined)
  set_property(TARGET ${target} PROPERTY LINK_DEPENDS ${exported})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME lockstep_${name} EXPORT_NAME ${name} VERSION ${PROJECT_VERSION}
                                             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                                             INSTALL_RPATH "$ORIGIN")
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_include_directories(${target} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                 $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  install(TARGETS ${target} EXPORT lockstep_components LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  foreach(module IN LISTS C_MODULES)
    if(EXISTS ${PROJECT_SOURCE_DIR}/include/lockstep/${module})
      install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lockstep/${module}
              DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep FILES_MATCHING PATTERN "*.h")
    endif()
  endforeach()
  install(FILES ${PROJECT_SOURCE_DIR}/include/lockstep/${name}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)

  list(TRANSFORM C_NEEDS PREPEND lockstep_ OUTPUT_VARIABLE requires)
  list(JOIN requires " " requires)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/package/lockstep_${name}.pc @ONLY CONTENT "\
prefix=\${pcfiledir}/@LOCKSTEP_PREFIX_FROM_PKGCONFIG@
Name: lockstep_${name}
Description: ${C_DESCRIPTION}
Version: @PROJECT_VERSION@
Requires: ${requires}
Cflags: -I\${prefix}/@CMAKE_INSTALL_INCLUDEDIR@
Libs: -L\${prefix}/@CMAKE_INSTALL_LIBDIR@ -llockstep_${name}
")
  install(FILES ${PROJECT_BINARY_DIR}/package/lockstep_${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_COMPONENTS ${name})
endfunction()

# lockstep_source_component(NAME SOURCES files…): lockstep::NAME, which a consumer's build makes from
# these files, for what has to be compiled against libraries of the consumer's own. cmake/lockstep_NAME.cmake says how.
function(lockstep_source_component name)
  if(NOT LOCKSTEP_INSTALL)
    return()
  endif()
  cmake_parse_arguments(C "" "" "SOURCES" ${ARGN})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lockstep/${name}
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep FILES_MATCHING PATTERN "*.h")
  install(FILES ${PROJECT_SOURCE_DIR}/include/lockstep/${name}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
  install(FILES ${C_SOURCES} DESTINATION ${CMAKE_INSTALL_DATADIR}/lockstep/bindings/${name})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/lockstep_${name}.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_SOURCE_COMPONENTS ${name})
endfunction()

# After all components.
function(lockstep_install_package)
  if(NOT LOCKSTEP_INSTALL)
    return()
  endif()
  get_property(LOCKSTEP_COMPONENTS GLOBAL PROPERTY LOCKSTEP_COMPONENTS)
  get_property(LOCKSTEP_SOURCE_COMPONENTS GLOBAL PROPERTY LOCKSTEP_SOURCE_COMPONENTS)
  list(JOIN LOCKSTEP_SOURCE_COMPONENTS "|" LOCKSTEP_SOURCE_PATTERN)
  set(place ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
  install(TARGETS lockstep RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(EXPORT lockstep_components NAMESPACE lockstep:: DESTINATION ${place})
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/lockstepConfig.cmake.in
                                ${PROJECT_BINARY_DIR}/package/lockstepConfig.cmake INSTALL_DESTINATION ${place}
                                PATH_VARS CMAKE_INSTALL_DATADIR NO_SET_AND_CHECK_MACRO)
  # Before 1.0 a minor version may change what programs see.
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/lockstepConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/package/lockstepConfig.cmake ${PROJECT_BINARY_DIR}/package/lockstepConfigVersion.cmake
          DESTINATION ${place})
endfunction()

# From the folder of .pc files up to the prefix, so that an installed tree may be moved.
file(RELATIVE_PATH LOCKSTEP_PREFIX_FROM_PKGCONFIG /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
