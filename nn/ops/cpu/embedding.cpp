#include "lockstep/nn/ops/embedding.h"

#include <algorithm>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements
constexpr std::int64_t kLine = 16;      // columns of a cache line

template <class T>
LOCKSTEP_SIMD_CLONES void add_range(const T* x, float* y, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) y[i] += wide(x[i]);
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_row(const T* x, const T* row, T* y, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) y[i] = narrow<T>(wide(x[i]) + wide(row[i]));
}

template <class T>
LOCKSTEP_SIMD_CLONES void rotate_head(const T* x, const float* cosines, const float* sines, float sign,
                                      std::int64_t half, T* y) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = wide(x[i]), b = wide(x[i + half]), cosine = cosines[i], sine = sign * sines[i];
    y[i] = narrow<T>(a * cosine - b * sine);
    y[i + half] = narrow<T>(b * cosine + a * sine);
  }
}

class CpuEmbedding final : public EmbeddingKernels {
 public:
  void forward(const Tensor& table, const Tensor& indices, const Tensor& y) override {
    const std::int64_t rows = table.size(0), width = table.size(1), n = indices.count();
    const auto* const index = indices.data<std::int32_t>();
    for (std::int64_t i = 0; i < n; ++i)
      if (index[i] < 0 || index[i] >= rows)
        throw UsageError(fmt::format("token {} at place {} of a batch, where the table has {} rows", index[i], i, rows),
                         "give the model as many tokens as the data has");
    with_type(table.dtype(), [&](auto type) {
      using T = decltype(type);
      const T* const from = table.data<T>();
      T* const to = y.data<T>();
      parallel_for(n, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i)
                       std::copy_n(from + index[i] * width, width, to + i * width);
                   });
    });
  }

  // Threads share the columns, not the rows: each sum is taken in the order of the rows, whatever their number.
  void backward(const Tensor& indices, const Tensor& dy, bool accumulate, const Tensor& dtable) override {
    const std::int64_t width = dtable.size(1), n = indices.count();
    if (!accumulate) clear(dtable);
    const auto* const index = indices.data<std::int32_t>();
    with_type(dy.dtype(), [&](auto type) {
      const auto* const from = dy.data<decltype(type)>();
      over_columns(width, n, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < n; ++i) add_range(from + i * width, dtable.f32() + index[i] * width, begin, end);
      });
    });
  }

  void add_rows(const Tensor& x, const Tensor& table, std::int64_t first, const Tensor& y) override {
    const std::int64_t tokens = x.size(1), width = x.size(2);
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      const T *const from = x.data<T>(), *const rows = table.data<T>();
      T* const to = y.data<T>();
      parallel_for(x.size(0) * tokens, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i)
                       add_row(from + i * width, rows + (first + i % tokens) * width, to + i * width, width);
                   });
    });
  }

  void add_rows_backward(const Tensor& dy, std::int64_t first, bool accumulate, const Tensor& dtable) override {
    const std::int64_t batch = dy.size(0), tokens = dy.size(1), width = dy.size(2);
    if (!accumulate) clear(dtable);
    with_type(dy.dtype(), [&](auto type) {
      const auto* const from = dy.data<decltype(type)>();
      over_columns(width, batch * tokens, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t b = 0; b < batch; ++b)
          for (std::int64_t t = 0; t < tokens; ++t)
            add_range(from + (b * tokens + t) * width, dtable.f32() + (first + t) * width, begin, end);
      });
    });
  }

  void rotate(const Tensor& x, const Tensor& cosines, const Tensor& sines, std::int64_t first, bool back,
              const Tensor& y) override {
    const std::int64_t tokens = x.size(1), width = x.size(2), half = cosines.size(1);
    const float sign = back ? -1.0f : 1.0f;
    with_type(x.dtype(), [&](auto type) {
      using T = decltype(type);
      parallel_for(x.size(0) * tokens, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width)),
                   [&, from = x.data<T>(), to = y.data<T>()](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) {
                       const std::int64_t angles = (first + row % tokens) * half;
                       for (std::int64_t at = row * width; at < (row + 1) * width; at += 2 * half)
                         rotate_head(from + at, cosines.f32() + angles, sines.f32() + angles, sign, half, to + at);
                     }
                   });
    });
  }

  void row_indices(const Tensor& positions, std::int64_t position, std::int64_t rows, const Tensor& indices) override {
    auto* const to = indices.data<std::int32_t>();
    const std::int64_t each = indices.size(0) > 0 ? indices.count() / indices.size(0) : 1;
    for (std::int64_t i = 0; i < indices.count(); ++i) {
      const std::int64_t at = positions.defined() ? positions.data<std::int32_t>()[i] : position;
      to[i] = static_cast<std::int32_t>(at >= 0 && at < rows ? i / each * rows + at : -1);
    }
  }

 private:
  static void clear(const Tensor& table) {
    parallel_for(table.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::fill(table.f32() + begin, table.f32() + end, 0.0f);
    });
  }

  template <class Body>
  static void over_columns(std::int64_t width, std::int64_t rows, const Body& body) {
    const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, rows * kLine));
    parallel_for((width + kLine - 1) / kLine, grain,
                 [&](std::int64_t begin, std::int64_t end) { body(begin * kLine, std::min(end * kLine, width)); });
  }
};

}  // namespace

std::unique_ptr<EmbeddingKernels> make_embedding_kernels() { return std::make_unique<CpuEmbedding>(); }

}  // namespace lockstep::nn::cpu
