// What a checkpoint's tensors are, as they were at one moment.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "lockstep/nn/io/state.h"

namespace lockstep::checkpoint {

/// What of a run's state is not in the module's and the optimizer's memory on this rank.
struct ExtraState {
  /// By the files' names: what a model carries from batch to batch (kCarriedFile), what a communication hook keeps
  /// (kHookFile), the scale of losses (kScalerFile). Files without tensors are not written.
  std::map<std::string, std::vector<nn::HostTensor>> files = {};
  std::vector<std::vector<std::byte>> moments = {};  // of an optimizer of slices: whole, as its moments() come
  EvaluationHistory evaluations = {};
};

/// A module's and its optimizer's state, and a moving average, in host memory, in the device's layout: a plain copy, so
/// that training waits for no more than that. The memory is used again for the next one. take() and write() alternate;
/// each may be called by another thread. Module and optimizer must outlive it.
class StateCopy {
 public:
  /// `average`: of the module's parameters; nullptr: there is none.
  /// `part`: moments are written as this rank's part (Note [Checkpoints in parts]); nullptr: they are whole.
  StateCopy(const nn::Module& module, const nn::Optimizer& optimizer, const nn::MovingAverage* average = nullptr,
            const OwnPart* part = nullptr);
  /// Of the part alone.
  StateCopy(const nn::Optimizer& optimizer, const OwnPart& part);

  /// By the thread that computes.
  void take(ExtraState extra = {});
  /// Gives back the memory of the moments that were taken. Likewise.
  void free_moments();

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

  void add_part(const nn::Optimizer& optimizer, const OwnPart& part);

  std::vector<Part> module_, optimizer_, average_;
  std::string moments_file_ = kOptimizerFile;
  std::map<std::string, std::vector<nn::HostTensor>> extra_files_;
};

}  // namespace lockstep::checkpoint
