#include "nn/ops/pointwise.h"

#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/vector.cuh"

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
struct Relu {
  static constexpr int kInputs = 1;
  __device__ float operator()(float a, float) const { return a < 0.0f ? 0.0f : a; }  // this way round NaN passes
};
struct Mask {
  static constexpr int kInputs = 2;
  __device__ float operator()(float a, float b) const { return a > 0.0f ? b : 0.0f; }
};
struct AddScaled {
  static constexpr int kInputs = 2;
  float alpha;
  __device__ float operator()(float a, float b) const { return b + alpha * a; }
};
struct Add {
  static constexpr int kInputs = 2;
  __device__ float operator()(float a, float b) const { return a + b; }
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
  for (int i = 0; i < kPacksPerThread; ++i) {
    const std::int64_t pack = first + i * kBlock;
    if (pack >= packs) continue;
    if constexpr (F::kInputs > 0) from_a[i] = load_pack<kWidth>(a + pack * kWidth);
    if constexpr (F::kInputs > 1) from_b[i] = load_pack<kWidth>(b + pack * kWidth);
  }
  for (int i = 0; i < kPacksPerThread; ++i) {
    const std::int64_t pack = first + i * kBlock;
    if (pack >= packs) continue;
    Pack<Out, kWidth> made;
    for (int j = 0; j < kWidth; ++j) made.of[j] = apply<Out>(f, from_a[i].of, from_b[i].of, j);
    store_pack(out + pack * kWidth, made);
  }
  const std::int64_t left = packs * kWidth + threadIdx.x;  // less than a pack: the last block's
  if (kWidth > 1 && blockIdx.x == gridDim.x - 1 && left < count) out[left] = apply<Out>(f, a, b, left);
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

__global__ void add_one(std::int64_t* counter) { ++*counter; }

class CudaPointwise final : public PointwiseKernels {
 public:
  explicit CudaPointwise(Context& context) : context_(context) {}

  void fill(const Tensor& y, float value) override {
    with_float_type(y.dtype(),
                    [&]<class T>(T) { start<T, T, T>("fill", Fill{value}, y.count(), nullptr, nullptr, y.data<T>()); });
  }

  void copy(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.bytes() == y.bytes());
    if (x.bytes() == 0) return;
    check_cuda(cudaMemcpyAsync(y.raw(), x.raw(), x.bytes(), cudaMemcpyDeviceToDevice, native(context_.stream)),
               "a copy");
  }

  void cast(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count());
    if (x.dtype() == y.dtype()) return copy(x, y);
    with_float_type(x.dtype(), [&]<class From>(From) {
      with_float_type(y.dtype(), [&]<class To>(To) {
        start<From, From, To>("a cast", Cast{}, y.count(), x.data<From>(), nullptr, y.data<To>());
      });
    });
  }

  void increment(const Tensor& counter) override {
    launch("counting", add_one, dim3(1), dim3(1), context_.stream, counter.data<std::int64_t>());
  }

  void add_to(const Tensor& x, float alpha, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count() && (x.dtype() == y.dtype() || y.dtype() == DType::kF32));
    with_float_type(x.dtype(), [&]<class X>(X) {
      with_float_type(y.dtype(), [&]<class Y>(Y) {
        start<X, Y, Y>("an addition", AddScaled{alpha}, y.count(), x.data<X>(), y.data<Y>(), y.data<Y>());
      });
    });
  }

  void add(const Tensor& x, const Tensor& y, const Tensor& z) override {
    LOCKSTEP_ASSERT(x.count() == z.count() && y.count() == z.count());
    with_float_type(z.dtype(), [&]<class T>(T) {
      start<T, T, T>("an addition", Add{}, z.count(), x.data<T>(), y.data<T>(), z.data<T>());
    });
  }

  void relu(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count());
    with_float_type(y.dtype(),
                    [&]<class T>(T) { start<T, T, T>("ReLU", Relu{}, y.count(), x.data<T>(), nullptr, y.data<T>()); });
  }

  void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    LOCKSTEP_ASSERT(y.count() == dx.count() && dy.count() == dx.count());
    with_float_type(dx.dtype(), [&]<class T>(T) {
      start<T, T, T>("ReLU's backward", Mask{}, dx.count(), y.data<T>(), dy.data<T>(), dx.data<T>());
    });
  }

  void swap_last_axes(const Tensor& x, const Tensor& y) override {
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
