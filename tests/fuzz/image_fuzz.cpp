// Headers, decoding and resampling. Sizes are kept small: what is looked for is not how much memory there is.
#include <cmath>

#include "data/resample.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::data;
  return lockstep::fuzz::parse([&] {
    static ImageDecoder decoder(1 << 18);
    static Resampler resampler;
    const ImageSize whole = decoder.open(std::as_bytes(std::span(data, size)));
    constexpr int kSide = 8;
    float out[kSide * kSide * 3];
    const Resampling view = size % 2 == 0 ? evaluation_view(whole, kSide) : training_view(whole, kSide, size);
    const ImageView image = decoder.decode(size % 2 == 0 ? 8 : eighths_for(view));
    resampler.run(image, for_decoded(view, whole, image.size), kImageNet, out);
    for (const float v : out)
      if (!std::isfinite(v) || std::abs(v) > 3) std::abort();
  });
}
