// Ranks that must come to the same conclusion.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// Runs `work` on every rank, and returns only if it succeeded on all of them; collective. If it failed, every rank
/// throws: the lowest failing rank its own error, as does a rank that failed with another text; the others (same text,
/// or no failure) throw PeerError with the code of the lowest failing rank. So a file that is bad for all ranks is
/// complained about once. `work` is called once, on the calling thread. It must issue no collectives: a rank that fails
/// would leave them. What it throws that is no Error has ExitCode::kDevice if it is std::bad_alloc, else kInternal.
void run_collectively(ProcessGroup& group, const std::function<void()>& work);

/// Element by element the largest of all ranks' values, on every rank: what all do together takes as long as on the
/// slowest one. Collective; all ranks pass equally many (else OutOfStepError).
std::vector<double> largest_of_ranks(ProcessGroup& group, std::span<const double> mine);

/// Names and values, in any order, that must be the same on every rank: build, instruction set, model, options. No name
/// is empty, and none of them has the characters 0x1e and 0x1f, which separate them on the way.
using Manifest = std::vector<std::pair<std::string, std::string>>;

/// Compares `mine` with rank 0's; collective. A difference is an OutOfStepError on the lowest rank that has one,
/// naming host, keys and both values, and a PeerError on all others.
void compare_manifests(ProcessGroup& group, const Manifest& mine);

}  // namespace lockstep::comm
