// How a measurement is printed.
#pragma once

#include <cstdint>

namespace lockstep::bench {

enum class Format : std::uint8_t { kTable, kCsv, kJson };

}  // namespace lockstep::bench
