#include "tests/parity/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/base/env.h"
#include "lockstep/nn/io/state.h"
#include "tests/parity/counter.h"

namespace lockstep::parity {

Golden::Golden(const std::string& name) {
  // Packed tests run elsewhere than they were built, where LOCKSTEP_TEST_SOURCE names the checkout
  // (scripts/pack-for-gpu).
  const std::string source = env("LOCKSTEP_TEST_SOURCE").value_or(LOCKSTEP_SOURCE_DIR);
  for (auto& tensor : nn::read_safetensors(source + "/tests/parity/golden/" + name + ".safetensors"))
    tensors_.emplace(tensor.name, std::move(tensor));
  if (!tensors_.contains("names")) return;
  const auto summary = elements<double>(extra("summary"));
  const auto samples = elements<float>(extra("samples"));
  std::string row;
  std::size_t at = 0;
  for (const char c : elements<char>(extra("names"))) {
    if (c != '\n') {
      row += c;
      continue;
    }
    rows_[row] = {summary.subspan(at * kSummary, kSummary), samples.subspan(at * kSamples, kSamples)};
    ++at;
    row.clear();
  }
  EXPECT_EQ(at * kSummary, summary.size());
  EXPECT_EQ(rows_.size(), at) << "names that come twice";
}

const nn::HostTensor& Golden::extra(const std::string& name) const {
  asked_.insert(name);
  return tensors_.at(name);
}

void Golden::expect(const std::string& name, std::span<const float> actual, double tolerance, double slack) {
  const auto found = rows_.find(name);
  ASSERT_NE(found, rows_.end()) << name << " is in no golden file";
  const auto& [summary, samples] = found->second;
  const auto count = static_cast<std::int64_t>(summary[0]);
  ASSERT_EQ(static_cast<std::int64_t>(actual.size()), count) << name;
  const double largest = summary[1], norm = summary[2];

  double worst = 0.0;
  const auto hold = [&](const std::string& what, double a, double b, double scale, double allowance) {
    const double error = std::abs(a - b);
    worst = std::isfinite(error) ? std::max(worst, error / scale) : std::numeric_limits<double>::infinity();
    EXPECT_TRUE(error <= tolerance * scale + allowance)
        << name << ", " << what << ": " << a << ", not " << b << ": " << error / scale << " of " << scale;
  };
  double my_largest = 0.0, my_squares = 0.0;
  for (const float value : actual) {
    my_largest = std::max(my_largest, std::abs(static_cast<double>(value)));
    my_squares += static_cast<double>(value) * static_cast<double>(value);
  }
  const double norm_slack = slack * std::sqrt(static_cast<double>(count));
  hold("the largest magnitude", my_largest, largest, largest, slack);
  hold("the norm", std::sqrt(my_squares), norm, norm, norm_slack);
  for (std::size_t p = 0; p < kProjections; ++p) {
    const std::uint64_t key = key_of(name + "/sign/" + std::to_string(p));
    double sum = 0.0;
    for (std::size_t i = 0; i < actual.size(); ++i) sum += sign(key, i) * static_cast<double>(actual[i]);
    hold("projection " + std::to_string(p), sum, summary[3 + p], norm, norm_slack);
  }
  const auto places = below<std::int64_t>(name + "/place", kSamples, count);
  for (std::size_t i = 0; i < std::min<std::size_t>(kSamples, actual.size()); ++i) {
    const std::size_t place = actual.size() > kSamples ? static_cast<std::size_t>(places[i]) : i;
    hold("element " + std::to_string(place), static_cast<double>(actual[place]), static_cast<double>(samples[i]),
         largest, slack);
  }
  errors_[name] = worst;
}

std::vector<std::string> Golden::not_compared(const std::string& beginning) const {
  std::vector<std::string> left;
  for (const auto& [name, row] : rows_)
    if (name.starts_with(beginning) && !errors_.contains(name)) left.push_back(name);
  for (const auto& [name, tensor] : tensors_)
    if (name.starts_with(beginning) && !asked_.contains(name)) left.push_back(name);
  return left;
}

double Golden::worst(const std::string& kind) const {
  double worst = 0.0;
  for (const auto& [name, error] : errors_)
    if (name.find(kind) != std::string::npos) worst = std::max(worst, error);
  return worst;
}

namespace {

std::vector<float> turned(const std::vector<float>& values, const std::vector<std::int64_t>& nchw, bool to_nhwc) {
  if (nchw.size() != 4) return values;
  std::vector<float> made(values.size());
  const auto [n, c, h, w] = std::array{nchw[0], nchw[1], nchw[2], nchw[3]};
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t k = 0; k < c; ++k)
      for (std::int64_t y = 0; y < h; ++y)
        for (std::int64_t x = 0; x < w; ++x) {
          const auto planar = static_cast<std::size_t>(((i * c + k) * h + y) * w + x);
          const auto packed = static_cast<std::size_t>(((i * h + y) * w + x) * c + k);
          if (to_nhwc)
            made[packed] = values[planar];
          else
            made[planar] = values[packed];
        }
  return made;
}

}  // namespace

std::vector<float> to_nhwc(const std::vector<float>& values, const std::vector<std::int64_t>& nchw) {
  return turned(values, nchw, true);
}
std::vector<float> to_nchw(const std::vector<float>& values, const std::vector<std::int64_t>& nchw) {
  return turned(values, nchw, false);
}

nn::Tensor upload(nn::Backend& backend, const std::vector<float>& values, const std::vector<std::int64_t>& nchw) {
  const nn::Shape shape = nchw.size() == 4 ? nn::Shape{nchw[0], nchw[2], nchw[3], nchw[1]} : nn::Shape(std::span(nchw));
  nn::Tensor made = backend.empty(shape);
  const std::vector<float> packed = to_nhwc(values, nchw);
  backend.upload(std::as_bytes(std::span(packed)), made);
  return made;
}

nn::Tensor upload(nn::Backend& backend, const std::vector<std::int32_t>& values, const nn::Shape& shape) {
  nn::Tensor made = backend.empty(shape, DType::kI32);
  backend.upload(std::as_bytes(std::span(values)), made);
  return made;
}

std::vector<float> download(nn::Backend& backend, const nn::Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  backend.download(tensor, std::as_writable_bytes(std::span(values)));
  const nn::Shape& s = tensor.shape();
  return s.size() == 4 ? to_nchw(values, {s[0], s[3], s[1], s[2]}) : values;
}

std::vector<float> gradient_of(nn::Backend& backend, const nn::Parameter& parameter) {
  const nn::Tensor& gradient = parameter.gradient();
  auto values = download(backend, gradient);  // (O, H, W, I) turns into (O, I, H, W) as images do
  if (const nn::Shape& s = gradient.shape(); parameter.layout() == nn::FileLayout::kOhwiToOihw && s.size() == 3)
    return to_nchw(values, {s[0], s[2], 1, s[1]});
  if (parameter.layout() != nn::FileLayout::kTransposed) return values;
  const std::int64_t rows = gradient.shape()[0], columns = gradient.shape()[1];
  std::vector<float> transposed(values.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      transposed[static_cast<std::size_t>(c * rows + r)] = values[static_cast<std::size_t>(r * columns + c)];
  return transposed;
}

void fill(nn::Module& module, const std::string& case_name, double norm_bias) {
  auto state = nn::state_of(module);
  for (auto& tensor : state) {
    if (tensor.dtype != DType::kF32) continue;
    const auto values = initial(case_name, tensor.name, tensor.shape, norm_bias);
    std::ranges::copy(std::as_bytes(std::span(values)), tensor.bytes.begin());
  }
  nn::load_state(module, state, case_name);
}

}  // namespace lockstep::parity
