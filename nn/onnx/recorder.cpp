#include "nn/onnx/recorder.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "base/error.h"

namespace lockstep::nn::onnx {
namespace {

constexpr const char* kRemedy = "compute it with the operators of lockstep/nn/autograd/functions.h";
constexpr const char* kUnnamed = "an operator without a name (Tape::OpScope)";
constexpr std::size_t kAlignment = 64;

std::uintptr_t address_of(const Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.raw_rows()); }

// To the end of its last row, without what follows that.
std::size_t extent_of(const Tensor& x) {
  if (x.is_contiguous()) return x.bytes();
  const std::int64_t width = x.size(x.shape().size() - 1), rows = x.count() / width;
  return static_cast<std::size_t>((rows - 1) * x.pitch() + width) * size_of(x.dtype());
}

}  // namespace

// Of nothing, at addresses that are never given out twice.
class Recorder::Memory final : public MemorySource {
 public:
  explicit Memory(Recorder& recorder) : recorder_(recorder) {}
  std::byte* allocate(std::size_t bytes) override {
    const std::uintptr_t begin = next_;
    next_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    recorder_.asked_.push_back(begin);
    return reinterpret_cast<std::byte*>(begin);
  }
  void free(std::byte*, std::size_t) noexcept override {}
  Device device() const override { return recorder_.like_.device(); }

 private:
  Recorder& recorder_;
  std::uintptr_t next_ = kShapesAlone;
};

Recorder::Recorder(Backend& like, const Module& module, const std::vector<StateEntry>& entries)
    : like_(like), allocator_(std::make_unique<Memory>(*this)) {
  for (const auto& [name, parameter] : module.named_parameters())
    layers_.emplace(parameter, name.substr(0, name.rfind('.') == std::string::npos ? 0 : name.rfind('.')));
  for (const StateEntry& entry : entries)
    if (entry.value.dtype() == DType::kF32 && entry.value.count() > 0)
      entries_.try_emplace(address_of(entry.value), Entry{.bytes = entry.value.bytes(), .state = &entry});
}

void Recorder::refuse(const std::string& does) {
  refused_ = true;
  throw UsageError(does, kRemedy);
}

void Recorder::refuse_unknown(const Tensor& x) {
  const auto after = makers_.upper_bound(address_of(x));
  const bool is_older = asked_.empty() || address_of(x) < asked_.front();  // than the operator that reads it
  if (is_older && after != makers_.begin()) culprit_ = std::prev(after)->second;
  refuse("it computes what is none of ONNX's operators");
}

std::string Recorder::culprit() const { return refused_ && culprit_.empty() ? kUnnamed : culprit_; }

void Recorder::op_begins() {
  allocator_.trim();  // what is asked for next is seen, and lies elsewhere
  for (const std::uintptr_t begin : asked_) makers_[begin] = kUnnamed;
  asked_.clear();
  first_node_ = graph_.nodes().size();
  exceptions_ = std::uncaught_exceptions();
}

void Recorder::op_ended(const OpLabel& label, bool) {
  const auto layer = layers_.find(label.parameter);
  graph_.name_nodes(first_node_, label.op, layer != layers_.end() ? layer->second : std::string());
  const std::string name = fmt::format("operator \"{}\"", label.op);
  for (const std::uintptr_t begin : asked_) makers_[begin] = name;
  asked_.clear();
  if (std::uncaught_exceptions() > exceptions_ && culprit_.empty()) culprit_ = name;
}

Recorder::Entries::iterator Recorder::find(const Tensor& x) {
  const std::uintptr_t begin = address_of(x);
  auto found = entries_.upper_bound(begin);
  if (found == entries_.begin()) return entries_.end();
  --found;
  return begin + extent_of(x) <= found->first + found->second.bytes ? found : entries_.end();
}

// x is in it.
Content Recorder::content_of(const Tensor& x, Entry& entry) {
  if (entry.content) return *entry.content;
  if (entry.state == nullptr) refuse_unknown(x);
  const StateEntry& state = *entry.state;
  const Shape& shape = state.value.shape();
  Order order = plain_order(shape.size());
  if (state.layout == FileLayout::kOhwiToOihw) order = channels_second(shape.size());
  if (state.layout == FileLayout::kTransposed) order = {1, 0};
  return entry.content.emplace(shape, std::move(order), graph_.add_parameter(state));
}

Content Recorder::content(const Tensor& x) {
  if (x.count() == 0) refuse(fmt::format("it computes with {}, which has no elements", to_string(x.shape())));
  const std::uintptr_t begin = address_of(x);
  const auto found = find(x);
  if (found != entries_.end()) {
    Content whole = content_of(x, found->second);
    if (begin == found->first && x.is_contiguous() && x.bytes() == found->second.bytes)
      return reshaped(graph_, whole, x.shape());
    return part_of(found->first, std::move(whole), x);
  }
  if (begin >= kShapesAlone) refuse_unknown(x);
  // A tensor of the module's that is neither a parameter nor a buffer. Another one may lie there by the next time.
  if (!x.is_contiguous()) refuse(fmt::format("it reads rows of {} that lie apart", to_string(x.shape())));
  std::vector<std::byte> bytes(x.bytes());
  like_.download(x, bytes);
  return constant_content(x, bytes);
}

Content Recorder::part_of(std::uintptr_t begin, Content whole, const Tensor& x) {
  const auto offset = static_cast<std::int64_t>((address_of(x) - begin) / size_of(x.dtype()));
  const Shape& shape = x.shape();
  // Of a first axis of as many rows as there are, those from `offset` on, or so many columns of all rows.
  Shape all = shape;
  const bool rows = x.is_contiguous();
  const int axis = rows ? 0 : shape.size() - 1;
  const std::int64_t step = rows && shape.size() > 0 ? shape.count() / shape[0] : 1;
  if (shape.size() > 0) all[axis] = rows ? whole.shape.count() / step : x.pitch();
  if (shape.size() == 0 || all.count() != whole.shape.count() || offset % step != 0 ||
      offset / step + shape[axis] > all[axis])
    refuse(fmt::format("it reads {} within {}", to_string(shape), to_string(whole.shape)));
  Content by_rows = reshaped(graph_, whole, all);
  Extents from(static_cast<std::size_t>(shape.size())), to = extents_of(all);
  from[static_cast<std::size_t>(axis)] = offset / step;
  to[static_cast<std::size_t>(axis)] = offset / step + shape[axis];
  return sliced(graph_, by_rows, from, to);
}

Content Recorder::natural_content(const Tensor& x, int last) {
  const auto found = find(x);
  if (found != entries_.end() && found->first == address_of(x) && x.is_contiguous() &&
      x.bytes() == found->second.bytes) {
    Content whole = content_of(x, found->second);
    const int axes = whole.shape.size(), own = x.shape().size();
    bool fits = axes >= last && own >= last;
    for (int back = 1; back <= last && fits; ++back) fits = whole.shape[axes - back] == x.shape()[own - back];
    if (fits) return whole;
  }
  return content(x);
}

Recorder::Entry& Recorder::begin_writing(const Tensor& x) {
  if (!x.is_contiguous()) refuse(fmt::format("it writes rows of {} that lie apart", to_string(x.shape())));
  const std::uintptr_t begin = address_of(x), end = begin + x.bytes();
  if (begin < kShapesAlone) refuse("it writes to memory that stays from pass to pass");
  auto next = entries_.upper_bound(begin);
  if (next != entries_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin) --next;
  while (next != entries_.end() && next->first < end) next = entries_.erase(next);
  return entries_.emplace(begin, Entry{.bytes = x.bytes(), .holder = x}).first->second;
}

void Recorder::set(const Tensor& x, Content content) {
  LOCKSTEP_ASSERT(content.shape.count() == x.count(), "{} for {}", to_string(content.shape), to_string(x.shape()));
  begin_writing(x).content = std::move(content);
}

void Recorder::set_part(const Tensor& x, int axis, std::int64_t begin, Content content) {
  auto found = find(x);
  const bool begun = found != entries_.end() && found->first == address_of(x) && found->second.bytes == x.bytes() &&
                     !found->second.content && !found->second.parts.empty() && found->second.axis == axis;
  if (!begun && found != entries_.end()) refuse("it overwrites a part of a value");
  Entry& entry = begun ? found->second : begin_writing(x);
  entry.axis = axis;
  entry.parts.push_back({begin, std::move(content)});
  std::ranges::sort(entry.parts, {}, &Part::begin);
  std::int64_t whole = 0;
  for (const Part& part : entry.parts) {
    if (part.begin != whole) return;
    whole += part.content.shape[axis];
  }
  if (whole < x.size(axis)) return;
  const Order order = some_form(graph_, entry.parts.front().content).order;
  const auto place = std::ranges::find(order, axis) - order.begin();
  std::vector<Operand> operands;
  for (Part& part : entry.parts) operands.emplace_back(in_order(graph_, part.content, order));
  Extents extents;
  for (const int one : order) extents.push_back(x.size(one));
  const Element type = graph_.value(std::get<Id>(operands.front())).type;
  const Id joined = graph_.add("Concat", std::move(operands), extents, {{"axis", std::int64_t{place}}}, type);
  entry.parts.clear();
  entry.content.emplace(x.shape(), order, joined);
}

void Recorder::set_rows(const Tensor& indices, RowPlaces places) { begin_writing(indices).rows = std::move(places); }

const Recorder::RowPlaces* Recorder::find_rows(const Tensor& indices) {
  const auto found = find(indices);
  return found != entries_.end() && found->second.rows ? &*found->second.rows : nullptr;
}

// One value all over is as many of it as a shape has, which may depend on the batch.
Content Recorder::constant_content(const Tensor& x, std::span<const std::byte> bytes) {
  const std::size_t size = size_of(x.dtype());
  if (x.dtype() != DType::kF32 && x.dtype() != DType::kI32 && x.dtype() != DType::kI64)
    refuse(fmt::format("it computes with constants of {}", name_of(x.dtype())));
  const bool whole_numbers = x.dtype() != DType::kF32;
  std::vector<std::byte> values(bytes.begin(), bytes.end());
  if (x.dtype() == DType::kI32) {  // whole numbers are int64 in the graph
    values.resize(bytes.size() * 2);
    for (std::size_t i = 0; i < bytes.size() / size; ++i) {
      std::int32_t narrow = 0;
      std::memcpy(&narrow, bytes.data() + i * size, size);
      const std::int64_t wide = narrow;
      std::memcpy(values.data() + i * sizeof wide, &wide, sizeof wide);
    }
  }
  const Element type = whole_numbers ? Element::kI64 : Element::kF32;
  bool uniform = true;
  for (std::size_t i = size; i < bytes.size() && uniform; i += size)
    uniform = std::memcmp(bytes.data(), bytes.data() + i, size) == 0;
  if (!uniform) return Content::plain(x.shape(), graph_.add_constant(type, extents_of(x.shape()), std::move(values)));
  values.resize(values.size() / static_cast<std::size_t>(x.count()));
  return Content::broadcast(x.shape(), graph_.add_constant(type, {}, std::move(values)));
}

void Recorder::set_constant(const Tensor& x, std::span<const std::byte> bytes) {
  if (bytes.size() != x.bytes()) refuse("it writes a part of a tensor");
  Content content = constant_content(x, bytes);
  set(x, std::move(content));
}

}  // namespace lockstep::nn::onnx
