#include "nn/io/unpickler.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "base/error.h"

namespace lockstep::nn {
namespace {

constexpr int kDeepest = 64;
constexpr std::size_t kMostAxes = 16;  // of a tensor
constexpr std::string_view kOrderedDict = "collections OrderedDict";
constexpr std::string_view kTensor = "torch._utils _rebuild_tensor_v2";
constexpr std::string_view kParameter = "torch._utils _rebuild_parameter";

struct StorageType {
  std::string_view name;
  DType dtype;
  bool half;
};
constexpr StorageType kStorages[] = {
    {"torch FloatStorage", DType::kF32, false},     {"torch HalfStorage", DType::kBF16, true},
    {"torch BFloat16Storage", DType::kBF16, false}, {"torch DoubleStorage", DType::kF64, false},
    {"torch LongStorage", DType::kI64, false},      {"torch IntStorage", DType::kI32, false},
    {"torch ByteStorage", DType::kU8, false},       {"torch BoolStorage", DType::kU8, false},
};

// Python's opcodes (Lib/pickletools.py).
enum Op : std::uint8_t {
  kMark = '(',
  kStop = '.',
  kNone = 'N',
  kInt4 = 'J',
  kInt1 = 'K',
  kInt2 = 'M',
  kFloat = 'G',
  kText4 = 'X',
  kEmptyDict = '}',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kTuple = 't',
  kAppend = 'a',
  kAppends = 'e',
  kSetItem = 's',
  kSetItems = 'u',
  kGlobal = 'c',
  kReduce = 'R',
  kBuild = 'b',
  kPersistent = 'Q',
  kPut1 = 'q',
  kPut4 = 'r',
  kGet1 = 'h',
  kGet4 = 'j',
  kProtocol = 0x80,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kTrue = 0x88,
  kFalse = 0x89,
  kLong1 = 0x8a,
  kText1 = 0x8c,
};

class Machine {
 public:
  Machine(std::span<const std::byte> bytes, std::size_t at, const std::string& source)
      : bytes_(bytes), at_(at), source_(source) {}

  Pickled run() {
    while (true) {
      op_at_ = at_;
      const std::uint8_t op = byte();
      if (op == kStop) break;
      step(op);
    }
    if (stack_.size() != 1 || !marks_.empty()) refuse("it ends with values left over");
    return stack_.back();
  }
  std::size_t at() const { return at_; }

 private:
  using V = PickledValue;

  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(fmt::format("{}: at byte {} of its pickle: {}", source_, op_at_, why),
                  "load files of tensors alone: torch.save(model.state_dict(), FILE)");
  }

  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size() - at_) refuse("it is cut");
    at_ += count;
    return bytes_.subspan(at_ - count, count);
  }
  std::uint8_t byte() { return std::to_integer<std::uint8_t>(take(1)[0]); }
  std::uint64_t little_endian(std::size_t count) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < count; ++i) value |= std::uint64_t{byte()} << (8 * i);
    return value;
  }
  std::string text(std::size_t count) {
    const auto part = take(count);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  std::string line() {
    std::string word;
    for (std::uint8_t c = byte(); c != '\n'; c = byte()) word += static_cast<char>(c);
    return word;
  }

  template <class T>
  static Pickled made(T value, int depth = 1) {
    auto one = std::make_shared<V>();
    one->is = std::move(value);
    one->depth = depth;
    return one;
  }
  void push(Pickled value) { stack_.push_back(std::move(value)); }
  Pickled pop() {
    if (stack_.size() <= floor()) refuse("a value is missing");
    Pickled value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  const Pickled& top() const {
    if (stack_.size() <= floor()) refuse("a value is missing");
    return stack_.back();
  }
  std::vector<Pickled> since_mark() {
    if (marks_.empty()) refuse("a mark is missing");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Pickled> values(std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
    stack_.resize(marks_.back());
    marks_.pop_back();
    return values;
  }
  int around(int deepest) const {
    if (deepest >= kDeepest) refuse("it nests too deep");
    return deepest + 1;
  }
  void push_tuple(std::vector<Pickled> items) {
    int deepest = 0;
    for (const Pickled& item : items) {
      deepest = std::max(deepest, item->depth);
      item->sealed = true;
    }
    push(made(V::Sequence{std::move(items), true}, around(deepest)));
  }
  void tuple_of(std::size_t count) {
    std::vector<Pickled> items(count);
    for (std::size_t i = count; i > 0; --i) items[i - 1] = pop();
    push_tuple(std::move(items));
  }

  template <class T>
  const T& as(const Pickled& value, const char* what) const {
    const T* const found = std::get_if<T>(&value->is);
    if (found == nullptr) refuse(fmt::format("{} is of another type", what));
    return *found;
  }
  // A container that is about to hold `item`.
  void deepen(V& container, const Pickled& item) const {
    if (container.sealed || item.get() == &container) refuse("a value contains itself, or grows later on");
    item->sealed = true;
    container.depth = std::max(container.depth, around(item->depth));
  }
  void set(const Pickled& dict, Pickled key, Pickled value) {
    auto* const items = std::get_if<V::Dict>(&dict->is);
    if (items == nullptr) refuse("an entry for what is no dictionary");
    deepen(*dict, key);
    deepen(*dict, value);
    items->items.emplace_back(std::move(key), std::move(value));
  }
  void append(const Pickled& list, Pickled item) {
    auto* const items = std::get_if<V::Sequence>(&list->is);
    if (items == nullptr || items->tuple) refuse("an item for what is no list");
    deepen(*list, item);
    items->items.push_back(std::move(item));
  }

  void step(std::uint8_t op) {
    switch (op) {
      case kProtocol:
        if (const int version = byte(); version < 2 || version > 5) refuse(fmt::format("protocol {}", version));
        return;
      case kMark: return marks_.push_back(stack_.size());
      case kNone: return push(made(V::None{}));
      case kTrue: return push(made(true));
      case kFalse: return push(made(false));
      case kInt1: return push(made(static_cast<std::int64_t>(byte())));
      case kInt2: return push(made(static_cast<std::int64_t>(little_endian(2))));
      case kInt4: return push(made(std::int64_t{static_cast<std::int32_t>(little_endian(4))}));
      case kLong1: return push_long();
      case kFloat: return push_float();
      case kText1: return push(made(text(byte())));
      case kText4: return push(made(text(little_endian(4))));
      case kEmptyDict: return push(made(V::Dict{}));
      case kEmptyList: return push(made(V::Sequence{}));
      case kEmptyTuple: return push_tuple({});
      case kTuple: return push_tuple(since_mark());
      case kTuple1: return tuple_of(1);
      case kTuple2: return tuple_of(2);
      case kTuple3: return tuple_of(3);
      case kAppend: {
        Pickled item = pop();
        return append(top(), std::move(item));
      }
      case kAppends:
        for (auto items = since_mark(); Pickled & item : items) append(top(), std::move(item));
        return;
      case kSetItem: {
        Pickled value = pop(), key = pop();
        return set(top(), std::move(key), std::move(value));
      }
      case kSetItems: {
        auto items = since_mark();
        if (items.size() % 2 != 0) refuse("a key without a value");
        for (std::size_t i = 0; i < items.size(); i += 2) set(top(), std::move(items[i]), std::move(items[i + 1]));
        return;
      }
      case kGlobal: return push_name();
      case kReduce: return reduce();
      case kBuild: {
        // What torch.save() hangs on to a state dict (its metadata) says nothing about tensors.
        pop();
        if (!std::holds_alternative<V::Dict>(top()->is)) refuse("attributes for what is no dictionary");
        return;
      }
      case kPersistent: return push_storage();
      case kPut1: return put(byte());
      case kPut4: return put(little_endian(4));
      case kGet1: return get(byte());
      case kGet4: return get(little_endian(4));
      default: refuse(fmt::format("the operation 0x{:02x}, which no state dict needs", op));
    }
  }

  void push_long() {
    const std::size_t count = byte();
    if (count > 8) refuse("an integer of more than 64 bits");
    std::uint64_t value = little_endian(count);
    if (count > 0 && count < 8 && (value >> (8 * count - 1) & 1) != 0) value |= ~std::uint64_t{0} << (8 * count);
    push(made(static_cast<std::int64_t>(value)));
  }

  void push_float() {
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    push(made(std::bit_cast<double>(bits)));
  }

  void put(std::uint64_t place) { memo_[place] = top(); }
  void get(std::uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) refuse("a value that was not there before");
    push(found->second);
  }

  void push_name() {
    std::string name = line();
    name += ' ' + line();
    const bool known = name == kOrderedDict || name == kTensor || name == kParameter ||
                       std::ranges::any_of(kStorages, [&](const StorageType& type) { return type.name == name; });
    if (!known) refuse(fmt::format("the name '{}', which no state dict needs", printable(name)));
    push(made(V::Name{std::move(name)}));
  }

  static std::string printable(std::string name) {
    for (char& c : name)
      if (c < ' ' || c > '~') c = '?';
    return name.substr(0, 80);
  }

  // ("storage", type, key, location, elements), and in older files None.
  void push_storage() {
    const Pickled id = pop();
    const auto& items = as<V::Sequence>(id, "a persistent id").items;
    if (items.size() < 5 || items.size() > 6 || as<std::string>(items[0], "a persistent id") != "storage")
      refuse("a persistent id that names no storage");
    if (items.size() == 6 && !std::holds_alternative<V::None>(items[5]->is)) refuse("a storage within another one");
    const auto& type = as<V::Name>(items[1], "a storage's type").text;
    const auto* const known = std::ranges::find(kStorages, type, &StorageType::name);
    if (known == std::end(kStorages)) refuse("a storage of another type");
    const std::int64_t elements = as<std::int64_t>(items[4], "a storage's size");
    if (elements < 0) refuse("a storage of negative size");
    // Copied with each tensor of the storage; PyTorch's are short numbers.
    constexpr std::size_t kLongestKey = 64;
    const auto& key = as<std::string>(items[2], "a storage's key");
    if (key.size() > kLongestKey) refuse(fmt::format("a storage with a key of {} bytes", key.size()));
    push(made(PickledStorage{known->dtype, known->half, key, elements}));
  }

  void reduce() {
    const Pickled arguments = pop(), function = pop();
    const auto& name = as<V::Name>(function, "what is called").text;
    const auto& given = as<V::Sequence>(arguments, "arguments").items;
    if (name == kOrderedDict && given.empty()) return push(made(V::Dict{}));
    if (name == kTensor && given.size() >= 4) {
      PickledTensor tensor{as<PickledStorage>(given[0], "a tensor's storage"),
                           as<std::int64_t>(given[1], "a tensor's offset"), sizes(given[2]), sizes(given[3])};
      return push(made(std::move(tensor)));
    }
    if (name == kParameter && !given.empty() && std::holds_alternative<PickledTensor>(given[0]->is))
      return push(given[0]);
    refuse(fmt::format("a call of {} with {} arguments", name, given.size()));
  }

  std::vector<std::int64_t> sizes(const Pickled& tuple) const {
    const auto& items = as<V::Sequence>(tuple, "a tensor's sizes").items;
    if (items.size() > kMostAxes) refuse(fmt::format("a tensor with {} axes", items.size()));
    std::vector<std::int64_t> all;
    for (const Pickled& item : items) {
      all.push_back(as<std::int64_t>(item, "a tensor's size"));
      if (all.back() < 0) refuse("a tensor of negative size");
    }
    return all;
  }

  std::span<const std::byte> bytes_;
  std::size_t at_;
  std::size_t op_at_ = 0;
  const std::string& source_;
  std::vector<Pickled> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Pickled> memo_;
};

}  // namespace

Pickled unpickle(std::span<const std::byte> bytes, std::size_t& at, const std::string& source) {
  Machine machine(bytes, at, source);
  Pickled value = machine.run();
  at = machine.at();
  return value;
}

}  // namespace lockstep::nn
