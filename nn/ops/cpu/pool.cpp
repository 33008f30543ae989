#include "nn/ops/pool.h"

#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/onednn_versions.h"

namespace lockstep::nn::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

struct Pooling {
  HeldPrimitive forward, backward;
  std::size_t choice_bytes = 0;
};

class CpuPool final : public PoolKernels {
 public:
  CpuPool(OneDnn& onednn, CachingAllocator& allocator) : onednn_(onednn), allocator_(allocator) {}

  Tensor forward(PoolKind kind, const Tensor& x, const Window& window, const Tensor& y) override {
    if (y.count() == 0) return {};
    auto& held = pooling(kind, x.shape(), y.shape(), window);
    Tensor choices;
    held.forward.bind(DNNL_ARG_SRC, x);
    held.forward.bind(DNNL_ARG_DST, y);
    if (held.choice_bytes > 0) {
      choices = Tensor::empty(allocator_, {static_cast<std::int64_t>(held.choice_bytes)}, DType::kU8);
      held.forward.bind(DNNL_ARG_WORKSPACE, choices);
    }
    held.forward.run();
    return choices;
  }

  void backward(PoolKind kind, const Tensor& dy, const Tensor& choices, const Window& window,
                const Tensor& dx) override {
    if (dx.count() == 0) return;
    auto& held = pooling(kind, dx.shape(), dy.shape(), window);
    held.backward.bind(DNNL_ARG_DIFF_DST, dy);
    held.backward.bind(DNNL_ARG_DIFF_SRC, dx);
    if (held.choice_bytes > 0) held.backward.bind(DNNL_ARG_WORKSPACE, choices);
    held.backward.run();
  }

 private:
  Pooling& pooling(PoolKind kind, const Shape& xs, const Shape& ys, const Window& window) {
    PrimitiveKey key{};
    std::size_t at = 0;
    key[at++] = static_cast<std::int64_t>(kind);
    for (const Shape* shape : {&xs, &ys})
      for (int i = 0; i < 4; ++i) key[at++] = (*shape)[i];
    for (const auto* pair : {&window.kernel, &window.stride, &window.padding})
      for (const auto d : *pair) key[at++] = d;
    auto& held = poolings_[key];
    if (!held.forward) held = make(kind, xs, ys, window);
    return held;
  }

  Pooling make(PoolKind kind, const Shape& xs, const Shape& ys, const Window& window) {
    const auto algorithm =
        kind == PoolKind::kMax ? dnnl::algorithm::pooling_max : dnnl::algorithm::pooling_avg_include_padding;
    const auto x = f32_desc({xs[0], xs[3], xs[1], xs[2]}, Tag::nhwc);
    const auto y = f32_desc({ys[0], ys[3], ys[1], ys[2]}, Tag::nhwc);
    const memory::dims strides{window.stride[0], window.stride[1]}, kernel{window.kernel[0], window.kernel[1]};
    // A stride that does not divide the input leaves rows out at the far edge: negative padding there says so.
    memory::dims before{window.padding[0], window.padding[1]}, after(2);
    for (std::size_t a = 0; a < 2; ++a)
      after[a] = (ys[static_cast<int>(a) + 1] - 1) * strides[a] + kernel[a] - xs[static_cast<int>(a) + 1] - before[a];

    const memory::dims undilated{0, 0};
    const auto forward =
        describe<PoolingForward>(onednn_.engine(), user_scratchpad(), dnnl::prop_kind::forward_training, algorithm, x,
                                 y, strides, kernel, undilated, before, after);
    const auto backward = describe_backward<PoolingBackward>(onednn_.engine(), user_scratchpad(), forward, algorithm, x,
                                                             y, strides, kernel, undilated, before, after);
    Pooling made;
    made.choice_bytes = forward.workspace_desc().get_size();
    made.forward = HeldPrimitive(onednn_, PoolingForward(forward),
                                 {{DNNL_ARG_SRC, x}, {DNNL_ARG_DST, y}, {DNNL_ARG_WORKSPACE, forward.workspace_desc()}},
                                 forward.scratchpad_desc());
    made.backward =
        HeldPrimitive(onednn_, PoolingBackward(backward),
                      {{DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_DIFF_SRC, x}, {DNNL_ARG_WORKSPACE, backward.workspace_desc()}},
                      backward.scratchpad_desc());
    return made;
  }

  OneDnn& onednn_;
  CachingAllocator& allocator_;
  PrimitiveMap<Pooling> poolings_;
};

}  // namespace

std::unique_ptr<PoolKernels> make_pool_kernels(OneDnn& onednn, CachingAllocator& allocator) {
  return std::make_unique<CpuPool>(onednn, allocator);
}

}  // namespace lockstep::nn::cpu
