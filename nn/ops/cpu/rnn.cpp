#include "lockstep/nn/ops/rnn.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/products.h"
#include "nn/ops/cpu/rnn_cells.h"

namespace lockstep::nn::cpu {
namespace {

// Note [Recurrent layers on the CPU]
// What inputs contribute to the gates is one product over all steps, and so are the gradients of weights and inputs.
// What remains for each step is a product of B rows with w_hh, forward and backward, which takes packed weights and a
// kernel of our own (products.h). With 8 rows of 256 features dnnl_sgemm, which packs the weights each time, takes ten
// times as long for it, and oneDNN's recurrent primitives take a fifth longer for the whole layer. A thread computes
// the gates of its own features at every step, so a step takes one parallel region, and the weights that it reads stay
// in its cache.
//
// Sequences of different lengths take all steps: at a sequence's padding its state stays as it is, and no gradient
// comes from there. Nothing else distinguishes them.
//
// In bf16 all products are of bf16, where the processor multiplies it in pairs: those of a step read h, which is
// rounded at each step, as y is, so that a sequence may be cut anywhere, and the gates' gradients as the products over
// all steps read them. Elsewhere w_hh is widened when it is packed, and the products of a step are f32's. Gates, c and
// sums are f32 within the layer.

constexpr std::int64_t kGrain = std::int64_t{1} << 18;  // multiplications of a step that are worth a thread

// A layer over some sequences: how much there is of everything, and in which order the steps follow each other.
struct Layer {
  Layer(const RnnOptions& options, const Tensor& x, const Tensor& y)
      : cell(options.cell),
        reverse(options.reverse),
        batch(x.size(0)),
        steps(x.size(1)),
        inputs(x.size(2)),
        width(y.size(2)),
        gate_count(gates_of(options.cell)),
        gates(gate_count * width),
        lengths(options.lengths.defined() && batch > 0 ? options.lengths.data<std::int32_t>() : nullptr) {}

  std::int64_t rows() const { return batch * steps; }
  // Of the memory that each step has besides its gates: an LSTM's c, and what a GRU's state contributes to n.
  bool has_memory() const { return cell == RnnCell::kLstm || cell == RnnCell::kGru; }

  // The step that comes as number `turn`.
  std::int64_t step_of(std::int64_t turn) const { return reverse ? steps - 1 - turn : turn; }
  std::int64_t length_of(std::int64_t b) const {
    return lengths == nullptr ? steps : std::clamp<std::int64_t>(lengths[b], 0, steps);
  }
  bool is_padding(std::int64_t b, std::int64_t t) const { return lengths != nullptr && t >= length_of(b); }
  // The row of (B, T) with the state that step t of sequence b, which is no padding, begins with; -1: the first one.
  std::int64_t row_before(std::int64_t b, std::int64_t t) const {
    const std::int64_t before = reverse ? t + 1 : t - 1;
    return before < 0 || before >= length_of(b) ? -1 : b * steps + before;
  }

  RnnCell cell;
  bool reverse;
  std::int64_t batch, steps, inputs, width, gate_count, gates;
  const std::int32_t* lengths;  // nullptr: all are `steps`
};

std::size_t bytes_of(std::int64_t floats) { return static_cast<std::size_t>(floats) * sizeof(float); }

void copy_floats(float* to, const float* from, std::int64_t count) { std::memcpy(to, from, bytes_of(count)); }

template <class From, class To>
LOCKSTEP_SIMD_CLONES void convert(const From* from, To* to, std::int64_t count) {
  for (std::int64_t u = 0; u < count; ++u) to[u] = narrow<To>(wide(from[u]));
}

// y = h, which is rounded as y is.
void put_state(float* h, float* y, std::int64_t count) { copy_floats(y, h, count); }
LOCKSTEP_SIMD_CLONES
void put_state(float* h, BFloat16* y, std::int64_t count) {
  for (std::int64_t u = 0; u < count; ++u) {
    const auto rounded = narrow<BFloat16>(h[u]);
    y[u] = rounded;
    h[u] = wide(rounded);
  }
}

// dh = dy + direct, which may be nullptr: zeros.
template <class T>
LOCKSTEP_SIMD_CLONES void begin_gradient(const T* dy, const float* direct, float* dh, std::int64_t count) {
  if (direct == nullptr)
    for (std::int64_t u = 0; u < count; ++u) dh[u] = wide(dy[u]);
  else
    for (std::int64_t u = 0; u < count; ++u) dh[u] = wide(dy[u]) + direct[u];
}

// w_hh as the products of each step want it.
struct Packed {
  Tensor panels;
  std::uint64_t version = 0;  // 0: never packed
};

// What the steps of a forward pass work on. Their products are of Es: float or BFloat16.
template <class E>
struct ForwardArrays {
  const E* panels = nullptr;       // of w_hh; nullptr: the state is zero
  float* gates = nullptr;          // (B, T, G · H)
  float* h = nullptr;              // (2, B, H): that of the step before and of this one, alternating
  E* factor = nullptr;             // the same as products read it: h itself, or its copy
  float* memory = nullptr;         // of an LSTM (B, H), its c; of a GRU (B, T, H) or (B, H)
  float* kept_memory = nullptr;    // (B, T, H): where an LSTM's c goes for backward; nullptr: nowhere
  std::int64_t memory_stride = 0;  // of a GRU: from one sequence to the next
  std::int64_t memory_step = 0;    // of a GRU: from one step to the next
  const float* b_n = nullptr;      // of a GRU: the bias of what its state contributes to n; nullptr: zeros
};

// The same of a backward pass, whose activations are Ts.
template <class T, class E>
struct BackwardArrays {
  const E* panels = nullptr;     // of w_hh, transposed
  float* gates = nullptr;        // (B, T, G · H)
  float* memory = nullptr;       // (B, T, H)
  const float* first = nullptr;  // (B, H): the first c of an LSTM, the first h of a GRU
  const float* y = nullptr;      // (B, T, H), of all cells but an LSTM's
  const T* dy = nullptr;
  E* dgates = nullptr;      // (2, B, G · H): of the step after and of this one, alternating
  E* all_dgates = nullptr;  // (B, T, G · H): copies of them; nullptr: not wanted
  float* dh = nullptr;      // (B, H)
  float* dstate = nullptr;  // (B, H): of an LSTM's c; of a GRU's h, as far as no gate passes it on
};

class CpuRnn final : public RnnKernels {
 public:
  CpuRnn(CachingAllocator& allocator, LinearKernels& linear, PointwiseKernels& pointwise, PackedWeights* shared)
      : allocator_(allocator), linear_(linear), pointwise_(pointwise), shared_(shared) {}

  Tensor forward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                 const Tensor& y, const RnnState& to, bool keep) override {
    const Layer at(options, x, y);
    const bool keeps_memory = keep && at.has_memory();
    const Tensor kept = empty({at.rows() * (at.gates + (keeps_memory ? at.width : 0))});
    const Tensor gates = kept.slice(0, at.rows() * at.gates).reshaped({at.rows(), at.gates});
    if (at.batch > 0) {
      linear_.forward(x.reshaped({at.rows(), at.inputs}), weights.w_ih, bias_of(at, weights), Epilogue::kNone, gates);
      float* const kept_memory = keeps_memory ? gates.f32() + gates.count() : nullptr;
      with_types(y.dtype(), [&](auto of_y, auto of_factor) {
        forward_steps<decltype(of_y), decltype(of_factor)>(at, weights, from, gates.f32(), kept_memory, y, to);
      });
    }
    return keep ? kept : Tensor();
  }

  void backward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                const Tensor& y, const Tensor& kept, const Tensor& dy, const RnnGradients& gradients, const Tensor& dx,
                FunctionRef<void()> gradients_done) override {
    const Layer at(options, x, y);
    const Tensor gates = kept.slice(0, at.rows() * at.gates).reshaped({at.rows(), at.gates});
    Tensor memory;
    if (at.has_memory())
      memory = kept.slice(gates.count(), gates.count() + at.rows() * at.width).reshaped({at.rows(), at.width});
    // As the products over all steps read them; of f32 they take the place of the gates.
    const Tensor dgates = x.dtype() == DType::kF32 ? gates : Tensor::empty(allocator_, gates.shape(), x.dtype());
    if (at.batch > 0)
      with_types(y.dtype(), [&](auto of_y, auto of_factor) {
        backward_steps<decltype(of_y), decltype(of_factor)>(at, weights, from, y, gates, memory, dy, dgates);
      });
    if (gradients.b_ih.defined() || gradients.b_hh.defined()) bias_gradients(at, gates, memory, gradients);
    if (gradients.w_hh.defined())
      linear_.backward_weight(h_before(at, from.h, y), dgates, gradients.accumulate[1], gradients.w_hh);
    if (at.cell == RnnCell::kGru && (gradients.w_ih.defined() || dx.defined())) turn_to_inputs(at, dgates, memory);
    if (gradients.w_ih.defined())
      linear_.backward_weight(without_padding(at, x), dgates, gradients.accumulate[0], gradients.w_ih);
    gradients_done();
    if (dx.defined()) linear_.backward_input(dgates, weights.w_ih, dx.reshaped({at.rows(), at.inputs}));
  }

 private:
  Tensor empty(const Shape& shape) { return Tensor::empty(allocator_, shape); }

  // The tensor itself, or a copy of the type that is wanted.
  Tensor as(DType dtype, const Tensor& tensor) {
    if (tensor.dtype() == dtype) return tensor;
    const Tensor made = Tensor::empty(allocator_, tensor.shape(), dtype);
    pointwise_.cast(tensor, made);
    return made;
  }
  Tensor as_f32(const Tensor& tensor) { return as(DType::kF32, tensor); }

  void start(const Tensor& from, const Tensor& state) {
    if (from.defined())
      pointwise_.cast(from, state);
    else
      pointwise_.fill(state, 0.0f);
  }

  // use(T(), E()): activations are Ts, and the products of a step of Es.
  template <class Use>
  static void with_types(DType dtype, const Use& use) {
    if (dtype == DType::kF32)
      use(float(), float());
    else if (multiplies_pairs())
      use(BFloat16(), BFloat16());
    else
      use(BFloat16(), float());
  }

  // `gates` hold what inputs contribute. kept_memory: what comes after the gates in `kept`; nullptr: nothing.
  template <class T, class E>
  void forward_steps(const Layer& at, const RnnWeights& weights, const RnnState& from, float* gates, float* kept_memory,
                     const Tensor& y, const RnnState& to) {
    const Tensor h = empty({2, at.batch, at.width});
    Tensor factor, memory, b_hh;
    if (from.h.defined())
      pointwise_.cast(from.h, h.slice(0, 1));
    else if (at.lengths != nullptr || at.cell == RnnCell::kGru)  // else nobody reads it
      pointwise_.fill(h.slice(0, 1), 0.0f);
    ForwardArrays<E> arrays = {.gates = gates, .h = h.f32()};
    if constexpr (std::is_same_v<E, float>) {
      arrays.factor = h.f32();
    } else {
      factor = Tensor::empty(allocator_, h.shape(), DType::kBF16);
      if (from.h.defined() || at.lengths != nullptr) pointwise_.cast(h.slice(0, 1), factor.slice(0, 1));
      arrays.factor = factor.data<E>();
    }
    if (at.cell == RnnCell::kLstm) {
      memory = empty({at.batch, at.width});
      start(from.c, memory);
      arrays.memory = memory.f32();
      arrays.kept_memory = kept_memory;
    } else if (at.cell == RnnCell::kGru) {
      const bool keep = kept_memory != nullptr;
      if (!keep) memory = empty({at.batch, at.width});
      arrays.memory = keep ? kept_memory : memory.f32();
      arrays.memory_stride = (keep ? at.steps : 1) * at.width;
      arrays.memory_step = keep ? at.width : 0;
      if (weights.b_hh.defined()) {
        b_hh = as_f32(weights.b_hh);
        arrays.b_n = b_hh.f32() + 2 * at.width;
      }
    }
    for (std::int64_t turn = 0; turn < at.steps; ++turn) {
      if (turn > 0 || from.h.defined()) arrays.panels = forward_panels<E>(at, weights);
      step(at, turn, arrays, y.data<T>());
    }
    if (to.h.defined()) pointwise_.cast(h.slice(at.steps % 2, at.steps % 2 + 1), to.h);
    if (to.c.defined() && at.cell == RnnCell::kLstm) pointwise_.cast(memory, to.c);
  }

  // The gates' gradients take their place, and are rounded into dgates, where that is another tensor.
  template <class T, class E>
  void backward_steps(const Layer& at, const RnnWeights& weights, const RnnState& from, const Tensor& y,
                      const Tensor& gates, const Tensor& memory, const Tensor& dy, const Tensor& dgates) {
    constexpr bool kInPairs = !std::is_same_v<E, float>;
    const Tensor dh = empty({at.batch, at.width});
    const Tensor alternating =
        Tensor::empty(allocator_, {2, at.batch, at.gates}, kInPairs ? DType::kBF16 : DType::kF32);
    const Tensor y_f32 = at.cell == RnnCell::kLstm ? Tensor() : as_f32(y);
    BackwardArrays<T, E> arrays = {.panels = at.steps > 1 ? backward_panels<E>(at, weights) : nullptr,
                                   .gates = gates.f32(),
                                   .y = y_f32.defined() ? y_f32.f32() : nullptr,
                                   .dy = dy.data<T>(),
                                   .dgates = alternating.data<E>(),
                                   .dh = dh.f32()};
    if constexpr (kInPairs) arrays.all_dgates = dgates.data<E>();
    Tensor dstate, first;
    if (at.has_memory()) {
      dstate = empty({at.batch, at.width});
      first = empty({at.batch, at.width});
      start(at.cell == RnnCell::kLstm ? from.c : from.h, first);
      pointwise_.fill(dstate, 0.0f);
      arrays.memory = memory.f32();
      arrays.first = first.f32();
      arrays.dstate = dstate.f32();
    }
    for (std::int64_t turn = at.steps - 1; turn >= 0; --turn) step_backward(at, turn, arrays);
    if (!kInPairs && dgates.dtype() != DType::kF32) pointwise_.cast(gates, dgates);
  }

  // What the product of the inputs begins with, f32: both biases, but of a GRU's n that of the inputs alone.
  Tensor bias_of(const Layer& at, const RnnWeights& weights) {
    if (!weights.b_ih.defined()) return {};
    const Tensor bias = empty({at.gates});
    const std::int64_t joined = at.cell == RnnCell::kGru ? 2 * at.width : at.gates;
    pointwise_.cast(weights.b_ih, bias);
    pointwise_.add_to(weights.b_hh.slice(0, joined), 1.0f, bias.slice(0, joined));
    return bias;
  }

  // Panel (p · G + gate): what features [32 p, 32 p + 32) of h contribute that gate's product to, of depth H.
  template <class E>
  const E* forward_panels(const Layer& at, const RnnWeights& weights) {
    const std::int64_t panels = panels_of(at.width) * at.gate_count, width = at.width, size = panel_size<E>(width);
    return packed<E>(forward_, weights, {panels, size}, [&](const E* w, E* to) {
      parallel_for(panels, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t first = i / at.gate_count * kPanel, gate = i % at.gate_count;
          pack_rows(w + (gate * width + first) * width, width, std::min(kPanel, width - first), width, to + i * size);
        }
      });
    });
  }

  // Panel p, of depth G · H: features [32 p, 32 p + 32) of each row of w_hh.
  template <class E>
  const E* backward_panels(const Layer& at, const RnnWeights& weights) {
    const std::int64_t panels = panels_of(at.width), width = at.width, size = panel_size<E>(at.gates);
    return packed<E>(backward_, weights, {panels, size}, [&](const E* w, E* to) {
      parallel_for(panels, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t p = begin; p < end; ++p)
          pack_columns(w + p * kPanel, width, std::min(kPanel, width - p * kPanel), at.gates, to + p * size);
      });
    });
  }

  // Calls pack(w_hh, panels), unless that has been done for this version.
  template <class E, class Pack>
  const E* packed(PrimitiveMap<Packed>& all, const RnnWeights& weights, const Shape& shape, const Pack& pack) {
    constexpr DType kDType = std::is_same_v<E, float> ? DType::kF32 : DType::kBF16;
    PrimitiveKey key{};
    key[0] = reinterpret_cast<std::intptr_t>(weights.w_hh.raw());
    key[1] = weights.w_hh.size(0);
    key[2] = weights.w_hh.size(1);
    key[3] = static_cast<std::int64_t>(weights.w_hh.dtype());
    Packed& held = all[key];
    const std::uint64_t version = weights.versions[1];
    const auto panels = [&] { return static_cast<E*>(held.panels.raw()); };
    if (held.version == version && version != 0) return panels();
    const auto fill = [&](const Tensor& to) {
      const Tensor w = as(kDType, weights.w_hh);
      pack(w.data<E>(), static_cast<E*>(to.raw()));
    };
    if (shared_ != nullptr) {
      held.panels = shared_->get(weights.w_hh.raw(), version,
                                 desc_of(kDType, to_dims(shape), dnnl::memory::format_tag::ab), fill);
    } else {
      if (!held.panels.defined()) held.panels = Tensor::empty(allocator_, shape, kDType);
      fill(held.panels);
    }
    held.version = version;
    return panels();
  }

  // Calls body(first, end) on disjoint ranges of the features, whole panels each.
  template <class Body>
  static void over_features(const Layer& at, const Body& body) {
    const std::int64_t work = at.batch * at.gates * kPanel;
    parallel_for(panels_of(at.width), (kGrain + work - 1) / work,
                 [&](std::int64_t begin, std::int64_t end) { body(begin * kPanel, std::min(end * kPanel, at.width)); });
  }

  template <class T, class E>
  static void step(const Layer& at, std::int64_t turn, const ForwardArrays<E>& a, T* all_y) {
    const std::int64_t state = at.batch * at.width;
    const float* const before = a.h + (turn % 2) * state;
    float* const after = a.h + (1 - turn % 2) * state;
    const E* const factor = a.factor + (turn % 2) * state;
    const std::int64_t t = at.step_of(turn);
    const bool gru = at.cell == RnnCell::kGru;
    float* const b_n = gru ? a.memory + t * a.memory_step : nullptr;
    over_features(at, [&](std::int64_t first, std::int64_t end) {
      float* const now = a.gates + t * at.gates;
      const std::int64_t count = end - first;
      for (std::int64_t b = 0; b < at.batch && gru; ++b) {
        float* const to = b_n + b * a.memory_stride + first;
        if (a.b_n != nullptr)
          copy_floats(to, a.b_n + first, count);
        else
          std::fill_n(to, count, 0.0f);
      }
      for (std::int64_t u = first; u < end && a.panels != nullptr; u += kPanel)
        for (std::int64_t gate = 0; gate < at.gate_count; ++gate) {
          const bool apart = gru && gate == 2;
          add_product(factor, at.width, at.batch, at.width,
                      a.panels + (u / kPanel * at.gate_count + gate) * panel_size<E>(at.width),
                      std::min(kPanel, end - u), apart ? b_n + u : now + gate * at.width + u,
                      apart ? a.memory_stride : at.steps * at.gates);
        }
      for (std::int64_t b = 0; b < at.batch; ++b) {
        const std::int64_t row = b * at.steps + t, place = b * at.width + first;
        T* const y = all_y + row * at.width + first;
        if (at.is_padding(b, t)) {
          copy_floats(after + place, before + place, count);
          if constexpr (!std::is_same_v<E, float>)
            std::copy_n(factor + place, count, a.factor + (1 - turn % 2) * state + place);
          std::fill_n(y, count, T());
          continue;
        }
        float* const gates = a.gates + row * at.gates + first;
        switch (at.cell) {
          case RnnCell::kLstm:
            lstm_cell(gates, at.width, count, a.memory + place, after + place);
            if (a.kept_memory != nullptr) copy_floats(a.kept_memory + row * at.width + first, a.memory + place, count);
            break;
          case RnnCell::kGru:
            gru_cell(gates, at.width, count, b_n + b * a.memory_stride + first, before + place, after + place);
            break;
          default: plain_cell(at.cell, gates, count, after + place);
        }
        put_state(after + place, y, count);
        if constexpr (!std::is_same_v<E, float>) std::copy_n(y, count, a.factor + (1 - turn % 2) * state + place);
      }
    });
  }

  template <class T, class E>
  static void step_backward(const Layer& at, std::int64_t turn, const BackwardArrays<T, E>& a) {
    const E* const later = a.dgates + (turn % 2) * at.batch * at.gates;
    E* const now = a.dgates + (1 - turn % 2) * at.batch * at.gates;
    const std::int64_t t = at.step_of(turn);
    over_features(at, [&](std::int64_t first, std::int64_t end) {
      const std::int64_t count = end - first;
      for (std::int64_t b = 0; b < at.batch; ++b) {
        const float* const direct = at.cell == RnnCell::kGru ? a.dstate + b * at.width + first : nullptr;
        begin_gradient(a.dy + (b * at.steps + t) * at.width + first, direct, a.dh + b * at.width + first, count);
      }
      for (std::int64_t u = first; u < end && turn + 1 < at.steps; u += kPanel)
        add_product(later, at.gates, at.batch, at.gates, a.panels + u / kPanel * panel_size<E>(at.gates),
                    std::min(kPanel, end - u), a.dh + u, at.width);
      for (std::int64_t b = 0; b < at.batch; ++b) {
        const std::int64_t row = b * at.steps + t, place = b * at.width + first;
        float* const d = a.gates + row * at.gates + first;
        float* const memory = a.memory + (a.memory != nullptr ? row * at.width + first : 0);
        if (at.is_padding(b, t)) {
          for (std::int64_t gate = 0; gate < at.gate_count; ++gate) std::fill_n(d + gate * at.width, count, 0.0f);
          if (at.cell == RnnCell::kGru) std::fill_n(memory, count, 0.0f);
        } else {
          const std::int64_t row_before = at.row_before(b, t);
          const auto before = [&](const float* all) {
            return row_before < 0 ? a.first + place : all + row_before * at.width + first;
          };
          switch (at.cell) {
            case RnnCell::kLstm:
              lstm_cell_backward(d, at.width, count, memory, before(a.memory), a.dh + place, a.dstate + place);
              break;
            case RnnCell::kGru:
              gru_cell_backward(d, at.width, count, memory, before(a.y), a.dh + place, a.dstate + place);
              break;
            default: plain_cell_backward(at.cell, a.y + row * at.width + first, count, a.dh + place, d);
          }
        }
        for (std::int64_t gate = 0; gate < at.gate_count; ++gate) {
          const std::int64_t from = gate * at.width;
          E* const to = now + b * at.gates + from + first;
          if (turn > 0 || a.all_dgates != nullptr) convert(d + from, to, count);
          if (a.all_dgates != nullptr) std::copy_n(to, count, a.all_dgates + row * at.gates + from + first);
        }
      }
    });
  }

  // What each step's h was before it, as rows beside those of the gates.
  Tensor h_before(const Layer& at, const Tensor& first, const Tensor& y) {
    const Tensor rows = Tensor::empty(allocator_, {at.rows(), at.width}, y.dtype());
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      parallel_for(at.batch, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t b = begin; b < end; ++b)
          for (std::int64_t t = 0; t < at.steps; ++t) {
            T* const to = rows.data<T>() + (b * at.steps + t) * at.width;
            const bool padding = at.is_padding(b, t);
            const std::int64_t row = padding ? -1 : at.row_before(b, t);
            if (row >= 0)
              std::copy_n(y.data<T>() + row * at.width, at.width, to);
            else if (first.defined() && !padding)
              std::copy_n(first.data<T>() + b * at.width, at.width, to);
            else
              std::fill_n(to, at.width, T());
          }
      });
    });
    return rows;
  }

  // x as rows. The gates' gradients at padding are 0, but padding may be NaN.
  Tensor without_padding(const Layer& at, const Tensor& x) {
    const Tensor given = x.reshaped({at.rows(), at.inputs});
    if (at.lengths == nullptr) return given;
    const Tensor rows = Tensor::empty(allocator_, given.shape(), x.dtype());
    with_type(x.dtype(), [&](auto type) {
      using T = decltype(type);
      for (std::int64_t b = 0; b < at.batch; ++b) {
        const std::int64_t begin = b * at.steps * at.inputs, count = at.length_of(b) * at.inputs;
        std::copy_n(given.data<T>() + begin, count, rows.data<T>() + begin);
        std::fill_n(rows.data<T>() + begin + count, at.steps * at.inputs - count, T());
      }
    });
    return rows;
  }

  // The gradients of a GRU's gates, so far of what its state contributes to them, become those of what inputs do: they
  // differ in n.
  static void turn_to_inputs(const Layer& at, const Tensor& dgates, const Tensor& dn) {
    with_type(dgates.dtype(), [&](auto type) {
      auto* const to = dgates.data<decltype(type)>();
      parallel_for(at.rows(), (std::int64_t{1} << 14) / at.width + 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
          convert(dn.f32() + row * at.width, to + row * at.gates + 2 * at.width, at.width);
      });
    });
  }

  // Both biases have the same gradient, but for a GRU's n.
  void bias_gradients(const Layer& at, const Tensor& gates, const Tensor& memory, const RnnGradients& gradients) {
    const Tensor sums = empty({at.gates});
    linear_.backward_bias(gates, false, sums);
    const auto put = [&](const Tensor& to, bool accumulate) {
      if (!to.defined()) return;
      if (accumulate)
        pointwise_.add_to(sums, 1.0f, to);
      else
        pointwise_.copy(sums, to);
    };
    put(gradients.b_hh, gradients.accumulate[3]);
    if (at.cell == RnnCell::kGru && gradients.b_ih.defined())
      linear_.backward_bias(memory, false, sums.slice(2 * at.width, at.gates));
    put(gradients.b_ih, gradients.accumulate[2]);
  }

  CachingAllocator& allocator_;
  LinearKernels& linear_;
  PointwiseKernels& pointwise_;
  PackedWeights* shared_;
  PrimitiveMap<Packed> forward_, backward_;
};

}  // namespace

std::unique_ptr<RnnKernels> make_rnn_kernels(CachingAllocator& allocator, LinearKernels& linear,
                                             PointwiseKernels& pointwise, PackedWeights* shared) {
  return std::make_unique<CpuRnn>(allocator, linear, pointwise, shared);
}

}  // namespace lockstep::nn::cpu
