// Single kernels on one thread (Google Benchmark): what a step is made of.
//   build/micro --benchmark_filter=Conv
#include <benchmark/benchmark.h>

#include <vector>

#include "base/aead.h"
#include "base/hash.h"
#include "comm/reduce.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/sampler/permutation.h"
#include "nn/ops/update_rules.h"

namespace {

using namespace lockstep;

// Google Benchmark prints them by these names.
// NOLINTBEGIN(readability-identifier-naming)
void Permute(benchmark::State& state) {
  const sampler::Permutation permutation(static_cast<std::uint64_t>(state.range(0)), 1, 0);
  std::uint64_t i = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(permutation(i));
    if (++i == static_cast<std::uint64_t>(state.range(0))) i = 0;
  }
}
BENCHMARK(Permute)->Arg(1437)->Arg(60'000)->Arg(1'000'000'000);

// Some ranks' parts of a bucket into the first of them, or into all: type, sources, bytes of each.
void Reduce(benchmark::State& state, bool into_all) {
  const auto dtype = static_cast<DType>(state.range(0));
  const auto bytes = static_cast<std::size_t>(state.range(2));
  std::vector<std::vector<std::byte>> parts(static_cast<std::size_t>(state.range(1)), std::vector<std::byte>(bytes));
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> copies;
  for (auto& part : parts) {
    sources.push_back(part.data());
    copies.push_back(part.data());
  }
  const std::size_t count = bytes / size_of(dtype);
  for (auto _ : state) {
    if (into_all)
      comm::reduce_into_all(dtype, comm::ReduceOp::kSum, copies, count);
    else
      comm::reduce_in_order(dtype, comm::ReduceOp::kSum, copies[0], sources, count);
  }
  const auto moved = bytes * (sources.size() + (into_all ? copies.size() : 1));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(moved));
  state.SetLabel(name_of(dtype));
}
const std::vector<std::vector<std::int64_t>> kReductions = {
    {static_cast<std::int64_t>(DType::kF32), static_cast<std::int64_t>(DType::kBF16)},
    {2, 4},
    {4 << 10, 256 << 10, 4 << 20, 48 << 20}};
BENCHMARK_CAPTURE(Reduce, IntoOne, false)->ArgsProduct(kReductions)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Reduce, IntoAll, true)->ArgsProduct(kReductions)->Unit(benchmark::kMicrosecond);

// What a core moves by itself, as STREAM measures it: the yardstick for reductions.
void Scale(benchmark::State& state) {
  std::vector<float> values(static_cast<std::size_t>(state.range(0)) / sizeof(float), 1.0f);
  for (auto _ : state) {
    for (float& value : values) value *= 0.5f;
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * 2);
}
BENCHMARK(Scale)->Arg(4 << 10)->Arg(8 << 20)->Arg(96 << 20)->Unit(benchmark::kMicrosecond);

// What a frame between hosts costs beside the copy: method, bytes.
void Crc32c(benchmark::State& state) {
  const auto method = static_cast<Crc32cMethod>(state.range(0));
  if (!crc32c_has(method)) return state.SkipWithError("this CPU lacks it");
  const std::vector<std::byte> bytes(static_cast<std::size_t>(state.range(1)), std::byte{1});
  for (auto _ : state) benchmark::DoNotOptimize(crc32c_by(method, bytes));
  state.SetBytesProcessed(state.iterations() * state.range(1));
}
BENCHMARK(Crc32c)->ArgsProduct({{0, 1, 2}, {72, 128 << 10, 96 << 20}})->Unit(benchmark::kMicrosecond);

// What takes its place with --encrypt: 0 seals into another buffer, as a sender does, 1 opens in place; bytes.
void AeadFrame(benchmark::State& state) {
  const bool opens = state.range(0) == 1;
  Aead cipher(opens ? Aead::Use::kOpens : Aead::Use::kSeals, std::string(Aead::kKeyBytes, 'k'));
  std::vector<std::byte> bytes(static_cast<std::size_t>(state.range(1)), std::byte{1}), staging(bytes.size());
  std::byte tag[Aead::kTagBytes] = {};
  for (auto _ : state) {
    cipher.begin();
    cipher.process(bytes, opens ? bytes.data() : staging.data());
    if (opens)
      benchmark::DoNotOptimize(cipher.open(tag));  // it is none: that takes as long
    else
      cipher.seal(tag);
  }
  state.SetBytesProcessed(state.iterations() * state.range(1));
}
BENCHMARK(AeadFrame)->Name("Aead")->ArgsProduct({{0, 1}, {96, 128 << 10, 96 << 20}})->Unit(benchmark::kMicrosecond);

// Forward and backward of one layer on a batch of 64.
void LayerStep(benchmark::State& state, const nn::Shape& shape,
               std::unique_ptr<nn::Module> (*make)(nn::Context& context)) {
  const auto backend = nn::make_cpu_backend(1);
  nn::Generator generator(1);
  nn::Context context{*backend, generator};
  const auto layer = make(context);
  const nn::Tensor x = backend->empty(shape);
  generator.uniform(x.span<float>(), -1.0, 1.0);
  nn::Tape tape(*backend);
  nn::Tensor target;
  for (auto _ : state) {
    for (const auto& [name, parameter] : layer->named_parameters()) parameter->clear_grad();
    const nn::Var y = layer->forward(tape, tape.differentiable_input(x));
    if (!target.defined()) target = backend->zeros(y.shape());
    tape.backward(nn::squared_error(tape, y, target, 1.0f).value);
    tape.reset();
  }
  state.SetItemsProcessed(state.iterations() * shape[0]);
}

constexpr nn::Window kSame3x3 = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};

BENCHMARK_CAPTURE(LayerStep, Linear1024, nn::Shape{64, 1024}, [](nn::Context& context) -> std::unique_ptr<nn::Module> {
  return std::make_unique<nn::Linear>(context, 1024, 1024);
})->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(LayerStep, Conv32To64, nn::Shape{64, 14, 14, 32},
                  [](nn::Context& context) -> std::unique_ptr<nn::Module> {
                    return std::make_unique<nn::Conv2d>(context, 32, 64, kSame3x3);
                  })
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(LayerStep, BatchNorm64, nn::Shape{64, 14, 14, 64},
                  [](nn::Context& context) -> std::unique_ptr<nn::Module> {
                    return std::make_unique<nn::BatchNorm>(context, 64);
                  })
    ->Unit(benchmark::kMicrosecond);

// Linear layers of N to N features on as many samples, forward: the rate of products that a training step can hope for.
void Product(benchmark::State& state) {
  const auto backend = nn::make_cpu_backend(1);
  nn::Generator generator(1);
  nn::Context context{*backend, generator};
  const std::int64_t n = state.range(0);
  nn::Linear layer(context, n, n);
  const nn::Tensor x = backend->empty({n, n});
  generator.uniform(x.span<float>(), -1.0, 1.0);
  nn::Tape tape(*backend);
  tape.set_recording(false);
  for (auto _ : state) {
    layer.forward(tape, tape.input(x));
    tape.reset();
  }
  const auto flops = 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
  state.counters["FLOP/s"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(Product)->Arg(512)->Arg(1024)->Arg(2048)->Unit(benchmark::kMicrosecond);

void AdamW(benchmark::State& state) {
  const auto backend = nn::make_cpu_backend(1);
  const nn::Tensor p = backend->zeros({state.range(0)}), g = backend->zeros({state.range(0)});
  const nn::Tensor m = backend->zeros({state.range(0)}), v = backend->zeros({state.range(0)});
  const nn::Tensor control = backend->empty({nn::StepControl::kSize});
  backend->pointwise().fill(control, 1.0f);
  const nn::UpdateArrays arrays = {
      .count = p.count(), .gradient = g.f32(), .parameter = p.f32(), .first = m.f32(), .second = v.f32()};
  const auto rule = nn::AdamWRule::of(0.999, 1e-8);
  for (auto _ : state) backend->optim().update(rule, control, std::span(&arrays, 1), {});
  state.SetBytesProcessed(state.iterations() * state.range(0) * 7 * static_cast<std::int64_t>(sizeof(float)));
}
BENCHMARK(AdamW)->Arg(1 << 20)->Unit(benchmark::kMicrosecond);

// NOLINTEND(readability-identifier-naming)

}  // namespace

BENCHMARK_MAIN();
