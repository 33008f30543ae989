// Which of attention's kernels are used where cuDNN has some, or none: a cuDNN in software.
#include <array>
#include <optional>
#include <span>

#include "tests/nn/cuda/device_values.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class SoftAttention : public DeviceTest {
 protected:
  SoftAttention() { soft_cuda::set_fused_attention(true); }
  ~SoftAttention() override { soft_cuda::set_fused_attention(false); }

  // Forward and backward of two samples, against the CPU's. Returns how much of that cuDNN did.
  // `lengths_at`: how many elements after an aligned address lengths begin, where samples have some.
  std::uint64_t compare(std::int64_t width, double p, bool causal = true, std::optional<int> lengths_at = {}) {
    constexpr std::int64_t samples = 2, tokens = 11, heads = 3;
    const Shape of_qkv = {samples, tokens, 3 * heads * width}, of_y = {samples, tokens, heads * width};
    const Shape of_sums = {samples, heads, tokens};
    const std::array<std::int64_t, 3> numbers = {9, 4, 17};
    const Tensor state = cpu->empty({3}, DType::kI64);
    cpu->upload(std::as_bytes(std::span(numbers)), state);
    const Tensor lengths = cpu->empty({samples}, DType::kI32);
    constexpr std::array<std::int32_t, samples> kLengths = {7, tokens};
    cpu->upload(std::as_bytes(std::span(kLengths)), lengths);
    Both<AttentionOptions> options;
    options.host = {.causal = causal, .dropout = p, .dropout_state = state};
    if (lengths_at) options.host.lengths = lengths;
    options.device = options.host;
    options.device.dropout_state = plain(state);
    if (lengths_at) options.device.lengths = on_device(lengths, DType::kI32, *lengths_at);

    const auto before = soft_cuda::counts().fused_attentions;
    const double ulps = is_half(type()) ? 0x1p16 * finer_than_bf16(type()) : 64.0;
    const Operand qkv = activations(random(of_qkv, 1)), dy = activations(random(of_y, 2));
    std::vector<Tolerance> tolerances = {{type(), ulps}};
    if (!lengths_at) tolerances.push_back({DType::kF32, 64.0, 8.0});
    const auto made = DeviceTest::compare(
        cpu->attention(), *attention,
        {activation_like(of_y), {of_sums, DType::kF32, lengths_at ? cpu->zeros(of_sums) : Tensor()}}, tolerances,
        [&](auto& on, Side at, const auto& out) { on.forward(at(qkv), heads, at(options), out[0], out[1]); });
    const Operand y = activations(rounded(made.expected[0])), sums = plains(made.expected[1]);
    DeviceTest::compare(cpu->attention(), *attention, {activation_like(of_qkv)}, {{type(), ulps, 4.0}},
                        [&](auto& on, Side at, const auto& out) {
                          on.backward(at(qkv), heads, at(options), at(y), at(sums), at(dy), out[0]);
                        });
    return soft_cuda::counts().fused_attentions - before;
  }

  std::unique_ptr<AttentionKernels> attention = cuda::make_attention_kernels(context);
};

// results() runs each of them twice.
TEST_P(SoftAttention, CudnnTakesHalvesThatLieWell) {
  const bool taken = is_half(type()) && GetParam().offset == 0;
  EXPECT_EQ(compare(16, 0.0), taken ? 4u : 0u);
  EXPECT_EQ(compare(16, 0.0, /*causal=*/false), taken ? 4u : 0u);
  for (const int lengths_at : {0, 1})
    EXPECT_EQ(compare(16, 0.0, /*causal=*/false, lengths_at), taken ? 4u : 0u) << lengths_at;
  EXPECT_EQ(compare(12, 0.0), 0u) << "no multiple of 8 features";
  EXPECT_EQ(compare(16, 0.25), 0u) << "its dropout is another one";
  soft_cuda::set_fused_attention(false);
  attention = cuda::make_attention_kernels(context);
  EXPECT_EQ(compare(16, 0.0), 0u);
}

INSTANTIATE_TEST_SUITE_P(Types, SoftAttention, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
