// Ranks that divide a machine among them, and ranks by their values: beside what programs see of this.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "devices/binding.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/agree.h"

namespace lockstep::comm {

/// devices::bind_to_share() among the ranks of `group`; collective.
devices::Binding bind_to_share(ProcessGroup& group, const EnvLookup& lookup = env,
                               const devices::Locality& device = {});

/// Groups ranks by their values.
struct Division {
  std::vector<int> most;    // ranks with the value that most have; of several such values, the lowest rank's
  std::vector<int> others;  // empty: all are equal
  /// Whether more than half of the ranks are `most`: then the others are the odd ones.
  bool has_majority() const { return most.size() > others.size(); }
};
Division divide(std::span<const std::uint64_t> values);

/// "rank 3", "ranks 1, 2, 5", "ranks 0, …, 7 and 56 more".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace lockstep::comm
