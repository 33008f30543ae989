// CUDA's kernels of operators against the CPU's.
#include "tests/nn/cuda/device_values.h"
#include "tests/nn/operator_cases.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaOperators : public DeviceTest {
 protected:
  Tensor placed(const Tensor& host) { return on_device(host, DType::kF32, GetParam().offset); }

  std::unique_ptr<OperatorKernels> operators = cuda::make_operator_kernels(context);
};

TEST_P(CudaOperators, LikeTheCpus) {
  for_operators([&]<class Op>(const OperatorCase& each, const Op& op) {
    for (const Shape& shape : each.shapes)
      for (const bool odd : {false, true}) {
        SCOPED_TRACE(to_string(shape));
        Tensor host = random_tensor(*cpu, shape, 1);
        if (odd) host = with_odd_ones(host);
        const Tensor y_host = cpu->empty(op.shape(shape)), dx_host = cpu->empty(shape);
        cpu->operators().forward(op, host, y_host);
        const Tensor x = placed(host);
        const auto y = results({{y_host.shape()}}, [&](const auto& out) { operators->forward(op, x, out[0]); });
        expect_close(y_host, y[0], {DType::kF32, each.forward.ulps, each.forward.scale});

        const Tensor dy_host = random_tensor(*cpu, y_host.shape(), 2);
        const Tensor read_x = requires { Op::kReadsX; }
        ? host : Tensor(), read_y = requires { Op::kReadsY; }
        ? y_host : Tensor();
        const Tensor there_x = read_x.defined() ? x : Tensor(), there_y = read_y.defined() ? placed(y_host) : Tensor();
        cpu->operators().backward(op, read_x, read_y, dy_host, dx_host);
        const Tensor dy = placed(dy_host);
        const auto dx =
            results({{shape}}, [&](const auto& out) { operators->backward(op, there_x, there_y, dy, out[0]); });
        expect_close(dx_host, dx[0], {DType::kF32, each.backward.ulps, each.backward.scale});
      }
  });
}

INSTANTIATE_TEST_SUITE_P(, CudaOperators, ::testing::Values(DeviceCase{DType::kF32, 0}, DeviceCase{DType::kF32, 1}),
                         name_of_case);

}  // namespace
}  // namespace lockstep::nn
