// What is to go wrong in a rank, where and when: from the environment, for tests of how a job ends.
#pragma once

#include <cstdint>

namespace lockstep::faults {

/// Where a rank is; by the same names in small letters below.
enum class Place : std::uint8_t {
  kMain,        // the process begins
  kStart,       // data sets are opened: the ranks are connected
  kData,        // a sample is read, by the loader's thread
  kForward,     // of training
  kBackward,    // the gradient has come to the last layers
  kEvaluation,  // a forward pass of it
  kCheckpoint,  // of a checkpoint rank 0's weights, or another rank's part, are flushed, by the writer's thread
  kSave,        // the file of --save is flushed
  kExit,        // the work is done and reported, and the process ends
};

/// LOCKSTEP_TEST_FAULT="rank=1 at=forward count=12 do=kill" makes rank 1 kill itself when it comes to its twelfth
/// forward pass. `count` is 1 where it is not given; `attempt` is 0, the first of a job that is started again, and -1
/// stands for each. What is done:
///
///   kill, stop, segv   the signal of this name, to itself
///   throw              an exception that nobody knows; bad-data: an IoError
///   loop               for ever
///   exit0              at once, with code 0
///   eat                memory, until there is no more
///   hold               waits until the file `go` is there
///   eio, slow          a flush fails; takes half a second, from now on
///
/// LOCKSTEP_TEST_FAULT_DIR names a directory, in which a file `reached` says that the rank is there, and
/// since when, in milliseconds since 1970.
///
/// Called at each of these places, by any thread. Whether the flush that it is called in fails.
bool reach(Place place);

}  // namespace lockstep::faults
