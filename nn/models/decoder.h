// What models that generate text by attention have in common. Generation is for tapes that do not record: nothing here
// has a backward.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/nn/models/language_model.h"

namespace lockstep::nn {

/// Throws UsageError, naming `model`, unless these are tokens (N, T) i32.
void check_tokens(const char* model, const Tensor& tokens);

/// causal_attention() for tokens that follow `past` others, whose keys and values are in `cache` (N, most, 2 · C),
/// where those of the new ones are put: qkv (N, T, 3 · C) → (N, T, C) (AttentionKernels::extend).
Var extend_attention(Tape& tape, Var qkv, std::int64_t heads, std::int64_t past, const Tensor& cache);

/// x (N, T, C) → (N, C), what T ends with.
Var last_rows(Tape& tape, Var x);

/// Keys and values of all layers: 2 · layers · width numbers a token.
class KeyValueCache final : public LanguageModel::Memory {
 public:
  /// Throws UsageError, naming `model`, for more tokens than it has positions, and for sizes below 1.
  KeyValueCache(const char* model, Tape& tape, std::int64_t layers, std::int64_t width, std::int64_t batch,
                std::int64_t most, std::int64_t positions);

  /// The memory that a model was given, which `tokens` (N, T) continue; else UsageError.
  static KeyValueCache& of(Memory& memory, const Tensor& tokens);
  /// Of extend_attention().
  const Tensor& layer(std::size_t i) const { return layers_[i]; }
  void move_on(std::int64_t tokens) { seen_ += tokens; }

 private:
  std::vector<Tensor> layers_;
};

}  // namespace lockstep::nn
