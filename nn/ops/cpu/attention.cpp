#include "lockstep/nn/ops/attention.h"

#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

// Queries whose weights are there at a time: a block's weights over all keys stay in a core's second cache up to some
// thousand tokens, and few products are wasted above the diagonal.
constexpr std::int64_t kBlock = 64;

/// Rows of one head within a tensor whose rows hold more than that.
template <class T>
struct RowsOf {
  T* first;
  std::int64_t stride;

  T* row(std::int64_t i) const { return first + i * stride; }
  RowsOf from(std::int64_t i) const { return {row(i), stride}; }
};
using Rows = RowsOf<float>;

enum class Transposed : std::uint8_t { kNo, kYes };

/// c (m, n) = alpha · a · b + beta · c, row-major, a (m, k) or (k, m) transposed, b (k, n) or (n, k) transposed.
void product(Transposed a_as, Transposed b_as, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Rows a,
             Rows b, float beta, Rows c) {
  const auto letter = [](Transposed t) { return t == Transposed::kYes ? 'T' : 'N'; };
  const auto status = dnnl_sgemm(letter(a_as), letter(b_as), m, n, k, alpha, a.first, a.stride, b.first, b.stride, beta,
                                 c.first, c.stride);
  LOCKSTEP_ASSERT(status == dnnl_success, "a product of {} by {} by {} ended with {}", m, n, k,
                  static_cast<int>(status));
}

// Scores become weights without their divisor, zero from `seen` on; returns the largest score and the sum.
struct RowWeights {
  float largest, sum;
};
LOCKSTEP_SIMD_CLONES
RowWeights weigh(float* row, std::int64_t seen, std::int64_t width) {
  const float largest = lane_max(seen, [&](std::int64_t i) { return row[i]; });
  for (std::int64_t i = 0; i < seen; ++i) row[i] = exp_of(row[i] - largest);
  const float sum = lane_sum(seen, [&](std::int64_t i) { return row[i]; });
  for (std::int64_t i = seen; i < width; ++i) row[i] = 0.0f;
  return {largest, sum};
}

LOCKSTEP_SIMD_CLONES
void weigh_again(float* row, float log_sum, std::int64_t seen, std::int64_t width) {
  for (std::int64_t i = 0; i < seen; ++i) row[i] = exp_of(row[i] - log_sum);
  for (std::int64_t i = seen; i < width; ++i) row[i] = 0.0f;
}

// What dropout keeps of one head's rows.
struct Mask {
  DropoutState state;
  std::int64_t layer = 0, sample = 0, head = 0, tokens = 0;
  std::uint32_t threshold = 0;
  float scale = 1.0f;
};

// to[i] = from[i] as dropout leaves it, for the first `seen` keys of a query; after them it is 0.
LOCKSTEP_SIMD_CLONES
void drop_row(const Mask& mask, std::int64_t query, std::int64_t seen, std::int64_t width, const float* from,
              float* to) {
  std::int64_t key = 0;
  for (; key + 4 <= seen; key += 4) {
    const RandomBits bits = attention_bits(mask.state, mask.layer, mask.sample, mask.head, mask.tokens, query, key);
    for (int i = 0; i < 4; ++i) to[key + i] = bits.word[i] >= mask.threshold ? from[key + i] * mask.scale : 0.0f;
  }
  if (key < seen) {
    const RandomBits bits = attention_bits(mask.state, mask.layer, mask.sample, mask.head, mask.tokens, query, key);
    for (int i = 0; key + i < seen; ++i)
      to[key + i] = bits.word[i] >= mask.threshold ? from[key + i] * mask.scale : 0.0f;
  }
  for (std::int64_t i = seen; i < width; ++i) to[i] = 0.0f;
}

LOCKSTEP_SIMD_CLONES
void scale_row(float* row, float factor, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) row[i] *= factor;
}

LOCKSTEP_SIMD_CLONES
float dot(const float* a, const float* b, std::int64_t width) {
  return lane_sum(width, [&](std::int64_t i) { return a[i] * b[i]; });
}

// The gradient of the scores: of weight p, whose gradient is dp, in a row where Σ p dp = `mean`.
LOCKSTEP_SIMD_CLONES
void score_gradients(const float* p, float* dp, float mean, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) dp[i] = p[i] * (dp[i] - mean);
}

template <class From, class To>
LOCKSTEP_SIMD_CLONES void convert_row(const From* from, To* to, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) to[i] = narrow<To>(wide(from[i]));
}

// The result of one query over `seen` keys and values; `weights` is memory for as many.
template <class T>
LOCKSTEP_SIMD_CLONES void attend_row(const T* q, RowsOf<T> k, RowsOf<T> v, std::int64_t seen, std::int64_t width,
                                     float scale, float* weights, T* out) {
  float largest = -__builtin_inff();
  for (std::int64_t s = 0; s < seen; ++s) {
    const T* const key = k.first + s * k.stride;
    weights[s] = scale * lane_sum(width, [&](std::int64_t i) { return wide(q[i]) * wide(key[i]); });
    largest = weights[s] > largest ? weights[s] : largest;
  }
  for (std::int64_t s = 0; s < seen; ++s) weights[s] = exp_of(weights[s] - largest);
  const float inverse = 1.0f / lane_sum(seen, [&](std::int64_t s) { return weights[s]; });
  // Some features at a time, whose sums stay at hand.
  constexpr std::int64_t kFeatures = 128;
  for (std::int64_t first = 0; first < width; first += kFeatures) {
    const std::int64_t count = width - first < kFeatures ? width - first : kFeatures;
    float sums[kFeatures] = {};
    constexpr std::int64_t kTogether = 4;  // rows of values: the result is read and written once for them
    std::int64_t s = 0;
    for (; s + kTogether <= seen; s += kTogether) {
      const T* const a = v.first + s * v.stride + first;
      const T *const b = a + v.stride, *const c = b + v.stride, *const d = c + v.stride;
      for (std::int64_t i = 0; i < count; ++i)
        sums[i] += weights[s] * wide(a[i]) + weights[s + 1] * wide(b[i]) + weights[s + 2] * wide(c[i]) +
                   weights[s + 3] * wide(d[i]);
    }
    for (; s < seen; ++s)
      for (std::int64_t i = 0; i < count; ++i) sums[i] += weights[s] * wide(v.first[s * v.stride + first + i]);
    for (std::int64_t i = 0; i < count; ++i) out[first + i] = narrow<T>(sums[i] * inverse);
  }
}

class CpuAttention final : public AttentionKernels {
 public:
  explicit CpuAttention(CachingAllocator& allocator) : allocator_(allocator) {}

  void forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
               const Tensor& log_sums) override {
    const Layout at(x.q, heads);
    const Mask all = mask_of(options, at);
    each_head(at, 1, staged_rows(y, 4, at.tokens), [&](std::int64_t b, std::int64_t h, float* scratch, float* stage) {
      const auto in = [&](const Tensor& from) { return read(from, at, b, h, at.tokens, stage); };
      const Rows q = in(x.q), k = in(x.k), v = in(x.v), out = place(y, at, b, h, stage);
      float* const log_sum = log_sums.f32() + (b * heads + h) * at.tokens;
      const Mask mask = of_head(all, b, h);
      const std::int64_t tokens = tokens_of(options, at, b);
      for (std::int64_t begin = 0; begin < tokens; begin += kBlock) {
        const Seen seen = {.causal = options.causal, .before = begin, .most = tokens};
        attend(at, q.from(begin), std::min(tokens - begin, kBlock), seen, k, v, options.dropout > 0 ? &mask : nullptr,
               scratch, out.from(begin), log_sum + begin);
      }
      clear(out, tokens, at);
      write(out, y, at, b, h);
    });
  }

  void backward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
                const Tensor& log_sums, const Tensor& dy, const AttentionInputs& dx) override {
    const Layout at(x.q, heads);
    const Mask all = mask_of(options, at);
    const bool drops = options.dropout > 0;
    const auto body = [&](std::int64_t b, std::int64_t h, float* scratch, float* stage) {
      const auto in = [&](const Tensor& from) { return read(from, at, b, h, at.tokens, stage); };
      const Rows q = in(x.q), k = in(x.k), v = in(x.v), out = in(y), dout = in(dy);
      const Rows dq = place(dx.q, at, b, h, stage), dk = place(dx.k, at, b, h, stage),
                 dv = place(dx.v, at, b, h, stage);
      const float* const log_sum = log_sums.f32() + (b * heads + h) * at.tokens;
      const Mask mask = of_head(all, b, h);
      const std::int64_t tokens = tokens_of(options, at, b);
      // From the last block, which sees all keys and so overwrites all gradients, to the first.
      const std::int64_t blocks = (tokens + kBlock - 1) / kBlock;
      for (std::int64_t block = blocks - 1; block >= 0; --block) {
        const std::int64_t begin = block * kBlock, rows = std::min(tokens - begin, kBlock);
        const Seen seen = {.causal = options.causal, .before = begin, .most = tokens};
        const std::int64_t keys = seen.by(rows - 1);  // of the block
        const float beta = block == blocks - 1 ? 0.0f : 1.0f;
        const Rows p = {scratch, keys}, dp = {scratch + kBlock * at.tokens, keys};
        const Rows dout_block = dout.from(begin), q_block = q.from(begin);
        product(Transposed::kNo, Transposed::kYes, rows, keys, at.width, at.scale, q_block, k, 0.0f, p);
        product(Transposed::kNo, Transposed::kYes, rows, keys, at.width, 1.0f, dout_block, v, 0.0f, dp);
        for (std::int64_t i = 0; i < rows; ++i) weigh_again(p.row(i), log_sum[begin + i], seen.by(i), keys);
        // With dropout, values have their gradients from the weights that are left, and weights only where they are.
        const Rows left = drops ? Rows{scratch + 2 * kBlock * at.tokens, keys} : p;
        for (std::int64_t i = 0; drops && i < rows; ++i) {
          drop_row(mask, begin + i, seen.by(i), keys, p.row(i), left.row(i));
          drop_row(mask, begin + i, seen.by(i), keys, dp.row(i), dp.row(i));
        }
        product(Transposed::kYes, Transposed::kNo, keys, at.width, rows, 1.0f, left, dout_block, beta, dv);
        for (std::int64_t i = 0; i < rows; ++i)
          score_gradients(p.row(i), dp.row(i), dot(dout_block.row(i), out.row(begin + i), at.width), keys);
        product(Transposed::kNo, Transposed::kNo, rows, at.width, keys, at.scale, dp, k, 0.0f, dq.from(begin));
        product(Transposed::kYes, Transposed::kNo, keys, at.width, rows, at.scale, dp, q_block, beta, dk);
      }
      for (const Rows& gradient : {dq, dk, dv}) clear(gradient, tokens, at);
      write(dq, dx.q, at, b, h);
      write(dk, dx.k, at, b, h);
      write(dv, dx.v, at, b, h);
    };
    each_head(at, drops ? 3 : 2, staged_rows(dy, 8, at.tokens), body);
  }

  void extend(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache, const Tensor& y) override {
    with_type(y.dtype(), [&](auto type) { extend_as<decltype(type)>(qkv, heads, past, cache, y); });
  }

 private:
  struct Layout {
    Layout(const Tensor& q, std::int64_t head_count)
        : batch(q.size(0)),
          tokens(q.size(1)),
          heads(head_count),
          width(q.size(2) / head_count),
          scale(1.0f / std::sqrt(static_cast<float>(width))) {}

    /// Head h of sample b.
    template <class T>
    RowsOf<T> head(const Tensor& all, std::int64_t b, std::int64_t h) const {
      return {all.rows<T>() + b * tokens * all.pitch() + h * width, all.pitch()};
    }

    std::int64_t batch, tokens, heads, width;
    float scale;
  };

  // Note [Attention in bf16]
  // What a head has of queries, keys, values and gradients is widened once, into scratch memory that stays in the
  // cache: the weights of attention are f32 throughout, and all sums, so nothing is rounded but results.
  static std::int64_t staged_rows(const Tensor& like, std::int64_t tensors, std::int64_t rows) {
    return like.dtype() == DType::kF32 ? 0 : tensors * rows;
  }
  // A head's first rows as f32: where they are, or at `stage`, which moves on.
  static Rows read(const Tensor& all, const Layout& at, std::int64_t b, std::int64_t h, std::int64_t rows,
                   float*& stage) {
    if (all.dtype() == DType::kF32) return at.head<float>(all, b, h);
    return widened(at.head<BFloat16>(all, b, h), rows, at.width, stage);
  }
  static Rows widened(const RowsOf<BFloat16>& from, std::int64_t rows, std::int64_t width, float*& stage) {
    const Rows made = {stage, width};
    for (std::int64_t i = 0; i < rows; ++i) convert_row(from.row(i), made.row(i), width);
    stage += rows * width;
    return made;
  }
  static Rows widened(const Rows& from, std::int64_t, std::int64_t, float*&) { return from; }
  static Rows place(const Tensor& all, const Layout& at, std::int64_t b, std::int64_t h, float*& stage) {
    if (all.dtype() == DType::kF32) return at.head<float>(all, b, h);
    const Rows made = {stage, at.width};
    stage += at.tokens * at.width;
    return made;
  }
  // What place() has made, to where it belongs.
  static void write(const Rows& from, const Tensor& all, const Layout& at, std::int64_t b, std::int64_t h) {
    if (all.dtype() == DType::kF32) return;
    const RowsOf<BFloat16> to = at.head<BFloat16>(all, b, h);
    for (std::int64_t i = 0; i < at.tokens; ++i) convert_row(from.row(i), to.row(i), at.width);
  }

  template <class T>
  void extend_as(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache, const Tensor& y) {
    const AttentionInputs x(qkv);
    const Layout at(x.q, heads);
    const std::int64_t model = heads * at.width, most = cache.size(1);
    LOCKSTEP_ASSERT(past + at.tokens <= most, "{} tokens after {} in a cache for {}", at.tokens, past, most);
    T* const cached = cache.data<T>();
    for (std::int64_t b = 0; b < at.batch; ++b)
      for (std::int64_t t = 0; t < at.tokens; ++t)
        std::copy_n(qkv.data<T>() + (b * at.tokens + t) * 3 * model + model, 2 * model,
                    cached + (b * most + past + t) * 2 * model);
    Layout seen = at;
    seen.tokens = past + at.tokens;  // how many weights a row of the scratch memory needs
    const std::int64_t staged = at.tokens == 1 ? 0 : staged_rows(y, 2, seen.tokens) + staged_rows(y, 2, at.tokens);
    each_head(seen, 1, staged, [&](std::int64_t b, std::int64_t h, float* scratch, float* stage) {
      const RowsOf<T> keys = {cached + b * most * 2 * model + h * at.width, 2 * model};
      const RowsOf<T> values = {keys.first + model, 2 * model};
      if (at.tokens == 1) {
        attend_row(at.head<T>(x.q, b, h).first, keys, values, seen.tokens, at.width, at.scale, scratch,
                   at.head<T>(y, b, h).first);
        return;
      }
      const Rows q = read(x.q, at, b, h, at.tokens, stage), out = place(y, at, b, h, stage);
      const Rows k = widened(keys, seen.tokens, at.width, stage), v = widened(values, seen.tokens, at.width, stage);
      float log_sum[kBlock];
      for (std::int64_t begin = 0; begin < at.tokens; begin += kBlock)
        attend(at, q.from(begin), std::min(at.tokens - begin, kBlock), {.causal = true, .before = past + begin}, k, v,
               nullptr, scratch, out.from(begin), log_sum);
      write(out, y, at, b, h);
    });
  }

  // How many keys the queries of a block see.
  struct Seen {
    bool causal;
    std::int64_t before;    // queries before the block's first
    std::int64_t most = 0;  // where it is not causal

    std::int64_t by(std::int64_t row) const { return causal ? before + row + 1 : most; }
  };

  static std::int64_t tokens_of(const AttentionOptions& options, const Layout& at, std::int64_t b) {
    if (!options.lengths.defined()) return at.tokens;
    return std::clamp<std::int64_t>(options.lengths.data<std::int32_t>()[b], 0, at.tokens);
  }
  // The rows of padding.
  static void clear(Rows all, std::int64_t tokens, const Layout& at) {
    for (std::int64_t t = tokens; t < at.tokens; ++t) std::fill_n(all.row(t), at.width, 0.0f);
  }

  static Mask mask_of(const AttentionOptions& options, const Layout& at) {
    if (options.dropout == 0) return {};
    const auto* const numbers = options.dropout_state.data<std::int64_t>();
    return {.state = {.seed = numbers[0], .step = numbers[1], .first_sample = numbers[2]},
            .layer = options.layer,
            .tokens = at.tokens,
            .threshold = dropout_threshold(options.dropout),
            .scale = static_cast<float>(1.0 / (1.0 - options.dropout))};
  }
  static Mask of_head(Mask all, std::int64_t b, std::int64_t h) {
    all.sample = all.state.first_sample + b;
    all.head = h;
    return all;
  }

  // `rows` queries: their results, and the logarithmic sums. `mask`: of weights that are dropped; nullptr: none.
  static void attend(const Layout& at, Rows q, std::int64_t rows, const Seen& seen, Rows k, Rows v, const Mask* mask,
                     float* scratch, Rows out, float* log_sum) {
    const std::int64_t keys = seen.by(rows - 1);
    const Rows weights = {scratch, keys};
    product(Transposed::kNo, Transposed::kYes, rows, keys, at.width, at.scale, q, k, 0.0f, weights);
    float inverse[kBlock];
    for (std::int64_t i = 0; i < rows; ++i) {
      const RowWeights row = weigh(weights.row(i), seen.by(i), keys);
      inverse[i] = 1.0f / row.sum;
      log_sum[i] = row.largest + std::log(row.sum);
      if (mask != nullptr) drop_row(*mask, seen.before + i, seen.by(i), keys, weights.row(i), weights.row(i));
    }
    product(Transposed::kNo, Transposed::kNo, rows, at.width, keys, 1.0f, weights, v, 0.0f, out);
    for (std::int64_t i = 0; i < rows; ++i) scale_row(out.row(i), inverse[i], at.width);
  }

  // Calls body(b, h, scratch, stage) for all heads of all samples, with memory for `blocks` blocks of weights and for
  // `staged` rows of a head.
  template <class Body>
  void each_head(const Layout& at, std::int64_t blocks, std::int64_t staged, const Body& body) {
    const std::int64_t threads =
        std::min<std::int64_t>(omp_get_max_threads(), std::max<std::int64_t>(1, at.batch * at.heads));
    const std::int64_t weights = blocks * kBlock * at.tokens, elements = weights + staged * at.width;
    const Tensor scratch = Tensor::empty(allocator_, {threads, elements});
    parallel_for(at.batch * at.heads, 1, [&](std::int64_t begin, std::int64_t end) {
      float* const mine = scratch.f32() + omp_get_thread_num() * elements;
      for (std::int64_t i = begin; i < end; ++i) body(i / at.heads, i % at.heads, mine, mine + weights);
    });
  }

  CachingAllocator& allocator_;
};

}  // namespace

std::unique_ptr<AttentionKernels> make_attention_kernels(CachingAllocator& allocator) {
  return std::make_unique<CpuAttention>(allocator);
}

}  // namespace lockstep::nn::cpu
