#include "nn/io/unpickler.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_set>

#include "base/error.h"
#include "lockstep/nn/io/state.h"
#include "nn/io/torch_file.h"

namespace lockstep::nn {
namespace {

constexpr int kDeepest = 4;  // keys that lead to a state dict
// What people save a model's under, in scripts and frameworks (DeepSpeed: module; BasicSR: params).
constexpr std::string_view kUsualKeys[] = {"state_dict", "model_state_dict", "model_state", "model",   "net",
                                           "network",    "net_state_dict",   "module",      "weights", "params"};
// Moments have the names and shapes of parameters.
constexpr std::string_view kOfOptimizers = "optim";

bool is_usual(const std::string& key) { return std::ranges::find(kUsualKeys, key) != std::end(kUsualKeys); }

const std::string* text_of(const PickledValue* value) { return std::get_if<std::string>(&value->is); }
const PickledTensor* tensor_of(const PickledValue* value) { return std::get_if<PickledTensor>(&value->is); }

struct FoundDict {
  const PickledValue::Dict* entries = nullptr;
  std::size_t parent = 0;
  const std::string* key = nullptr;  // within its parent
  int depth = 0;
  bool usual = true;  // all keys that lead to it are
};

/// The dictionaries of a file, each once, whatever ways lead to it. Keys are not copied: a small file may name a long
/// one often.
class Dictionaries {
 public:
  explicit Dictionaries(const PickledValue& root) {
    std::unordered_set<const PickledValue*> seen;
    const auto add = [&](const PickledValue* value, const FoundDict& node) {
      const auto* const dict = std::get_if<PickledValue::Dict>(&value->is);
      if (dict == nullptr || !seen.insert(value).second) return;
      nodes_.push_back(node);
      nodes_.back().entries = dict;
    };
    add(&root, {});
    for (std::size_t at = 0; at < nodes_.size(); ++at) {  // which add() appends to
      const FoundDict parent = nodes_[at];
      if (parent.depth == kDeepest) continue;
      for (const auto& [key, value] : parent.entries->items) {
        const std::string* const name = text_of(key);
        if (name == nullptr || name->starts_with(kOfOptimizers)) continue;
        add(value, {.parent = at, .key = name, .depth = parent.depth + 1, .usual = parent.usual && is_usual(*name)});
      }
    }
  }

  const std::vector<FoundDict>& nodes() const { return nodes_; }

  bool has_key(const FoundDict& node, std::string_view wanted) const {
    const FoundDict* at = &node;
    for (; at->depth > 1; at = &nodes_[at->parent]) {
      if (!wanted.ends_with(*at->key)) return false;
      wanted.remove_suffix(at->key->size());
      if (!wanted.ends_with('.')) return false;
      wanted.remove_suffix(1);
    }
    return at->depth == 1 && wanted == *at->key;
  }

  /// For people; of a long key the beginning.
  std::string shown_key(const FoundDict& node) const {
    if (node.depth == 0) return "";
    const std::string own = shown_name(*node.key);
    return node.depth == 1 ? own : shown_key(nodes_[node.parent]) + "." + own;
  }

 private:
  std::vector<FoundDict> nodes_;
};

bool is_state_dict(const FoundDict& node) {
  return !node.entries->items.empty() && std::ranges::all_of(node.entries->items, [](const auto& entry) {
    return text_of(entry.first) != nullptr && tensor_of(entry.second) != nullptr;
  });
}

bool holds_tensors(const FoundDict& node) {
  return std::ranges::any_of(node.entries->items, [](const auto& entry) { return tensor_of(entry.second) != nullptr; });
}

/// Where two have the same, a model takes both or neither.
using Signature = std::set<std::pair<std::string, std::vector<std::int64_t>>>;
Signature signature_of(const FoundDict& node) {
  std::vector<HostTensor> headers;
  for (const auto& [key, value] : node.entries->items)
    headers.push_back({*text_of(key), DType::kF32, tensor_of(value)->shape, {}});
  const auto names = plain_names(headers);
  Signature signature;
  for (std::size_t i = 0; i < names.size(); ++i) signature.emplace(names[i], headers[i].shape);
  return signature;
}

/// Python's dictionaries have each key once. Names are copied from here on: no file shall have one for many tensors.
void check_names(const FoundDict& node, const std::string& path) {
  constexpr std::size_t kLongestName = 4096;
  std::unordered_set<const PickledValue*> seen;
  for (const auto& [key, value] : node.entries->items) {
    const std::string& name = *text_of(key);
    if (name.size() > kLongestName)
      refuse_torch_file(path, fmt::format("a tensor has a name of {} bytes", name.size()));
    if (!seen.insert(key).second) refuse_torch_file(path, fmt::format("'{}' is there twice", shown_name(name)));
  }
}

[[noreturn]] void refuse_all(const Dictionaries& all, const std::vector<const FoundDict*>& candidates,
                             const std::string& what) {
  std::vector<std::string> keys;
  for (const FoundDict* node : candidates) keys.push_back(all.shown_key(*node));
  throw UsageError(fmt::format("{} of {}", what, few_of(keys)),
                   fmt::format("say which is meant: --weights-key {}", keys.front()));
}

/// There is no state dict: an entry that should be one, or the first that is no tensor, says what there is.
[[noreturn]] void refuse_content(const Dictionaries& all, const std::string& path) {
  const FoundDict* nearest = &all.nodes().front();
  for (const FoundDict& node : all.nodes())
    if (node.usual && node.depth > nearest->depth && holds_tensors(node)) nearest = &node;
  std::string fault;
  for (const auto& [key, value] : nearest->entries->items) {
    if (text_of(key) != nullptr && tensor_of(value) != nullptr) continue;
    if (text_of(key) == nullptr) {
      if (fault.empty()) fault = "an entry without a name is no tensor";
      continue;
    }
    const bool usual = is_usual(*text_of(key));
    if (fault.empty() || usual) {
      const std::string kind = kind_of(*value), name = shown_name(*text_of(key));
      const bool tensor = kind.find("tensor") != std::string::npos;  // of a kind that is not read
      fault = tensor ? fmt::format("'{}' is {}", name, kind) : fmt::format("'{}' is no tensor but {}", name, kind);
    }
    if (usual) break;
  }
  refuse_torch_file(path, fault);
}

}  // namespace

StateDict find_state_dict(const Unpickled& file, const std::string& path, const std::string& key) {
  if (!std::holds_alternative<PickledValue::Dict>(file.root->is))
    refuse_torch_file(path, fmt::format("it does not hold a dictionary but {}", kind_of(*file.root)));
  const Dictionaries all(*file.root);
  std::vector<const FoundDict*> candidates, usual;
  for (const FoundDict& node : all.nodes())
    if (is_state_dict(node)) {
      check_names(node, path);
      candidates.push_back(&node);
      if (node.usual) usual.push_back(&node);
    }
  const auto as_found = [&](const FoundDict* node) { return StateDict{all.shown_key(*node), node->entries}; };

  if (!key.empty()) {
    std::vector<const FoundDict*> named;
    for (const FoundDict* node : candidates)
      if (all.has_key(*node, key)) named.push_back(node);
    if (named.size() == 1) return as_found(named.front());
    if (!named.empty())
      throw UsageError(fmt::format("{} holds two dictionaries of tensors under the key '{}'", path, key),
                       "save the one that is meant by itself: torch.save(state_dict, FILE)");
    std::vector<std::string> keys;
    for (const FoundDict* node : candidates)
      if (node->depth > 0) keys.push_back(all.shown_key(*node));
    throw UsageError(fmt::format("{} holds no dictionary of tensors under the key '{}'", path, key),
                     keys.empty() ? std::string("leave --weights-key out: there is none under a key")
                                  : fmt::format("it has {}", few_of(keys)));
  }
  if (all.nodes().front().entries->items.empty()) return as_found(&all.nodes().front());
  if (candidates.empty()) refuse_content(all, path);
  if (candidates.size() == 1) return as_found(candidates.front());
  if (usual.size() != 1)
    refuse_all(
        all, usual.empty() ? candidates : usual,
        fmt::format("{} holds several dictionaries of tensors, and nothing says which is the model's: those", path));
  std::vector<const FoundDict*> alike = usual;
  const Signature wanted = signature_of(*usual.front());
  for (const FoundDict* node : candidates)
    if (node != usual.front() && signature_of(*node) == wanted) alike.push_back(node);
  if (alike.size() > 1)
    refuse_all(all, alike, fmt::format("{} holds several models with the same names and shapes: those", path));
  return as_found(usual.front());
}

}  // namespace lockstep::nn
