# lockstep_module(NAME [LIGHT] SOURCES files… [FAMILIES folders…] [APART files…] [CUDA files…] [NO_CUDA files…]
#                 [SEES modules…] [LINKS libraries…])
#
# One static library per module, `lockstep_NAME`, with the alias `lockstep::NAME`. SEES lists the modules whose headers
# this one may include; the dependency test (tests/layering) checks the includes against that list. Programs of others that
# link it see the public headers (include/) and no option of this build.
#
# FAMILIES: folders of which every .cpp file is a source, so that a model or a data set is its file and its row in a list.
#
# Files of a folder are compiled together, a few at a time: headers take most of the time. Those of APART, files or folders,
# are each compiled alone: kernels of the CPU, whose inlining is theirs, and what takes long itself.
#
# LIGHT: it decides, starts and reports, and what it computes takes no time: -O1 compiles it in two thirds of the time.
#
# CUDA lists what a build with CUDA adds, NO_CUDA what stands in its place in one without. The former is a library of
# its own, `lockstep_NAME_cuda`: a test program that sets LOCKSTEP_SOFT_CUDA links `lockstep_soft_cuda` instead, which
# is the same files compiled for the CPU (tests/soft_cuda).
function(lockstep_module name)
  cmake_parse_arguments(MODULE "LIGHT" "" "SOURCES;FAMILIES;APART;CUDA;NO_CUDA;SEES;LINKS" ${ARGN})
  if(MODULE_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "lockstep_module(${name}): unknown arguments ${MODULE_UNPARSED_ARGUMENTS}")
  endif()
  foreach(folder IN LISTS MODULE_FAMILIES)
    file(GLOB found RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND MODULE_SOURCES ${found})
  endforeach()
  if(NOT LOCKSTEP_HAVE_CUDA)
    list(APPEND MODULE_SOURCES ${MODULE_NO_CUDA})
  endif()
  add_library(lockstep_${name} STATIC ${MODULE_SOURCES})
  add_library(lockstep::${name} ALIAS lockstep_${name})
  lockstep_precompiled(lockstep_${name})
  lockstep_together(lockstep_${name} SOURCES ${MODULE_SOURCES} APART ${MODULE_APART})
  if(MODULE_LIGHT AND NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    target_compile_options(lockstep_${name} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-O1>)
  endif()
  target_compile_features(lockstep_${name} PUBLIC cxx_std_20)
  target_include_directories(lockstep_${name} INTERFACE ${PROJECT_SOURCE_DIR}/include)
  lockstep_find(${MODULE_LINKS})
  target_link_libraries(lockstep_${name} PRIVATE ${MODULE_LINKS})
  set_property(GLOBAL PROPERTY LOCKSTEP_LINKS_${name} ${MODULE_LINKS})
  foreach(seen IN LISTS MODULE_SEES)
    target_link_libraries(lockstep_${name} PUBLIC lockstep::${seen})
  endforeach()
  list(JOIN MODULE_SEES " " sees)
  set_property(GLOBAL APPEND_STRING PROPERTY LOCKSTEP_DEPENDENCIES "${name}: ${sees}\n")
  if(NOT LOCKSTEP_HAVE_CUDA OR NOT MODULE_CUDA)
    return()
  endif()

  list(TRANSFORM MODULE_CUDA PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  list(TRANSFORM MODULE_APART PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  lockstep_kernels_together(MODULE_CUDA SOURCES ${MODULE_CUDA} APART ${MODULE_APART})
  add_library(lockstep_${name}_cuda STATIC ${MODULE_CUDA})
  lockstep_precompiled(lockstep_${name}_cuda)
  lockstep_together(lockstep_${name}_cuda SOURCES ${MODULE_CUDA} APART ${MODULE_APART})
  target_link_libraries(lockstep_${name}_cuda PUBLIC lockstep_${name} PRIVATE lockstep::cuda)
  set(chosen "$<IF:$<BOOL:$<TARGET_PROPERTY:LOCKSTEP_SOFT_CUDA>>,lockstep_soft_cuda,lockstep_${name}_cuda>")
  set(is_linked $<IN_LIST:$<TARGET_PROPERTY:TYPE>,EXECUTABLE;SHARED_LIBRARY;MODULE_LIBRARY>)
  target_link_libraries(lockstep_${name} INTERFACE "$<${is_linked}:${chosen}>")
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_CUDA_SOURCES ${MODULE_CUDA})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_CUDA_MODULES ${name})
endfunction()

# lockstep_together(TARGET SOURCES files… [APART files or folders…]): see lockstep_module.
function(lockstep_together target)
  cmake_parse_arguments(T "" "" "SOURCES;APART" ${ARGN})
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${LOCKSTEP_UNITY_BUILD} UNITY_BUILD_MODE GROUP)
  # A file that is included looks like a header, whose types may not have members of an anonymous namespace.
  if(LOCKSTEP_UNITY_BUILD)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
  foreach(source IN LISTS T_SOURCES)
    get_filename_component(folder "${source}" DIRECTORY)
    if(NOT source MATCHES "[.]cpp$" OR source IN_LIST T_APART OR folder IN_LIST T_APART)
      continue()
    endif()
    if(IS_ABSOLUTE "${folder}")
      file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${folder})
    endif()
    string(MAKE_C_IDENTIFIER "${target}_${folder}" group)
    list(APPEND files_${group} ${source})
    list(LENGTH files_${group} number)
    math(EXPR part "(${number} - 1) / 6")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group}_${part})
  endforeach()
endfunction()

# lockstep_kernels_together(RESULT SOURCES files… [APART files…]): the same for .cu files, which CMake's unity builds leave
# out, and for both compilers of them, nvcc and the CPU's: RESULT is SOURCES with files that include several .cu files in
# their place. All paths are whole.
function(lockstep_kernels_together result)
  cmake_parse_arguments(T "" "" "SOURCES;APART" ${ARGN})
  if(NOT LOCKSTEP_UNITY_BUILD)
    set(${result} ${T_SOURCES} PARENT_SCOPE)
    return()
  endif()
  set(sources "")
  set(groups "")
  foreach(source IN LISTS T_SOURCES)
    if(NOT source MATCHES "[.]cu$" OR source IN_LIST T_APART)
      list(APPEND sources ${source})
      continue()
    endif()
    get_filename_component(folder "${source}" DIRECTORY)
    file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${folder})
    string(MAKE_C_IDENTIFIER "${folder}" group)
    list(APPEND files_${group} ${source})
    list(LENGTH files_${group} number)
    math(EXPR part "(${number} - 1) / 6")
    list(APPEND groups ${group}_${part})
    string(APPEND text_${group}_${part} "#include \"${source}\"\n")
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    set(together ${CMAKE_CURRENT_BINARY_DIR}/${group}.cu)
    file(CONFIGURE OUTPUT ${together} CONTENT "${text_${group}}" @ONLY)
    list(APPEND sources ${together})
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()
