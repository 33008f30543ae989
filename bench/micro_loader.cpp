// Batches of rows and of photographs through the loader, beside bench/peers/torch/loader.py.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "base/file.h"
#include "lockstep/base/env.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"

namespace {

using namespace lockstep;

constexpr int kRows = 100'000, kNumbers = 16;

/// Of 16 numbers and two categories.
std::shared_ptr<const data::Dataset> rows_of_a_table() {
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("lockstep-micro-{}.csv", ::getpid())).string();
  std::string text;
  for (int i = 0; i < kNumbers; ++i) text += fmt::format("x{},", i);
  text += "kind,place,target\n";
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kNumbers; ++i) text += fmt::format("{},", (row * 31 + i * 17) % 1009);
    text += fmt::format("k{},p{},{}\n", row % 5, row % 97, row % 1013);
  }
  write_whole_file(path, text);
  auto splits = data::open_data("table:" + path);
  std::filesystem::remove(path);
  return splits.train;
}

// NOLINTBEGIN(readability-identifier-naming)
void LoadRows(benchmark::State& state) {
  static const auto dataset = rows_of_a_table();
  const auto batch = static_cast<std::uint64_t>(state.range(0));
  data::Loader loader(dataset,
                      sampler::DistributedSampler({.length = dataset->size(), .seed = 1, .global_batch = batch}, 0, 1),
                      {.workers = static_cast<int>(state.range(1))});
  std::uint64_t rows = 0;
  for (auto _ : state) rows += loader.next().count;
  state.SetItemsProcessed(static_cast<std::int64_t>(rows));
}
BENCHMARK(LoadRows)->ArgNames({"batch", "workers"})->ArgsProduct({{32, 256, 4096}, {0, 1}})->UseRealTime();

// A folder of JPEGs (images:DIR), which are cropped and mirrored at random, resampled to 224 x 224 and normalised:
// loader.py makes it, and names it to both. With what else `settings` ask for.
void load_images(benchmark::State& state, const Settings& settings) {
  const auto folder = env("MICRO_IMAGES");
  if (!folder) return state.SkipWithError("MICRO_IMAGES names no folder: see bench/peers/torch/loader.py");
  const auto dataset = data::open_data("images:" + *folder, {.settings = settings}).train;
  data::Loader loader(dataset,
                      sampler::DistributedSampler({.length = dataset->size(), .seed = 1, .global_batch = 32}, 0, 1),
                      {.workers = static_cast<int>(state.range(0))});
  std::uint64_t images = 0;
  for (auto _ : state) images += loader.next().count;
  state.SetItemsProcessed(static_cast<std::int64_t>(images));
}
void LoadImages(benchmark::State& state) { load_images(state, {}); }
BENCHMARK(LoadImages)->ArgName("workers")->Arg(0)->Arg(1)->UseRealTime();
void LoadMixedImages(benchmark::State& state) { load_images(state, {{"mixup", 0.2}, {"cutmix", 1.0}}); }
BENCHMARK(LoadMixedImages)->ArgName("workers")->Arg(0)->UseRealTime();
void LoadAugmentedImages(benchmark::State& state) { load_images(state, {{"randaugment", {2, 9}}}); }
BENCHMARK(LoadAugmentedImages)->ArgName("workers")->Arg(0)->UseRealTime();
// NOLINTEND(readability-identifier-naming)

}  // namespace
