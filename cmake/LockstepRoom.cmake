# lockstep_room(NAME SOURCES files… [SEES rooms…] [LINKS libraries…] [INTERFACE_LINKS libraries…])
#
# One static library a room, `lockstep_NAME`, with the alias `lockstep::NAME`. SEES lists the rooms whose headers
# this one may include; the list is also what the arrow test (tests/house) holds the includes against.
function(lockstep_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;SEES;LINKS;INTERFACE_LINKS" ${ARGN})
  if(ROOM_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "lockstep_room(${name}): unknown arguments ${ROOM_UNPARSED_ARGUMENTS}")
  endif()
  add_library(lockstep_${name} STATIC ${ROOM_SOURCES})
  add_library(lockstep::${name} ALIAS lockstep_${name})
  target_link_libraries(lockstep_${name} PUBLIC lockstep_flags ${ROOM_INTERFACE_LINKS} PRIVATE ${ROOM_LINKS})
  foreach(seen IN LISTS ROOM_SEES)
    target_link_libraries(lockstep_${name} PUBLIC lockstep::${seen})
  endforeach()
  list(JOIN ROOM_SEES " " sees)
  set_property(GLOBAL APPEND_STRING PROPERTY LOCKSTEP_ARROWS "${name}: ${sees}\n")
endfunction()
