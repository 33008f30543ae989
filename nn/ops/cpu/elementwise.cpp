#include "lockstep/nn/ops/elementwise.h"

#include <limits>

#include "base/error.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements; a thread that gets fewer costs more than it brings

/// Calls body(i) for all elements, a thread for each stretch of them.
template <class Body>
void for_each(std::int64_t count, const Body& body) {
  parallel_for(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i);
  });
}

class CpuElementwise final : public ElementwiseKernels {
 public:
  void affine(const Tensor& x, float scale, float shift, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count());
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(y.count(), [=](std::int64_t i) { to[i] = scale * from[i] + shift; });
  }

  void sum_rows(const Tensor& x, const Tensor& y) override {
    const std::int64_t columns = x.size(1);
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(y.count(), [=](std::int64_t row) {
      double sum = 0;
      for (std::int64_t i = 0; i < columns; ++i) sum += static_cast<double>(from[row * columns + i]);
      to[row] = static_cast<float>(sum);
    });
  }

  void broadcast_rows(const Tensor& x, const Tensor& y) override {
    const std::int64_t columns = y.size(1);
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(x.count(), [=](std::int64_t row) { std::fill_n(to + row * columns, columns, from[row]); });
  }

  void total(const Tensor& x, const Tensor& totals) override {
    double sum = 0;
    const float* const from = x.f32();
    for (std::int64_t i = 0; i < x.count(); ++i) sum += static_cast<double>(from[i]);
    totals.f32()[0] = static_cast<float>(sum);
    totals.f32()[1] = std::numeric_limits<float>::quiet_NaN();
  }
};

}  // namespace

std::unique_ptr<ElementwiseKernels> make_elementwise_kernels() { return std::make_unique<CpuElementwise>(); }

}  // namespace lockstep::nn::cpu
