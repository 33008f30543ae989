// Data for who names none.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::bench {

/// `samples` random samples of the size that a model is known for: what --data takes.
std::string made_up_data(const std::string& model, std::int64_t samples);

}  // namespace lockstep::bench
