# lockstep_room(NAME [LIGHT] SOURCES files… [CUDA files…] [NO_CUDA files…] [SEES rooms…] [LINKS libraries…]
#               [INTERFACE_LINKS libraries…])
#
# One static library a room, `lockstep_NAME`, with the alias `lockstep::NAME`. SEES lists the rooms whose headers
# this one may include; the list is also what the arrow test (tests/house) holds the includes against.
#
# LIGHT: it decides, starts and reports, and what it computes takes no time: -O1 compiles it in two thirds of the time.
#
# CUDA lists what a build with CUDA adds, NO_CUDA what stands in its place in one without. The former is a library of
# its own, `lockstep_NAME_cuda`: a test program that sets LOCKSTEP_SOFT_CUDA links `lockstep_soft_cuda` instead, which
# is the same files compiled for the CPU (tests/soft_cuda).
function(lockstep_room name)
  cmake_parse_arguments(ROOM "LIGHT" "" "SOURCES;CUDA;NO_CUDA;SEES;LINKS;INTERFACE_LINKS" ${ARGN})
  if(ROOM_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "lockstep_room(${name}): unknown arguments ${ROOM_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT LOCKSTEP_HAVE_CUDA)
    list(APPEND ROOM_SOURCES ${ROOM_NO_CUDA})
  endif()
  add_library(lockstep_${name} STATIC ${ROOM_SOURCES})
  add_library(lockstep::${name} ALIAS lockstep_${name})
  lockstep_precompiled(lockstep_${name})
  if(ROOM_LIGHT AND NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    target_compile_options(lockstep_${name} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-O1>)
  endif()
  target_link_libraries(lockstep_${name} PUBLIC lockstep_flags ${ROOM_INTERFACE_LINKS} PRIVATE ${ROOM_LINKS})
  foreach(seen IN LISTS ROOM_SEES)
    target_link_libraries(lockstep_${name} PUBLIC lockstep::${seen})
  endforeach()
  list(JOIN ROOM_SEES " " sees)
  set_property(GLOBAL APPEND_STRING PROPERTY LOCKSTEP_ARROWS "${name}: ${sees}\n")
  if(NOT LOCKSTEP_HAVE_CUDA OR NOT ROOM_CUDA)
    return()
  endif()

  add_library(lockstep_${name}_cuda STATIC ${ROOM_CUDA})
  lockstep_precompiled(lockstep_${name}_cuda)
  target_link_libraries(lockstep_${name}_cuda PUBLIC lockstep_${name} lockstep::cuda)
  set(chosen "$<IF:$<BOOL:$<TARGET_PROPERTY:LOCKSTEP_SOFT_CUDA>>,lockstep_soft_cuda,lockstep_${name}_cuda>")
  target_link_libraries(lockstep_${name} INTERFACE $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:${chosen}>)
  list(TRANSFORM ROOM_CUDA PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_CUDA_SOURCES ${ROOM_CUDA})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_CUDA_ROOMS ${name})
endfunction()
