#include "nn/onnx/contents.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace lockstep::nn::onnx {
namespace {

int place_of(const Order& order, int axis) { return static_cast<int>(std::ranges::find(order, axis) - order.begin()); }

// Axes [begin, end) of one shape that hold the elements of axes [to_begin, to_end) of another one.
struct AxisGroup {
  int begin, end, to_begin, to_end;
};
std::vector<AxisGroup> common_groups(const Shape& from, const Shape& to) {
  std::vector<AxisGroup> groups;
  int i = 0, j = 0;
  while (i < from.size() || j < to.size()) {
    AxisGroup group = {i, i, j, j};
    std::int64_t elements = 1, wanted = 1;
    if (i < from.size()) elements = from[i++];
    if (j < to.size()) wanted = to[j++];
    while (elements != wanted) {
      if (elements < wanted)
        elements *= from[i++];
      else
        wanted *= to[j++];
    }
    group.end = i;
    group.to_end = j;
    groups.push_back(group);
  }
  return groups;
}

// Both shapes have as many elements. Nothing where axes that become one do not follow each other in the value; those of
// one index lie anywhere.
std::optional<Content> reshaped_form(Graph& graph, const Content& content, const Content::Form& form, const Shape& to) {
  const auto counts = [&](int axis) { return content.shape[axis] != 1; };
  Order from, order;
  for (const int axis : form.order)
    if (counts(axis)) from.push_back(axis);
  Extents extents;
  const auto append = [&](const AxisGroup& group) {
    for (int axis = group.to_begin; axis < group.to_end; ++axis) {
      order.push_back(axis);
      extents.push_back(to[axis]);
    }
  };
  const auto groups = common_groups(content.shape, to);
  for (auto place = from.begin(); place != from.end();) {
    const auto group = std::ranges::find_if(
        groups, [axis = *place](const AxisGroup& one) { return axis >= one.begin && axis < one.end; });
    for (int axis = group->begin; axis < group->end; ++axis)
      if (counts(axis) && (place == from.end() || *place++ != axis)) return std::nullopt;
    append(*group);
  }
  for (const AxisGroup& group : groups) {
    bool none = true;
    for (int axis = group.begin; axis < group.end; ++axis) none = none && !counts(axis);
    if (none) append(group);
  }
  return Content(to, std::move(order), graph.reshape(form.id, extents));
}

Id expanded(Graph& graph, Id small, const Shape& shape) {
  // An extent of 1 leaves the value's own.
  Extents to = extents_of(shape);
  const Extents own = graph.shape(small);
  const std::size_t more = to.size() - own.size();
  for (std::size_t i = 0; i < own.size(); ++i)
    if (own[i] == to[more + i]) to[more + i] = 1;
  if (std::ranges::all_of(to, [](std::int64_t extent) { return extent == 1; }) && more == 0) return small;
  return graph.add("Expand", {small, Numbers{to}}, extents_of(shape), {}, graph.value(small).type);
}

}  // namespace

Extents extents_of(const Shape& shape) { return {shape.dims().begin(), shape.dims().end()}; }

Order plain_order(int axes) {
  Order order(at(axes));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

Order channels_second(int axes) {
  Order order = plain_order(axes);
  if (axes > 2) std::rotate(order.begin() + 1, order.end() - 1, order.end());
  return order;
}

Id Content::find(const Order& order) const {
  const auto found = std::ranges::find(forms, order, &Form::order);
  return found != forms.end() ? found->id : kNone;
}

Id in_order(Graph& graph, Content& content, const Order& order) {
  if (const Id known = content.find(order); known != kNone) return known;
  const Content::Form from = some_form(graph, content);
  Order axes;
  for (const int axis : order) axes.push_back(place_of(from.order, axis));
  const Id made = graph.transpose(from.id, axes);
  content.forms.push_back({order, made});
  return made;
}

Content::Form some_form(Graph& graph, Content& content, bool last) {
  if (content.forms.empty())
    content.forms.push_back({plain_order(content.shape.size()), expanded(graph, content.small, content.shape)});
  if (!last || content.shape.size() == 0) return content.forms.front();
  for (const auto& form : content.forms)
    if (form.order.back() == content.shape.size() - 1) return form;
  const Order order = plain_order(content.shape.size());
  return {order, in_order(graph, content, order)};
}

Content permuted(Graph& graph, Content& content, const Order& axes) {
  static_cast<void>(some_form(graph, content));
  Content made = content;
  made.small = kNone;
  for (int i = 0; i < made.shape.size(); ++i) made.shape[i] = content.shape[axes[at(i)]];
  for (auto& form : made.forms)
    for (int& axis : form.order) axis = place_of(axes, axis);
  return made;
}

Content reshaped(Graph& graph, Content& content, const Shape& shape) {
  if (shape == content.shape) return content;
  if (content.forms.empty() && graph.shape(content.small).empty()) return Content::broadcast(shape, content.small);
  for (const auto& form : content.forms)
    if (auto made = reshaped_form(graph, content, form, shape)) return *std::move(made);
  return *reshaped_form(graph, content, {plain_order(content.shape.size()), in_plain_order(graph, content)}, shape);
}

Content sliced(Graph& graph, Content& content, const Extents& begin, const Extents& end) {
  Numbers from, to, axes;
  Shape shape = content.shape;
  const Content::Form form = some_form(graph, content);
  Extents extents = graph.shape(form.id);
  for (std::size_t place = 0; place < form.order.size(); ++place) {
    const int axis = form.order[place];
    if (begin[at(axis)] == 0 && end[at(axis)] == shape[axis]) continue;
    from.values.push_back(begin[at(axis)]);
    to.values.push_back(end[at(axis)]);
    axes.values.push_back(static_cast<std::int64_t>(place));
    extents[place] = shape[axis] = end[at(axis)] - begin[at(axis)];
  }
  if (axes.values.empty()) return content;
  return {shape, form.order, graph.add("Slice", {form.id, from, to, axes}, extents, {}, graph.value(form.id).type)};
}

}  // namespace lockstep::nn::onnx
