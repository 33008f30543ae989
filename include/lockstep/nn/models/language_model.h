// What generating text needs of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/nn/layers/module.h"

namespace lockstep::nn {

/// A model that predicts which token comes next: forward() takes (N, T) i32 to logits (N, T, vocabulary()), each
/// of the token that follows. next() does the same a few tokens at a time and computes nothing twice.
class LanguageModel : public Module {
 public:
  /// What a model keeps of the tokens that it has been given: keys and values, or a state. Belongs to the tape's
  /// backend that it was made with, and to one model, and is used while both are there; the tape may end before it. One
  /// thread uses it at a time. After an error of next() it is not used any more.
  class Memory {
   public:
    virtual ~Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    /// How many tokens of each text next() has been given.
    std::int64_t seen() const { return seen_; }

   protected:
    Memory() = default;
    std::int64_t seen_ = 0;  // next() moves it on
  };

  virtual std::int64_t vocabulary() const = 0;
  /// The most tokens that a text can have; none: as many as you like.
  virtual std::optional<std::int64_t> positions() const = 0;

  /// Nothing seen yet of `batch` texts, with memory for `most` tokens of each. Throws UsageError where `most` is more
  /// than positions(), or either is below 1.
  virtual std::unique_ptr<Memory> begin(Tape& tape, std::int64_t batch, std::int64_t most) const = 0;

  /// tokens (N, T) i32, T ≥ 1, after those in `memory` → the logits of the token after the last one, (N, vocabulary()),
  /// of the tape's activations' type. In evaluation mode, on a tape that does not record. Changes nothing but `memory`
  /// and the tape: several threads may each call it with their own of both on one model, once Parameter::as() has been
  /// called for that type. `tokens` is not used after the call. Throws UsageError for more tokens than there is memory
  /// for; InternalError in training mode, on a tape that records, and for the memory of another class of models (that
  /// of another model of its class is not found).
  virtual Var next(Tape& tape, const Tensor& tokens, Memory& memory) const = 0;
};

}  // namespace lockstep::nn
