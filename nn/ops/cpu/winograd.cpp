#include "nn/ops/cpu/winograd.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/column_products.h"
#include "nn/ops/cpu/panels.h"
#include "nn/ops/cpu/parallel.h"

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

// The matrices times a column. `step` is between the rows of what is read and of what is written.

// Bᵀ
[[gnu::always_inline]] inline void transform_input(const Lanes* d, int d_step, Lanes* v, int v_step) {
  const Lanes a = d[4 * d_step] - 4.0f * d[2 * d_step], b = d[3 * d_step] - 4.0f * d[d_step];
  const Lanes e = d[4 * d_step] - d[2 * d_step], f = 2.0f * (d[3 * d_step] - d[d_step]);
  v[0] = 4.0f * d[0] - 5.0f * d[2 * d_step] + d[4 * d_step];
  v[v_step] = a + b;
  v[2 * v_step] = a - b;
  v[3 * v_step] = e + f;
  v[4 * v_step] = e - f;
  v[5 * v_step] = 4.0f * d[d_step] - 5.0f * d[3 * d_step] + d[5 * d_step];
}

// Aᵀ
[[gnu::always_inline]] inline void transform_output(const Lanes* m, int m_step, Lanes* y, int y_step) {
  const Lanes a = m[m_step] + m[2 * m_step], b = m[m_step] - m[2 * m_step];
  const Lanes e = m[3 * m_step] + m[4 * m_step], f = m[3 * m_step] - m[4 * m_step];
  y[0] = m[0] + a + e;
  y[y_step] = b + 2.0f * f;
  y[2 * y_step] = a + 4.0f * e;
  y[3 * y_step] = b + 8.0f * f + m[5 * m_step];
}

// A
[[gnu::always_inline]] inline void transform_gradient(const Lanes* y, int y_step, Lanes* m, int m_step) {
  const Lanes a = y[0] + y[2 * y_step], b = y[y_step] + y[3 * y_step];
  const Lanes e = y[0] + 4.0f * y[2 * y_step], f = 2.0f * y[y_step] + 8.0f * y[3 * y_step];
  m[0] = y[0];
  m[m_step] = a + b;
  m[2 * m_step] = a - b;
  m[3 * m_step] = e + f;
  m[4 * m_step] = e - f;
  m[5 * m_step] = y[3 * y_step];
}

// G
[[gnu::always_inline]] inline void transform_weights(const Lanes* g, int g_step, Lanes* u, int u_step) {
  const Lanes a = (g[0] + g[2 * g_step]) * (1.0f / 6.0f), b = g[g_step] * (1.0f / 6.0f);
  const Lanes e = g[0] * (1.0f / 24.0f) + g[2 * g_step] * (1.0f / 6.0f), f = g[g_step] * (1.0f / 12.0f);
  u[0] = 0.25f * g[0];
  u[u_step] = -a - b;
  u[2 * u_step] = b - a;
  u[3 * u_step] = e + f;
  u[4 * u_step] = e - f;
  u[5 * u_step] = g[2 * g_step];
}

// Gᵀ
[[gnu::always_inline]] inline void gather_weights(const Lanes* u, int u_step, Lanes* g, int g_step) {
  const Lanes a = u[u_step] + u[2 * u_step], b = u[2 * u_step] - u[u_step];
  const Lanes e = u[3 * u_step] + u[4 * u_step], f = u[3 * u_step] - u[4 * u_step];
  g[0] = 0.25f * u[0] - a * (1.0f / 6.0f) + e * (1.0f / 24.0f);
  g[g_step] = b * (1.0f / 6.0f) + f * (1.0f / 12.0f);
  g[2 * g_step] = (e - a) * (1.0f / 6.0f) + u[5 * u_step];
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

// Tiles [begin, end) of x to v, of which (tiles, channels) is a place's and `place` the distance to the next one's.
LOCKSTEP_SIMD_CLONES
void scatter_inputs(const float* x, const Tiles& tiles, std::int64_t first, std::int64_t begin, std::int64_t end,
                    float* v, std::int64_t place) {
  for (std::int64_t t = begin; t < end; ++t) {
    const Corner corner(tiles, first + t);
    for (std::int64_t c = 0; c < tiles.channels; c += kLanes) {
      Lanes d[kPlaces], half[kPlaces], whole[kPlaces];
      for (std::int64_t i = 0; i < kWide; ++i)
        for (std::int64_t j = 0; j < kWide; ++j) {
          const std::int64_t row = corner.row + i - 1, column = corner.column + j - 1;
          if (row >= 0 && row < tiles.height && column >= 0 && column < tiles.width)
            load(x + corner.image + (row * tiles.width + column) * tiles.channels + c, d[i * kWide + j]);
          else
            d[i * kWide + j] = Lanes{};
        }
      for (int j = 0; j < kWide; ++j) transform_input(d + j, kWide, half + j, kWide);
      for (int i = 0; i < kWide; ++i) transform_input(half + i * kWide, 1, whole + i * kWide, 1);
      for (std::int64_t p = 0; p < kPlaces; ++p) store(whole[p], v + p * place + t * tiles.channels + c);
    }
  }
}

// Tiles [begin, end) of dy to m, as above; beyond the images it is 0.
LOCKSTEP_SIMD_CLONES
void scatter_gradients(const float* dy, const Tiles& tiles, std::int64_t first, std::int64_t begin, std::int64_t end,
                       float* m, std::int64_t place) {
  for (std::int64_t t = begin; t < end; ++t) {
    const Corner corner(tiles, first + t);
    for (std::int64_t c = 0; c < tiles.channels; c += kLanes) {
      Lanes d[kTile * kTile], half[kWide * kTile], whole[kPlaces];
      for (std::int64_t i = 0; i < kTile; ++i)
        for (std::int64_t j = 0; j < kTile; ++j) {
          const std::int64_t row = corner.row + i, column = corner.column + j;
          if (row < tiles.height && column < tiles.width)
            load(dy + corner.image + (row * tiles.width + column) * tiles.channels + c, d[i * kTile + j]);
          else
            d[i * kTile + j] = Lanes{};
        }
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

LOCKSTEP_SIMD_CLONES
void sum_pixels(const float* dy, std::int64_t pixels, std::int64_t channels, std::int64_t begin, std::int64_t end,
                bool accumulate, float* sums) {
  if (!accumulate) std::fill(sums + begin, sums + end, 0.0f);
  for (std::int64_t p = 0; p < pixels; ++p)
    for (std::int64_t c = begin; c < end; ++c) sums[c] += dy[p * channels + c];
}

// Tiles at a time, of which each place has (tiles, `channels` in all).
std::int64_t tiles_at_a_time(const Tiles& tiles, std::int64_t channels) {
  const std::int64_t most = std::max(kLeastTiles, kBlockFloats / (kPlaces * channels));
  const std::int64_t blocks = (tiles.count + most - 1) / most;
  return (tiles.count + blocks - 1) / blocks;
}

}  // namespace

bool WinogradConv::suits(const Shape& x, const Shape& w, const Window& window) {
  const auto three = [](const std::array<std::int64_t, 2>& sides, std::int64_t size) {
    return sides[0] == size && sides[1] == size;
  };
  const auto enough = [](std::int64_t channels) { return channels >= kLeastChannels && channels % kPanel == 0; };
  return three(window.kernel, 3) && three(window.stride, 1) && three(window.padding, 1) && enough(x[3]) &&
         enough(w[0]) && Tiles(x, x[3]).count >= kLeastTiles;
}

void WinogradConv::convolve(const Tensor& x, const Tensor& w, Weights weights, const float* bias, bool relu,
                            const Tensor& y) {
  const Tiles from(x.shape(), x.size(3)), to(y.shape(), y.size(3));
  const std::int64_t in = from.channels, out = to.channels, panels = panels_of(out), panel = in * kPanel;
  const std::int64_t u_place = panels * panel + kGap;
  const Tensor u = Tensor::empty(allocator_, {kPlaces, u_place});  // of each place (panels, in, kPanel)
  if (weights == Weights::kTurned) {                               // w is (in, 3, 3, out)
    parallel_for(in, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        spread_weights(w.f32() + i * 9 * out, out, true, u.f32() + i * kPanel, u_place, panel);
    });
  } else {
    const std::int64_t parts = std::min<std::int64_t>(omp_get_max_threads(), panels), place = panel + kGap;
    const Tensor rows = Tensor::empty(allocator_, {parts, kPlaces, place});  // of each place (kPanel, in)
    parallel_for(parts, 1, [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t part = first; part < end; ++part)
        for (std::int64_t p = panels * part / parts; p < panels * (part + 1) / parts; ++p) {
          float* const mine = rows.f32() + part * kPlaces * place;
          for (std::int64_t o = 0; o < kPanel; ++o)
            spread_weights(w.f32() + (p * kPanel + o) * 9 * in, in, false, mine + o * in, place, kPanel);
          for (std::int64_t q = 0; q < kPlaces; ++q)
            pack_rows(mine + q * place, in, kPanel, in, u.f32() + q * u_place + p * panel);
        }
    });
  }

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
        add_product(v.f32() + q * v_place, in, some, in, u.f32() + q * u_place + p * panel, kPanel, sums, out);
      }
    });
    parallel_for(some, 1, [&](std::int64_t begin, std::int64_t end) {
      gather_outputs(m.f32(), m_place, to, first, begin, end, bias, relu, y.f32());
    });
  }
}

void WinogradConv::forward(const Tensor& x, const Tensor& w, const Tensor& b, bool relu, const Tensor& y) {
  convolve(x, w, Weights::kAsTheyAre, b.defined() ? b.f32() : nullptr, relu, y);
}

void WinogradConv::backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) {
  convolve(dy, w, Weights::kTurned, nullptr, false, dx);
}

void WinogradConv::backward_weight(const Tensor& x, const Tensor& dy, bool accumulate_w, const Tensor& dw,
                                   bool accumulate_b, const Tensor& db) {
  const Tiles from(x.shape(), x.size(3)), to(dy.shape(), dy.size(3));
  const std::int64_t in = from.channels, out = to.channels, most = tiles_at_a_time(from, in + out);
  const std::int64_t v_place = most * in + kGap, m_place = most * out + kGap, u_place = out * in + kGap;
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
  if (!db.defined()) return;
  parallel_for(out / kPanel, 1, [&](std::int64_t begin, std::int64_t end) {
    sum_pixels(dy.f32(), dy.count() / out, out, begin * kPanel, end * kPanel, accumulate_b, db.f32());
  });
}

}  // namespace lockstep::nn::cpu
