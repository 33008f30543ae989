// What weights files say of their model: what is read is written so that it is read the same.
#include "checkpoint/model_metadata.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::checkpoint;
  return lockstep::fuzz::parse([&] {
    const auto metadata =
        find_model_metadata({{"lockstep", std::string(lockstep::fuzz::text_of(data, size))}}, "input");
    const auto written = metadata_of(*metadata);
    if (metadata_of(*find_model_metadata(written, "input")) != written) std::abort();
  });
}
