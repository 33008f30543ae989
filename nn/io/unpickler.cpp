#include "nn/io/unpickler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::nn {
namespace {

constexpr std::size_t kMostAxes = 16;  // of a tensor
// Subclasses of dict whose entries are a dict's.
constexpr std::string_view kDicts[] = {"collections OrderedDict", "collections defaultdict", "builtins dict",
                                       "__builtin__ dict"};
// Of (storage, offset, sizes, strides, requires_grad, hooks, metadata): the last ones may be missing.
constexpr std::string_view kTensors[] = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor"};
constexpr std::size_t kMetadata = 6;
// The same, with an element type that has no kind of storage before the metadata.
constexpr std::string_view kOfOtherType = "torch._utils _rebuild_tensor_v3";
constexpr std::size_t kType = 6;
// Of (tensor, …).
constexpr std::string_view kParameters[] = {"torch._utils _rebuild_parameter",
                                            "torch._utils _rebuild_parameter_with_state"};
// Of (one of the functions above, a class, its arguments, attributes): a tensor that has attributes. The class may take
// the bytes for something else than values; these do not.
constexpr std::string_view kWithAttributes = "torch._tensor _rebuild_from_type_v2";
constexpr std::string_view kPlainClasses[] = {"torch Tensor", "torch._tensor Tensor", "torch.nn.parameter Parameter",
                                              "torch.nn.parameter Buffer"};
// What they make has no values of its own, or other ones than its bytes.
constexpr std::pair<std::string_view, const char*> kOtherTensors[] = {
    {"torch._utils _rebuild_qtensor", "a quantized tensor"},
    {"torch._utils _rebuild_sparse_tensor", "a sparse tensor"},
    {"torch._utils _rebuild_sparse_csr_tensor", "a sparse tensor"},
    {"torch._utils _rebuild_nested_tensor", "a nested tensor"},
    {"torch._utils _rebuild_meta_tensor_no_storage", "a tensor on the meta device, which has no values"},
    {"torch._utils _rebuild_wrapper_subclass", "a tensor that wraps others"},
    {"torch._utils _rebuild_device_tensor_from_numpy", "a tensor of another device, as an array of NumPy's"},
    {"torch._utils _rebuild_device_tensor_from_cpu_tensor", "a tensor of another device"},
    {"torch._utils _rebuild_xla_tensor", "a tensor of another device, as an array of NumPy's"},
};

struct StorageType {
  std::string_view name;
  std::size_t element_bytes;
  std::optional<DType> dtype = {};
  bool half = false;
};
constexpr StorageType kStorages[] = {
    {"torch FloatStorage", 4, DType::kF32},
    {"torch HalfStorage", 2, DType::kBF16, true},
    {"torch BFloat16Storage", 2, DType::kBF16},
    {"torch DoubleStorage", 8, DType::kF64},
    {"torch LongStorage", 8, DType::kI64},
    {"torch IntStorage", 4, DType::kI32},
    {"torch ByteStorage", 1, DType::kU8},
    {"torch BoolStorage", 1, DType::kU8},
    {"torch ShortStorage", 2},
    {"torch CharStorage", 1},
    {"torch ComplexFloatStorage", 8},
    {"torch ComplexDoubleStorage", 16},
    {"torch QInt8Storage", 1},
    {"torch QUInt8Storage", 1},
    {"torch QInt32Storage", 4},
    {"torch UntypedStorage", 1},
};

bool among(std::span<const std::string_view> names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// Short, and safe to print.
std::string shown(std::string_view name) { return cut_columns(utf8_prefix(name, 400), 80); }

// Python's opcodes (Lib/pickletools.py) of protocols 2 to 5, without those of text and of extensions.
enum Op : std::uint8_t {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDuplicate = '2',
  kNone = 'N',
  kInt4 = 'J',
  kInt1 = 'K',
  kInt2 = 'M',
  kFloat = 'G',
  kString4 = 'T',
  kString1 = 'U',
  kText4 = 'X',
  kBytes4 = 'B',
  kBytes1 = 'C',
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
  kObject = 'o',
  kPersistent = 'Q',
  kPut1 = 'q',
  kPut4 = 'r',
  kGet1 = 'h',
  kGet4 = 'j',
  kProtocol = 0x80,
  kNewObject = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kTrue = 0x88,
  kFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kText1 = 0x8c,
  kText8 = 0x8d,
  kBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjectEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
  kReadOnly = 0x98,
};

class Machine {
 public:
  Machine(std::span<const std::byte> bytes, std::size_t at, const std::string& source)
      : bytes_(bytes), at_(at), source_(source) {}

  Unpickled run() {
    while (true) {
      op_at_ = at_;
      const std::uint8_t op = byte();
      if (op == kStop) break;
      step(op);
    }
    if (stack_.size() != 1 || !marks_.empty()) refuse("it ends with values left over");
    made_.root = stack_.back();
    return std::move(made_);
  }
  std::size_t at() const { return at_; }

 private:
  using V = PickledValue;

  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(fmt::format("{}: at byte {} of its pickle: {}", source_, op_at_, why),
                  "load files of tensors alone: torch.save(model.state_dict(), FILE)");
  }

  std::span<const std::byte> take(std::uint64_t count) {
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
  std::string text(std::uint64_t count) {
    const auto part = take(count);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  std::string line() {
    std::string word;
    for (std::uint8_t c = byte(); c != '\n'; c = byte()) word += static_cast<char>(c);
    return word;
  }

  template <class T>
  void push_new(T value) {
    stack_.push_back(&made_.values.emplace_back(V{std::move(value)}));
  }
  void push(Pickled value) { stack_.push_back(value); }
  Pickled pop() {
    const Pickled value = top();
    stack_.pop_back();
    return value;
  }
  Pickled top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) refuse("a value is missing");
    return stack_.back();
  }
  std::vector<Pickled> since_mark() {
    if (marks_.empty()) refuse("a mark is missing");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Pickled> values(first, stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return values;
  }
  void push_tuple(std::size_t count) {
    std::vector<Pickled> items(count);
    for (std::size_t i = count; i > 0; --i) items[i - 1] = pop();
    push_new(V::Sequence{std::move(items), true});
  }

  template <class T>
  const T& as(Pickled value, const char* what) const {
    const T* const found = std::get_if<T>(&value->is);
    if (found == nullptr) refuse(fmt::format("{} is {}", what, kind_of(*value)));
    return *found;
  }

  // What goes into an object of no use here is of none either.
  void set(Pickled target, Pickled key, Pickled value) {
    if (std::holds_alternative<V::Opaque>(target->is)) return;
    auto* const dict = std::get_if<V::Dict>(&target->is);
    if (dict == nullptr) refuse(fmt::format("an entry for {}, which is no dictionary", kind_of(*target)));
    dict->items.emplace_back(key, value);
  }
  void append(Pickled target, Pickled item) {
    if (std::holds_alternative<V::Opaque>(target->is)) return;
    auto* const list = std::get_if<V::Sequence>(&target->is);
    if (list == nullptr || list->tuple) refuse(fmt::format("an item for {}, which is no list", kind_of(*target)));
    list->items.push_back(item);
  }

  void step(std::uint8_t op) {
    switch (op) {
      case kProtocol:
        if (const int version = byte(); version < 2 || version > 5) refuse(fmt::format("protocol {}", version));
        return;
      case kFrame: return static_cast<void>(little_endian(8));  // how far a reader may read ahead
      case kMark: return marks_.push_back(stack_.size());
      case kPopMark: return static_cast<void>(since_mark());
      case kPop:
        if (!marks_.empty() && stack_.size() == marks_.back()) return marks_.pop_back();
        return static_cast<void>(pop());
      case kDuplicate: return push(top());
      case kNone: return push_new(V::None{});
      case kTrue: return push_new(true);
      case kFalse: return push_new(false);
      case kInt1: return push_new(static_cast<std::int64_t>(byte()));
      case kInt2: return push_new(static_cast<std::int64_t>(little_endian(2)));
      case kInt4: return push_new(std::int64_t{static_cast<std::int32_t>(little_endian(4))});
      case kLong1: return push_long(byte());
      case kLong4: return push_long(little_endian(4));
      case kFloat: return push_float();
      case kString1:
      case kText1: return push_new(text(byte()));
      case kString4:
      case kText4: return push_new(text(little_endian(4)));
      case kText8: return push_new(text(little_endian(8)));
      case kBytes1: return push_bytes(byte());
      case kBytes4: return push_bytes(little_endian(4));
      case kBytes8:
      case kByteArray8: return push_bytes(little_endian(8));
      case kReadOnly: return;
      case kEmptyDict: return push_new(V::Dict{});
      case kEmptyList: return push_new(V::Sequence{});
      case kEmptySet: return push_new(V::Opaque{"a set"});
      case kFrozenSet: since_mark(); return push_new(V::Opaque{"a set"});
      case kEmptyTuple: return push_tuple(0);
      case kTuple: return push_new(V::Sequence{since_mark(), true});
      case kTuple1: return push_tuple(1);
      case kTuple2: return push_tuple(2);
      case kTuple3: return push_tuple(3);
      default: return step_further(op);
    }
  }

  // Those that change or combine what is there.
  void step_further(std::uint8_t op) {
    switch (op) {
      case kAppend: {
        const Pickled item = pop();
        return append(top(), item);
      }
      case kAppends:
        for (const Pickled item : since_mark()) append(top(), item);
        return;
      case kAddItems: return static_cast<void>(since_mark());
      case kSetItem: {
        const Pickled value = pop(), key = pop();
        return set(top(), key, value);
      }
      case kSetItems: {
        const auto items = since_mark();
        if (items.size() % 2 != 0) refuse("a key without a value");
        for (std::size_t i = 0; i < items.size(); i += 2) set(top(), items[i], items[i + 1]);
        return;
      }
      case kGlobal: {
        std::string name = line();
        name += ' ' + line();
        return push_new(V::Name{std::move(name)});
      }
      case kStackGlobal: {
        const Pickled name = pop(), module = pop();
        return push_new(V::Name{as<std::string>(module, "a module") + ' ' + as<std::string>(name, "a name")});
      }
      case kReduce: {
        const Pickled arguments = pop(), function = pop();
        return call(function, arguments);
      }
      case kNewObject: {
        const Pickled arguments = pop(), type = pop();
        return push_object(type, as<V::Sequence>(arguments, "arguments").items);
      }
      case kNewObjectEx: {
        pop();
        const Pickled arguments = pop(), type = pop();
        return push_object(type, as<V::Sequence>(arguments, "arguments").items);
      }
      case kObject: {
        const auto values = since_mark();
        if (values.empty()) refuse("a class is missing");
        return push_object(values[0], std::span(values).subspan(1));
      }
      // Attributes, and what torch.save() hangs on to a state dict (its metadata), say nothing about tensors.
      case kBuild:
        pop();
        if (std::holds_alternative<PickledTensor>(top()->is)) refuse("a tensor that is given another state");
        return;
      case kPersistent: return push_storage();
      case kMemoize: return put(memo_.size());
      case kPut1: return put(byte());
      case kPut4: return put(little_endian(4));
      case kGet1: return get(byte());
      case kGet4: return get(little_endian(4));
      default: refuse(fmt::format("the operation 0x{:02x}, which no state dict needs", op));
    }
  }

  void push_long(std::uint64_t count) {
    if (count > sizeof(std::int64_t)) {
      take(count);
      return push_new(V::Opaque{"an integer of more than 64 bits"});
    }
    std::uint64_t value = little_endian(count);
    if (count > 0 && count < 8 && (value >> (8 * count - 1) & 1) != 0) value |= ~std::uint64_t{0} << (8 * count);
    push_new(static_cast<std::int64_t>(value));
  }

  void push_float() {
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    push_new(std::bit_cast<double>(bits));
  }

  void push_bytes(std::uint64_t count) {
    take(count);
    push_new(V::Opaque{"bytes"});
  }

  void put(std::uint64_t place) { memo_[place] = top(); }
  void get(std::uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) refuse("a value that was not there before");
    push(found->second);
  }

  // ("storage", type, key, location, elements), and in older files None.
  void push_storage() {
    const Pickled id = pop();
    const auto& items = as<V::Sequence>(id, "a persistent id").items;
    if (items.size() < 5 || items.size() > 6 || as<std::string>(items[0], "a persistent id") != "storage")
      refuse("a persistent id that names no storage");
    if (items.size() == 6 && !std::holds_alternative<V::None>(items[5]->is)) refuse("a storage within another one");
    const auto& type = as<V::Name>(items[1], "a storage's type").text;
    const std::int64_t elements = as<std::int64_t>(items[4], "a storage's size");
    if (elements < 0) refuse("a storage of negative size");
    // Copied with each use of the storage; PyTorch's are short numbers.
    constexpr std::size_t kLongestKey = 64;
    const auto& key = as<std::string>(items[2], "a storage's key");
    if (key.size() > kLongestKey) refuse(fmt::format("a storage with a key of {} bytes", key.size()));
    const auto* const known = std::ranges::find(kStorages, type, &StorageType::name);
    if (known == std::end(kStorages)) return push_new(V::Opaque{fmt::format("a '{}'", shown(type))});
    const PickledStorage& storage = made_.storages.emplace_back(
        PickledStorage{type, known->dtype, known->half, known->element_bytes, key, elements});
    push_new(&storage);
  }

  void call(Pickled function, Pickled arguments) {
    const auto& given = as<V::Sequence>(arguments, "arguments").items;
    if (const auto* const name = std::get_if<V::Name>(&function->is)) {
      if (name->text == kWithAttributes && given.size() >= 3 && std::holds_alternative<V::Name>(given[0]->is) &&
          std::get<V::Name>(given[0]->is).text != kWithAttributes) {
        const auto* const type = std::get_if<V::Name>(&given[1]->is);
        if (type != nullptr && among(kPlainClasses, type->text)) return call(given[0], given[2]);
        return push_new(V::Opaque{fmt::format("a tensor of the class {}", name_in(given[1]))});
      }
      if (among(kTensors, name->text) && given.size() >= 4) return push_tensor(given);
      if (name->text == kOfOtherType && given.size() > kType)
        return push_new(V::Opaque{fmt::format("a tensor of the type {}", name_in(given[kType]))});
      const auto* const other =
          std::ranges::find(kOtherTensors, name->text, &std::pair<std::string_view, const char*>::first);
      if (other != std::end(kOtherTensors)) return push_new(V::Opaque{other->second});
      if (among(kParameters, name->text) && !given.empty() && std::holds_alternative<PickledTensor>(given[0]->is))
        return push(given[0]);
    }
    push_object(function, given);
  }

  // Nothing is made: of all but dictionaries only what it would be is kept.
  void push_object(Pickled type, std::span<const Pickled> arguments) {
    const auto* const name = std::get_if<V::Name>(&type->is);
    if (name == nullptr) {
      if (!std::holds_alternative<V::Opaque>(type->is)) refuse(fmt::format("what is called is {}", kind_of(*type)));
      return push_new(V::Opaque{"an object of an unknown class"});
    }
    if (!among(kDicts, name->text)) return push_new(V::Opaque{fmt::format("an object of '{}'", shown(name->text))});
    V::Dict dict;
    // Python 2's ordered dictionaries come with a list of their entries. It goes into the dictionary: a list that many
    // dictionaries were made of would be copied each time.
    auto* const list = arguments.empty() ? nullptr : std::get_if<V::Sequence>(&arguments.back()->is);
    if (list != nullptr) {
      for (const Pickled item : std::exchange(list->items, {})) {
        const auto& pair = as<V::Sequence>(item, "an entry").items;
        if (pair.size() != 2) refuse("an entry that is no pair");
        dict.items.emplace_back(pair[0], pair[1]);
      }
    }
    push_new(std::move(dict));
  }

  static std::string name_in(Pickled value) {
    const auto* const name = std::get_if<V::Name>(&value->is);
    return name != nullptr ? fmt::format("'{}'", shown(name->text)) : kind_of(*value);
  }

  void push_tensor(const std::vector<Pickled>& given) {
    if (const auto* const other = std::get_if<V::Opaque>(&given[0]->is))
      return push_new(V::Opaque{fmt::format("a tensor of {}", other->what)});
    if (given.size() > kMetadata && !std::holds_alternative<V::None>(given[kMetadata]->is))
      if (const auto flag = set_flag(as<V::Dict>(given[kMetadata], "a tensor's metadata")))
        return push_new(V::Opaque{*flag});
    push_new(PickledTensor{as<const PickledStorage*>(given[0], "a tensor's storage"),
                           as<std::int64_t>(given[1], "a tensor's offset"), sizes(given[2]), sizes(given[3])});
  }

  // What the tensor is by the first flag that is set: its values are not its bytes.
  std::optional<std::string> set_flag(const V::Dict& metadata) const {
    for (const auto& [key, value] : metadata.items) {
      const auto* const set = std::get_if<bool>(&value->is);
      if (set != nullptr && !*set) continue;
      const std::string& name = as<std::string>(key, "a flag of a tensor");
      if (name == "neg") return "a tensor whose values are its bytes' negatives (save resolve_neg() of it)";
      if (name == "conj") return "a tensor whose values are its bytes' conjugates (save resolve_conj() of it)";
      return fmt::format("a tensor with the flag '{}'", shown(name));
    }
    return std::nullopt;
  }

  std::vector<std::int64_t> sizes(Pickled tuple) const {
    const auto& items = as<V::Sequence>(tuple, "a tensor's sizes").items;
    if (items.size() > kMostAxes) refuse(fmt::format("a tensor with {} axes", items.size()));
    std::vector<std::int64_t> all;
    for (const Pickled item : items) {
      all.push_back(as<std::int64_t>(item, "a tensor's size"));
      if (all.back() < 0) refuse("a tensor of negative size");
    }
    return all;
  }

  std::span<const std::byte> bytes_;
  std::size_t at_;
  std::size_t op_at_ = 0;
  const std::string& source_;
  Unpickled made_;
  std::vector<Pickled> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Pickled> memo_;
};

}  // namespace

std::string kind_of(const PickledValue& value) {
  struct Kind {
    std::string operator()(PickledValue::None) const { return "None"; }
    std::string operator()(bool) const { return "a truth value"; }
    std::string operator()(std::int64_t) const { return "a number"; }
    std::string operator()(double) const { return "a number"; }
    std::string operator()(const std::string&) const { return "text"; }
    std::string operator()(const PickledValue::Name& name) const {
      return fmt::format("the name '{}'", shown(name.text));
    }
    std::string operator()(const PickledValue::Sequence& all) const { return all.tuple ? "a tuple" : "a list"; }
    std::string operator()(const PickledValue::Dict&) const { return "a dictionary"; }
    std::string operator()(const PickledValue::Opaque& opaque) const { return opaque.what; }
    std::string operator()(const PickledStorage*) const { return "a storage"; }
    std::string operator()(const PickledTensor&) const { return "a tensor"; }
  };
  return std::visit(Kind{}, value.is);
}

Unpickled unpickle(std::span<const std::byte> bytes, std::size_t& at, const std::string& source) {
  Machine machine(bytes, at, source);
  Unpickled value = machine.run();
  at = machine.at();
  return value;
}

}  // namespace lockstep::nn
