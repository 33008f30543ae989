// Attention, embeddings and recurrent layers as nodes.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "nn/onnx/kernels.h"

namespace lockstep::nn::onnx {
namespace {

class AttentionNodes final : public AttentionKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
               const Tensor&) override {
    if (options.dropout != 0.0) r_.refuse("it drops elements");
    const std::int64_t batch = y.size(0), tokens = y.size(1), features = y.size(2) / heads;
    // (N, T, H · D) as (N, H, T, D), of keys as (N, H, D, T).
    const auto by_heads = [&](const Tensor& of, const std::vector<int>& axes) {
      return g_.transpose(g_.reshape(r_.value(of), {batch, tokens, heads, features}), axes);
    };
    Id scores =
        g_.add("MatMul", {by_heads(x.q, {0, 2, 1, 3}), by_heads(x.k, {0, 2, 3, 1})}, {batch, heads, tokens, tokens});
    scores = g_.map("Mul", {scores, g_.scalar(1.0f / std::sqrt(static_cast<float>(features)))});
    Id seen = kNone;  // which keys a query sees: (T, T), (N, 1, 1, T) or (N, 1, T, T)
    if (options.causal) {
      const Id places = range(tokens);
      seen = g_.add("LessOrEqual", {row(places, {1, tokens}, 0), row(places, {tokens, 1}, 1)}, {tokens, tokens}, {},
                    Element::kBool);
    }
    Id is_token = kNone;  // (N, T)
    if (options.lengths.defined()) {
      is_token = g_.add("Less", {range(tokens), row(r_.value(options.lengths), {batch, 1}, 1)}, {batch, tokens}, {},
                        Element::kBool);
      const Id keys = g_.add("Unsqueeze", {is_token, Numbers{{1, 2}}}, {batch, 1, 1, tokens}, {}, Element::kBool);
      seen = seen == kNone ? keys : g_.add("And", {seen, keys}, {batch, 1, tokens, tokens}, {}, Element::kBool);
    }
    // Not −∞: of a text without tokens it would make NaN.
    if (seen != kNone)
      scores = g_.add("Where", {seen, scores, g_.scalar(std::numeric_limits<float>::lowest())}, g_.shape(scores));
    const Id weights = g_.map("Softmax", {scores}, {{"axis", std::int64_t{-1}}});
    const Id mixed = g_.add("MatMul", {weights, by_heads(x.v, {0, 2, 1, 3})}, {batch, heads, tokens, features});
    Id made = g_.reshape(g_.transpose(mixed, {0, 2, 1, 3}), {batch, tokens, heads * features});
    if (is_token != kNone) {
      const Id queries = g_.add("Unsqueeze", {is_token, Numbers{{2}}}, {batch, tokens, 1}, {}, Element::kBool);
      made = g_.add("Where", {queries, made, g_.scalar(0.0f)}, g_.shape(made));
    }
    set_plain(y, made);
  }

  void extend(const Tensor&, std::int64_t, std::int64_t, const Tensor&, const Tensor&) override {
    r_.refuse("it continues a text from a memory of its keys");
  }

 private:
  Id row(Id x, const Extents& shape, std::int64_t axis) {
    return g_.add("Unsqueeze", {x, Numbers{{axis}}}, shape, {}, Element::kI64);
  }
};

class EmbeddingNodes final : public EmbeddingKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  void forward(const Tensor& table, const Tensor& indices, const Tensor& y) override {
    if (const auto* const places = r_.find_rows(indices)) return select_rows(table, indices, *places, y);
    Extents extents = extents_of(indices.shape());
    extents.push_back(table.size(1));
    r_.set(y, Content::plain(
                  Shape(std::span<const std::int64_t>(extents)),
                  g_.add("Gather", {r_.value(table), r_.value(indices)}, extents, {{"axis", std::int64_t{0}}})));
  }
  void row_indices(const Tensor& positions, std::int64_t position, std::int64_t rows, const Tensor& indices) override {
    r_.set_rows(indices, {positions, position, rows});
  }

  void add_rows(const Tensor& x, const Tensor& table, std::int64_t first, const Tensor& y) override {
    Content content = r_.content(x);
    const Id rows = rows_of(table, first, x.size(1));
    r_.set(y, Content::plain(content.shape, g_.map("Add", {in_plain_order(g_, content), rows})));
  }

  void rotate(const Tensor& x, const Tensor& cosines, const Tensor& sines, std::int64_t first, bool back,
              const Tensor& y) override {
    const std::int64_t batch = x.size(0), tokens = x.size(1), half = cosines.size(1), heads = x.size(2) / (2 * half);
    const Id all = g_.reshape(r_.value(x), {batch, tokens, heads, 2 * half});
    const auto half_of = [&](std::int64_t begin) {
      return g_.add("Slice", {all, Numbers{{begin}}, Numbers{{begin + half}}, Numbers{{3}}},
                    {batch, tokens, heads, half});
    };
    const auto of_tokens = [&](const Tensor& table) {
      return g_.add("Unsqueeze", {rows_of(table, first, tokens), Numbers{{1}}}, {tokens, 1, half});
    };
    const Id low = half_of(0), high = half_of(half), cosine = of_tokens(cosines), sine = of_tokens(sines);
    const auto product = [&](Id a, Id b) { return g_.map("Mul", {a, b}); };
    const Id turned_low = g_.map(back ? "Add" : "Sub", {product(low, cosine), product(high, sine)});
    const Id turned_high = g_.map(back ? "Sub" : "Add", {product(high, cosine), product(low, sine)});
    const Id joined =
        g_.add("Concat", {turned_low, turned_high}, {batch, tokens, heads, 2 * half}, {{"axis", std::int64_t{3}}});
    set_plain(y, g_.reshape(joined, extents_of(x.shape())));
  }

 private:
  // Rows [first, first + count) of a table (P, C), of which there may be one alone.
  Id rows_of(const Tensor& table, std::int64_t first, std::int64_t count) {
    Id rows = r_.value(table);
    if (table.size(0) == 1) return rows;
    const auto slice = [&](std::int64_t begin, std::int64_t end) {
      rows = g_.add("Slice", {rows, Numbers{{begin}}, Numbers{{end}}, Numbers{{0}}}, {end - begin, table.size(1)});
    };
    if (first > 0) slice(first, table.size(0));
    slice(0, count);  // a free length
    return rows;
  }

  // The table is samples of `rows` rows each.
  void select_rows(const Tensor& table, const Tensor& indices, const Recorder::RowPlaces& places, const Tensor& y) {
    const std::int64_t samples = table.size(0) / places.rows, features = table.size(1);
    Content content = r_.content(table.reshaped({samples, places.rows, features}));
    if (places.positions.defined()) {
      const std::int64_t each = indices.size(1);
      const Id at =
          g_.add("Unsqueeze", {r_.value(places.positions), Numbers{{2}}}, {samples, each, 1}, {}, Element::kI64);
      set_plain(y, g_.add("GatherND", {in_plain_order(g_, content), at}, {samples, each, features},
                          {{"batch_dims", std::int64_t{1}}}));
      return;
    }
    const Content::Form from = some_form(g_, content);
    const auto axis = std::ranges::find(from.order, 1) - from.order.begin();
    Order order;
    Extents extents;
    for (const int one : from.order) {
      if (one == 1) continue;
      order.push_back(one > 1 ? one - 1 : one);
      extents.push_back(content.shape[one]);
    }
    // The last row is that of sequences of any length.
    const std::int64_t position = places.position == places.rows - 1 ? -1 : places.position;
    const Id taken =
        g_.add("Gather", {from.id, Numbers{{position}, Numbers::As::kScalar}}, extents, {{"axis", std::int64_t{axis}}});
    r_.set(y, Content({samples, features}, order, taken));
  }
};

// https://onnx.ai/onnx/operators: RNN, GRU and LSTM, with sequences (T, N, I) and weights for each direction.
class RnnNodes final : public RnnKernels, NodeMaker {
 public:
  using NodeMaker::NodeMaker;

  Tensor forward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                 const Tensor& y, const RnnState& to, bool keep) override {
    if (keep) r_.refuse("it computes for training");
    if (from.h.defined() || to.h.defined()) r_.refuse("it continues from a state");
    const std::int64_t batch = x.size(0), steps = x.size(1), features = y.size(2), rows = weights.w_hh.size(0);
    const Order by_steps = {1, 0, 2};
    Content sequence = r_.content(x);
    const auto ordered = [&](const Tensor& of, const Extents& extents) {
      return in_gate_order(options.cell, r_.value(of), extents, features);
    };
    const auto one_direction = [&](Id of, Extents extents) {
      extents.insert(extents.begin(), 1);
      return g_.add("Unsqueeze", {of, Numbers{{0}}}, extents);
    };
    const Extents of_input = {rows, x.size(2)}, of_state = {rows, features};
    std::vector<Operand> operands = {in_order(g_, sequence, by_steps),
                                     one_direction(ordered(weights.w_ih, of_input), of_input),
                                     one_direction(ordered(weights.w_hh, of_state), of_state), kNone};
    if (weights.b_ih.defined()) {
      const Id biases = g_.add("Concat", {ordered(weights.b_ih, {rows}), ordered(weights.b_hh, {rows})}, {2 * rows},
                               {{"axis", std::int64_t{0}}});
      operands.back() = one_direction(biases, {2 * rows});
    }
    if (options.lengths.defined())
      operands.emplace_back(g_.add("Cast", {r_.value(options.lengths)}, {batch},
                                   {{"to", static_cast<std::int64_t>(Element::kI32)}}, Element::kI32));
    Attributes attributes = {{"hidden_size", features}, {"direction", options.reverse ? "reverse" : "forward"}};
    if (options.cell == RnnCell::kGru) attributes.emplace_back("linear_before_reset", std::int64_t{1});
    if (options.cell == RnnCell::kRelu) attributes.emplace_back("activations", std::vector<std::string>{"Relu"});
    const Id all =
        g_.add(name_of(options.cell), std::move(operands), {steps, 1, batch, features}, std::move(attributes));
    const Id made = g_.add("Squeeze", {all, Numbers{{1}}}, {steps, batch, features});
    r_.set(y, Content(y.shape(), by_steps, made));
    return {};
  }

  void backward(const RnnOptions&, const Tensor&, const RnnWeights&, const RnnState&, const Tensor&, const Tensor&,
                const Tensor&, const RnnGradients&, const Tensor&, FunctionRef<void()>) override {
    r_.refuse("it computes gradients");
  }

 private:
  // Gates are i, o, f, g there, and z, r, n.
  Id in_gate_order(RnnCell cell, Id x, const Extents& shape, std::int64_t features) {
    Extents order;
    if (cell == RnnCell::kLstm) order = {0, 3, 1, 2};
    if (cell == RnnCell::kGru) order = {1, 0, 2};
    if (order.empty()) return x;
    Numbers rows;
    for (const std::int64_t gate : order)
      for (std::int64_t i = 0; i < features; ++i) rows.values.push_back(gate * features + i);
    return g_.add("Gather", {x, rows}, shape, {{"axis", std::int64_t{0}}});
  }
};

}  // namespace

std::unique_ptr<AttentionKernels> make_attention_nodes(Recorder& recorder) {
  return std::make_unique<AttentionNodes>(recorder);
}
std::unique_ptr<EmbeddingKernels> make_embedding_nodes(Recorder& recorder) {
  return std::make_unique<EmbeddingNodes>(recorder);
}
std::unique_ptr<RnnKernels> make_rnn_nodes(Recorder& recorder) { return std::make_unique<RnnNodes>(recorder); }

}  // namespace lockstep::nn::onnx
