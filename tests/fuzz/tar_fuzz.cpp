// Archives of images, in whatever bytes.
#include <cstdio>
#include <cstring>
#include <vector>

#include "data/images.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Headers' checksums are made right, so that what comes after them is reached.
  std::vector<std::uint8_t> archive(data, data + size);
  for (std::size_t at = 0; at + 512 <= size; at += 512) {
    std::uint8_t* const header = archive.data() + at;
    if (std::memcmp(header + 257, "ustar", 5) != 0) continue;
    std::memset(header + 148, ' ', 8);
    unsigned sum = 0;
    for (std::size_t i = 0; i < 512; ++i) sum += header[i];
    char digits[8];
    std::snprintf(digits, sizeof digits, "%06o", sum);
    std::memcpy(header + 148, digits, 7);
  }
  const std::string path = lockstep::fuzz::file_of(archive.data(), size);
  return lockstep::fuzz::parse([&] {
    const auto splits = lockstep::data::open_tar(path, {.parts = {.whole = true}});
    std::vector<std::byte> bytes;
    splits.whole->append_source(0, bytes);
    splits.whole->append_source(splits.whole->size() - 1, bytes);
  });
}
