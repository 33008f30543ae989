# Files of tests that are compiled at a time.
set(LOCKSTEP_TESTS_TOGETHER 12)

# What GoogleTest prints where a filter matches nothing: such an entry fails.
set(LOCKSTEP_NO_TEST_RAN "Running 0 tests from 0 test suites")

# lockstep_test(NAME SOURCES files… [LINKS targets…] [DEFINITIONS name=value…] [DEPENDS targets…] [PROGRAM name]
#               [RANKS 1 2 …] [GROUPS inline thread shm tcp hosts1 …] [ALSO n:group …] [NIGHTLY_ALSO n:group …]
#               [ALONE Suite.Test…] [OWN_GROUPS] [SERIAL] [SOFT_CUDA [LATE] | GPU | CUDA [LAZY]] [TIER quick|default|nightly]
#               [TIMEOUT s] [LABELS …])
#
# One ctest entry, or several, that run the test suites of SOURCES. The tests of a directory below tests/ that run in the
# same way are one GoogleTest program, PROGRAM: MODULE_tests in one process, MODULE_ranks on several, MODULE_own_ranks
# with OWN_GROUPS; with soft_ or gpu_ in between on a GPU in software or a real one. Name another where files cannot be
# linked with those of the others, or need no optimization as those do (LOCKSTEP_TESTS_COMPUTE). The suites are read from
# the sources, and of one program each belongs to one entry.
#
# With RANKS it is one entry for each world size, started by tests/support/run_ranks (under mpirun, or for tcp and
# hosts… by RANK and WORLD_SIZE alone), and main() joins the ranks first, unless they make OWN_GROUPS. GROUPS says which
# kinds of group it runs on (one entry each; inline alone by default): tests/support/ranks.h; ALSO adds single ones, of a
# number of ranks and a group. ALONE names tests that leave their group broken: each is an entry of its own, and no other
# test of the entry is run. Beside an entry ctest runs fewer others: it counts as as many as it has ranks, or as two of
# one process, but for those labelled fault, which mostly wait: as one, or as two under MPI. SERIAL ones, which look at
# clocks or at what the whole machine does, run beside no other.
#
# Tiers (scripts/test) are labels: `quick` entries are in all tiers, `nightly` ones in the largest alone, and those with
# neither in two. Without TIER the entries of one process and those of two ranks in shared memory are quick, unless they
# are labelled fault or program or take a GPU in software. Entries of NIGHTLY_ALSO are nightly: groups that run the code of
# others with another rendezvous or another number of ranks. Tests that add_test() makes say lockstep_tier(TIER name…).
#
# SOFT_CUDA runs the modules' CUDA code on a GPU in software (tests/soft_cuda). GPU runs it on a real one, labelled gpu;
# where there is none, the test reports itself skipped and why (with RANKS, if it says that it NeedsGpu). CUDA is both,
# from files that are compiled once: neither kind of GPU is seen in them. LAZY adds an entry in software whose streams run
# as late as they may (NAME_test.lazy): for tests in which the order of streams, copies and events, or what the host reads
# and frees meanwhile, can be wrong; not for kernels that one stream runs and whose results are compared with the CPU's.
# With LATE the streams of ranks run some time later, by themselves. All are left out of builds without CUDA.
function(lockstep_test name)
  cmake_parse_arguments(T "SOFT_CUDA;LATE;GPU;CUDA;LAZY;OWN_GROUPS;SERIAL" "TIMEOUT;PROGRAM;TIER"
                        "SOURCES;LINKS;DEFINITIONS;DEPENDS;RANKS;GROUPS;ALSO;NIGHTLY_ALSO;ALONE;LABELS" ${ARGN})
  if(T_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "lockstep_test(${name}): unknown arguments ${T_UNPARSED_ARGUMENTS}")
  endif()
  if((T_SOFT_CUDA OR T_GPU OR T_CUDA) AND NOT LOCKSTEP_HAVE_CUDA)
    return()
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 180)
  endif()
  if(T_CUDA)
    lockstep_cuda_test_entries()
    return()
  endif()
  set(kind "")
  if(T_SOFT_CUDA)
    set(kind soft)
  elseif(T_GPU)
    set(kind gpu)
    list(APPEND T_LABELS gpu)
  endif()
  lockstep_test_program(program ${kind})
  lockstep_add_to_test_program(${program})
  lockstep_filter_of(filter ${program})
  if(T_RANKS)
    lockstep_ranks_entries()
    return()
  endif()
  if(NOT T_LABELS)
    set(T_LABELS unit)
  endif()
  add_test(NAME ${name} COMMAND ${program} --gtest_filter=${filter})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS}"
                                          FAIL_REGULAR_EXPRESSION "${LOCKSTEP_NO_TEST_RAN}")
  if(NOT "fault" IN_LIST T_LABELS)
    set_tests_properties(${name} PROPERTIES PROCESSORS 2)
  endif()
  if(T_GPU)
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
  endif()
  if(T_GPU OR T_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
  if(NOT T_TIER AND T_LABELS STREQUAL "unit" AND NOT kind)
    set(T_TIER quick)
  endif()
  lockstep_tier("${T_TIER}" ${name} TARGETS ${program})
endfunction()

# lockstep_tier(quick|default|nightly NAME… [TARGETS what they run…]): the label; the target quick_tests builds what quick
# ones run.
function(lockstep_tier tier)
  cmake_parse_arguments(TIER "" "" "TARGETS" ${ARGN})
  if(NOT tier OR tier STREQUAL "default")
    return()
  elseif(NOT tier MATCHES "^(quick|nightly)$")
    message(FATAL_ERROR "${ARGN}: there is no tier ${tier}")
  endif()
  foreach(name IN LISTS TIER_UNPARSED_ARGUMENTS)
    set_property(TEST ${name} APPEND PROPERTY LABELS ${tier})
  endforeach()
  if(tier STREQUAL "quick")
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_QUICK_TEST_TARGETS ${TIER_TARGETS})
  endif()
endfunction()

# lockstep_shared_tests(SOURCES files… LINKS targets…), before tests of these files: programs of this directory that have any
# of them have all. They are compiled once, and see neither a GPU in software nor a real one.
function(lockstep_shared_tests)
  cmake_parse_arguments(T "" "" "SOURCES;LINKS" ${ARGN})
  lockstep_test_objects(shared)
endfunction()

# What follows is part of lockstep_test, and reads its variables.

# The program that tests of this directory and kind ("soft", "gpu" or nothing) belong to; made when first asked for.
function(lockstep_test_program result)
  set(kind ${ARGN})
  set(program ${T_PROGRAM})
  if(NOT program)
    file(RELATIVE_PATH program ${PROJECT_SOURCE_DIR}/tests ${CMAKE_CURRENT_SOURCE_DIR})
    foreach(word IN ITEMS ${kind})
      string(APPEND program _${word})
    endforeach()
    if(T_OWN_GROUPS)
      string(APPEND program _own_ranks)
    elseif(T_RANKS)
      string(APPEND program _ranks)
    else()
      string(APPEND program _tests)
    endif()
  endif()
  set(${result} ${program} PARENT_SCOPE)
  if(TARGET ${program})
    return()
  endif()
  add_executable(${program} EXCLUDE_FROM_ALL)
  # A few files at a time, so that the programs of a module are compiled side by side.
  set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests LINKER_LANGUAGE CXX
                                              UNITY_BUILD ${LOCKSTEP_UNITY_BUILD} UNITY_BUILD_BATCH_SIZE ${LOCKSTEP_TESTS_TOGETHER})
  target_link_libraries(${program} PRIVATE GTest::gtest GTest::gmock)
  if(T_RANKS)
    target_link_libraries(${program} PRIVATE lockstep_ranks_main)
    if(T_OWN_GROUPS)
      target_sources(${program} PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/own_groups.cpp)
    endif()
  elseif(kind STREQUAL "gpu")
    target_link_libraries(${program} PRIVATE lockstep_gpu_main)
  else()
    target_link_libraries(${program} PRIVATE GTest::gtest_main)
  endif()
  lockstep_test_options(${program})
  if(kind STREQUAL "soft")
    set_target_properties(${program} PROPERTIES LOCKSTEP_SOFT_CUDA ON)
    target_include_directories(${program} BEFORE PRIVATE ${PROJECT_SOURCE_DIR}/tests/soft_cuda)
  elseif(kind STREQUAL "gpu")
    target_link_libraries(${program} PRIVATE lockstep::cuda)  # its headers
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_GPU_TEST_TARGETS ${program})
  endif()
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_TEST_TARGETS ${program})
endfunction()

# Each file once, however many tests need it; as objects if it has been compiled for several programs.
function(lockstep_add_to_test_program program)
  get_target_property(there ${program} SOURCES)
  foreach(source IN LISTS T_SOURCES)
    get_filename_component(source ${source} ABSOLUTE)
    get_property(objects DIRECTORY PROPERTY LOCKSTEP_OBJECTS_OF_${source})
    if(objects)
      set(source $<TARGET_OBJECTS:${objects}>)
    endif()
    if(NOT source IN_LIST there)
      target_sources(${program} PRIVATE ${source})
      list(APPEND there ${source})
    endif()
  endforeach()
  target_link_libraries(${program} PRIVATE ${T_LINKS})
  target_compile_definitions(${program} PRIVATE LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}" ${T_DEFINITIONS})
  if(T_DEPENDS)
    add_dependencies(${program} ${T_DEPENDS})
  endif()
endfunction()

# The test's files become objects of this directory, named after a reason, which its programs have in common.
function(lockstep_test_objects reason)
  file(RELATIVE_PATH objects ${PROJECT_SOURCE_DIR}/tests ${CMAKE_CURRENT_SOURCE_DIR})
  string(APPEND objects _${reason}_test_objects)
  if(NOT TARGET ${objects})
    add_library(${objects} OBJECT EXCLUDE_FROM_ALL)
    target_link_libraries(${objects} PRIVATE GTest::gtest GTest::gmock)
    # Neither library of CUDA's files is linked yet that would say where its headers are.
    set(cuda_headers $<TARGET_PROPERTY:lockstep_cuda,INTERFACE_SYSTEM_INCLUDE_DIRECTORIES>)
    target_include_directories(${objects} SYSTEM PRIVATE $<$<TARGET_EXISTS:lockstep_cuda>:${cuda_headers}>)
    lockstep_test_options(${objects})
    # Position-independent as the programs are which they become part of, and the headers.
    set_target_properties(${objects} PROPERTIES POSITION_INDEPENDENT_CODE OFF UNITY_BUILD ${LOCKSTEP_UNITY_BUILD}
                                                UNITY_BUILD_BATCH_SIZE ${LOCKSTEP_TESTS_TOGETHER})
    target_compile_options(${objects} PRIVATE -fPIE)
  endif()
  set(sources ${T_SOURCES})
  set(T_SOURCES "")
  foreach(source IN LISTS sources)
    get_filename_component(source ${source} ABSOLUTE)
    get_property(before DIRECTORY PROPERTY LOCKSTEP_OBJECTS_OF_${source})
    if(NOT before)
      list(APPEND T_SOURCES ${source})
    endif()
  endforeach()
  lockstep_add_to_test_program(${objects})
  foreach(source IN LISTS T_SOURCES)
    set_property(DIRECTORY PROPERTY LOCKSTEP_OBJECTS_OF_${source} ${objects})
  endforeach()
endfunction()

# GoogleTest's filter for the suites of the test's own files.
function(lockstep_filter_of result program)
  set(patterns "")
  foreach(source IN LISTS T_SOURCES)
    get_filename_component(source ${source} ABSOLUTE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
    file(READ ${source} text)
    string(REGEX MATCHALL "(^|\n)(TYPED_)?TEST(_F|_P)?\\([A-Za-z0-9_]+" tests "${text}")
    list(TRANSFORM tests REPLACE "^.*\\(" "")
    list(REMOVE_DUPLICATES tests)
    foreach(suite IN LISTS tests)
      get_property(owner GLOBAL PROPERTY LOCKSTEP_SUITE_${program}_${suite})
      if(owner AND NOT owner STREQUAL name)
        message(FATAL_ERROR "${program}: suite ${suite} is in ${owner} and in ${name}: rename one of them")
      endif()
      set_property(GLOBAL PROPERTY LOCKSTEP_SUITE_${program}_${suite} ${name})
      list(APPEND patterns ${suite}.* ${suite}/* */${suite}.*)
    endforeach()
  endforeach()
  if(NOT patterns)
    message(FATAL_ERROR "lockstep_test(${name}): there is no test in ${T_SOURCES}: an entry that runs nothing would pass")
  endif()
  list(JOIN patterns ":" patterns)
  set(${result} "${patterns}" PARENT_SCOPE)
endfunction()

# NAME_test in software, NAME_test.lazy if asked for, and NAME_gpu_test.
function(lockstep_cuda_test_entries)
  lockstep_test_objects(cuda)
  foreach(kind soft gpu)
    lockstep_test_program(${kind} ${kind})
    lockstep_add_to_test_program(${${kind}})
    lockstep_filter_of(filter ${${kind}})
  endforeach()
  set(labels ${T_LABELS})
  if(NOT labels)
    set(labels unit)
  endif()
  add_test(NAME ${name}_test COMMAND ${soft} --gtest_filter=${filter})
  set_tests_properties(${name}_test PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${labels}" PROCESSORS 2
                                               FAIL_REGULAR_EXPRESSION "${LOCKSTEP_NO_TEST_RAN}")
  if(T_LAZY)
    # When streams run has nothing to do with where arrays lie, nor with how well 16 bits learn.
    add_test(NAME ${name}_test.lazy COMMAND ${soft} --gtest_filter=${filter}:-*_misaligned:*.LearnsIn*)
    set_tests_properties(${name}_test.lazy PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${labels}" PROCESSORS 2
                                                      FAIL_REGULAR_EXPRESSION "${LOCKSTEP_NO_TEST_RAN}"
                                                      ENVIRONMENT LOCKSTEP_SOFT_STREAMS=lazy)
  endif()
  add_test(NAME ${name}_gpu_test COMMAND ${gpu} --gtest_filter=${filter})
  set_tests_properties(${name}_gpu_test PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS};gpu" SKIP_RETURN_CODE 77
                                                   RUN_SERIAL TRUE FAIL_REGULAR_EXPRESSION "${LOCKSTEP_NO_TEST_RAN}"
                                                   ENVIRONMENT XDG_CACHE_HOME=${PROJECT_BINARY_DIR}/tests/cache)
endfunction()

# One entry for each number of ranks, kind of group and test that is alone.
function(lockstep_ranks_entries)
  # run_ranks gives up first, and cleans up; what ctest kills cannot.
  math(EXPR limit "${T_TIMEOUT} - 10")
  if(NOT T_LABELS)
    set(T_LABELS ranks)
  endif()
  if(NOT T_GROUPS)
    set(T_GROUPS inline)
  endif()
  if(NOT T_ALONE)
    set(T_ALONE "*")
  endif()
  set(runs ${T_ALSO})
  foreach(n IN LISTS T_RANKS)
    foreach(kind IN LISTS T_GROUPS)
      list(APPEND runs ${n}:${kind})
    endforeach()
  endforeach()
  if(T_NIGHTLY_ALSO)
    list(REMOVE_ITEM T_NIGHTLY_ALSO ${runs})
  endif()
  foreach(run IN LISTS runs T_NIGHTLY_ALSO)
    string(REGEX MATCH "^([0-9]+):(.*)$" matched ${run})
    set(n ${CMAKE_MATCH_1})
    foreach(kind IN ITEMS ${CMAKE_MATCH_2})
      if(n GREATER 1 AND NOT LOCKSTEP_HAVE_MPI AND NOT kind MATCHES "^(tcp|hosts[1-9x](-thread|-encrypt)?)$")
        continue()
      endif()
      if(n EQUAL 1 AND NOT kind STREQUAL "inline")
        continue()  # a world of one has nothing to move on
      endif()
      set(processors ${n})
      set(environment "LOCKSTEP_TEST_GROUP=${kind};LOCKSTEP_TEST_TIMEOUT=${limit}")
      if(T_LATE)
        list(APPEND environment LOCKSTEP_SOFT_STREAMS=late)
      endif()
      if("fault" IN_LIST T_LABELS)
        set(processors 1)
        if(n GREATER 1 AND kind MATCHES "^(inline|thread)$|-mpi$")
          set(processors 2)  # MPI's ranks wait for each other by asking again and again
        endif()
      endif()
      foreach(test IN LISTS T_ALONE)
        set(entry ${name}.np${n})
        set(chosen ${test})
        if(test STREQUAL "*")
          set(chosen ${filter})
        else()
          string(APPEND entry .${test})
        endif()
        if(NOT kind STREQUAL "inline")
          string(APPEND entry .${kind})
        endif()
        add_test(NAME ${entry}
                 COMMAND ${PROJECT_SOURCE_DIR}/tests/support/run_ranks ${n} $<TARGET_FILE:${program}>
                         --gtest_filter=${chosen})
        set_tests_properties(${entry} PROPERTIES TIMEOUT ${T_TIMEOUT} LABELS "${T_LABELS}" PROCESSORS ${processors}
                                                 FAIL_REGULAR_EXPRESSION "${LOCKSTEP_NO_TEST_RAN}"
                                                 ENVIRONMENT "${environment}")
        if(T_GPU)
          set_tests_properties(${entry} PROPERTIES SKIP_RETURN_CODE 77)
        endif()
        if(T_GPU OR T_SERIAL)
          set_tests_properties(${entry} PROPERTIES RUN_SERIAL TRUE)
        endif()
        set(tier ${T_TIER})
        if(run IN_LIST T_NIGHTLY_ALSO)
          set(tier nightly)
        elseif(NOT tier AND T_LABELS STREQUAL "ranks" AND NOT T_SOFT_CUDA AND run MATCHES "^(1:inline|2:shm)$")
          set(tier quick)
        endif()
        lockstep_tier("${tier}" ${entry} TARGETS ${program})
      endforeach()
    endforeach()
  endforeach()
endfunction()

# lockstep_test_headers() makes what all tests share: headers that nearly all of them include, compiled before. Without
# optimization tests compile in two thirds of the time, and most compute little. A directory whose tests compute more sets
# LOCKSTEP_TESTS_COMPUTE: without optimization they would take four times as long.
function(lockstep_test_headers)
  foreach(kind IN ITEMS "" computing_)
    # A program, not a library: where those are position-independent in another way, so are their headers.
    set(target lockstep_${kind}test_headers)
    add_executable(${target} EXCLUDE_FROM_ALL support/headers.cpp)
    set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    target_link_libraries(${target} PRIVATE lockstep::base GTest::gtest GTest::gmock)
    target_compile_options(${target} PRIVATE ${LOCKSTEP_PRECOMPILED_OPTIONS})
    if(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:$<IF:$<BOOL:${kind}>,-O1,-O0>>)
    endif()
    target_precompile_headers(${target} PRIVATE <gmock/gmock.h> <gtest/gtest.h> <nlohmann/json.hpp> ${LOCKSTEP_COMMON_HEADERS})
  endforeach()
endfunction()

# lockstep_test_options(TARGET): it reads those headers, and is compiled as they are.
function(lockstep_test_options target)
  set(headers lockstep_test_headers)
  if(LOCKSTEP_TESTS_COMPUTE)
    set(headers lockstep_computing_test_headers)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${headers})
  target_compile_options(${target} PRIVATE $<TARGET_PROPERTY:${headers},COMPILE_OPTIONS>)
endfunction()
