// What a tensor of a recorded pass holds, as values of a graph.
#pragma once

#include <vector>

#include "lockstep/nn/tensor/shape.h"
#include "nn/onnx/graph.h"

namespace lockstep::nn::onnx {

/// Of axes: each of them once.
using Order = std::vector<int>;

/// An axis as an index of a vector.
constexpr std::size_t at(int axis) { return static_cast<std::size_t>(axis); }

Extents extents_of(const Shape& shape);
/// 0, 1, …
Order plain_order(int axes);
/// (N, …, C) as (N, C, …): images as ONNX's convolutions take them.
Order channels_second(int axes);

/// Note [Contents]
/// ONNX's operators want their operands otherwise than our kernels: channels second, sequences by steps, weights
/// turned. So what a tensor holds is described by a shape, in whose row-major order its elements lie, and by values
/// that have these elements with their axes in some order. Permutations and most reshapes change the description alone;
/// a Transpose is added where an operator needs an order that there is not yet, and is found again by the next one. So
/// convolutions follow each other without any. Likewise a broadcast value is only repeated for operators that do not
/// broadcast themselves.
struct Content {
  struct Form {
    Order order;  // axis i of the value is axis order[i] of the content
    Id id;
  };
  Shape shape;
  std::vector<Form> forms = {};
  Id small = kNone;  // a value that is broadcast to `shape`, from the last axis on

  Content(const Shape& of, Order order, Id id) : shape(of), forms{{std::move(order), id}} {}
  static Content plain(const Shape& shape, Id id) { return {shape, plain_order(shape.size()), id}; }
  static Content broadcast(const Shape& shape, Id small) { return {shape, small}; }

  /// kNone: there is none in this order.
  Id find(const Order& order) const;

 private:
  Content(const Shape& of, Id broadcast) : shape(of), small(broadcast) {}
};

/// The value with the axes in this order; a Transpose where there is none, and then the content has it.
Id in_order(Graph& graph, Content& content, const Order& order);
inline Id in_plain_order(Graph& graph, Content& content) {
  return in_order(graph, content, plain_order(content.shape.size()));
}
/// Some value that is there, made where the content is broadcast. Such that its last axis is the content's, if `last`.
Content::Form some_form(Graph& graph, Content& content, bool last = false);

/// Axis i of the result is axis axes[i].
Content permuted(Graph& graph, Content& content, const Order& axes);
Content reshaped(Graph& graph, Content& content, const Shape& shape);
/// Of each axis the indices [begin, end).
Content sliced(Graph& graph, Content& content, const Extents& begin, const Extents& end);

}  // namespace lockstep::nn::onnx
