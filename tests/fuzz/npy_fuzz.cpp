// NumPy arrays, in whatever bytes: as samples and as targets.
#include "data/npy.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = lockstep::fuzz::file_of(data, size);
  return lockstep::fuzz::parse([&] {
    const auto splits =
        lockstep::data::open_npy(path + "," + path, {.settings = {{"channels", ""}}, .parts = {.whole = true}});
    std::vector<std::byte> bytes;
    splits.whole->append_source(0, bytes);
    splits.whole->append_source(splits.whole->size() - 1, bytes);
  });
}
