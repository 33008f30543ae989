// A GPU's kernels by themselves, without a backend: its memory, values that go there and back, and how closely results
// must agree with the CPU's.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/nn/ops/backend.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/product.h"
#include "tests/nn/values.h"

namespace lockstep::nn::testing {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class DeviceMemory final : public MemorySource {
 public:
  std::byte* allocate(std::size_t bytes) override {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
    return static_cast<std::byte*>(data);
  }
  void free(std::byte* data, std::size_t) noexcept override { cudaFree(data); }
};

/// The type of activations, and how many elements after an aligned address they begin.
struct DeviceCase {
  DType dtype = DType::kF32;
  int offset = 0;
};
inline std::string name_of_case(const ::testing::TestParamInfo<DeviceCase>& info) {
  return std::string(name_of(info.param.dtype)) + (info.param.offset > 0 ? "_misaligned" : "");
}
inline const auto kDeviceCases =
    ::testing::Values(DeviceCase{DType::kF32, 0}, DeviceCase{DType::kF32, 1}, DeviceCase{DType::kBF16, 0},
                      DeviceCase{DType::kBF16, 1}, DeviceCase{DType::kF16, 0}, DeviceCase{DType::kF16, 1});

/// As a tensor of `dtype` has it.
inline float as_rounded(float value, DType dtype) {
  if (dtype == DType::kBF16) return BFloat16::from_float(value).to_float();
  return dtype == DType::kF16 ? Float16::from_float(value).to_float() : value;
}
/// The bits of `value` in a type of 16.
inline std::uint16_t half_bits(float value, DType dtype) {
  return dtype == DType::kF16 ? Float16::from_float(value).bits : BFloat16::from_float(value).bits;
}
inline float float_of_half(std::uint16_t bits, DType dtype) {
  return dtype == DType::kF16 ? Float16{bits}.to_float() : BFloat16{bits}.to_float();
}
/// How much finer f16 is than bf16, for which tolerances are given: 3 more bits of mantissa.
inline double finer_than_bf16(DType dtype) { return dtype == DType::kF16 ? 0x1p-3 : 1.0; }

/// What a kernel writes: from poison on, or from the values of `initial` (on the host; f32 for bf16 and f16, too).
struct Output {
  Shape shape;
  DType dtype = DType::kF32;
  Tensor initial = {};
};

/// `ulps` units in the last place of f32 of `scale`, which is about the largest term of a result, or of the result if
/// that is larger. For results in bf16 2⁻⁸ of it is added, in f16 2⁻¹¹.
struct Tolerance {
  DType dtype = DType::kF32;
  double ulps = 4.0;
  double scale = 1.0;
};
/// The same numbers, as a result of the output's type has them.
constexpr Tolerance kSame = {.ulps = 0.0};

/// What a call takes that runs with the CPU's kernels and with CUDA's.
template <class T>
struct Both {
  T host, device;
};
using Operand = Both<Tensor>;
/// Which of the two a call takes: `at(x)`.
struct Side {
  bool on_device;
  template <class T>
  const T& operator()(const Both<T>& both) const {
    return on_device ? both.device : both.host;
  }
};

inline void expect_close(const Tensor& expected, const Tensor& actual, const Tolerance& tolerance,
                         const Tensor& rounded_before = {});
inline void expect_same(const Tensor& expected, const Tensor& actual);

class DeviceTest : public ::testing::TestWithParam<DeviceCase> {
 protected:
  DType type() const { return GetParam().dtype; }

  /// Activations: f32 values on the host, of which bf16 or f16 has exact copies where that is the type.
  Tensor random(const Shape& shape, std::uint64_t seed) { return rounded(random_tensor(*cpu, shape, seed)); }
  Tensor rounded(const Tensor& host) {
    for (float& v : host.span<float>()) v = as_rounded(v, type());
    return host;
  }
  Tensor activation(const Tensor& host) { return on_device(host, type(), GetParam().offset); }
  Output activation_like(const Shape& shape, const Tensor& initial = {}) { return {shape, type(), initial}; }
  /// Statistics, parameters, labels…: always aligned, as the host has them.
  Tensor plain(const Tensor& host) { return on_device(host, host.dtype(), 0); }

  Tensor on_device(const Tensor& host, DType dtype, int offset) {
    const std::int64_t count = host.count();
    const Tensor made =
        Tensor::empty(allocator, {count + offset}, dtype).slice(offset, count + offset).reshaped(host.shape());
    upload(host, made);
    return made;
  }

  /// Runs `call` with these outputs, which lie between guards that must stay as they are, and once more: it must leave
  /// the same bits. They come back on the host, bf16 and f16 as f32. Those of the activations' type lie where the case
  /// says.
  std::vector<Tensor> results(const std::vector<Output>& outputs,
                              const std::function<void(const std::vector<Tensor>&)>& call) {
    std::vector<std::vector<std::byte>> first, second;
    run(outputs, call, first);
    run(outputs, call, second);
    std::vector<Tensor> made;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(first[i] == second[i]) << "output " << i << " has other bits the second time";
      made.push_back(on_host(first[i], outputs[i]));
    }
    return made;
  }

  Operand activations(const Tensor& host) { return {host, host.defined() ? activation(host) : Tensor()}; }
  Operand plains(const Tensor& host) { return {host, host.defined() ? plain(host) : Tensor()}; }

  struct OfBoth {
    std::vector<Tensor> expected, got;
  };
  /// Runs `call(kernels, at, out)` with the CPU's kernels, and with the device's as results() does, on outputs that
  /// begin alike. Each output must be as close as its tolerance says; those without one are returned only. `over`: the
  /// device also computes with output 0 in this operand's place, and must come to the same numbers.
  template <class Kernels, class Call>
  OfBoth compare(Kernels& on_cpu, Kernels& on_device, const std::vector<Output>& outputs,
                 const std::vector<Tolerance>& tolerances, const Call& call, Operand* over = nullptr) {
    OfBoth both;
    for (const Output& output : outputs) {
      both.expected.push_back(cpu->empty(output.shape, is_half(output.dtype) ? DType::kF32 : output.dtype));
      const Tensor& made = both.expected.back();
      if (output.initial.defined()) std::memcpy(made.raw(), output.initial.raw(), made.bytes());
    }
    call(on_cpu, Side{false}, both.expected);
    both.got = results(outputs, [&](const std::vector<Tensor>& out) { call(on_device, Side{true}, out); });
    for (std::size_t i = 0; i < tolerances.size(); ++i) {
      SCOPED_TRACE(fmt::format("output {}", i));
      if (both.expected[i].dtype() != DType::kF32) {
        EXPECT_EQ(std::memcmp(both.expected[i].raw(), both.got[i].raw(), both.got[i].bytes()), 0);
        continue;
      }
      if (tolerances[i].ulps == 0.0 && is_half(outputs[i].dtype)) rounded(both.expected[i]);
      expect_close(both.expected[i], both.got[i], tolerances[i]);
    }
    if (over == nullptr) return both;
    std::vector<Output> in_place = outputs;
    in_place[0].initial = over->host;
    const Tensor apart = over->device;
    const auto again = results(in_place, [&](const std::vector<Tensor>& out) {
      over->device = out[0];
      call(on_device, Side{true}, out);
    });
    over->device = apart;
    for (std::size_t i = 0; i < again.size(); ++i) {
      SCOPED_TRACE(fmt::format("output {}, in place", i));
      expect_same(both.got[i], again[i]);
    }
    return both;
  }

  void upload(const Tensor& host, const Tensor& device) {
    std::vector<std::byte> bytes(device.bytes());
    if (bytes.empty()) return;
    if (host.dtype() == device.dtype())
      std::copy_n(static_cast<const std::byte*>(host.raw()), bytes.size(), bytes.begin());
    else
      std::transform(host.f32(), host.f32() + host.count(), reinterpret_cast<std::uint16_t*>(bytes.data()),
                     [&](float value) { return half_bits(value, device.dtype()); });
    check_cuda(cudaMemcpyAsync(device.raw(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream.get()),
               "upload");
    stream.synchronize();
  }
  std::vector<std::byte> download(const Tensor& device) {
    std::vector<std::byte> bytes(device.bytes());
    if (bytes.empty()) return bytes;
    check_cuda(cudaMemcpyAsync(bytes.data(), device.raw_rows(), bytes.size(), cudaMemcpyDeviceToHost, stream.get()),
               "download");
    stream.synchronize();
    return bytes;
  }

  /// Rows of the activations' type as a backend lays out logits (Note [Pitch]), with poison between them.
  Tensor apart(const Tensor& host) {
    const std::int64_t columns = host.size(host.shape().size() - 1), rows = host.count() / columns;
    const auto element = static_cast<std::int64_t>(size_of(type()));
    const Tensor made = Tensor::empty(allocator, host.shape(), type(), cuda::pitch_of_rows(columns, element));
    std::vector<std::byte> bytes(made.bytes(), kPoison);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) {
        const float value = host.f32()[r * columns + c];
        const std::uint16_t half = half_bits(value, type());
        std::memcpy(bytes.data() + (r * made.pitch() + c) * element,
                    is_half(type()) ? static_cast<const void*>(&half) : &value, size_of(type()));
      }
    check_cuda(cudaMemcpyAsync(made.raw_rows(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream.get()),
               "upload");
    stream.synchronize();
    return made;
  }
  Tensor apart_like(const Shape& shape) { return apart(cpu->zeros(shape)); }
  /// On the host, as f32. Between the rows must be as it was, or such bytes; or nothing in particular.
  Tensor joined(const Tensor& apart, std::optional<std::byte> between = kPoison) {
    const auto bytes = download(apart);
    const std::int64_t columns = apart.size(apart.shape().size() - 1);
    const auto element = static_cast<std::int64_t>(size_of(type()));
    std::vector<std::byte> rows;
    for (std::int64_t at = 0; at < std::ssize(bytes); at += apart.pitch() * element) {
      const auto row = bytes.begin() + at, end = row + columns * element, next = row + apart.pitch() * element;
      rows.insert(rows.end(), row, end);
      EXPECT_TRUE(!between || std::all_of(end, next, [&](std::byte value) { return value == *between; }))
          << "written between rows";
    }
    return on_host(rows, activation_like(apart.shape()));
  }

  static constexpr std::byte kPoison{0xff};

  /// What was downloaded of an output: bf16 and f16 as f32.
  Tensor on_host(const std::vector<std::byte>& bytes, const Output& output) {
    const bool widen = is_half(output.dtype);
    const Tensor made = cpu->empty(output.shape, widen ? DType::kF32 : output.dtype);
    if (widen) {
      const auto* const from = reinterpret_cast<const std::uint16_t*>(bytes.data());
      for (std::int64_t i = 0; i < made.count(); ++i) made.f32()[i] = float_of_half(from[i], output.dtype);
    } else {
      std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(made.raw()));
    }
    return made;
  }

  std::unique_ptr<Backend> cpu = make_cpu_backend(1);
  CudaStream stream;
  CachingAllocator allocator{std::make_unique<DeviceMemory>()};
  cuda::Context context{.device = 0, .stream = stream.view(), .allocator = allocator};

 private:
  static constexpr std::int64_t kGuard = 64;  // elements; a multiple of 16 bytes of all types

  void run(const std::vector<Output>& outputs, const std::function<void(const std::vector<Tensor>&)>& call,
           std::vector<std::vector<std::byte>>& contents) {
    std::vector<Tensor> whole, inner;
    for (const Output& output : outputs) {
      const std::int64_t begin = kGuard + (output.dtype == type() ? GetParam().offset : 0);
      const std::int64_t end = begin + output.shape.count();
      whole.push_back(Tensor::empty(allocator, {end + kGuard}, output.dtype));
      check_cuda(cudaMemsetAsync(whole.back().raw(), 0xff, whole.back().bytes(), stream.get()), "poison");
      inner.push_back(whole.back().slice(begin, end).reshaped(output.shape));
      if (output.initial.defined()) upload(output.initial, inner.back());
    }
    call(inner);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto bytes = download(whole[i]);
      const auto begin =
          bytes.begin() + (static_cast<std::byte*>(inner[i].raw()) - static_cast<std::byte*>(whole[i].raw()));
      const auto end = begin + static_cast<std::ptrdiff_t>(inner[i].bytes());
      const auto untouched = [](std::byte value) { return value == std::byte{0xff}; };
      EXPECT_TRUE(std::all_of(bytes.begin(), begin, untouched)) << "written before output " << i;
      EXPECT_TRUE(std::all_of(end, bytes.end(), untouched)) << "written after output " << i;
      contents.emplace_back(begin, end);
    }
  }
};

/// For reports: what the test that runs tolerates, and its largest error as a share of that.
inline void note_error(const Tolerance& tolerance, double share) {
  static const ::testing::TestInfo* noted = nullptr;
  static double largest = 0.0;
  const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (std::exchange(noted, test) != test) largest = -1.0;
  if (share <= largest) return;
  largest = share;
  const bool half = is_half(tolerance.dtype);
  ::testing::Test::RecordProperty("tolerance",
                                  tolerance.ulps == 0.0 && !half
                                      ? std::string("none")
                                      : fmt::format("{:.3g} ulp of {:.3g}{}", tolerance.ulps, tolerance.scale,
                                                    !half                             ? ""
                                                    : tolerance.dtype == DType::kBF16 ? ", and 2⁻⁸"
                                                                                      : ", and 2⁻¹¹"));
  ::testing::Test::RecordProperty("largest_error", fmt::format("{:.2g}", share));
}

/// What may be between `expected` and a result. `rounded_before`: the size of all values that a kernel may round to
/// `dtype` before it has its result, each times what the result changes by with it.
inline double most_off(const Tolerance& tolerance, double expected, double rounded_before = 0.0) {
  const double relative = is_half(tolerance.dtype) ? 0x1p-8 * finer_than_bf16(tolerance.dtype) : 0.0;
  return relative * (std::abs(expected) + (1.0 + relative) * rounded_before) +
         tolerance.ulps * 0x1p-23 * std::max(tolerance.scale, std::abs(expected));
}

/// The element that is off by the largest share of what it may be.
struct Deviation {
  double share = 0.0;
  std::int64_t element = 0;
  double expected = 0.0, actual = 0.0, most = 0.0;
};
/// NaN where NaN is expected, infinity where infinity is, or where f16 ends; otherwise the share is infinite.
/// `rounded_before`: as above for each element; undefined: nothing is.
inline Deviation largest_deviation(const Tensor& expected, const Tensor& actual, const Tolerance& tolerance,
                                   const Tensor& rounded_before = {}) {
  Deviation largest;
  for (std::int64_t i = 0; i < expected.count(); ++i) {
    const bool ends = tolerance.dtype == DType::kF16 && std::isinf(as_rounded(expected.f32()[i], DType::kF16));
    const auto e = static_cast<double>(ends ? as_rounded(expected.f32()[i], DType::kF16) : expected.f32()[i]);
    const auto a = static_cast<double>(actual.f32()[i]);
    if ((std::isnan(e) && std::isnan(a)) || (std::isinf(e) && a == e)) continue;
    const double before = rounded_before.defined() ? static_cast<double>(rounded_before.f32()[i]) : 0.0;
    const double most = most_off(tolerance, e, before), off = std::abs(e - a);
    const double share = !std::isfinite(off) ? std::numeric_limits<double>::infinity() : off == 0.0 ? 0.0 : off / most;
    if (share > largest.share) largest = {share, i, e, a, most};
  }
  return largest;
}

inline void expect_close(const Tensor& expected, const Tensor& actual, const Tolerance& tolerance,
                         const Tensor& rounded_before) {
  ASSERT_EQ(expected.count(), actual.count());
  const Deviation largest = largest_deviation(expected, actual, tolerance, rounded_before);
  ASSERT_LE(largest.share, 1.0) << "element " << largest.element << " is " << largest.actual << ", expected "
                                << largest.expected << " ± " << largest.most;
  note_error(tolerance, largest.share);
}

/// The same numbers; of NaN any.
inline void expect_same(const Tensor& expected, const Tensor& actual) { expect_close(expected, actual, {.ulps = 0.0}); }

}  // namespace lockstep::nn::testing
