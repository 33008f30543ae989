// What a data worker does with a photograph: decoding, resampling, both. A JPEG of 500 × 375, as ImageNet's are on
// average; bench/peers/torch/read_images.py does the same with Pillow and torchvision.
#include <benchmark/benchmark.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "data/resample.h"
#include "lockstep/data/open.h"

namespace {

using namespace lockstep;

constexpr int kWidth = 500, kHeight = 375, kSize = data::kDefaultImageSize;

// Waves and some noise: about as many bytes as a photograph of this size, at quality 90.
std::vector<std::byte> make_jpeg() {
  std::vector<std::uint8_t> pixels;
  for (int y = 0; y < kHeight; ++y)
    for (int x = 0; x < kWidth; ++x)
      for (int c = 0; c < 3; ++c) {
        const auto place = static_cast<std::uint64_t>(y * kWidth + x);
        const double noise = static_cast<double>(mix64(place) % 33) - 16;
        const double wave = 60 * std::sin(x / 17.0 + c) + 40 * std::sin(y / 11.0 - x / 29.0);
        pixels.push_back(static_cast<std::uint8_t>(std::lround(std::clamp(128 + wave + noise, 0.0, 255.0))));
      }
  const tjhandle handle = tjInitCompress();
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  constexpr int kQuality = 90;
  if (tjCompress2(handle, pixels.data(), kWidth, 0, kHeight, TJPF_RGB, &bytes, &size, TJSAMP_420, kQuality, 0) != 0)
    throw std::runtime_error(tjGetErrorStr2(handle));
  const auto* const begin = reinterpret_cast<const std::byte*>(bytes);
  std::vector<std::byte> jpeg(begin, begin + size);
  tjFree(bytes);
  tjDestroy(handle);
  return jpeg;
}

const std::vector<std::byte>& jpeg() {
  static const auto kJpeg = make_jpeg();
  return kJpeg;
}

void count(benchmark::State& state) {
  state.counters["images/s"] = benchmark::Counter(static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  state.SetLabel(std::to_string(jpeg().size()) + " bytes");
}

void DecodeJpeg(benchmark::State& state) {
  data::ImageDecoder decoder;
  for (auto _ : state) {
    decoder.open(jpeg());
    benchmark::DoNotOptimize(decoder.decode(static_cast<int>(state.range(0))).pixels);
  }
  count(state);
}
BENCHMARK(DecodeJpeg)->Arg(8)->Arg(4)->Unit(benchmark::kMicrosecond);

void Resample(benchmark::State& state, bool training) {
  data::ImageDecoder decoder;
  data::Resampler resampler;
  std::vector<float> out(std::size_t{kSize} * kSize * 3);
  decoder.open(jpeg());
  const data::ImageView image = decoder.decode();
  std::uint64_t draw = 0;
  for (auto _ : state) {
    const auto view =
        training ? data::training_view(image.size, kSize, mix64(draw++)) : data::evaluation_view(image.size, kSize);
    resampler.run(image, view, data::kImageNet, out);
    benchmark::ClobberMemory();
  }
  count(state);
}
BENCHMARK_CAPTURE(Resample, Evaluation, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Resample, Training, true)->Unit(benchmark::kMicrosecond);

// All that a worker does, but for opening the file.
void ReadImage(benchmark::State& state, bool training) {
  data::ImageDecoder decoder;
  data::Resampler resampler;
  std::vector<float> out(std::size_t{kSize} * kSize * 3);
  std::uint64_t draw = 0;
  for (auto _ : state) {
    const data::ImageSize whole = decoder.open(jpeg());
    const auto view = training ? data::training_view(whole, kSize, mix64(draw++)) : data::evaluation_view(whole, kSize);
    const data::ImageView image = decoder.decode(training ? data::eighths_for(view) : 8);
    resampler.run(image, data::for_decoded(view, whole, image.size), data::kImageNet, out);
    benchmark::ClobberMemory();
  }
  count(state);
}
BENCHMARK_CAPTURE(ReadImage, Evaluation, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(ReadImage, Training, true)->Unit(benchmark::kMicrosecond);

}  // namespace
