#include "lockstep/nn/ops/pointwise.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/transpose.h"
#include "nn/ops/elementwise_rules.h"
#include "nn/ops/strided.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements; a thread that gets fewer costs more than it brings

// x may be of another type than y.
template <class X, class Y>
LOCKSTEP_SIMD_CLONES void add_scaled(const X* x, float alpha, Y* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = narrow<Y>(wide(y[i]) + alpha * wide(x[i]));
}

struct CpuMath {
  [[gnu::always_inline]] static float exp(float x) { return exp_of(x); }
  [[gnu::always_inline]] static float sigmoid(float x) { return sigmoid_of(x); }
  [[gnu::always_inline]] static float normal(float z, float density) { return normal_of(z, density); }
  [[gnu::always_inline]] static float cubic(float x, float a, float b) { return a * (x + b * x * x * x); }
};

// Loops over rules. Those of activations are compiled for several instruction sets; those of losses are not, whose bits
// are the same with all of them.
template <class Rule, class T>
[[gnu::always_inline]] inline void map_unary(const T* x, T* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (MasksValues<Rule>)
      y[i] = keep_if(Rule::passes(wide(x[i])), x[i]);
    else
      y[i] = narrow<T>(value_of<Rule, CpuMath>(wide(x[i])));
  }
}
template <class Rule, class T>
[[gnu::always_inline]] inline void map_unary_back(const T* x, const T* y, const T* dy, T* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (MasksGradients<Rule>)
      dx[i] = keep_if(Rule::slope_passes(wide(y[i])), dy[i]);
    else
      dx[i] = narrow<T>(gradient_of<Rule, CpuMath>(Rule::kReadsX ? wide(x[i]) : 0.0f, Rule::kReadsY ? wide(y[i]) : 0.0f,
                                                   wide(dy[i])));
  }
}
template <class Rule, class T>
[[gnu::always_inline]] inline void map_binary(const T* x, const T* y, T* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) z[i] = narrow<T>(Rule::value(wide(x[i]), wide(y[i])));
}
template <class Rule, class T>
LOCKSTEP_SIMD_CLONES void map_unary_fast(const T* x, T* y, std::int64_t n) {
  map_unary<Rule>(x, y, n);
}
template <class Rule, class T>
LOCKSTEP_SIMD_CLONES void map_unary_back_fast(const T* x, const T* y, const T* dy, T* dx, std::int64_t n) {
  map_unary_back<Rule>(x, y, dy, dx, n);
}
template <class Rule, class T>
LOCKSTEP_SIMD_CLONES void map_binary_fast(const T* x, const T* y, T* z, std::int64_t n) {
  map_binary<Rule>(x, y, z, n);
}

// Elements 4 · begin to 4 · end of one sample.
template <class T>
LOCKSTEP_SIMD_CLONES void drop(const T* x, T* y, const DropoutState& state, std::int64_t layer, std::int64_t sample,
                               std::uint32_t threshold, float scale, std::int64_t begin, std::int64_t end) {
  for (std::int64_t quad = begin; quad < end; ++quad) {
    const RandomBits bits = dropout_bits(state, layer, sample, quad);
    for (int i = 0; i < 4; ++i)
      y[4 * quad + i] = keep_if(bits.word[i] >= threshold, narrow<T>(wide(x[4 * quad + i]) * scale));
  }
}

template <class From, class To>
LOCKSTEP_SIMD_CLONES void convert(const From* x, To* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = narrow<To>(wide(x[i]));
}

// Its last axis at a time, or with another one as a matrix that is turned round.
template <class T>
void walk_strided(const StridedWalk& walk, const T* x, T* y) {
  using Places = std::array<std::int64_t, Shape::kMaxDims>;
  const int last = walk.axes - 1;
  const auto at = [](const Places& of, int axis) { return of[static_cast<std::size_t>(axis)]; };
  if (last < 0) {
    *y = *x;
    return;
  }
  const std::int64_t n = at(walk.extent, last), x_step = at(walk.from, last), y_step = at(walk.to, last);
  // A matrix: y follows its last axis, x another one.
  int turned = -1;
  for (int axis = 0; axis < last && x_step > 1 && y_step == 1; ++axis)
    if (at(walk.from, axis) == 1 && at(walk.to, axis) >= n) turned = axis;
  std::int64_t outer = 1, inner = n;
  for (int axis = 0; axis < last; ++axis) (axis == turned ? inner : outer) *= at(walk.extent, axis);
  parallel_for(outer, std::max<std::int64_t>(1, kGrain / inner), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t rest = i;
      const T* from = x;
      T* to = y;
      for (int axis = last - 1; axis >= 0; --axis) {
        if (axis == turned) continue;
        const std::int64_t index = rest % at(walk.extent, axis);
        rest /= at(walk.extent, axis);
        from += index * at(walk.from, axis);
        to += index * at(walk.to, axis);
      }
      if (turned >= 0)
        transpose(from, x_step, n, at(walk.extent, turned), to, at(walk.to, turned));
      else if (x_step == 1 && y_step == 1)
        std::copy_n(from, n, to);
      else
        for (std::int64_t j = 0; j < n; ++j) to[j * y_step] = from[j * x_step];
    }
  });
}

class CpuPointwise final : public PointwiseKernels {
 public:
  void fill(const Tensor& y, float value) override {
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      std::fill_n(y.data<T>(), y.count(), narrow<T>(value));
    });
  }

  void copy(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.bytes() == y.bytes());
    std::memcpy(y.raw(), x.raw(), x.bytes());
  }

  void copy_rows(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.shape() == y.shape() && x.dtype() == y.dtype());
    if (x.count() == 0) return;
    const std::int64_t columns = x.size(x.shape().size() - 1);
    const std::size_t element = size_of(x.dtype()), bytes = static_cast<std::size_t>(columns) * element;
    const auto* const from = static_cast<const std::byte*>(x.raw_rows());
    auto* const to = static_cast<std::byte*>(y.raw_rows());
    parallel_for(x.count() / columns, kGrain / columns + 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        std::memcpy(to + static_cast<std::size_t>(row * y.pitch()) * element,
                    from + static_cast<std::size_t>(row * x.pitch()) * element, bytes);
    });
  }

  void cast(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count());
    if (x.dtype() == y.dtype()) return copy(x, y);
    parallel_for(y.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      if (y.dtype() == DType::kBF16)
        convert(x.f32() + begin, y.data<BFloat16>() + begin, end - begin);
      else
        convert(x.data<BFloat16>() + begin, y.f32() + begin, end - begin);
    });
  }

  void increment(const Tensor& counter) override { ++*counter.data<std::int64_t>(); }

  void add_to(const Tensor& x, float alpha, const Tensor& y) override {
    with_type(x.dtype(), [&](auto of_x) {
      with_type(y.dtype(), [&](auto of_y) {
        const auto* const from = x.data<decltype(of_x)>();
        auto* const to = y.data<decltype(of_y)>();
        parallel_for(y.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
          add_scaled(from + begin, alpha, to + begin, end - begin);
        });
      });
    });
  }

  void unary(UnaryOp op, const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count());
    with_rule(op, [&]<class Rule>(Rule, const OpNames&) {
      each_piece<Rule>(MasksGradients<Rule> ? kGrain : kGrain / 4, y, [&]<class T>(std::int64_t begin, std::int64_t n) {
        if constexpr (Rule::kAllTypes)
          map_unary_fast<Rule>(x.data<T>() + begin, y.data<T>() + begin, n);
        else
          map_unary<Rule>(x.data<T>() + begin, y.data<T>() + begin, n);
      });
    });
  }

  void unary_backward(UnaryOp op, const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    LOCKSTEP_ASSERT(dy.count() == dx.count());
    with_rule(op, [&]<class Rule>(Rule, const OpNames&) {
      LOCKSTEP_ASSERT((!Rule::kReadsX || x.count() == dx.count()) && (!Rule::kReadsY || y.count() == dx.count()));
      each_piece<Rule>(MasksGradients<Rule> ? kGrain : kGrain / 4, dx,
                       [&]<class T>(std::int64_t begin, std::int64_t n) {
                         const T* const at = Rule::kReadsX ? x.data<T>() + begin : nullptr;
                         const T* const value = Rule::kReadsY ? y.data<T>() + begin : nullptr;
                         if constexpr (Rule::kAllTypes)
                           map_unary_back_fast<Rule>(at, value, dy.data<T>() + begin, dx.data<T>() + begin, n);
                         else
                           map_unary_back<Rule>(at, value, dy.data<T>() + begin, dx.data<T>() + begin, n);
                       });
    });
  }

  void binary(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& z) override {
    LOCKSTEP_ASSERT(x.count() == z.count() && y.count() == z.count());
    with_rule(op, [&]<class Rule>(Rule, const OpNames&) {
      each_piece<Rule>(Rule::kAllTypes ? kGrain : kGrain / 4, z, [&]<class T>(std::int64_t begin, std::int64_t n) {
        if constexpr (Rule::kAllTypes)
          map_binary_fast<Rule>(x.data<T>() + begin, y.data<T>() + begin, z.data<T>() + begin, n);
        else
          map_binary<Rule>(x.data<T>() + begin, y.data<T>() + begin, z.data<T>() + begin, n);
      });
    });
  }

  void binary_backward(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& dz, const Tensor& dx,
                       const Tensor& dy) override {
    with_rule(op, [&]<class Rule>(Rule, const OpNames&) {
      each_piece<Rule>(kGrain / 4, dz, [&]<class T>(std::int64_t begin, std::int64_t n) {
        const T *const a = x.data<T>(), *const b = y.data<T>(), *const from = dz.data<T>();
        T *const to_x = dx.defined() ? dx.data<T>() : nullptr, *const to_y = dy.defined() ? dy.data<T>() : nullptr;
        for (std::int64_t i = begin; i < begin + n; ++i) {
          const float gradient = wide(from[i]), at_x = wide(a[i]), at_y = wide(b[i]);
          if (to_x != nullptr) to_x[i] = narrow<T>(gradient * Rule::slope_x(at_x, at_y));
          if (to_y != nullptr) to_y[i] = narrow<T>(gradient * Rule::slope_y(at_x, at_y));
        }
      });
    });
  }

  void dropout(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) override {
    if (x.count() > 0) with_type(y.dtype(), [&](auto type) { drop_some<decltype(type)>(x, p, state, layer, y); });
  }

  void normal(const Tensor& state, std::int64_t layer, const Tensor& y) override {
    if (y.count() == 0) return;
    const std::int64_t samples = y.size(0), width = y.count() / samples, quads = (width + 3) / 4;
    const DropoutState at = state_of(state);
    float* const to = y.f32();
    parallel_for(samples * quads, kGrain / 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t n = i / quads, quad = i % quads;
        const RandomBits bits = dropout_bits(at, layer, at.first_sample + n, quad);
        const NormalPair low = normal_pair(bits.word[0], bits.word[1]), high = normal_pair(bits.word[2], bits.word[3]);
        const float four[] = {low.first, low.second, high.first, high.second};
        std::copy_n(four, std::min<std::int64_t>(4, width - 4 * quad), to + n * width + 4 * quad);
      }
    });
  }

  void select(const Tensor& mask, const Tensor& x, const Tensor& y, const Tensor& z) override {
    LOCKSTEP_ASSERT(mask.count() == z.count());
    const auto* const wanted = mask.data<std::int32_t>();
    with_type(z.dtype(), [&](auto type) {
      using T = decltype(type);
      const T *const a = x.defined() ? x.data<T>() : nullptr, *const b = y.defined() ? y.data<T>() : nullptr;
      parallel_for(z.count(), kGrain, [&, to = z.data<T>()](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const T* const from = wanted[i] != 0 ? a : b;
          to[i] = from != nullptr ? from[i] : T();
        }
      });
    });
  }

  void copy_strided(const Tensor& x, const Strides& from, const Tensor& y, const Strides& to,
                    const Shape& shape) override {
    LOCKSTEP_ASSERT(x.dtype() == y.dtype());
    if (shape.count() == 0) return;
    const StridedWalk walk(from, to, shape);
    const auto run = [&]<class T>(T) {
      walk_strided(walk, static_cast<const T*>(x.raw()) + from.offset, static_cast<T*>(y.raw()) + to.offset);
    };
    size_of(x.dtype()) == sizeof(BFloat16) ? run(BFloat16()) : run(float());
  }

  void swap_last_axes(const Tensor& x, const Tensor& y) override {
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      const std::int64_t n = x.size(0), rows = x.size(1), columns = x.size(2), each = rows * columns;
      parallel_for(n, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, each)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i)
                       transpose(x.data<T>() + i * each, columns, rows, columns, y.data<T>() + i * each, rows);
                   });
    });
  }

 private:
  // Calls body<T>(begin, number of elements) for pieces of what is written, on several threads.
  template <class Rule, class Body>
  static void each_piece(std::int64_t grain, const Tensor& written, const Body& body) {
    const auto run = [&](auto type) {
      parallel_for(written.count(), grain, [&](std::int64_t begin, std::int64_t end) {
        body.template operator()<decltype(type)>(begin, end - begin);
      });
    };
    if constexpr (Rule::kAllTypes)
      with_type(written.dtype(), run);
    else
      run(float());
  }

  static DropoutState state_of(const Tensor& state) {
    const auto* const numbers = state.data<std::int64_t>();
    return {.seed = numbers[0], .step = numbers[1], .first_sample = numbers[2]};
  }

  template <class T>
  static void drop_some(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) {
    const std::int64_t samples = x.size(0), width = x.count() / samples, quads = width / 4;
    const DropoutState at = state_of(state);
    const std::uint32_t threshold = dropout_threshold(p);
    const auto scale = static_cast<float>(1.0 / (1.0 - p));
    const T* const from = x.data<T>();
    T* const to = y.data<T>();
    parallel_for(samples * quads, kGrain / 16, [&](std::int64_t begin, std::int64_t end) {
      while (begin < end) {
        const std::int64_t n = begin / quads, first = begin % quads, last = std::min(quads, first + end - begin);
        drop(from + n * width, to + n * width, at, layer, at.first_sample + n, threshold, scale, first, last);
        begin += last - first;
      }
    });
    for (std::int64_t n = 0; n < samples && width % 4 != 0; ++n) {
      const RandomBits bits = dropout_bits(at, layer, at.first_sample + n, quads);
      for (std::int64_t e = n * width + 4 * quads; e < (n + 1) * width; ++e)
        to[e] = bits.word[e - n * width - 4 * quads] >= threshold ? narrow<T>(wide(from[e]) * scale) : T();
    }
  }
};

}  // namespace

std::unique_ptr<PointwiseKernels> make_pointwise_kernels() { return std::make_unique<CpuPointwise>(); }

}  // namespace lockstep::nn::cpu
