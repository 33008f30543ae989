// A module's parameters and buffers as a state dict: names, shapes and bytes as PyTorch has them.
#pragma once

#include <string>
#include <vector>

#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"

namespace lockstep::nn {

/// Copies of parameters, then of buffers, in registration order and file layout. Where all names begin with "module.",
/// as those of a module within a wrapper do, they are without it. Waits for the device.
std::vector<HostTensor> state_of(const Module& module);

/// The names of `tensors` without what wrappers put before all of them: "module." (PyTorch's DataParallel and
/// DistributedDataParallel) and "_orig_mod." (torch.compile), each once and in either order, and the "transformer." of
/// a file of GPT-2 with its head. Names of a BERT without a head get the "bert." that those with one have, and the
/// LayerNorm.{gamma, beta} of older files of BERT are LayerNorm.{weight, bias}. In the order of `tensors`.
std::vector<std::string> plain_names(const std::vector<HostTensor>& tensors);

/// What the names of `tensors` may be meant to be: plain_names(), and the same without up to three other first parts
/// that all of them have, such as the "model." of a LightningModule.
struct PossibleNames {
  std::string prefix;  // that is taken off besides
  std::vector<std::string> names;
};
std::vector<PossibleNames> possible_names(const std::vector<HostTensor>& tensors);

/// The first of `names` in quotes, and how many more there are, for an error.
std::string few_of(const std::vector<std::string>& names);

/// Whether type, shape and bytes are the same, whatever the names.
bool same_content(const HostTensor& a, const HostTensor& b);

struct LoadOptions {
  /// Names that are missing or unexpected are errors; otherwise they are returned. Shapes that differ always are
  /// errors.
  bool strict = true;
  /// Names are taken as they are. Otherwise those of the file are its plain_names(), and a "module." is also taken off
  /// where all of the model's have it.
  bool keep_prefix = false;
  /// Names that start so are neither loaded nor missed.
  std::vector<std::string> without = {};
  /// Of those that start so, the ones that are missing are no errors, but are returned.
  std::vector<std::string> may_lack = {};
  /// If names differ and `strict` would refuse them: a common first part of all names in the file is removed if the
  /// rest are the model's names. Tensors with unknown names replace missing ones if their shapes allow only one
  /// assignment. LoadReport lists both. Not with keep_prefix.
  bool match_other_names = false;
};

/// What was not loaded, and what was loaded from another name.
struct LoadReport {
  std::vector<std::string> missing, unexpected;
  std::string prefix = {};  // that was taken off all names of the file: "model."
  struct Renamed {
    std::string from, to;  // the file's name, the model's
  };
  std::vector<Renamed> renamed = {};  // by shape
};

/// Sets parameters and buffers, in the memory that they have, and calls Parameter::changed() of all. Not while a pass
/// waits for backward. Everything is checked before anything is changed: what does not fit is listed in one UsageError,
/// with `source`, the file's name. Floating-point numbers of any width are loaded into f32. As PyTorch does, it takes
/// files that lack num_batches_tracked, which then stays. A GPT-2 also loads files with its attention's masks (unused)
/// and with its head. The head is the table of tokens again: unexpected if it differs, or the table itself if that is
/// missing; a GPT-2 with a head of its own loads it. Of a BERT, it takes files that hold its positions' numbers
/// (unused), copies of a head's table and bias, and layers for other tasks than the model's (unused). Of many names an
/// error lists a few, and how many more there are.
LoadReport load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source,
                      const LoadOptions& options = {});

/// One tensor of a module's or an optimizer's state: where it lies, and how files have it. For those who copy now and
/// write later. `value` shares the memory of what it is the state of, so it changes with that; `backend` must outlive
/// it.
struct StateEntry {
  std::string name;
  Tensor value;
  Backend* backend = nullptr;
  FileLayout layout = FileLayout::kSame;
  Parameter* parameter = nullptr;  // of which it is the value: it notes that load_entries() changes that

  TensorHeader header() const;
  /// `memory`: a copy of the value's bytes, all of them, f32 where the layout is another one. Empty where that is in
  /// the file's order as it is.
  std::vector<std::byte> in_file_order(std::span<const std::byte> memory) const;
};

/// Those of state_of(), with the same names and in the same order.
std::vector<StateEntry> entries_of(const Module& module);
/// Of an optimizer of slices they have the shapes of whole parameters, and no content. Its parameters must be there.
std::vector<StateEntry> entries_of(const Optimizer& optimizer);
/// Those of a module, with the averages in the places of the parameters that have one, which must be there.
std::vector<StateEntry> entries_of(const Module& module, const MovingAverage& average);
/// Of the averages alone; their parameters must be there.
std::vector<StateEntry> entries_of(const MovingAverage& average);
/// Sets the entries from tensors with exactly these names, types and shapes, which it checks before it changes any.
/// Throws UsageError naming `source` and what does not fit.
void load_entries(const std::vector<StateEntry>& entries, const std::vector<HostTensor>& tensors,
                  const std::string& source);

/// SHA-256, in hexadecimal digits, over name bytes and little-endian f32 bytes of all parameters, in name order and
/// file layout. Waits for the device.
std::string parameters_sha256(const Module& module);

}  // namespace lockstep::nn
