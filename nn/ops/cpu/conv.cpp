#include "lockstep/nn/ops/conv.h"

#include <string_view>

#include "base/error.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/layouts.h"
#include "nn/ops/cpu/lowered_conv.h"
#include "nn/ops/cpu/onednn_versions.h"
#include "nn/ops/cpu/products.h"
#include "nn/ops/cpu/transpose.h"
#include "nn/ops/cpu/winograd.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

// Note [Weights any]
// oneDNN picks its own weight layout; given our plain OHWI (or OIHW) its weight gradient falls to a reference path
// up to 800 times slower. So weights are reordered into packed copies (kept until the version changes) and weight
// gradients out of a packed buffer into the plain one.
struct Packed {
  dnnl::memory::desc layout;  // empty: the plain one is what the primitive wants
  HeldPrimitive to_oihw;      // first, where oneDNN knows no way from OHWI
  HeldPrimitive reorder;      // none: it is plain, or one of the others
  // Those that we move there ourselves:
  std::int64_t block = 0;  // of output channels
  PairTiles tiles = PairTiles::kNone;
  Tensor memory;              // undefined until it is needed
  std::uint64_t version = 0;  // 0: never packed

  bool is_stale(std::uint64_t wanted) const { return version != wanted || wanted == 0; }
};

// Note [Winograd]
// Three by three windows of stride 1 take less than half of the multiplications in Winograd's way (Lavin and Gray,
// "Fast Algorithms for Convolutional Neural Networks", 2016), for some more rounding. oneDNN 2 has it for activations
// with sixteen channels side by side: with enough channels, moving them there and back costs little of what is won.
// Whether it is used is a question of the shape alone. oneDNN 3 has it no longer.
// In bf16 direct convolutions are as fast. With AVX512-BF16 the weight gradients of many channels and of small images,
// which tiles cover, are an exception: they are faster in Winograd's way, in f32 on the same numbers.
constexpr std::int64_t kWinogradChannels = 64;  // at least
constexpr std::int64_t kWinogradTiles = 32;     // of four by four pixels, at least: transforming the weights costs too
constexpr std::int64_t kWinogradTile = 4;
constexpr std::int64_t kWinogradChannelsOfBf16 = 256, kWinogradSideOfBf16 = 8;

struct Forward {
  HeldPrimitive conv;
  Packed weights;
  bool winograd = false;
};

// Note [Direct in bf16]
// With AVX512-BF16 oneDNN has two kinds of kernels for forward convolutions. It prefers brgemm, which multiplies the
// images' padding, too: images of 4 × 4 pixels take 1.7 times as long as with the other kind. That is faster or as fast
// for all windows that pad but in rows of 8 to 15 pixels.
constexpr std::int64_t kShortRow = 8, kLongRow = 16;

// Note [Backward as forward]
// With stride 1 the input's gradient is itself a convolution: of dy, padded by kernel − 1 − padding, with the weights'
// two channel axes exchanged and their windows turned by 180°. oneDNN 2 has its fastest kernels (brgemm) for forward
// alone, and they take two thirds of the time of its backward, the turning included. So we ask what it would use. In
// bf16 its backward is as fast.
struct BackwardInput {
  HeldPrimitive conv;
  Packed weights;
  bool winograd = false;
  bool is_forward = false;  // false: oneDNN's own backward runs on the weights as they are
  Tensor turned;            // (I, Kh, Kw, O), where weights.block is 0
};

struct BackwardWeight {
  HeldPrimitive conv;
  HeldPrimitive unpack;  // packed → plain; none when the layouts agree, or are tiles
  bool tiles = false;    // that we move ourselves
  bool winograd = false;
  Tensor packed;
  Tensor bias;  // where db goes first when it is accumulated
  HeldPrimitive add_weight;
};

class CpuConv final : public ConvKernels {
 public:
  CpuConv(OneDnn& onednn, CachingAllocator& allocator, PointwiseKernels& pointwise, PackedWeights* shared)
      : onednn_(onednn),
        allocator_(allocator),
        pointwise_(pointwise),
        shared_(shared),
        winograd_(allocator, shared),
        lowered_(allocator) {}

  void forward(const Tensor& x, const Tensor& w, std::uint64_t w_version, const Tensor& b, const Window& window,
               Epilogue epilogue, const Tensor& y) override {
    if (y.count() == 0) return;
    if (is_for<WinogradConv>(x, w.shape(), window))
      return winograd_.forward(x, w, w_version, b, epilogue == Epilogue::kRelu, y);
    if (is_for<LoweredConv>(x, w.shape(), window)) {
      lowered_.forward(x, w, b, window, y);
      if (epilogue == Epilogue::kRelu) pointwise_.unary(UnaryOp::kRelu, y, y);
      return;
    }
    auto key = key_of(x, w.shape(), y.shape(), window, b.defined());
    key[kWeightPlace] = reinterpret_cast<std::int64_t>(w.raw());
    auto& held = forwards_[key];
    if (!held.conv) {
      const Purpose purpose = shared_ != nullptr ? Purpose::kEvaluation : Purpose::kTraining;
      const Problem problem(x.dtype(), x.shape(), w.shape(), y.shape(), window, b.defined(), onednn_.engine(), purpose);
      const auto desc = problem.describe_forward(onednn_.engine());
      held.winograd = problem.winograd();
      held.weights = make_packed(problem.plain_weights, desc.weights_desc());
      held.conv = HeldPrimitive(onednn_, dnnl::convolution_forward(desc),
                                {{DNNL_ARG_SRC, problem.x},
                                 {DNNL_ARG_WEIGHTS, desc.weights_desc()},
                                 {DNNL_ARG_BIAS, problem.bias},
                                 {DNNL_ARG_DST, problem.y}},
                                desc.scratchpad_desc());
    }
    const Tensor from = input_of(x, held.winograd), to = output_of(y, held.winograd);
    held.conv.bind(DNNL_ARG_SRC, from);
    held.conv.bind(DNNL_ARG_WEIGHTS, pack(held.weights, w, w_version));
    if (b.defined()) held.conv.bind(DNNL_ARG_BIAS, b);
    held.conv.bind(DNNL_ARG_DST, to);
    held.conv.run();
    const bool relu = epilogue == Epilogue::kRelu;  // see Note [ReLU apart]
    if (held.winograd)
      from_blocked(to.f32(), y, relu);
    else if (relu)
      pointwise_.unary(UnaryOp::kRelu, y, y);
  }

  void backward_input(const Tensor& dy, const Tensor& w, std::uint64_t w_version, const Window& window,
                      const Tensor& dx) override {
    if (dx.count() == 0) return;
    if (is_for<WinogradConv>(dx, w.shape(), window)) return winograd_.backward_input(dy, w, dx);
    if (is_for<LoweredConv>(dx, w.shape(), window)) return lowered_.backward_input(dy, w, window, dx);
    auto key = key_of(dx, w.shape(), dy.shape(), window, false);
    key[kWeightPlace] = reinterpret_cast<std::int64_t>(w.raw());
    auto& held = backward_inputs_[key];
    if (!held.conv) held = make_backward_input(dx.dtype(), dx.shape(), w.shape(), dy.shape(), window);
    if (held.is_forward) {
      held.conv.bind(DNNL_ARG_SRC, dy);
      held.conv.bind(DNNL_ARG_WEIGHTS, pack_turned_weights(held, w, w_version));
      held.conv.bind(DNNL_ARG_DST, dx);
      held.conv.run();
    } else {
      const Tensor from = input_of(dy, held.winograd), to = output_of(dx, held.winograd);
      held.conv.bind(DNNL_ARG_DIFF_DST, from);
      held.conv.bind(DNNL_ARG_WEIGHTS, pack(held.weights, w, w_version));
      held.conv.bind(DNNL_ARG_DIFF_SRC, to);
      held.conv.run();
      if (held.winograd) from_blocked(to.f32(), dx);
    }
  }

  void backward_weight(const Tensor& x, const Tensor& dy, const Window& window, bool accumulate_w, const Tensor& dw,
                       bool accumulate_b, const Tensor& db) override {
    if (dy.count() == 0) {
      if (!accumulate_w) pointwise_.fill(dw, 0.0f);
      if (db.defined() && !accumulate_b) pointwise_.fill(db, 0.0f);
      return;
    }
    if (is_for<WinogradConv>(x, dw.shape(), window))
      return winograd_.backward_weight(x, dy, accumulate_w, dw, accumulate_b, db);
    if (is_for<LoweredConv>(x, dw.shape(), window))
      return lowered_.backward_weight(x, dy, window, accumulate_w, dw, accumulate_b, db);
    auto& held = backward_weights_[key_of(x, dw.shape(), dy.shape(), window, db.defined())];
    if (!held.conv)
      held = make_backward_weight({x.dtype(), x.shape(), dw.shape(), dy.shape(), window, db.defined(), onednn_.engine(),
                                   Purpose::kTraining, Winograd::kOfBf16Too});

    const bool in_place = !held.unpack && !held.tiles && !accumulate_w;
    if (!in_place && !held.packed.defined()) held.packed = Tensor::empty(allocator_, dw.shape());
    const Tensor input = input_of(x, held.winograd), gradient = input_of(dy, held.winograd);
    held.conv.bind(DNNL_ARG_SRC, input);
    held.conv.bind(DNNL_ARG_DIFF_DST, gradient);
    held.conv.bind(DNNL_ARG_DIFF_WEIGHTS, in_place ? dw.raw() : held.packed.raw());
    if (db.defined() && accumulate_b && !held.bias.defined()) held.bias = Tensor::empty(allocator_, db.shape());
    if (db.defined()) held.conv.bind(DNNL_ARG_DIFF_BIAS, accumulate_b ? held.bias : db);
    held.conv.run();

    if (held.tiles && !accumulate_w) {
      unpack_tiles(held.packed.f32(), dw);
    } else if (!in_place) {
      move(accumulate_w ? held.add_weight : held.unpack, held.packed, dw);
    }
    if (db.defined() && accumulate_b) pointwise_.add_to(held.bias, 1.0f, db);
  }

 private:
  // Backends that share packed weights only evaluate: their forward need not go together with a backward, and of
  // Winograd's ways oneDNN then takes the one that is faster for few samples.
  enum class Purpose : std::uint8_t { kTraining, kEvaluation };

  // Of Note [Winograd] oneDNN has nothing with AVX2; see also Note [Lowered convolutions]. Neither is for groups.
  template <class Conv>
  static bool is_for(const Tensor& x, const Shape& w, const Window& window) {
    return x.dtype() == DType::kF32 && computes_with_avx2() && groups_of(x.shape(), w) == 1 &&
           Conv::suits(x.shape(), w, window);
  }

  // In which types it may be; in bf16 for weight gradients alone.
  enum class Winograd : std::uint8_t { kOfF32, kOfBf16Too };

  // One convolution as oneDNN names it: dimensions in N, C, H, W and O, I, Kh, Kw order whatever the layout. Weights in
  // groups have a dimension more: groups, O / groups, I / groups, Kh, Kw.
  struct Problem {
    Problem(DType dtype, const Shape& xs, const Shape& ws, const Shape& ys, const Window& window, bool has_bias,
            const dnnl::engine& engine, Purpose purpose = Purpose::kTraining, Winograd winograd = Winograd::kOfF32)
        : x(desc_of(dtype, {xs[0], xs[3], xs[1], xs[2]}, Tag::nhwc)),
          y(desc_of(dtype, {ys[0], ys[3], ys[1], ys[2]}, Tag::nhwc)),
          plain_weights(plain_desc(dtype, ws, groups_of(xs, ws))),
          any_weights(desc_of(dtype, dims_of(plain_weights), Tag::any)),
          plain_gradient(plain_desc(DType::kF32, ws, groups_of(xs, ws))),
          any_gradient(f32_desc(dims_of(plain_weights), Tag::any)),
          bias(has_bias ? desc_of(dtype, {ws[0]}, Tag::x) : memory::desc()),
          bias_gradient(has_bias ? f32_desc({ws[0]}, Tag::x) : memory::desc()),
          strides{window.stride[0], window.stride[1]},
          padding{window.padding[0], window.padding[1]},
          kind(purpose == Purpose::kTraining ? dnnl::prop_kind::forward_training : dnnl::prop_kind::forward_inference) {
      const std::int64_t groups = groups_of(xs, ws);
      LOCKSTEP_ASSERT(xs[3] == groups * ws[3] && ys[3] == ws[0] && ws[0] % groups == 0,
                      "input {}, weight {}, output {}", to_string(xs), to_string(ws), to_string(ys));
      if (grouped()) return;
      if (dtype == DType::kF32 || (winograd == Winograd::kOfBf16Too && suits_winograd_in_bf16(xs, ws, ys)))
        choose_algorithm(xs, ws, ys, engine);
    }

    static memory::desc plain_desc(DType dtype, const Shape& ws, std::int64_t groups) {
      if (groups == 1) return desc_of(dtype, {ws[0], ws[3], ws[1], ws[2]}, Tag::ohwi);
      const std::int64_t row = ws[1] * ws[2] * ws[3], outputs = ws[0] / groups;
      return {{groups, outputs, ws[3], ws[1], ws[2]},
              dtype == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32,
              memory::dims{outputs * row, row, 1, ws[2] * ws[3], ws[3]}};
    }

    bool grouped() const { return dims_of(any_weights).size() == 5; }

    static bool suits_winograd_in_bf16(const Shape& xs, const Shape& ws, const Shape& ys) {
      const auto small = [](std::int64_t side) { return side <= kWinogradSideOfBf16 && side % kWinogradTile == 0; };
      return cpu_bf16() == CpuBf16::kAvx512 && std::min(xs[3], ws[0]) >= kWinogradChannelsOfBf16 && small(ys[1]) &&
             small(ys[2]);
    }

    // See Note [Direct in bf16].
    bool prefers_direct() const {
      const auto window = dims_of(any_weights), image = dims_of(y);
      return !grouped() && cpu_bf16() == CpuBf16::kAvx512 && x == desc_of(DType::kBF16, dims_of(x), Tag::nhwc) &&
             window[0] % kChannelBlock == 0 && window[1] % kChannelBlock == 0 && window[3] > 1 &&
             (image[3] < kShortRow || image[3] >= kLongRow);
    }
    bool winograd() const { return algorithm == dnnl::algorithm::convolution_winograd; }

    void choose_algorithm(const Shape& xs, const Shape& ws, const Shape& ys, const dnnl::engine& engine) {
      const auto tiles = [](std::int64_t extent) { return (extent + kWinogradTile - 1) / kWinogradTile; };
      const auto enough = [](std::int64_t channels) {
        return channels >= kWinogradChannels && channels % kChannelBlock == 0;
      };
      if (ws[1] != 3 || ws[2] != 3 || strides != memory::dims{1, 1} || padding != memory::dims{1, 1} ||
          !enough(xs[3]) || !enough(ws[0]) || ys[0] * tiles(ys[1]) * tiles(ys[2]) < kWinogradTiles)
        return;
      const Problem direct = *this;
      algorithm = dnnl::algorithm::convolution_winograd;
      x = f32_desc(dims_of(x), Tag::nChw16c);
      y = f32_desc(dims_of(y), Tag::nChw16c);
      any_weights = f32_desc(dims_of(any_weights), Tag::any);
      if (bias.get_size() > 0) bias = bias_gradient;
      try {
        const auto forward = describe_forward(engine);
        if (kind == dnnl::prop_kind::forward_inference) return;
        describe_backward_input(engine, forward);
        describe_backward_weight(engine, forward);
      } catch (const dnnl::error&) {
        *this = direct;  // another processor, or another version
      }
    }

    dnnl::convolution_forward::primitive_desc describe_forward(const dnnl::engine& engine) const {
      if (prefers_direct())
        return describe_by<dnnl::convolution_forward>("jit_bf16", engine, user_scratchpad(), kind, algorithm, x,
                                                      any_weights, bias, y, strides, padding, padding);
      return describe<dnnl::convolution_forward>(engine, user_scratchpad(), kind, algorithm, x, any_weights, bias, y,
                                                 strides, padding, padding);
    }
    dnnl::convolution_backward_data::primitive_desc describe_backward_input(
        const dnnl::engine& engine, const dnnl::convolution_forward::primitive_desc& hint) const {
      return describe_backward<dnnl::convolution_backward_data>(engine, user_scratchpad(), hint, algorithm, x,
                                                                any_weights, y, strides, padding, padding);
    }
    dnnl::convolution_backward_weights::primitive_desc describe_backward_weight(
        const dnnl::engine& engine, const dnnl::convolution_forward::primitive_desc& hint) const {
      return describe_backward<dnnl::convolution_backward_weights>(
          engine, user_scratchpad(), hint, algorithm, x, any_gradient, bias_gradient, y, strides, padding, padding);
    }

    dnnl::algorithm algorithm = dnnl::algorithm::convolution_direct;
    memory::desc x, y, plain_weights, any_weights, plain_gradient, any_gradient, bias, bias_gradient;
    memory::dims strides, padding;
    dnnl::prop_kind kind;
  };

  // The place of the packed weights' address: after those that key_of fills.
  static constexpr std::size_t kWeightPlace = 17;

  static PrimitiveKey key_of(const Tensor& x, const Shape& ws, const Shape& ys, const Window& window, bool has_bias) {
    PrimitiveKey key{};
    std::size_t at = 0;
    for (const Shape* shape : {&x.shape(), &ws, &ys})
      for (int i = 0; i < 4; ++i) key[at++] = (*shape)[i];
    for (const auto d : window.stride) key[at++] = d;
    for (const auto d : window.padding) key[at++] = d;
    key[at] = has_bias ? 1 : 0;
    key[kWeightPlace + 1] = static_cast<std::int64_t>(x.dtype());
    return key;
  }

  HeldPrimitive make_reorder(const memory::desc& from, const memory::desc& to, bool add) {
    auto attributes = user_scratchpad();
    if (add) {
      dnnl::post_ops post;
      post.append_sum(1.0f);
      attributes.set_post_ops(post);
    }
    const dnnl::reorder::primitive_desc desc(onednn_.engine(), from, onednn_.engine(), to, attributes);
    return {onednn_, dnnl::reorder(desc), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}, desc.scratchpad_desc()};
  }

  Tensor bytes_for(const memory::desc& desc) {
    return Tensor::empty(allocator_,
                         {static_cast<std::int64_t>((desc.get_size() + sizeof(float) - 1) / sizeof(float))});
  }

  Packed make_packed(const memory::desc& plain, const memory::desc& wanted) {
    Packed packed;
    if (plain == wanted) return packed;
    packed.layout = wanted;
    packed.block = output_block(wanted);
    packed.tiles = pair_tiles(wanted);
    if (packed.block > 0 || packed.tiles != PairTiles::kNone) return packed;
    try {
      packed.reorder = make_reorder(plain, wanted, false);
    } catch (const dnnl::error&) {  // weights that Winograd's way has transformed already
      const auto oihw = f32_desc(dims_of(plain), Tag::oihw);
      packed.to_oihw = make_reorder(plain, oihw, false);
      packed.reorder = make_reorder(oihw, wanted, false);
    }
    return packed;
  }

  const void* pack(Packed& packed, const Tensor& w, std::uint64_t version) {
    if (packed.layout.get_size() == 0) return w.raw();
    if (packed.is_stale(version)) {
      const auto fill = [&](const Tensor& memory) { fill_packed(packed, w, memory); };
      if (shared_ != nullptr) {
        packed.memory = shared_->get(w.raw(), version, packed.layout, fill);
      } else {
        if (!packed.memory.defined()) packed.memory = bytes_for(packed.layout);
        fill(packed.memory);
      }
    }
    packed.version = version;
    return packed.memory.raw();
  }

  void fill_packed(Packed& packed, const Tensor& w, const Tensor& memory) {
    if (packed.block > 0) return pack_outputs(w, packed.block, memory.f32());
    if (packed.tiles != PairTiles::kNone) return pack_pair_tiles(w, packed.tiles, memory.raw());
    Tensor from = w;
    if (packed.to_oihw) {
      from = Tensor::empty(allocator_, w.shape());
      move(packed.to_oihw, w, from);
    }
    move(packed.reorder, from, memory);
  }

  static void move(HeldPrimitive& reorder, const Tensor& from, const Tensor& to) {
    reorder.bind(DNNL_ARG_FROM, from);
    reorder.bind(DNNL_ARG_TO, to);
    reorder.run();
  }

  const void* pack_turned_weights(BackwardInput& held, const Tensor& w, std::uint64_t version) {
    Packed& packed = held.weights;
    if (packed.block == 0) {
      if (packed.is_stale(version)) turn(w, held.turned);
      return pack(packed, held.turned, version);
    }
    if (!packed.memory.defined()) packed.memory = bytes_for(packed.layout);
    if (packed.is_stale(version)) pack_turned(w, packed.block, packed.memory.f32());
    packed.version = version;
    return packed.memory.raw();
  }

  // Activations as Note [Winograd] has them, if that is wanted: with the content of `plain`, or for what will be there.
  Tensor input_of(const Tensor& plain, bool blocked) {
    if (!blocked) return plain;
    Tensor made = Tensor::empty(allocator_, plain.shape());
    to_blocked(plain, made.f32());
    return made;
  }
  Tensor output_of(const Tensor& plain, bool blocked) {
    return blocked ? Tensor::empty(allocator_, plain.shape()) : plain;
  }

  BackwardInput make_backward_input(DType dtype, const Shape& xs, const Shape& ws, const Shape& ys,
                                    const Window& window) {
    const Problem problem(dtype, xs, ws, ys, window, false, onednn_.engine());
    const auto hint = problem.describe_forward(onednn_.engine());
    const auto desc = problem.describe_backward_input(onednn_.engine(), hint);
    BackwardInput made;
    made.winograd = problem.winograd();
    if (dtype == DType::kF32 && !problem.grouped() && !made.winograd && !is_brgemm(desc) && is_brgemm(hint) &&
        window.stride == std::array<std::int64_t, 2>{1, 1} && window.padding[0] < window.kernel[0] &&
        window.padding[1] < window.kernel[1]) {
      Window full = window;
      for (std::size_t a = 0; a < 2; ++a) full.padding[a] = window.kernel[a] - 1 - window.padding[a];
      const Problem turned(dtype, ys, {ws[3], ws[1], ws[2], ws[0]}, xs, full, false, onednn_.engine());
      const auto forward = turned.describe_forward(onednn_.engine());
      if (!turned.winograd() && is_brgemm(forward)) {
        made.is_forward = true;
        made.weights = make_packed(turned.plain_weights, forward.weights_desc());
        if (made.weights.block == 0) made.turned = Tensor::empty(allocator_, {ws[3], ws[1], ws[2], ws[0]});
        made.conv = HeldPrimitive(
            onednn_, dnnl::convolution_forward(forward),
            {{DNNL_ARG_SRC, turned.x}, {DNNL_ARG_WEIGHTS, forward.weights_desc()}, {DNNL_ARG_DST, turned.y}},
            forward.scratchpad_desc());
        return made;
      }
    }
    made.weights = make_packed(problem.plain_weights, desc.weights_desc());
    made.conv = HeldPrimitive(
        onednn_, dnnl::convolution_backward_data(desc),
        {{DNNL_ARG_DIFF_SRC, problem.x}, {DNNL_ARG_WEIGHTS, desc.weights_desc()}, {DNNL_ARG_DIFF_DST, problem.y}},
        desc.scratchpad_desc());
    return made;
  }

  template <class PrimitiveDesc>
  static bool is_brgemm(const PrimitiveDesc& desc) {
    return std::string_view(desc.impl_info_str()).find("brg") != std::string_view::npos;
  }

  // turned[i][a][b][o] = w[o][Kh − 1 − a][Kw − 1 − b][i]
  static void turn(const Tensor& w, const Tensor& turned) {
    const std::int64_t out = w.size(0), taps = w.size(1) * w.size(2), in = w.size(3);
    for (std::int64_t tap = 0; tap < taps; ++tap)
      transpose(w.f32() + (taps - 1 - tap) * in, taps * in, out, in, turned.f32() + tap * out, taps * out);
  }

  BackwardWeight make_backward_weight(const Problem& problem) {
    const auto hint = problem.describe_forward(onednn_.engine());
    const auto desc = problem.describe_backward_weight(onednn_.engine(), hint);
    BackwardWeight made;
    made.winograd = problem.winograd();
    made.conv = HeldPrimitive(onednn_, dnnl::convolution_backward_weights(desc),
                              {{DNNL_ARG_SRC, problem.x},
                               {DNNL_ARG_DIFF_DST, problem.y},
                               {DNNL_ARG_DIFF_WEIGHTS, desc.diff_weights_desc()},
                               {DNNL_ARG_DIFF_BIAS, problem.bias_gradient}},
                              desc.scratchpad_desc());
    if (desc.diff_weights_desc() != problem.plain_gradient) {
      made.tiles = is_tiled(desc.diff_weights_desc());
      if (!made.tiles) made.unpack = make_reorder(desc.diff_weights_desc(), problem.plain_gradient, false);
      made.packed = bytes_for(desc.diff_weights_desc());
    }
    made.add_weight = make_reorder(desc.diff_weights_desc(), problem.plain_gradient, true);
    return made;
  }

  OneDnn& onednn_;
  CachingAllocator& allocator_;
  PointwiseKernels& pointwise_;
  PackedWeights* shared_;
  WinogradConv winograd_;
  LoweredConv lowered_;
  PrimitiveMap<Forward> forwards_;
  PrimitiveMap<BackwardInput> backward_inputs_;
  PrimitiveMap<BackwardWeight> backward_weights_;
};

}  // namespace

std::unique_ptr<ConvKernels> make_conv_kernels(OneDnn& onednn, CachingAllocator& allocator, PointwiseKernels& pointwise,
                                               PackedWeights* shared) {
  return std::make_unique<CpuConv>(onednn, allocator, pointwise, shared);
}

}  // namespace lockstep::nn::cpu
