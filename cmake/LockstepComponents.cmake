# What programs of others link, by component: which modules it has, and in how many forms it is installed (docs/embed.md).

set(LOCKSTEP_COMPONENTS "" CACHE STRING
    "Components to build, with those that they need: comm, ddp, nn, trainer; empty: all, and the program")
option(LOCKSTEP_INSTALL "Make install rules, and the libraries that they install" ${PROJECT_IS_TOP_LEVEL})

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# lockstep_component(NAME ABOUT text MODULES modules… [NEEDS components…] [HEADERS files…]): declares one. MODULES are those
# that none of the components which it needs has, each after those that it sees. HEADERS are its own beside the modules'.
function(lockstep_component name)
  cmake_parse_arguments(C "" "ABOUT" "MODULES;NEEDS;HEADERS" ${ARGN})
  foreach(field IN ITEMS ABOUT MODULES NEEDS HEADERS)
    set_property(GLOBAL PROPERTY LOCKSTEP_${field}_${name} ${C_${field}})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ALL_COMPONENTS ${name})
endfunction()

# lockstep_choose_modules(RESULT): those of LOCKSTEP_COMPONENTS. The program has all of them, and some of its own.
function(lockstep_choose_modules result)
  get_property(all GLOBAL PROPERTY LOCKSTEP_ALL_COMPONENTS)
  set(wanted ${LOCKSTEP_COMPONENTS})
  set(LOCKSTEP_PROGRAM OFF PARENT_SCOPE)
  if(NOT wanted)
    set(wanted ${all})
    set(LOCKSTEP_PROGRAM ${PROJECT_IS_TOP_LEVEL} PARENT_SCOPE)
  elseif(PROJECT_IS_TOP_LEVEL)
    set(LOCKSTEP_TESTS OFF PARENT_SCOPE)  # they need the program
  endif()
  foreach(name IN LISTS wanted)
    if(NOT name IN_LIST all)
      list(JOIN all " " all)
      message(FATAL_ERROR "LOCKSTEP_COMPONENTS: no component '${name}': there are ${all}")
    endif()
  endforeach()
  # Needed ones stand before those that need them.
  set(chosen "")
  list(REVERSE all)
  foreach(name IN LISTS all)
    if(name IN_LIST wanted)
      get_property(needs GLOBAL PROPERTY LOCKSTEP_NEEDS_${name})
      list(APPEND wanted ${needs})
      list(PREPEND chosen ${name})
    endif()
  endforeach()
  set(modules "")
  foreach(name IN LISTS chosen)
    get_property(own GLOBAL PROPERTY LOCKSTEP_MODULES_${name})
    list(APPEND modules ${own})
  endforeach()
  set(LOCKSTEP_CHOSEN_COMPONENTS ${chosen} PARENT_SCOPE)
  set(${result} ${modules} PARENT_SCOPE)
endfunction()

# After all modules: the libraries, and install rules for them, their headers, and what find_package(lockstep COMPONENTS …)
# and pkg-config read.
function(lockstep_install_components)
  if(NOT LOCKSTEP_INSTALL)
    return()
  endif()
  foreach(name IN LISTS LOCKSTEP_CHOSEN_COMPONENTS)
    lockstep_shared_component(${name})
    lockstep_static_component(${name})
    lockstep_install_headers(${name})
    lockstep_install_pc_file(${name})
  endforeach()
  get_property(LOCKSTEP_SOURCE_COMPONENTS GLOBAL PROPERTY LOCKSTEP_SOURCE_COMPONENTS)
  list(JOIN LOCKSTEP_SOURCE_COMPONENTS "|" LOCKSTEP_SOURCE_PATTERN)
  set(place ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
  if(LOCKSTEP_PROGRAM)
    install(TARGETS lockstep RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    if(SKBUILD)  # pyproject.toml
      install(TARGETS lockstep RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT wheel)
      install(FILES ${PROJECT_BINARY_DIR}/package/lockstep.1 DESTINATION ${SKBUILD_DATA_DIR}/share/man/man1 COMPONENT wheel)
    endif()
    set(share ${CMAKE_INSTALL_DATADIR}/lockstep)
    install(DIRECTORY examples DESTINATION ${share})
    install(DIRECTORY docker/slurm docker/kubernetes docker/ssh DESTINATION ${share})
    configure_file(packaging/modulefile.in package/modulefile @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/package/modulefile DESTINATION ${share}/modulefiles/lockstep
            RENAME ${PROJECT_VERSION})
  endif()
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

# lockstep_source_component(NAME SOURCES files…): lockstep::NAME, which a consumer's build makes from these files, for what has
# to be compiled against libraries of the consumer's own. cmake/lockstep_NAME.cmake says how.
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

# lockstep_packages(): `cpack -G DEB` and `cpack -G RPM` make a package of all that is installed.
macro(lockstep_packages)
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_NAME lockstep)
  set(CPACK_PACKAGE_CONTACT "the maintainers of lockstep <lockstep@localhost>")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Data-parallel training: one process per device")
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION science)
  # The libraries that it needs, by the packages of the system that it is built on.
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR})
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
  set(CPACK_DEBIAN_PACKAGE_RECOMMENDS openmpi-bin)
  # rpmbuild finds by itself which libraries it needs, by their sonames.
  set(CPACK_RPM_FILE_NAME RPM-DEFAULT)
  set(CPACK_RPM_PACKAGE_LICENSE Apache-2.0)
  set(CPACK_RPM_PACKAGE_GROUP "Applications/Engineering")
  set(CPACK_RPM_PACKAGE_RECOMMENDS openmpi)
  # Directories that other packages own.
  set(CPACK_RPM_EXCLUDE_FROM_AUTO_FILELIST_ADDITION
      /usr/share/man /usr/share/man/man1 /usr/share/bash-completion /usr/share/bash-completion/completions /usr/share/zsh
      /usr/share/zsh/site-functions /usr/share/zsh/vendor-completions /usr/share/fish
      /usr/share/fish/vendor_completions.d /usr/${CMAKE_INSTALL_LIBDIR}/cmake /usr/${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  include(CPack)
endmacro()

# What a component consists of: RESULT is the modules' libraries, with and without CUDA.
function(lockstep_parts_of result name)
  get_property(modules GLOBAL PROPERTY LOCKSTEP_MODULES_${name})
  set(parts "")
  foreach(module IN LISTS modules)
    foreach(part IN ITEMS lockstep_${module} lockstep_${module}_cuda)
      if(TARGET ${part})
        list(APPEND parts ${part})
      endif()
    endforeach()
  endforeach()
  set(${result} ${parts} PARENT_SCOPE)
endfunction()

# What both kinds of library have in common.
function(lockstep_export_component target name export_name)
  lockstep_parts_of(parts ${name})
  foreach(part IN LISTS parts)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${part}> $<$<TARGET_EXISTS:${part}_host>:$<TARGET_OBJECTS:${part}_host>>)
  endforeach()
  set_target_properties(${target} PROPERTIES OUTPUT_NAME lockstep_${name} EXPORT_NAME ${export_name}
                                             LINKER_LANGUAGE CXX)
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_include_directories(${target} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                 $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  install(TARGETS ${target} EXPORT lockstep_components DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# liblockstep_NAME.so, as lockstep::NAME. A consumer needs its headers and that library alone: what it is made with stays
# inside.
function(lockstep_shared_component name)
  set(target lockstep_${name}_shared)
  add_library(${target} SHARED)
  # First: what they have is not taken from the static libraries below.
  get_property(needs GLOBAL PROPERTY LOCKSTEP_NEEDS_${name})
  foreach(needed IN LISTS needs)
    target_link_libraries(${target} PUBLIC lockstep_${needed}_shared)
  endforeach()
  lockstep_parts_of(parts ${name})
  target_link_libraries(${target} PRIVATE ${parts})  # for the libraries that they need
  # Other libraries that a program uses may bring copies of ours, of other versions: none is seen outside.
  set(exported ${PROJECT_SOURCE_DIR}/cmake/exported.map)
  target_link_options(${target} PRIVATE -Wl,--version-script=${exported})
  if(NOT LOCKSTEP_SANITIZE)  # whose functions the program brings
    target_link_options(${target} PRIVATE -Wl,--no-undefined)
  endif()
  set_property(TARGET ${target} PROPERTY LINK_DEPENDS ${exported})
  set_target_properties(${target} PROPERTIES VERSION ${PROJECT_VERSION} INSTALL_RPATH "$ORIGIN"
                                             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  lockstep_export_component(${target} ${name} ${name})
endfunction()

# liblockstep_NAME.a, as lockstep::NAME_static. Its consumer links what it is made with, by the names that its system has for
# those libraries.
function(lockstep_static_component name)
  set(target lockstep_${name}_static)
  add_library(${target} STATIC)
  set_target_properties(${target} PROPERTIES ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/package)
  get_property(needs GLOBAL PROPERTY LOCKSTEP_NEEDS_${name})
  foreach(needed IN LISTS needs)
    target_link_libraries(${target} INTERFACE lockstep_${needed}_static)
  endforeach()
  lockstep_files_linked_by(${name} files)
  target_link_libraries(${target} INTERFACE ${files})
  lockstep_export_component(${target} ${name} ${name}_static)
endfunction()

function(lockstep_install_headers name)
  set(without_mpi "")
  if(NOT LOCKSTEP_HAVE_MPI)
    set(without_mpi PATTERN mpi.h EXCLUDE)
  endif()
  get_property(headers GLOBAL PROPERTY LOCKSTEP_HEADERS_${name})
  foreach(header IN LISTS headers)
    install(FILES ${PROJECT_SOURCE_DIR}/include/lockstep/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
  endforeach()
  get_property(modules GLOBAL PROPERTY LOCKSTEP_MODULES_${name})
  foreach(module IN LISTS modules)
    if(EXISTS ${PROJECT_SOURCE_DIR}/include/lockstep/${module})
      install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lockstep/${module}
              DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep FILES_MATCHING PATTERN "*.h" ${without_mpi})
    endif()
    if(EXISTS ${PROJECT_SOURCE_DIR}/include/lockstep/${module}.h)
      install(FILES ${PROJECT_SOURCE_DIR}/include/lockstep/${module}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
    endif()
  endforeach()
endfunction()

# From the folder of .pc files up to the prefix, so that an installed tree may be moved.
file(RELATIVE_PATH LOCKSTEP_PREFIX_FROM_PKGCONFIG /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)

function(lockstep_install_pc_file name)
  get_property(about GLOBAL PROPERTY LOCKSTEP_ABOUT_${name})
  get_property(requires GLOBAL PROPERTY LOCKSTEP_NEEDS_${name})
  list(TRANSFORM requires PREPEND lockstep_)
  list(JOIN requires " " requires)
  lockstep_files_linked_by(${name} private)
  list(JOIN private " " private)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/package/lockstep_${name}.pc @ONLY CONTENT "\
prefix=\${pcfiledir}/@LOCKSTEP_PREFIX_FROM_PKGCONFIG@
Name: lockstep_${name}
Description: ${about}
Version: @PROJECT_VERSION@
Requires: ${requires}
Cflags: -I\${prefix}/@CMAKE_INSTALL_INCLUDEDIR@
Libs: -L\${prefix}/@CMAKE_INSTALL_LIBDIR@ -llockstep_${name}
Libs.private: ${private}
")
  install(FILES ${PROJECT_BINARY_DIR}/package/lockstep_${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()
