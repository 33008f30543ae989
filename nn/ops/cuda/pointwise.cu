#include "lockstep/nn/ops/pointwise.h"

#include <cstddef>
#include <limits>

#include "base/error.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/vector.cuh"
#include "nn/ops/elementwise_rules.h"
#include "nn/ops/strided.h"

namespace lockstep::nn::cuda {
namespace {

// What is done to each element, in f32. kInputs says how many of a and b there are.
struct Fill {
  static constexpr int kInputs = 0;
  float value;
  __device__ float operator()(float, float) const { return value; }
};
struct Cast {
  static constexpr int kInputs = 1;
  __device__ float operator()(float a, float) const { return a; }
};
struct AddScaled {
  static constexpr int kInputs = 2;
  float alpha;
  __device__ float operator()(float a, float b) const { return b + alpha * a; }
};
template <class Rule>
struct Unary {
  static constexpr int kInputs = 1;
  __device__ float operator()(float x, float) const { return value_of<Rule>(x); }
};
// Of what the rule reads and the gradient.
template <class Rule>
struct UnaryBack {
  static constexpr int kInputs = 2;
  __device__ float operator()(float read, float dy) const { return gradient_of<Rule>(read, read, dy); }
};
template <class Rule>
struct Binary {
  static constexpr int kInputs = 2;
  __device__ float operator()(float x, float y) const { return Rule::value(x, y); }
};

template <class Out, class F, class A, class B>
__device__ Out apply(const F& f, const A* a, const B* b, std::int64_t i) {
  float x = 0.0f, y = 0.0f;
  if constexpr (F::kInputs > 0) x = to_float(a[i]);
  if constexpr (F::kInputs > 1) y = to_float(b[i]);
  return from_float<Out>(f(x, y));
}

// out[i] = f(a[i], b[i]). Inputs may be the output: a thread has read all that is its own before it writes.
template <int kWidth, class F, class Out, class A, class B>
__global__ void __launch_bounds__(kBlock) map(F f, std::int64_t count, const A* a, const B* b, Out* out) {
  Pack<A, kWidth> from_a[kPacksPerThread];
  Pack<B, kWidth> from_b[kPacksPerThread];
  const std::int64_t packs = count / kWidth;
  const std::int64_t first = std::int64_t{blockIdx.x} * (kBlock * kPacksPerThread) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPacksPerThread; ++i) {
    const std::int64_t pack = first + i * kBlock;
    if (pack >= packs) continue;
    if constexpr (F::kInputs > 0) from_a[i] = load_pack<kWidth>(a + pack * kWidth);
    if constexpr (F::kInputs > 1) from_b[i] = load_pack<kWidth>(b + pack * kWidth);
  }
#pragma unroll
  for (int i = 0; i < kPacksPerThread; ++i) {
    const std::int64_t pack = first + i * kBlock;
    if (pack >= packs) continue;
    Pack<Out, kWidth> made;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) made.of[j] = apply<Out>(f, from_a[i].of, from_b[i].of, j);
    store_pack(out + pack * kWidth, made);
  }
  const std::int64_t left = packs * kWidth + threadIdx.x;  // less than a pack: the last block's
  if (kWidth > 1 && blockIdx.x == gridDim.x - 1 && left < count) out[left] = apply<Out>(f, a, b, left);
}

// Gradients of rules that read more than one array of values; `dx` and `dy` may be left out of the second.
template <class Rule, class T>
__global__ void __launch_bounds__(kBlock)
    map_unary_back(std::int64_t count, const T* x, const T* y, const T* dy, T* dx) {
  for_own_elements(count, [&](std::int64_t i) {
    dx[i] = from_float<T>(gradient_of<Rule>(to_float(x[i]), to_float(y[i]), to_float(dy[i])));
  });
}
template <class Rule, class T>
__global__ void __launch_bounds__(kBlock)
    map_binary_back(std::int64_t count, const T* x, const T* y, const T* dz, T* dx, T* dy) {
  for_own_elements(count, [&](std::int64_t i) {
    const float gradient = to_float(dz[i]), a = to_float(x[i]), b = to_float(y[i]);
    if (dx != nullptr) dx[i] = from_float<T>(gradient * Rule::slope_x(a, b));
    if (dy != nullptr) dy[i] = from_float<T>(gradient * Rule::slope_y(a, b));
  });
}

// A piece of a matrix at a time through shared memory, so that both sides are read and written along their rows. Bits
// are moved, 2 or 4 bytes; in shared memory each has a bank's width.
template <class Bits>
__global__ void __launch_bounds__(kBlock) transpose(TransposePlan plan, std::int64_t pieces, const Bits* x, Bits* y) {
  __shared__ std::uint32_t held[kTileCapacity];
  constexpr int kAtOnce = 4;
  const std::int64_t matrix = plan.rows * plan.columns;
  for (std::int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const std::int64_t row = piece / plan.across % plan.down * plan.tile_rows;
    const std::int64_t column = piece % plan.across * plan.tile_columns;
    const std::int64_t base = piece / plan.across / plan.down * matrix;
    const int rows = static_cast<int>(at_most(plan.rows - row, plan.tile_rows));
    const int columns = static_cast<int>(at_most(plan.columns - column, plan.tile_columns));
    const int count = rows * columns;

    // Where a thread is, along the rows of x: a block's width further on each time, without a division.
    int r = static_cast<int>(threadIdx.x) / columns, c = static_cast<int>(threadIdx.x) % columns;
    int down = kBlock / columns, across = kBlock % columns;
    const auto move = [&](int width) {
      r += down;
      c += across;
      if (c >= width) {
        c -= width;
        ++r;
      }
    };
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kAtOnce * kBlock) {
      Bits value[kAtOnce];
      int to[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) {
        to[k] = r * plan.pitch + c;
        if (i + k * kBlock < count) value[k] = x[base + (row + r) * plan.columns + column + c];
        move(columns);
      }
      for (int k = 0; k < kAtOnce; ++k)
        if (i + k * kBlock < count) held[to[k]] = value[k];
    }
    __syncthreads();
    // The same along the rows of y, with c along them.
    r = static_cast<int>(threadIdx.x) / rows;
    c = static_cast<int>(threadIdx.x) % rows;
    down = kBlock / rows;
    across = kBlock % rows;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kBlock) {
      y[base + (column + r) * plan.rows + row + c] = static_cast<Bits>(held[c * plan.pitch + r]);
      move(rows);
    }
    __syncthreads();
  }
}

// Random numbers come by four elements of a sample (dropout_bits): kQuads of them are one access where kWidth is 4, and
// single elements where it is 1, for the last quad of a sample may have less than four. A thread has kPacksPerThread
// groups, which lie a block's width apart; where the next one is takes no division.
struct DropoutPlan {
  std::int64_t samples = 0, width = 0;  // elements of a sample
  std::int64_t groups = 0;              // of a sample
  std::int64_t step_samples = 0, step_groups = 0;
};
template <int kQuads, int kWidth, class T>
__global__ void __launch_bounds__(kBlock) drop(DropoutPlan plan, const std::int64_t* numbers, std::int64_t layer,
                                               std::uint32_t threshold, float scale, const T* x, T* y) {
  const DropoutState state = {.seed = numbers[0], .step = numbers[1], .first_sample = numbers[2]};
  const std::int64_t first = std::int64_t{blockIdx.x} * (kBlock * kPacksPerThread) + threadIdx.x;
  std::int64_t sample = first / plan.groups, group = first % plan.groups;
  for (int i = 0; i < kPacksPerThread && sample < plan.samples; ++i) {
    const std::int64_t element = group * 4 * kQuads, begin = sample * plan.width + element;
    constexpr int kCount = 4 * kQuads;
    Pack<T, kCount> values = {};
    if constexpr (kWidth > 1) {
      values = load_pack<kCount>(x + begin);
    } else {
      for (int k = 0; k < kCount; ++k)
        if (element + k < plan.width) values.of[k] = x[begin + k];
    }
    for (int q = 0; q < kQuads; ++q) {
      const RandomBits bits = dropout_bits(state, layer, state.first_sample + sample, group * kQuads + q);
      for (int k = 0; k < 4; ++k) {
        T& value = values.of[4 * q + k];
        if (kWidth > 1 || element + 4 * q + k < plan.width)
          value = from_float<T>(bits.word[k] >= threshold ? to_float(value) * scale : 0.0f);
      }
    }
    if constexpr (kWidth > 1) {
      store_pack(y + begin, values);
    } else {
      for (int k = 0; k < kCount; ++k)
        if (element + k < plan.width) y[begin + k] = values.of[k];
    }
    sample += plan.step_samples;
    group += plan.step_groups;
    if (group >= plan.groups) {
      group -= plan.groups;
      ++sample;
    }
  }
}

// Four numbers of a sample a thread, as `drop` has them.
__global__ void __launch_bounds__(kBlock) draw_normal(std::int64_t count, std::int64_t quads, std::int64_t width,
                                                      const std::int64_t* numbers, std::int64_t layer, float* y) {
  const DropoutState state = {.seed = numbers[0], .step = numbers[1], .first_sample = numbers[2]};
  for_own_elements(count, [&](std::int64_t i) {
    const std::int64_t sample = i / quads, quad = i % quads;
    const RandomBits bits = dropout_bits(state, layer, state.first_sample + sample, quad);
    const NormalPair low = normal_pair(bits.word[0], bits.word[1]), high = normal_pair(bits.word[2], bits.word[3]);
    const float four[] = {low.first, low.second, high.first, high.second};
    for (int k = 0; k < 4; ++k)
      if (4 * quad + k < width) y[sample * width + 4 * quad + k] = four[k];
  });
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    choose(std::int64_t count, const std::int32_t* mask, const T* x, const T* y, T* z) {
  for_own_elements(count, [&](std::int64_t i) {
    const T* const from = mask[i] != 0 ? x : y;
    z[i] = from != nullptr ? from[i] : from_float<T>(0.0f);
  });
}

// Index is the narrowest type that counts the elements: 64-bit divisions take several times as long.
template <class Bits, class Index>
__global__ void __launch_bounds__(kBlock) walk_strided(std::int64_t count, StridedWalk walk, const Bits* x, Bits* y) {
  for_own_elements(count, [&](std::int64_t i) {
    auto rest = static_cast<Index>(i);
    std::int64_t from = 0, to = 0;
    for (int axis = walk.axes - 1; axis >= 0; --axis) {
      const auto extent = static_cast<Index>(walk.extent[axis]);
      const auto index = static_cast<std::int64_t>(rest % extent);
      rest /= extent;
      from += index * walk.from[axis];
      to += index * walk.to[axis];
    }
    y[to] = x[from];
  });
}

__global__ void add_one(std::int64_t* counter) { ++*counter; }

class CudaPointwise final : public PointwiseKernels {
 public:
  explicit CudaPointwise(Context& context) : context_(context) {}

  void fill(const Tensor& y, float value) override {
    const OpProfileScope scope(context_, "filling", {&y});
    with_float_type(y.dtype(),
                    [&]<class T>(T) { start<T, T, T>("fill", Fill{value}, y.count(), nullptr, nullptr, y.data<T>()); });
  }

  void copy(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "copying", {&x, &y});
    LOCKSTEP_ASSERT(x.bytes() == y.bytes());
    if (x.bytes() == 0) return;
    check_cuda(cudaMemcpyAsync(y.raw(), x.raw(), x.bytes(), cudaMemcpyDeviceToDevice, native(context_.stream)),
               "a copy");
  }

  void copy_rows(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "copying", {&x, &y});
    LOCKSTEP_ASSERT(x.shape() == y.shape() && x.dtype() == y.dtype());
    if (x.count() == 0) return;
    const std::int64_t columns = x.size(x.shape().size() - 1);
    cuda::copy_rows(context_, x.dtype(), 1, x.count() / columns, columns, {x.raw_rows(), 0, x.pitch()},
                    {y.raw_rows(), 0, y.pitch()});
  }

  void cast(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "changing types", {&x, &y});
    LOCKSTEP_ASSERT(x.count() == y.count());
    if (x.dtype() == y.dtype()) return copy(x, y);
    with_float_type(x.dtype(), [&]<class From>(From) {
      with_float_type(y.dtype(), [&]<class To>(To) {
        start<From, From, To>("a cast", Cast{}, y.count(), x.data<From>(), nullptr, y.data<To>());
      });
    });
  }

  void increment(const Tensor& counter) override {
    const OpProfileScope scope(context_, "counting", {&counter});
    launch("counting", add_one, dim3(1), dim3(1), context_.stream, counter.data<std::int64_t>());
  }

  void add_to(const Tensor& x, float alpha, const Tensor& y) override {
    const OpProfileScope scope(context_, "adding", {&x, &y});
    LOCKSTEP_ASSERT(x.count() == y.count() && (x.dtype() == y.dtype() || y.dtype() == DType::kF32));
    with_float_type(x.dtype(), [&]<class X>(X) {
      with_float_type(y.dtype(), [&]<class Y>(Y) {
        start<X, Y, Y>("an addition", AddScaled{alpha}, y.count(), x.data<X>(), y.data<Y>(), y.data<Y>());
      });
    });
  }

  void unary(UnaryOp op, const Tensor& x, const Tensor& y) override {
    with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
      const OpProfileScope scope(context_, names.title, {&x, &y});
      LOCKSTEP_ASSERT(x.count() == y.count());
      with_type_of<Rule>(y, [&]<class T>(T) {
        start<T, T, T>(names.title, Unary<Rule>{}, y.count(), x.data<T>(), nullptr, y.data<T>());
      });
    });
  }

  void unary_backward(UnaryOp op, const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
      const OpProfileScope scope(context_, names.backward, {&x, &y, &dy, &dx});
      const Tensor& read = Rule::kReadsX ? x : y;
      LOCKSTEP_ASSERT(read.count() == dx.count() && dy.count() == dx.count());
      with_type_of<Rule>(dx, [&]<class T>(T) {
        if constexpr (Rule::kReadsX && Rule::kReadsY)
          launch_each(names.backward, map_unary_back<Rule, T>, context_.stream, dx.count(), x.data<T>(), y.data<T>(),
                      dy.data<T>(), dx.data<T>());
        else
          start<T, T, T>(names.backward, UnaryBack<Rule>{}, dx.count(), read.data<T>(), dy.data<T>(), dx.data<T>());
      });
    });
  }

  void binary(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& z) override {
    with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
      const OpProfileScope scope(context_, names.title, {&x, &y, &z});
      LOCKSTEP_ASSERT(x.count() == z.count() && y.count() == z.count());
      with_type_of<Rule>(z, [&]<class T>(T) {
        start<T, T, T>(names.title, Binary<Rule>{}, z.count(), x.data<T>(), y.data<T>(), z.data<T>());
      });
    });
  }

  void binary_backward(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& dz, const Tensor& dx,
                       const Tensor& dy) override {
    with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
      const OpProfileScope scope(context_, names.backward, {&x, &y, &dz, &dx, &dy});
      LOCKSTEP_ASSERT(x.count() == dz.count() && y.count() == dz.count());
      with_type_of<Rule>(dz, [&]<class T>(T) {
        launch_each(names.backward, map_binary_back<Rule, T>, context_.stream, dz.count(), x.data<T>(), y.data<T>(),
                    dz.data<T>(), dx.defined() ? dx.data<T>() : nullptr, dy.defined() ? dy.data<T>() : nullptr);
      });
    });
  }

  void dropout(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) override {
    const OpProfileScope scope(context_, "dropout", {&x, &state, &y});
    LOCKSTEP_ASSERT(x.count() == y.count() && p >= 0.0 && p < 1.0);
    if (x.count() == 0) return;
    const std::int64_t samples = x.size(0), width = x.count() / samples;
    with_float_type(y.dtype(), [&]<class T>(T) {
      constexpr int kWide = kVector<T>, kQuads = kWide / 4;
      const bool wide = width % kWide == 0 && fits_packs(x.data<T>(), kWide) && fits_packs(y.data<T>(), kWide);
      const auto start_as = [&]<int kQuadsAtOnce, int kWidth>() {
        DropoutPlan plan = {.samples = samples, .width = width, .groups = ceil_div(width, 4 * kQuadsAtOnce)};
        plan.step_samples = kBlock / plan.groups;
        plan.step_groups = kBlock % plan.groups;
        const std::int64_t blocks = ceil_div(samples * plan.groups, kBlock * kPacksPerThread);
        LOCKSTEP_ASSERT(blocks <= kMostBlocks, "dropout of {} elements", x.count());
        launch("dropout", drop<kQuadsAtOnce, kWidth, T>, dim3(static_cast<unsigned>(blocks)), dim3(kBlock),
               context_.stream, plan, state.data<std::int64_t>(), layer, dropout_threshold(p), 1.0 / (1.0 - p),
               x.data<T>(), y.data<T>());
      };
      if (wide)
        start_as.template operator()<kQuads, 4>();
      else
        start_as.template operator()<1, 1>();
    });
  }

  void normal(const Tensor& state, std::int64_t layer, const Tensor& y) override {
    const OpProfileScope scope(context_, "normal numbers", {&state, &y});
    if (y.count() == 0) return;
    const std::int64_t samples = y.size(0), width = y.count() / samples, quads = ceil_div(width, 4);
    launch_each("normal numbers", draw_normal, context_.stream, samples * quads, quads, width,
                state.data<std::int64_t>(), layer, y.f32());
  }

  void select(const Tensor& mask, const Tensor& x, const Tensor& y, const Tensor& z) override {
    const OpProfileScope scope(context_, "selecting", {&mask, &x, &y, &z});
    LOCKSTEP_ASSERT(mask.count() == z.count());
    with_float_type(z.dtype(), [&]<class T>(T) {
      launch_each("selecting", choose<T>, context_.stream, z.count(), mask.data<std::int32_t>(),
                  x.defined() ? x.data<T>() : nullptr, y.defined() ? y.data<T>() : nullptr, z.data<T>());
    });
  }

  // By 16 bytes where all of it comes in such pieces.
  void copy_strided(const Tensor& x, const Strides& from, const Tensor& y, const Strides& to,
                    const Shape& shape) override {
    const auto each = static_cast<std::int64_t>(size_of(x.dtype())), width = kVectorBytes / each;
    const OpProfileScope scope(context_, "copying by strides", 2.0 * static_cast<double>(shape.count() * each));
    LOCKSTEP_ASSERT(x.dtype() == y.dtype() && (each == 2 || each == 4));
    if (shape.count() == 0) return;
    StridedWalk walk(from, to, shape);
    const auto* const source = static_cast<const std::byte*>(x.raw()) + from.offset * each;
    auto* const target = static_cast<std::byte*>(y.raw()) + to.offset * each;
    const auto start_as = [&]<class Bits>(Bits, std::int64_t count) {
      const auto run = [&](auto kernel) {
        launch_each("copying by strides", kernel, context_.stream, count, walk, reinterpret_cast<const Bits*>(source),
                    reinterpret_cast<Bits*>(target));
      };
      count <= std::numeric_limits<std::uint32_t>::max() ? run(walk_strided<Bits, std::uint32_t>)
                                                         : run(walk_strided<Bits, std::uint64_t>);
    };
    if (fits_packs(source, kVectorBytes) && fits_packs(target, kVectorBytes) && widen(walk, width))
      start_as(uint4{}, shape.count() / width);
    else if (each == 2)
      start_as(std::uint16_t{}, shape.count());
    else
      start_as(std::uint32_t{}, shape.count());
  }

  void swap_last_axes(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "exchanging two axes", {&x, &y});
    LOCKSTEP_ASSERT(x.dtype() == y.dtype() && x.count() == y.count());
    if (x.count() == 0) return;
    if (x.size(1) == 1 || x.size(2) == 1) return copy(x, y);
    const TransposePlan plan = plan_transpose(x.size(1), x.size(2));
    const std::int64_t pieces = x.size(0) * plan.down * plan.across;
    const dim3 grid(static_cast<unsigned>(at_most(pieces, kMostBlocks)));
    const auto start_as = [&]<class Bits>(Bits) {
      launch("exchanging two axes", transpose<Bits>, grid, dim3(kBlock), context_.stream, plan, pieces,
             static_cast<const Bits*>(x.raw()), static_cast<Bits*>(y.raw()));
    };
    with_float_type(x.dtype(), [&]<class T>(T) {
      if constexpr (sizeof(T) == 2)
        start_as(std::uint16_t{});
      else
        start_as(std::uint32_t{});
    });
  }

 private:
  /// Whether `width` elements can be moved at once, as far as strides say; the walk is then one of such packs.
  static bool widen(StridedWalk& walk, std::int64_t width) {
    const auto last = static_cast<std::size_t>(walk.axes) - 1;
    if (walk.axes == 0 || walk.from[last] != 1 || walk.to[last] != 1 || walk.extent[last] % width != 0) return false;
    for (std::size_t axis = 0; axis < last; ++axis)
      if (walk.from[axis] % width != 0 || walk.to[axis] % width != 0) return false;
    walk.extent[last] /= width;
    for (std::size_t axis = 0; axis < last; ++axis) {
      walk.from[axis] /= width;
      walk.to[axis] /= width;
    }
    return true;
  }

  template <class Rule, class F>
  static void with_type_of(const Tensor& written, F&& run) {
    if constexpr (Rule::kAllTypes)
      with_float_type(written.dtype(), run);
    else
      run(float{});
  }

  template <class A, class B, class Out, class F>
  void start(const char* what, F f, std::int64_t count, const A* a, const B* b, Out* out) {
    constexpr int kWide = kVector<A, Out>;
    with_width<kWide>(fits_packs(a, kWide) && fits_packs(b, kWide) && fits_packs(out, kWide), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto blocks = element_blocks(count, kWidth);
      LOCKSTEP_ASSERT(blocks <= kMostBlocks, "{} of {} elements", what, count);
      launch(what, map<kWidth, F, Out, A, B>, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), context_.stream, f,
             count, a, b, out);
    });
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<PointwiseKernels> make_pointwise_kernels(Context& context) {
  return std::make_unique<CudaPointwise>(context);
}

}  // namespace lockstep::nn::cuda
