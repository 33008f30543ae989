#include "data/content_reader.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = lockstep::fuzz::file_of(data, size);
  const int dimensions = size > 3 && data[3] >= 1 && data[3] <= 4 ? data[3] : 3;
  return lockstep::fuzz::parse([&] { lockstep::data::read_idx(path, dimensions); });
}
