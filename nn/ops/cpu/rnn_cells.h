// What recurrent cells do with the gates of one sample at one step (rnn.h), and its derivative.
#pragma once

#include <cstdint>

#include "lockstep/nn/ops/rnn.h"

namespace lockstep::nn::cpu {

/// `count` features. Arrays of gates have a row for each gate, `stride` apart; arrays do not overlap.

/// gates: i, f, g and o before their functions are applied, and with them afterwards. c: what was before, and what is
/// then.
void lstm_cell(float* gates, std::int64_t stride, std::int64_t count, float* c, float* h);
/// `gates` become the gradients of what they were taken of. dh is the gradient of h, and dc becomes that of c_before,
/// of what it was of c.
void lstm_cell_backward(float* gates, std::int64_t stride, std::int64_t count, const float* c, const float* c_before,
                        const float* dh, float* dc);

/// gates: what inputs contribute to n, and r and z before their functions are applied; with them afterwards. b_n: what
/// the state contributes to n.
void gru_cell(float* gates, std::int64_t stride, std::int64_t count, const float* b_n, const float* h_before, float* h);
/// `gates` become the gradients of what the state contributes to them, b_n becomes that of what inputs contribute to n.
/// direct: that of h_before which no gate passes on.
void gru_cell_backward(float* gates, std::int64_t stride, std::int64_t count, float* b_n, const float* h_before,
                       const float* dh, float* direct);

/// h = tanh(gate), or max(gate, 0), where NaN stays NaN.
void plain_cell(RnnCell cell, const float* gate, std::int64_t count, float* h);
/// The gate's gradient from that of h.
void plain_cell_backward(RnnCell cell, const float* h, std::int64_t count, const float* dh, float* gate);

}  // namespace lockstep::nn::cpu
