#include "lockstep/nn/ops/lstm.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/cpu.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/panels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

// Note [LSTM on the CPU]
// What inputs contribute to the gates is one product over all steps, and so are the gradients of weights and inputs.
// What remains for each step is a product of B rows with w_hh, forward and backward, which takes packed weights and a
// kernel of our own (panels.h). With 8 rows of 256 features dnnl_sgemm, which packs the weights each time, takes ten
// times as long for it, and oneDNN's recurrent primitives take a fifth longer for the whole layer. A thread computes
// the gates of its own features at every step, so a step takes one parallel region, and the weights that it reads stay
// in its cache.

constexpr std::int64_t kGates = 4;
constexpr std::int64_t kGrain = std::int64_t{1} << 18;  // multiplications of a step that are worth a thread

struct Sizes {
  Sizes(const Tensor& x, const Tensor& y)
      : batch(x.size(0)), steps(x.size(1)), inputs(x.size(2)), width(y.size(2)), gates(kGates * y.size(2)) {}

  std::int64_t rows() const { return batch * steps; }

  std::int64_t batch, steps, inputs, width, gates;
};

std::size_t bytes_of(std::int64_t floats) { return static_cast<std::size_t>(floats) * sizeof(float); }

// `gates`: i, f, g and o side by side, `stride` apart, before their functions are applied, and with them afterwards.
// c: what was before, and what is then.
LOCKSTEP_SIMD_CLONES
void cell(float* __restrict gates, std::int64_t stride, std::int64_t count, float* __restrict c, float* __restrict h) {
  float* const is = gates;
  float* const fs = gates + stride;
  float* const gs = gates + 2 * stride;
  float* const os = gates + 3 * stride;
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) {
    const float i = sigmoid_of(is[u]), f = sigmoid_of(fs[u]), g = tanh_of(gs[u]), o = sigmoid_of(os[u]);
    is[u] = i;
    fs[u] = f;
    gs[u] = g;
    os[u] = o;
    c[u] = f * c[u] + i * g;
    h[u] = o * tanh_of(c[u]);
  }
}

// `gates` become the gradients of what they were taken of. dh is the gradient of h, and dc becomes that of c_before, of
// what it was of c.
LOCKSTEP_SIMD_CLONES
void cell_backward(float* __restrict gates, std::int64_t stride, std::int64_t count, const float* __restrict c,
                   const float* __restrict c_before, const float* __restrict dh, float* __restrict dc) {
  float* const is = gates;
  float* const fs = gates + stride;
  float* const gs = gates + 2 * stride;
  float* const os = gates + 3 * stride;
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) {
    const float i = is[u], f = fs[u], g = gs[u], o = os[u], tanh_c = tanh_of(c[u]);
    const float d = dc[u] + dh[u] * o * (1.0f - tanh_c * tanh_c);
    is[u] = d * g * i * (1.0f - i);
    fs[u] = d * c_before[u] * f * (1.0f - f);
    gs[u] = d * i * (1.0f - g * g);
    os[u] = dh[u] * tanh_c * o * (1.0f - o);
    dc[u] = d * f;
  }
}

// w_hh as the products of each step want it.
struct Packed {
  Tensor panels;
  std::uint64_t version = 0;  // 0: never packed
};

class CpuLstm final : public LstmKernels {
 public:
  CpuLstm(CachingAllocator& allocator, LinearKernels& linear, PointwiseKernels& pointwise, PackedWeights* shared)
      : allocator_(allocator), linear_(linear), pointwise_(pointwise), shared_(shared) {}

  Tensor forward(const Tensor& x, const LstmWeights& weights, const LstmState& from, const Tensor& y,
                 const LstmState& to, bool keep) override {
    const Sizes at(x, y);
    const Tensor kept = empty({at.rows() * (at.gates + (keep ? at.width : 0))});
    const Tensor gates = kept.slice(0, at.rows() * at.gates).reshaped({at.rows(), at.gates});
    float* const cells = keep ? gates.f32() + gates.count() : nullptr;
    if (at.batch > 0) {
      const Tensor bias = empty({at.gates});
      pointwise_.add(weights.b_ih, weights.b_hh, bias);
      linear_.forward(x.reshaped({at.rows(), at.inputs}), weights.w_ih, bias, Epilogue::kNone, gates);
      // The step before's h and this step's alternate.
      const Tensor h = empty({2, at.batch, at.width}), c = empty({at.batch, at.width});
      start(from.c, c);
      if (from.h.defined()) pointwise_.copy(from.h, h.slice(0, 1));
      for (std::int64_t t = 0; t < at.steps; ++t)
        step(at, t, t > 0 || from.h.defined() ? forward_panels(weights, at.width) : nullptr, gates.f32(), h.f32(),
             c.f32(), cells, y.f32());
      if (to.h.defined()) pointwise_.copy(h.slice(at.steps % 2, at.steps % 2 + 1), to.h);
      if (to.c.defined()) pointwise_.copy(c, to.c);
    }
    return keep ? kept : Tensor();
  }

  void backward(const Tensor& x, const LstmWeights& weights, const LstmState& from, const Tensor& y, const Tensor& kept,
                const Tensor& dy, const LstmGradients& gradients, const Tensor& dx,
                FunctionRef<void()> gradients_done) override {
    const Sizes at(x, y);
    const Tensor gates = kept.slice(0, at.rows() * at.gates).reshaped({at.rows(), at.gates});
    if (at.batch > 0) {
      const Tensor dh = empty({at.batch, at.width}), dc = empty({at.batch, at.width});
      const Tensor dgates = empty({2, at.batch, at.gates});  // the gates' gradients of two steps, alternating
      const Tensor c_first = empty({at.batch, at.width});
      start(from.c, c_first);
      pointwise_.fill(dc, 0.0f);
      const float* const panels = at.steps > 1 ? backward_panels(weights, at.width) : nullptr;
      for (std::int64_t t = at.steps - 1; t >= 0; --t)
        step_backward(at, t, panels, gates.f32(), gates.f32() + gates.count(), c_first.f32(), dy.f32(), dgates.f32(),
                      dh.f32(), dc.f32());
    }
    // The gates' gradients have taken their place.
    const Tensor inputs = x.reshaped({at.rows(), at.inputs});
    if (gradients.b_ih.defined() || gradients.b_hh.defined()) bias_gradients(gates, gradients);
    if (gradients.w_hh.defined())
      linear_.backward_weight(h_before(at, from.h, y), gates, gradients.accumulate[1], gradients.w_hh);
    if (gradients.w_ih.defined()) linear_.backward_weight(inputs, gates, gradients.accumulate[0], gradients.w_ih);
    gradients_done();
    if (dx.defined()) linear_.backward_input(gates, weights.w_ih, dx.reshaped({at.rows(), at.inputs}));
  }

 private:
  Tensor empty(const Shape& shape) { return Tensor::empty(allocator_, shape); }

  void start(const Tensor& from, const Tensor& state) {
    if (from.defined())
      pointwise_.copy(from, state);
    else
      pointwise_.fill(state, 0.0f);
  }

  // Panel (p · 4 + gate): what features [32 p, 32 p + 32) of h contribute that gate's product to, (H, 32).
  const float* forward_panels(const LstmWeights& weights, std::int64_t width) {
    const std::int64_t panels = panels_of(width) * kGates;
    return packed(forward_, weights, {panels, width, kPanel}, [&](const Tensor& to) {
      parallel_for(panels, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t first = i / kGates * kPanel, gate = i % kGates;
          pack_rows(weights.w_hh.f32() + (gate * width + first) * width, width, std::min(kPanel, width - first), width,
                    to.f32() + i * width * kPanel);
        }
      });
    });
  }

  // Panel p: (4 · H, 32), features [32 p, 32 p + 32) of each row of w_hh.
  const float* backward_panels(const LstmWeights& weights, std::int64_t width) {
    const std::int64_t panels = panels_of(width), depth = kGates * width;
    return packed(backward_, weights, {panels, depth, kPanel}, [&](const Tensor& to) {
      parallel_for(panels, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t p = begin; p < end; ++p)
          pack_columns(weights.w_hh.f32() + p * kPanel, width, std::min(kPanel, width - p * kPanel), depth,
                       to.f32() + p * depth * kPanel);
      });
    });
  }

  template <class Pack>
  const float* packed(PrimitiveMap<Packed>& all, const LstmWeights& weights, const Shape& shape, const Pack& pack) {
    PrimitiveKey key{};
    key[0] = reinterpret_cast<std::intptr_t>(weights.w_hh.raw());
    key[1] = weights.w_hh.size(1);
    Packed& held = all[key];
    const std::uint64_t version = weights.versions[1];
    if (held.version == version && version != 0) return held.panels.f32();
    if (shared_ != nullptr) {
      held.panels =
          shared_->get(weights.w_hh.raw(), version, f32_desc(to_dims(shape), dnnl::memory::format_tag::abc), pack);
    } else {
      if (!held.panels.defined()) held.panels = empty(shape);
      pack(held.panels);
    }
    held.version = version;
    return held.panels.f32();
  }

  // Calls body(first, end) on disjoint ranges of the features, whole panels each.
  template <class Body>
  static void over_features(const Sizes& at, const Body& body) {
    const std::int64_t work = at.batch * at.width * kGates * kPanel;
    parallel_for(panels_of(at.width), (kGrain + work - 1) / work,
                 [&](std::int64_t begin, std::int64_t end) { body(begin * kPanel, std::min(end * kPanel, at.width)); });
  }

  // `panels`: nullptr where h was zero.
  static void step(const Sizes& at, std::int64_t t, const float* panels, float* gates, float* h, float* c, float* cells,
                   float* y) {
    const float* const before = h + (t % 2) * at.batch * at.width;
    float* const after = h + (1 - t % 2) * at.batch * at.width;
    over_features(at, [&](std::int64_t first, std::int64_t end) {
      float* const now = gates + t * at.gates;
      for (std::int64_t u = first; u < end && panels != nullptr; u += kPanel)
        for (std::int64_t gate = 0; gate < kGates; ++gate)
          add_product(before, at.width, at.batch, at.width, panels + (u / kPanel * kGates + gate) * at.width * kPanel,
                      std::min(kPanel, end - u), now + gate * at.width + u, at.steps * at.gates);
      for (std::int64_t b = 0; b < at.batch; ++b) {
        const std::int64_t row = b * at.steps + t, place = b * at.width + first, count = end - first;
        cell(gates + row * at.gates + first, at.width, count, c + place, after + place);
        std::memcpy(y + row * at.width + first, after + place, bytes_of(count));
        if (cells != nullptr) std::memcpy(cells + row * at.width + first, c + place, bytes_of(count));
      }
    });
  }

  static void step_backward(const Sizes& at, std::int64_t t, const float* panels, float* gates, const float* cells,
                            const float* c_first, const float* dy, float* dgates, float* dh, float* dc) {
    const float* const later = dgates + (t % 2) * at.batch * at.gates;
    float* const now = dgates + (1 - t % 2) * at.batch * at.gates;
    over_features(at, [&](std::int64_t first, std::int64_t end) {
      const std::int64_t count = end - first;
      for (std::int64_t b = 0; b < at.batch; ++b)
        std::memcpy(dh + b * at.width + first, dy + (b * at.steps + t) * at.width + first, bytes_of(count));
      for (std::int64_t u = first; u < end && t + 1 < at.steps; u += kPanel)
        add_product(later, at.gates, at.batch, at.gates, panels + u * at.gates, std::min(kPanel, end - u), dh + u,
                    at.width);
      for (std::int64_t b = 0; b < at.batch; ++b) {
        const std::int64_t row = b * at.steps + t, place = b * at.width + first;
        const float* const c = cells + row * at.width + first;
        const float* const c_before = t > 0 ? c - at.width : c_first + place;
        float* const d = gates + row * at.gates + first;
        cell_backward(d, at.width, count, c, c_before, dh + place, dc + place);
        if (t == 0) continue;
        for (std::int64_t gate = 0; gate < kGates; ++gate)
          std::memcpy(now + b * at.gates + gate * at.width + first, d + gate * at.width, bytes_of(count));
      }
    });
  }

  // What each step's h was before it, as rows beside those of the gates.
  Tensor h_before(const Sizes& at, const Tensor& first, const Tensor& y) {
    const Tensor rows = empty({at.rows(), at.width});
    const std::int64_t sample = at.steps * at.width;
    parallel_for(at.batch, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        float* const to = rows.f32() + b * sample;
        if (first.defined())
          std::memcpy(to, first.f32() + b * at.width, bytes_of(at.width));
        else
          std::fill(to, to + at.width, 0.0f);
        std::memcpy(to + at.width, y.f32() + b * sample, bytes_of(sample - at.width));
      }
    });
    return rows;
  }

  // Both biases have the same gradient.
  void bias_gradients(const Tensor& gates, const LstmGradients& gradients) {
    const Tensor sums = empty({gates.size(1)});
    linear_.backward_bias(gates, false, sums);
    const auto put = [&](const Tensor& to, bool accumulate) {
      if (!to.defined()) return;
      if (accumulate)
        pointwise_.add_to(sums, 1.0f, to);
      else
        pointwise_.copy(sums, to);
    };
    put(gradients.b_ih, gradients.accumulate[2]);
    put(gradients.b_hh, gradients.accumulate[3]);
  }

  CachingAllocator& allocator_;
  LinearKernels& linear_;
  PointwiseKernels& pointwise_;
  PackedWeights* shared_;
  PrimitiveMap<Packed> forward_, backward_;
};

}  // namespace

std::unique_ptr<LstmKernels> make_lstm_kernels(CachingAllocator& allocator, LinearKernels& linear,
                                               PointwiseKernels& pointwise, PackedWeights* shared) {
  return std::make_unique<CpuLstm>(allocator, linear, pointwise, shared);
}

}  // namespace lockstep::nn::cpu
