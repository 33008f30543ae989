// What a checkpoint's tensors are, as they were at one moment.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "lockstep/nn/io/state.h"

namespace lockstep::checkpoint {

/// Of a checkpoint beside weights and optimizer, by their files' names: what a model carries from batch to batch
/// (kCarriedFile), what a communication hook keeps (kHookFile). Files without tensors are not written.
using FurtherFiles = std::map<std::string, std::vector<nn::HostTensor>>;

/// A module's and its optimizer's state in host memory, in the device's layout: a plain copy, so that training waits
/// for no more than that. The memory is used again for the next one. take() and write() alternate; each may be called
/// by another thread. Module and optimizer must outlive it.
class StateCopy {
 public:
  StateCopy(const nn::Module& module, const nn::Optimizer& optimizer);

  /// By the thread that computes.
  void take(FurtherFiles further = {});

  /// A parameter, or what the optimizer remembers of it, with a number that is not finite.
  std::optional<std::string> not_finite() const;
  /// Writes the files into `directory`; `metadata` is the weights'. Throws IoError.
  std::map<std::string, CheckpointManifest::File> write(const std::string& directory,
                                                        const std::map<std::string, std::string>& metadata) const;

 private:
  struct Part {
    nn::StateEntry entry;
    bool trained = false;  // else a buffer
    std::vector<std::byte> memory;
  };
  static CheckpointManifest::File write_file(const std::string& path, const std::vector<Part>& parts,
                                             const std::map<std::string, std::string>& metadata);

  std::vector<Part> module_, optimizer_;
  FurtherFiles further_;
};

}  // namespace lockstep::checkpoint
