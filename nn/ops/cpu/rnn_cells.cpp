#include "nn/ops/cpu/rnn_cells.h"

#include "base/cpu.h"
#include "nn/ops/cpu/fast_math.h"

namespace lockstep::nn::cpu {
namespace {

LOCKSTEP_SIMD_CLONES
void tanh_cell(const float* __restrict gate, std::int64_t count, float* __restrict h) {
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) h[u] = tanh_of(gate[u]);
}

LOCKSTEP_SIMD_CLONES
void relu_cell(const float* __restrict gate, std::int64_t count, float* __restrict h) {
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) h[u] = gate[u] < 0.0f ? 0.0f : gate[u];  // this way round NaN passes
}

LOCKSTEP_SIMD_CLONES
void tanh_cell_backward(const float* __restrict h, std::int64_t count, const float* __restrict dh,
                        float* __restrict gate) {
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) gate[u] = dh[u] * (1.0f - h[u] * h[u]);
}

LOCKSTEP_SIMD_CLONES
void relu_cell_backward(const float* __restrict h, std::int64_t count, const float* __restrict dh,
                        float* __restrict gate) {
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) gate[u] = h[u] > 0.0f ? dh[u] : 0.0f;
}

}  // namespace

LOCKSTEP_SIMD_CLONES
void lstm_cell(float* __restrict gates, std::int64_t stride, std::int64_t count, float* __restrict c,
               float* __restrict h) {
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

LOCKSTEP_SIMD_CLONES
void lstm_cell_backward(float* __restrict gates, std::int64_t stride, std::int64_t count, const float* __restrict c,
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

LOCKSTEP_SIMD_CLONES
void gru_cell(float* __restrict gates, std::int64_t stride, std::int64_t count, const float* __restrict b_n,
              const float* __restrict h_before, float* __restrict h) {
  float* const rs = gates;
  float* const zs = gates + stride;
  float* const ns = gates + 2 * stride;
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) {
    const float r = sigmoid_of(rs[u]), z = sigmoid_of(zs[u]), n = tanh_of(ns[u] + r * b_n[u]);
    rs[u] = r;
    zs[u] = z;
    ns[u] = n;
    h[u] = n + z * (h_before[u] - n);
  }
}

LOCKSTEP_SIMD_CLONES
void gru_cell_backward(float* __restrict gates, std::int64_t stride, std::int64_t count, float* __restrict b_n,
                       const float* __restrict h_before, const float* __restrict dh, float* __restrict direct) {
  float* const rs = gates;
  float* const zs = gates + stride;
  float* const ns = gates + 2 * stride;
#pragma GCC ivdep
  for (std::int64_t u = 0; u < count; ++u) {
    const float r = rs[u], z = zs[u], n = ns[u], d = dh[u];
    const float dn = d * (1.0f - z) * (1.0f - n * n);
    rs[u] = dn * b_n[u] * r * (1.0f - r);
    zs[u] = d * (h_before[u] - n) * z * (1.0f - z);
    ns[u] = dn * r;
    b_n[u] = dn;
    direct[u] = d * z;
  }
}

void plain_cell(RnnCell cell, const float* gate, std::int64_t count, float* h) {
  if (cell == RnnCell::kRelu)
    relu_cell(gate, count, h);
  else
    tanh_cell(gate, count, h);
}

void plain_cell_backward(RnnCell cell, const float* h, std::int64_t count, const float* dh, float* gate) {
  if (cell == RnnCell::kRelu)
    relu_cell_backward(h, count, dh, gate);
  else
    tanh_cell_backward(h, count, dh, gate);
}

}  // namespace lockstep::nn::cpu
