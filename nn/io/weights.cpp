#include "lockstep/nn/io/weights.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/log.h"
#include "base/text.h"
#include "nn/io/torch_file.h"

namespace lockstep::nn {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetadataKey = "lockstep";  // what a run says of its model (checkpoint/model_metadata.h)

// ".pt", in lower case.
std::string extension_of(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  return lower_case(name.substr(std::min(name.rfind('.'), name.size())));
}

bool is_torch_path(const std::string& path) {
  const std::string extension = extension_of(path);
  return extension == ".pt" || extension == ".pth" || extension == ".bin";
}

[[noreturn]] void not_an_index(const std::string& path, const std::string& why) {
  throw IoError(fmt::format("{} is not a usable index of weight files: {}", path, why),
                "check where it came from, or name one of its files");
}

// Tensor → file.
std::map<std::string, std::string> parse_index(const std::string& path) {
  constexpr int kDeepest = 3;
  const MappedFile file(path);
  try {
    const auto index = parse_json(file.text(), kDeepest);
    return index.at("weight_map").get<std::map<std::string, std::string>>();
  } catch (const JsonError& error) {
    not_an_index(path, fmt::format("it {}", error.what()));
  } catch (const nlohmann::json::exception&) {
    not_an_index(path, "it has no weight_map from tensors to files");
  }
}

bool holds_torch_file(const std::string& path) {
  std::error_code failed;
  return fs::is_regular_file(path, failed) && is_torch_file(MappedFile(path).bytes());
}

std::vector<HostTensor> read_one(const std::string& path, const ReadOptions& options) {
  if (holds_torch_file(path)) {
    TorchState state = read_torch_file(path, options.key);
    if (!state.key.empty() && options.key.empty())
      log_info("{}: the model's tensors are those under the key '{}'", path, state.key);
    return std::move(state.tensors);
  }
  auto tensors = read_safetensors(path);
  if (!options.key.empty())
    throw UsageError(
        fmt::format("--weights-key {}: {} is a safetensors file, which has no dictionaries", options.key, path),
        "leave it out");
  return tensors;
}

std::vector<HostTensor> read_index(const std::string& path, const ReadOptions& options) {
  const auto places = parse_index(path);
  std::set<std::string> files;
  for (const auto& [tensor, file] : places) {
    // A name, never a way out of the directory.
    if (file.empty() || fs::path(file).filename() != fs::path(file) || file == "..")
      not_an_index(path,
                   fmt::format("'{}' lies in '{}', which is no file beside it", shown_name(tensor), shown_name(file)));
    files.insert(file);
  }
  std::vector<HostTensor> all;
  std::size_t found = 0;
  for (const std::string& file : files)
    for (HostTensor& tensor : read_one(fs::path(path).replace_filename(file), options)) {
      const auto place = places.find(tensor.name);
      if (place == places.end() || place->second != file)
        not_an_index(path, fmt::format("{} holds '{}', which the index does not say", shown_name(file),
                                       shown_name(tensor.name)));
      ++found;
      all.push_back(std::move(tensor));
    }
  if (found != places.size())
    not_an_index(path, fmt::format("its files hold {} of its {} tensors", found, places.size()));
  return all;
}

}  // namespace

namespace {

// The file of weights that people mean who name its directory, or that of a run's checkpoints, is named.
void refuse_directory(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error)) return;
  constexpr std::array kNames = {"weights.safetensors", "model.safetensors", "model.safetensors.index.json",
                                 "pytorch_model.bin"};
  std::string meant;
  const auto look_in = [&](const std::string& directory) {
    for (const char* name : kNames)
      if (const std::string file = directory + "/" + name; fs::exists(file, error)) meant = std::max(meant, file);
  };
  look_in(path);
  if (meant.empty())
    for (fs::directory_iterator at(path, error); !error && at != fs::directory_iterator(); at.increment(error))
      look_in(at->path().string());
  throw IoError(fmt::format("{}: a directory, not a file of weights", path),
                meant.empty() ? "give the path of a file of weights" : "give " + meant);
}

}  // namespace

std::map<std::string, std::string> read_weights_metadata(const std::string& path) {
  refuse_directory(path);
  if (path.ends_with(".json")) return {};
  if (!holds_torch_file(path)) return read_safetensors_metadata(path);
  const auto metadata = read_torch_metadata(path, kMetadataKey);
  return metadata ? std::map<std::string, std::string>{{kMetadataKey, *metadata}}
                  : std::map<std::string, std::string>{};
}

void check_weights_path(const std::string& path) {
  const std::string extension = extension_of(path);
  constexpr const char* kOnnx = ".onnx";
  constexpr std::array kOthers = {".json", kOnnx,   ".h5",   ".hdf5",   ".keras", ".npz",
                                  ".npy",  ".ckpt", ".gguf", ".tflite", ".pkl",   ".msgpack"};
  if (std::ranges::find(kOthers, extension) != kOthers.end())
    throw UsageError(
        fmt::format("weights for {}: '{}' is the extension of a format that is not written", path, extension),
        extension == kOnnx ? "save a .safetensors file; lockstep export onnx writes the model of it"
                           : "name a .safetensors file, or .pt, .pth or .bin for what torch.load() reads");
}

void write_weights(const std::string& path, const std::vector<HostTensor>& tensors,
                   const std::map<std::string, std::string>& metadata) {
  check_weights_path(path);
  if (!is_torch_path(path)) return write_safetensors(path, tensors, metadata);
  auto extra = metadata;
  extra.erase("format");  // for readers of safetensors
  write_torch_file(path, tensors, extra);
}

std::vector<HostTensor> read_weights(const std::string& path, const ReadOptions& options) {
  refuse_directory(path);
  return path.ends_with(".json") ? read_index(path, options) : read_one(path, options);
}

}  // namespace lockstep::nn
