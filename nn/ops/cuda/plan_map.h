// What plans are kept and looked up by.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace lockstep::nn::cuda {

/// Sizes and options as a fixed array of numbers: looking one up allocates nothing.
using PlanKey = std::array<std::int64_t, 24>;

struct PlanKeyHash {
  std::size_t operator()(const PlanKey& key) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15ull;
    for (const std::int64_t part : key) {
      hash ^= static_cast<std::uint64_t>(part);
      hash *= 0xff51afd7ed558ccdull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

template <class Plan>
using PlanMap = std::unordered_map<PlanKey, Plan, PlanKeyHash>;

/// The plan for `key`, made by make_it() when it is asked for first.
template <class Plan, class Make>
Plan& find(PlanMap<Plan>& plans, const PlanKey& key, const Make& make_it) {
  const auto at = plans.find(key);
  return at != plans.end() ? at->second : plans.emplace(key, make_it()).first->second;
}

}  // namespace lockstep::nn::cuda
