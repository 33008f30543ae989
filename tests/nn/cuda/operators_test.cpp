// CUDA's kernels of operators against the CPU's.
#include "tests/nn/cuda/device_values.h"
#include "tests/nn/operator_cases.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaOperators : public DeviceTest {
 protected:
  Operand placed(const Tensor& host) { return {host, on_device(host, DType::kF32, GetParam().offset)}; }

  std::unique_ptr<OperatorKernels> operators = cuda::make_operator_kernels(context);
};

TEST_P(CudaOperators, LikeTheCpus) {
  for_operators([&]<class Op>(const OperatorCase& each, const Op& op) {
    for (const Shape& shape : each.shapes)
      for (const bool odd : {false, true}) {
        SCOPED_TRACE(to_string(shape));
        const Tensor host = random_tensor(*cpu, shape, 1);
        const Operand x = placed(odd ? with_odd_ones(host) : host);
        const auto forward = compare(cpu->operators(), *operators, {{op.shape(shape)}},
                                     {{DType::kF32, each.forward.ulps, each.forward.scale}},
                                     [&](auto& on, Side at, const auto& out) { on.forward(op, at(x), out[0]); });
        const Operand y = placed(forward.expected[0]), dy = placed(random_tensor(*cpu, y.host.shape(), 2));
        constexpr bool kReadsX = requires { Op::kReadsX; }
        , kReadsY = requires { Op::kReadsY; };
        compare(cpu->operators(), *operators, {{shape}}, {{DType::kF32, each.backward.ulps, each.backward.scale}},
                [&](auto& on, Side at, const auto& out) {
                  on.backward(op, kReadsX ? at(x) : Tensor(), kReadsY ? at(y) : Tensor(), at(dy), out[0]);
                });
      }
  });
}

INSTANTIATE_TEST_SUITE_P(, CudaOperators, ::testing::Values(DeviceCase{DType::kF32, 0}, DeviceCase{DType::kF32, 1}),
                         name_of_case);

}  // namespace
}  // namespace lockstep::nn
