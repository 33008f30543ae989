#include "nn/ops/cpu/winograd.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/column_moments.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/products.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kTile = 4, kWide = kTile + 2, kPlaces = kWide * kWide;
constexpr std::int64_t kLeastChannels = 64, kLeastTiles = 32;
// Of what the transformations write for some tiles: it stays in the last cache.
constexpr std::int64_t kBlockFloats = 1 << 20;
// Between the 36 places, so that their distance is no power of two, of which a cache holds few lines.
constexpr std::int64_t kGap = 16;

// Channels side by side.
using Lanes = float __attribute__((vector_size(32)));
constexpr std::int64_t kLanes = sizeof(Lanes) / sizeof(float);

[[gnu::always_inline]] inline void load(const float* from, Lanes& to) { std::memcpy(&to, from, sizeof to); }
[[gnu::always_inline]] inline void store(const Lanes& from, float* to) { std::memcpy(to, &from, sizeof from); }

// The points at which polynomials are taken are 0, ±a, ±b and infinity. With the usual 1 and 2 the largest error of f32
// is three times as large (of 64 channels, 4.6e-6 of the largest number of y and 1.3e-6 with these).
constexpr float kA = 0.75f, kB = 1.5f;
constexpr float kA2 = kA * kA, kB2 = kB * kB, kA3 = kA2 * kA, kB3 = kB2 * kB;
// 1 / Π (p − q) over the other points q, for p = 0, ±a and ±b.
constexpr float kOf0 = 1.0f / (kA2 * kB2), kOfA = 0.5f / (kA2 * (kA2 - kB2)), kOfB = 0.5f / (kB2 * (kB2 - kA2));

// The matrices times a column. `step` is between the rows of what is read and of what is written.

// Numbers at a, -a, b and -b from their even and odd parts there.
[[gnu::always_inline]] inline void at_points(const Lanes& even_a, const Lanes& odd_a, const Lanes& even_b,
                                             const Lanes& odd_b, Lanes* to, int step) {
  to[0] = even_a + odd_a;
  to[step] = even_a - odd_a;
  to[2 * step] = even_b + odd_b;
  to[3 * step] = even_b - odd_b;
}

// Bᵀ
[[gnu::always_inline]] inline void transform_input(const Lanes* d, int d_step, Lanes* v, int v_step) {
  const Lanes even_a = d[4 * d_step] - kB2 * d[2 * d_step], odd_a = kA * (d[3 * d_step] - kB2 * d[d_step]);
  const Lanes even_b = d[4 * d_step] - kA2 * d[2 * d_step], odd_b = kB * (d[3 * d_step] - kA2 * d[d_step]);
  v[0] = kA2 * kB2 * d[0] - (kA2 + kB2) * d[2 * d_step] + d[4 * d_step];
  at_points(even_a, odd_a, even_b, odd_b, v + v_step, v_step);
  v[5 * v_step] = kA2 * kB2 * d[d_step] - (kA2 + kB2) * d[3 * d_step] + d[5 * d_step];
}

// Aᵀ
[[gnu::always_inline]] inline void transform_output(const Lanes* m, int m_step, Lanes* y, int y_step) {
  const Lanes even_a = m[m_step] + m[2 * m_step], odd_a = m[m_step] - m[2 * m_step];
  const Lanes even_b = m[3 * m_step] + m[4 * m_step], odd_b = m[3 * m_step] - m[4 * m_step];
  y[0] = m[0] + even_a + even_b;
  y[y_step] = kA * odd_a + kB * odd_b;
  y[2 * y_step] = kA2 * even_a + kB2 * even_b;
  y[3 * y_step] = kA3 * odd_a + kB3 * odd_b + m[5 * m_step];
}

// A
[[gnu::always_inline]] inline void transform_gradient(const Lanes* y, int y_step, Lanes* m, int m_step) {
  const Lanes even_a = y[0] + kA2 * y[2 * y_step], odd_a = kA * y[y_step] + kA3 * y[3 * y_step];
  const Lanes even_b = y[0] + kB2 * y[2 * y_step], odd_b = kB * y[y_step] + kB3 * y[3 * y_step];
  m[0] = y[0];
  at_points(even_a, odd_a, even_b, odd_b, m + m_step, m_step);
  m[5 * m_step] = y[3 * y_step];
}

// G
[[gnu::always_inline]] inline void transform_weights(const Lanes* g, int g_step, Lanes* u, int u_step) {
  const Lanes even_a = kOfA * g[0] + kOfA * kA2 * g[2 * g_step], odd_a = kOfA * kA * g[g_step];
  const Lanes even_b = kOfB * g[0] + kOfB * kB2 * g[2 * g_step], odd_b = kOfB * kB * g[g_step];
  u[0] = kOf0 * g[0];
  at_points(even_a, odd_a, even_b, odd_b, u + u_step, u_step);
  u[5 * u_step] = g[2 * g_step];
}

// Gᵀ
[[gnu::always_inline]] inline void gather_weights(const Lanes* u, int u_step, Lanes* g, int g_step) {
  const Lanes even_a = kOfA * (u[u_step] + u[2 * u_step]), odd_a = kOfA * kA * (u[u_step] - u[2 * u_step]);
  const Lanes even_b = kOfB * (u[3 * u_step] + u[4 * u_step]), odd_b = kOfB * kB * (u[3 * u_step] - u[4 * u_step]);
  g[0] = kOf0 * u[0] + even_a + even_b;
  g[g_step] = odd_a + odd_b;
  g[2 * g_step] = kA2 * even_a + kB2 * even_b + u[5 * u_step];
}

// Images of (height, width, channels) in tiles, which are counted row by row and image by image.
struct Tiles {
  Tiles(const Shape& image, std::int64_t c)
      : height(image[1]),
        width(image[2]),
        channels(c),
        down((height + kTile - 1) / kTile),
        across((width + kTile - 1) / kTile),
        count(image[0] * down * across) {}

  std::int64_t height, width, channels, down, across, count;
};

// Of a tile's first pixel (of y: so the six by six of x begin one before it).
struct Corner {
  Corner(const Tiles& tiles, std::int64_t tile)
      : row(tile / tiles.across % tiles.down * kTile),
        column(tile % tiles.across * kTile),
        image(tile / (tiles.across * tiles.down) * tiles.height * tiles.width * tiles.channels) {}

  std::int64_t row, column;
  std::int64_t image;  // where it begins, in floats
};

// Channels of kSide by kSide pixels from this row and column on; 0 beyond the image.
template <std::int64_t kSide>
[[gnu::always_inline]] inline void load_pixels(const float* channels, const Tiles& tiles, std::int64_t first_row,
                                               std::int64_t first_column, Lanes* to) {
  for (std::int64_t i = 0; i < kSide; ++i)
    for (std::int64_t j = 0; j < kSide; ++j) {
      const std::int64_t row = first_row + i, column = first_column + j;
      if (row >= 0 && row < tiles.height && column >= 0 && column < tiles.width)
        load(channels + (row * tiles.width + column) * tiles.channels, to[i * kSide + j]);
      else
        to[i * kSide + j] = Lanes{};
    }
}

// Tiles [begin, end) of x to v, of which (tiles, channels) is a place's and `place` the distance to the next one's.
LOCKSTEP_SIMD_CLONES
void scatter_inputs(const float* x, const Tiles& tiles, std::int64_t first, std::int64_t begin, std::int64_t end,
                    float* v, std::int64_t place) {
  for (std::int64_t t = begin; t < end; ++t) {
    const Corner corner(tiles, first + t);
    for (std::int64_t c = 0; c < tiles.channels; c += kLanes) {
      Lanes d[kPlaces], half[kPlaces], whole[kPlaces];
      load_pixels<kWide>(x + corner.image + c, tiles, corner.row - 1, corner.column - 1, d);
      for (int j = 0; j < kWide; ++j) transform_input(d + j, kWide, half + j, kWide);
      for (int i = 0; i < kWide; ++i) transform_input(half + i * kWide, 1, whole + i * kWide, 1);
      for (std::int64_t p = 0; p < kPlaces; ++p) store(whole[p], v + p * place + t * tiles.channels + c);
    }
  }
}

// Tiles [begin, end) of dy to m, as above.
LOCKSTEP_SIMD_CLONES
void scatter_gradients(const float* dy, const Tiles& tiles, std::int64_t first, std::int64_t begin, std::int64_t end,
                       float* m, std::int64_t place) {
  for (std::int64_t t = begin; t < end; ++t) {
    const Corner corner(tiles, first + t);
    for (std::int64_t c = 0; c < tiles.channels; c += kLanes) {
      Lanes d[kTile * kTile], half[kWide * kTile], whole[kPlaces];
      load_pixels<kTile>(dy + corner.image + c, tiles, corner.row, corner.column, d);
      for (int j = 0; j < kTile; ++j) transform_gradient(d + j, kTile, half + j, kTile);
      for (int i = 0; i < kWide; ++i) transform_gradient(half + i * kTile, 1, whole + i * kWide, 1);
      for (std::int64_t p = 0; p < kPlaces; ++p) store(whole[p], m + p * place + t * tiles.channels + c);
    }
  }
}

// What has become of tiles [begin, end), from m to y.
LOCKSTEP_SIMD_CLONES
void gather_outputs(const float* m, std::int64_t place, const Tiles& tiles, std::int64_t first, std::int64_t begin,
                    std::int64_t end, const float* bias, bool relu, float* y) {
  for (std::int64_t t = begin; t < end; ++t) {
    const Corner corner(tiles, first + t);
    for (std::int64_t c = 0; c < tiles.channels; c += kLanes) {
      Lanes d[kPlaces], half[kTile * kWide], whole[kTile * kTile], b = {};
      if (bias != nullptr) load(bias + c, b);
      for (std::int64_t p = 0; p < kPlaces; ++p) load(m + p * place + t * tiles.channels + c, d[p]);
      for (int j = 0; j < kWide; ++j) transform_output(d + j, kWide, half + j, kWide);
      for (int i = 0; i < kTile; ++i) transform_output(half + i * kWide, 1, whole + i * kTile, 1);
      for (std::int64_t i = 0; i < std::min(kTile, tiles.height - corner.row); ++i)
        for (std::int64_t j = 0; j < std::min(kTile, tiles.width - corner.column); ++j) {
          Lanes value = whole[i * kTile + j] + b;
          if (relu) value = value < Lanes{} ? Lanes{} : value;  // NaN stays
          store(value, y + corner.image + ((corner.row + i) * tiles.width + corner.column + j) * tiles.channels + c);
        }
    }
  }
}

// One output's weights (3, 3, C), or these turned by 180°, to u: of each place it has strips of kPanel channels.
LOCKSTEP_SIMD_CLONES
void spread_weights(const float* w, std::int64_t channels, bool turned, float* u, std::int64_t place,
                    std::int64_t strip) {
  for (std::int64_t c = 0; c < channels; c += kLanes) {
    Lanes g[9], half[kWide * 3], whole[kPlaces];
    for (std::int64_t i = 0; i < 9; ++i) load(w + (turned ? 8 - i : i) * channels + c, g[i]);
    for (int j = 0; j < 3; ++j) transform_weights(g + j, 3, half + j, 3);
    for (int i = 0; i < kWide; ++i) transform_weights(half + i * 3, 1, whole + i * kWide, 1);
    float* const to = u + c / kPanel * strip + c % kPanel;
    for (std::int64_t p = 0; p < kPlaces; ++p) store(whole[p], to + p * place);
  }
}

// One output's gradients, of which u has (C) in each place, to dw (3, 3, C).
LOCKSTEP_SIMD_CLONES
void collect_weights(const float* u, std::int64_t place, std::int64_t channels, bool accumulate, float* dw) {
  for (std::int64_t c = 0; c < channels; c += kLanes) {
    Lanes m[kPlaces], half[3 * kWide], g[9];
    for (std::int64_t p = 0; p < kPlaces; ++p) load(u + p * place + c, m[p]);
    for (int j = 0; j < kWide; ++j) gather_weights(m + j, kWide, half + j, kWide);
    for (int i = 0; i < 3; ++i) gather_weights(half + i * kWide, 1, g + i * 3, 1);
    for (std::int64_t i = 0; i < 9; ++i) {
      Lanes old = {};
      if (accumulate) load(dw + i * channels + c, old);
      store(accumulate ? g[i] + old : g[i], dw + i * channels + c);
    }
  }
}

// From one place of transformed weights to the next one, in floats; channels are multiples of kPanel.
std::int64_t distance(std::int64_t in, std::int64_t out) { return in * out + kGap; }

// Tiles at a time, of which each place has (tiles, `channels` in all).
std::int64_t tiles_at_a_time(const Tiles& tiles, std::int64_t channels) {
  const std::int64_t most = std::max(kLeastTiles, kBlockFloats / (kPlaces * channels));
  const std::int64_t blocks = (tiles.count + most - 1) / most;
  return (tiles.count + blocks - 1) / blocks;
}

}  // namespace

bool WinogradConv::suits(const Shape& x, const Shape& w, const Window& window) {
  const auto all = [](const std::array<std::int64_t, 2>& sides, std::int64_t size) {
    return sides[0] == size && sides[1] == size;
  };
  const auto enough = [](std::int64_t channels) { return channels >= kLeastChannels && channels % kPanel == 0; };
  return all(window.kernel, 3) && all(window.stride, 1) && all(window.padding, 1) && enough(x[3]) && enough(w[0]) &&
         Tiles(x, x[3]).count >= kLeastTiles;
}

// u: of each place (panels, in, kPanel), of w (out, 3, 3, in).
void WinogradConv::transform_rows(const Tensor& w, float* u) {
  const std::int64_t out = w.size(0), in = w.size(3), panels = panels_of(out), panel = in * kPanel;
  const std::int64_t parts = std::min<std::int64_t>(omp_get_max_threads(), panels), place = panel + kGap;
  const Tensor rows = Tensor::empty(allocator_, {parts, kPlaces, place});  // of each place (kPanel, in)
  parallel_for(parts, 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t part = first; part < end; ++part)
      for (std::int64_t p = panels * part / parts; p < panels * (part + 1) / parts; ++p) {
        float* const mine = rows.f32() + part * kPlaces * place;
        for (std::int64_t o = 0; o < kPanel; ++o)
          spread_weights(w.f32() + (p * kPanel + o) * 9 * in, in, false, mine + o * in, place, kPanel);
        for (std::int64_t q = 0; q < kPlaces; ++q)
          pack_rows(mine + q * place, in, kPanel, in, u + q * distance(in, out) + p * panel);
      }
  });
}

void WinogradConv::convolve(const Tensor& x, const float* u, const float* bias, bool relu, const Tensor& y) {
  const Tiles from(x.shape(), x.size(3)), to(y.shape(), y.size(3));
  const std::int64_t in = from.channels, out = to.channels, panels = panels_of(out), panel = in * kPanel;
  const std::int64_t most = tiles_at_a_time(from, in + out);
  const std::int64_t v_place = most * in + kGap, m_place = most * out + kGap;
  const Tensor v = Tensor::empty(allocator_, {kPlaces, v_place}), m = Tensor::empty(allocator_, {kPlaces, m_place});
  for (std::int64_t first = 0; first < from.count; first += most) {
    const std::int64_t some = std::min(most, from.count - first);
    parallel_for(some, 1, [&](std::int64_t begin, std::int64_t end) {
      scatter_inputs(x.f32(), from, first, begin, end, v.f32(), v_place);
    });
    parallel_for(kPlaces * panels, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t q = i / panels, p = i % panels;
        float* const sums = m.f32() + q * m_place + p * kPanel;
        for (std::int64_t t = 0; t < some; ++t) std::fill_n(sums + t * out, kPanel, 0.0f);
        add_product(v.f32() + q * v_place, in, some, in, u + q * distance(in, out) + p * panel, kPanel, sums, out);
      }
    });
    parallel_for(some, 1, [&](std::int64_t begin, std::int64_t end) {
      gather_outputs(m.f32(), m_place, to, first, begin, end, bias, relu, y.f32());
    });
  }
}

void WinogradConv::forward(const Tensor& x, const Tensor& w, std::uint64_t w_version, const Tensor& b, bool relu,
                           const Tensor& y) {
  const Shape transformed = {kPlaces, distance(w.size(3), w.size(0))};
  const auto fill = [&](const Tensor& to) { transform_rows(w, to.f32()); };
  Tensor u;
  if (shared_ != nullptr) {
    u = shared_->get(w.raw(), w_version, f32_desc(to_dims(transformed), dnnl::memory::format_tag::ab), fill);
  } else {
    u = Tensor::empty(allocator_, transformed);
    fill(u);
  }
  convolve(x, u.f32(), b.defined() ? b.f32() : nullptr, relu, y);
}

void WinogradConv::backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) {
  const std::int64_t from = w.size(0), to = w.size(3);
  const Tensor u = Tensor::empty(allocator_, {kPlaces, distance(from, to)});
  parallel_for(from, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      spread_weights(w.f32() + i * 9 * to, to, true, u.f32() + i * kPanel, distance(from, to), from * kPanel);
  });
  convolve(dy, u.f32(), nullptr, false, dx);
}

void WinogradConv::backward_weight(const Tensor& x, const Tensor& dy, bool accumulate_w, const Tensor& dw,
                                   bool accumulate_b, const Tensor& db) {
  const Tiles from(x.shape(), x.size(3)), to(dy.shape(), dy.size(3));
  const std::int64_t in = from.channels, out = to.channels, most = tiles_at_a_time(from, in + out);
  const std::int64_t v_place = most * in + kGap, m_place = most * out + kGap, u_place = distance(in, out);
  const Tensor v = Tensor::empty(allocator_, {kPlaces, v_place}), m = Tensor::empty(allocator_, {kPlaces, m_place}),
               u = Tensor::empty(allocator_, {kPlaces, u_place});
  const std::int64_t parts = std::min<std::int64_t>(omp_get_max_threads(), kPlaces);
  const Tensor scratch = Tensor::empty(allocator_, {parts, column_scratch(most, out, in)});
  for (std::int64_t first = 0; first < from.count; first += most) {
    const std::int64_t some = std::min(most, from.count - first);
    parallel_for(some, 1, [&](std::int64_t begin, std::int64_t end) {
      scatter_inputs(x.f32(), from, first, begin, end, v.f32(), v_place);
      scatter_gradients(dy.f32(), to, first, begin, end, m.f32(), m_place);
    });
    parallel_for(parts, 1, [&](std::int64_t first_part, std::int64_t end_part) {
      for (std::int64_t part = first_part; part < end_part; ++part)
        for (std::int64_t q = kPlaces * part / parts; q < kPlaces * (part + 1) / parts; ++q)
          multiply_columns_alone(m.f32() + q * m_place, v.f32() + q * v_place, some, out, in, first > 0,
                                 u.f32() + q * u_place, scratch.f32() + part * scratch.size(1));
    });
  }
  parallel_for(out, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t o = begin; o < end; ++o)
      collect_weights(u.f32() + o * in, u_place, in, accumulate_w, dw.f32() + o * 9 * in);
  });
  if (db.defined()) sum_rows(dy.f32(), dy.count() / out, out, accumulate_b, db.f32());
}

}  // namespace lockstep::nn::cpu
