# An overlay port of the checkout that this file lies in: `vcpkg install lockstep --overlay-ports=packaging`.
vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)  # the package has static libraries beside the shared ones

get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../.." ABSOLUTE)

set(components base)
if("comm" IN_LIST FEATURES)
  list(APPEND components comm ddp c)
endif()
foreach(feature nn trainer)
  if(${feature} IN_LIST FEATURES)
    list(APPEND components ${feature})
  endif()
endforeach()
set(mpi -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
if("mpi" IN_LIST FEATURES)
  set(mpi -DCMAKE_REQUIRE_FIND_PACKAGE_MPI=ON)
endif()

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    -DBUILD_TESTING=OFF
    -DLOCKSTEP_CCACHE=OFF
    -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
    ${mpi}
    "-DLOCKSTEP_COMPONENTS=${components}")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME lockstep CONFIG_PATH lib/cmake/lockstep)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
