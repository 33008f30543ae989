# lockstep_test(NAME SOURCES files… [LINKS targets…] [RANKS 1 2 …] [GROUPS inline thread shm tcp hosts1 …] [ALSO n:group …] [ALONE Suite.Test…]
#               [SOFT_CUDA | GPU] [TIMEOUT s] [LABELS …])
#
# Builds one GoogleTest program. Without RANKS it is one ctest entry, run in one process. With RANKS it is one entry
# for each world size, started by tests/support/run_ranks (under mpirun, or for tcp and hosts… by RANK and WORLD_SIZE alone), and its main() joins the ranks first.
# GROUPS says which kinds of group it runs on (one entry each; inline alone by default): tests/support/ranks.h; ALSO adds
# single ones, of a number of ranks and a group. ALONE
# names tests that leave their group broken: each is an entry of its own, and no other test of the program is run.
# Tests on several ranks run alone (RUN_SERIAL), so that timeouts mean something; but not those labelled fault, which mostly wait.
#
# SOFT_CUDA runs the rooms' CUDA code on a GPU in software (tests/soft_cuda). GPU runs it on a real one, labelled gpu;
# where there is none, the test reports itself skipped and why (with RANKS, if it says that it NeedsGpu). Both are left out of builds without CUDA.
function(lockstep_test name)
  cmake_parse_arguments(T "SOFT_CUDA;GPU" "TIMEOUT" "SOURCES;LINKS;RANKS;GROUPS;ALSO;ALONE;LABELS" ${ARGN})
  if((T_SOFT_CUDA OR T_GPU) AND NOT LOCKSTEP_HAVE_CUDA)
    return()
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 60)
  endif()
  add_executable(${name} EXCLUDE_FROM_ALL ${T_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_TEST_TARGETS ${name})
  if(T_GPU)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_GPU_TEST_TARGETS ${name})
  endif()
  target_link_libraries(${name} PRIVATE ${T_LINKS} GTest::gtest GTest::gmock)
  if(T_SOURCES MATCHES "TARGET_OBJECTS")
    set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)  # there is nothing to compile
  else()
    target_precompile_headers(${name} REUSE_FROM lockstep_test_headers)
  endif()
  target_compile_options(${name} PRIVATE ${LOCKSTEP_TEST_OPTIONS})
  if(T_SOFT_CUDA)
    set_target_properties(${name} PROPERTIES LOCKSTEP_SOFT_CUDA ON)
    target_include_directories(${name} BEFORE PRIVATE ${PROJECT_SOURCE_DIR}/tests/soft_cuda)
  endif()
  if(NOT T_RANKS)
    if(T_GPU)
      target_link_libraries(${name} PRIVATE lockstep_gpu_main)
      list(APPEND T_LABELS gpu)
    else()
      target_link_libraries(${name} PRIVATE GTest::gtest_main)
    endif()
    if(NOT T_LABELS)
      set(T_LABELS unit)
    endif()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS}")
    if(T_GPU)
      set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
    endif()
    return()
  endif()
  if(T_GPU)
    list(APPEND T_LABELS gpu)
  elseif(NOT T_LABELS)
    set(T_LABELS ranks)
  endif()
  target_link_libraries(${name} PRIVATE lockstep_ranks_main)
  # run_ranks gives up first, and cleans up; what ctest kills cannot.
  math(EXPR limit "${T_TIMEOUT} - 10")
  if(NOT T_GROUPS)
    set(T_GROUPS inline)
  endif()
  if(NOT T_ALONE)
    set(T_ALONE "*")
  endif()
  set(alone TRUE)
  if("fault" IN_LIST T_LABELS)
    set(alone FALSE)
  endif()
  set(runs ${T_ALSO})
  foreach(n IN LISTS T_RANKS)
    foreach(kind IN LISTS T_GROUPS)
      list(APPEND runs ${n}:${kind})
    endforeach()
  endforeach()
  foreach(run IN LISTS runs)
    string(REGEX MATCH "^([0-9]+):(.*)$" matched ${run})
    set(n ${CMAKE_MATCH_1})
    foreach(kind IN ITEMS ${CMAKE_MATCH_2})
      if(n GREATER 1 AND NOT LOCKSTEP_HAVE_MPI AND NOT kind MATCHES "^(tcp|hosts[1-9x](-thread|-encrypt)?)$")
        continue()
      endif()
      if(n EQUAL 1 AND NOT kind STREQUAL "inline")
        continue()  # a world of one has nothing to move on
      endif()
      set(serial ${alone})
      if(n EQUAL 1 AND NOT T_GPU)
        set(serial FALSE)
      endif()
      foreach(filter IN LISTS T_ALONE)
        set(entry ${name}.np${n})
        if(NOT filter STREQUAL "*")
          string(APPEND entry .${filter})
        endif()
        if(NOT kind STREQUAL "inline")
          string(APPEND entry .${kind})
        endif()
        add_test(NAME ${entry}
                 COMMAND ${PROJECT_SOURCE_DIR}/tests/support/run_ranks ${n} $<TARGET_FILE:${name}>
                         --gtest_filter=${filter})
        set_tests_properties(${entry} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS}" RUN_SERIAL ${serial}
                                                 ENVIRONMENT "LOCKSTEP_TEST_GROUP=${kind};LOCKSTEP_TEST_TIMEOUT=${limit}")
        if(T_GPU)
          set_tests_properties(${entry} PROPERTIES SKIP_RETURN_CODE 77)
        endif()
      endforeach()
    endforeach()
  endforeach()
endfunction()

# lockstep_test_headers() makes what all tests share: headers that nearly all of them include, compiled before.
function(lockstep_test_headers)
  set(options ${LOCKSTEP_PRECOMPILED_OPTIONS})
  # What a test computes itself is little, and it takes a third less time to compile.
  if(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    list(APPEND options $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-O1>)
  endif()
  set(LOCKSTEP_TEST_OPTIONS "${options}" PARENT_SCOPE)
  # A program, not a library: where those are position-independent in another way, so are their headers.
  add_executable(lockstep_test_headers EXCLUDE_FROM_ALL support/headers.cpp)
  set_target_properties(lockstep_test_headers PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_link_libraries(lockstep_test_headers PRIVATE lockstep::base GTest::gtest GTest::gmock)
  target_compile_options(lockstep_test_headers PRIVATE ${options})
  target_precompile_headers(lockstep_test_headers PRIVATE
    <gmock/gmock.h> <gtest/gtest.h> ${LOCKSTEP_COMMON_HEADERS})
endfunction()

# lockstep_cuda_test(NAME SOURCES files… …) is the same files three times: NAME_test in software, NAME_test.lazy with
# streams that run as late as they may, NAME_gpu_test on a GPU.
# The files are compiled once: neither kind of GPU is seen in them.
function(lockstep_cuda_test name)
  if(NOT LOCKSTEP_HAVE_CUDA)
    return()
  endif()
  cmake_parse_arguments(T "" "" "SOURCES;LINKS" ${ARGN})
  add_library(${name}_test_objects OBJECT EXCLUDE_FROM_ALL ${T_SOURCES})
  target_link_libraries(${name}_test_objects PRIVATE ${T_LINKS} GTest::gtest GTest::gmock)
  # Neither library of CUDA's files is linked yet that would say where its headers are.
  target_include_directories(${name}_test_objects SYSTEM PRIVATE
                             $<TARGET_PROPERTY:lockstep_cuda,INTERFACE_SYSTEM_INCLUDE_DIRECTORIES>)
  target_precompile_headers(${name}_test_objects REUSE_FROM lockstep_test_headers)
  # Position-independent as the programs are which they become part of, and the headers.
  set_target_properties(${name}_test_objects PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name}_test_objects PRIVATE -fPIE ${LOCKSTEP_TEST_OPTIONS})
  set(objects SOURCES $<TARGET_OBJECTS:${name}_test_objects> LINKS ${T_LINKS} ${T_UNPARSED_ARGUMENTS})
  lockstep_test(${name}_test ${objects} SOFT_CUDA)
  lockstep_test(${name}_gpu_test ${objects} GPU)
  get_test_property(${name}_test TIMEOUT timeout)
  get_test_property(${name}_test LABELS labels)
  # When streams run has nothing to do with where arrays lie, nor with how well bf16 learns.
  add_test(NAME ${name}_test.lazy COMMAND ${name}_test --gtest_filter=-*_misaligned:*.LearnsInBf16*)
  set_tests_properties(${name}_test.lazy PROPERTIES TIMEOUT ${timeout} LABELS "${labels}"
                                                    ENVIRONMENT LOCKSTEP_SOFT_STREAMS=lazy)
endfunction()
