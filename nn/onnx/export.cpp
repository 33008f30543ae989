#include <array>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "base/signals.h"
#include "lockstep/nn/io/onnx.h"
#include "nn/onnx/model_file.h"
#include "nn/onnx/passes.h"

namespace lockstep::nn {
namespace {

std::vector<std::byte> content_of(const onnx::Constant& constant) {
  throw_if_stopped("writing an ONNX file");
  if (constant.entry == nullptr) return constant.bytes;
  const StateEntry& entry = *constant.entry;
  std::vector<std::byte> memory(entry.value.bytes());
  entry.backend->download(entry.value, memory);
  auto ordered = entry.in_file_order(memory);
  return ordered.empty() ? memory : ordered;
}

// What lies beside it is complete before the file is there.
void write(const onnx::ModelFile& model, const std::string& path) {
  AtomicFile file(path);
  std::unique_ptr<AtomicFile> beside;
  if (!model.beside.empty()) {
    beside = std::make_unique<AtomicFile>(onnx::data_path(path));
    std::uint64_t written = 0;
    for (const onnx::Constant* const constant : model.beside) {
      constexpr std::array<std::byte, onnx::ModelFile::kAlignment> kZeros = {};
      const std::uint64_t gap = (kZeros.size() - written % kZeros.size()) % kZeros.size();
      beside->write(std::span(kZeros).first(gap));
      const auto bytes = content_of(*constant);
      beside->write(bytes);
      written += gap + bytes.size();
    }
    LOCKSTEP_ASSERT(written == model.bytes_beside);
  }
  for (const auto& piece : model.pieces) {
    file.write(std::as_bytes(std::span(piece.bytes)));
    if (piece.weights != nullptr) file.write(content_of(*piece.weights));
  }
  if (beside != nullptr) beside->commit();
  file.commit();
}

}  // namespace

OnnxReport export_onnx(Backend& backend, Module& module, const std::vector<OnnxInput>& inputs, const std::string& path,
                       const OnnxOptions& options) {
  const auto entries = entries_of(module);
  const auto passes = onnx::record_passes(backend, module, entries, inputs);
  const onnx::ModelFile model = onnx::make_model_file(passes, path, options);
  write(model, path);
  return {.nodes = model.nodes, .bytes = model.bytes, .data_bytes = model.bytes_beside};
}

}  // namespace lockstep::nn
