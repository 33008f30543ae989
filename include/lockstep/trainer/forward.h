// A batch through a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/base/short_list.h"
#include "lockstep/data/loader.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/losses/losses.h"

namespace lockstep::trainer {

/// What a data set's samples look like.
struct SampleFormat {
  std::vector<std::int64_t> dims;         // of one sample, without N
  bool tokens = false;                    // i32; else f32
  std::vector<std::int64_t> target_dims;  // of one sample's targets; {}: one
  bool numeric_targets = false;           // f32; else labels, i32
  std::int64_t targets = 1;               // of a sample: what its loss is the sum of
  std::vector<data::Dataset::Input> further = {};

  bool operator==(const SampleFormat&) const = default;
  /// For people: "[28, 28, 1] f32, good [4] f32, targets [] i32".
  std::string describe() const;
  /// The same of the further inputs alone.
  std::string describe_further() const;
};
SampleFormat format_of(const data::Dataset& dataset);
/// Of what a Loader for training makes of them: where it mixes samples, the targets of each are the probabilities of
/// all classes, which count as one.
SampleFormat training_format_of(const data::Dataset& dataset);

/// How many targets of the batch count: all, or of labels those that are not ignored. Not of mixed samples.
std::uint64_t counted_targets(const data::Batch& batch, std::optional<std::int32_t> ignored);

/// A batch on the device. Of most data sets that is x and targets: const auto [x, labels] = inputs_of(…).
struct Inputs {
  nn::Tensor x;        // (N, sample dims…)
  nn::Tensor targets;  // (N, target dims…): labels (i32) or numbers (f32)
  /// (N, dims…) each: the data set's further inputs, numbers (f32) or integers (i32).
  ShortList<nn::Tensor> further = {};

  /// As constants on `tape`: x and the further ones.
  nn::Vars on(nn::Tape& tape) const;

  /// For structured bindings, of two names.
  template <std::size_t kIndex>
  const nn::Tensor& get() const {
    return kIndex == 0 ? x : targets;
  }
};

/// Where an array of a batch comes from: the samples, the targets, or a further input by its number from kFurther on.
enum InputNumber : int { kSamples, kTargets, kFurther };
/// Inputs of so many samples, each array what `make` makes of that shape and type, in the order of their numbers,
/// before this returns. Throws UsageError for arrays of more axes than a tensor has.
Inputs make_inputs(const SampleFormat& format, std::int64_t samples,
                   FunctionRef<nn::Tensor(int input, const nn::Shape& shape, DType dtype)> make);
/// `batch`, which is not empty, as it comes: x is f32 or tokens. `format` is that of the loader's data set. Valid as
/// long as Backend::stage() says: on the CPU these are views of the batch, which end with the loader's following
/// next(); a GPU may still read the batch then, unless Backend::finish_inputs() comes before that next().
Inputs inputs_of(nn::Backend& backend, const data::Batch& batch, const SampleFormat& format);
/// Of no samples.
Inputs no_inputs(nn::Backend& backend, const SampleFormat& format, DType activations);
/// With the numbers of samples and of further inputs as `activations`: f32, or bf16 where the backend computes in it.
/// Targets and integers stay as they are.
Inputs with_activations(nn::Backend& backend, Inputs inputs, DType activations);
/// The type that with_activations() makes of an input's.
inline DType computed_type(DType given, DType activations) { return given == DType::kF32 ? activations : given; }

/// The loss of what a module returned for `inputs`, summed over the targets and scaled as nn::Loss says.
nn::Loss loss_of(nn::Tape& tape, const nn::Vars& outputs, const Inputs& inputs, const nn::LossFunction& loss,
                 float scale);

/// Runs `module` on them and returns loss_of() its outputs: nn::Module::forward_loss(). `loss` is called before this
/// returns, by a DataParallel on several threads at once.
nn::Loss forward(nn::Tape& tape, nn::Module& module, const Inputs& inputs, const nn::LossFunction& loss, float scale);

}  // namespace lockstep::trainer

template <>
struct std::tuple_size<lockstep::trainer::Inputs> : std::integral_constant<std::size_t, 2> {};
template <std::size_t kIndex>
struct std::tuple_element<kIndex, lockstep::trainer::Inputs> {
  using type = const lockstep::nn::Tensor;
};
