#include "inference/continuation.h"
#include "lockstep/nn/ops/transfer.h"

#include <algorithm>

#include "base/error.h"
#include "inference/workers.h"

namespace lockstep::inference {

Continuation::Continuation(nn::Backend& backend, const nn::LanguageModel& model, DType activations)
    : backend_(backend), model_(model), tape_(backend) {
  tape_.set_recording(false);
  tape_.set_activations(activations);
}

void Continuation::begin(std::span<const std::int32_t> prompt, std::int64_t more) {
  LOCKSTEP_ASSERT(!prompt.empty(), "an empty prompt");
  recent_.assign(prompt.begin(), prompt.end());
  restart(static_cast<std::int64_t>(prompt.size()), more);
}

void Continuation::add(std::int32_t token) {
  recent_.push_back(token);
  if (memory_->seen() < room_) return feed(std::span(recent_).last(1));
  // Positions are used up: as far as is known, no more tokens are added than fit.
  const std::int64_t positions = *model_.positions();
  restart(std::max<std::int64_t>(1, positions / 2), positions);
}

// Begins again with the last `keep` tokens.
void Continuation::restart(std::int64_t keep, std::int64_t more) {
  room_ = keep + more;
  if (const auto positions = model_.positions()) {
    keep = std::min(keep, *positions);
    room_ = std::min(room_, *positions);
  }
  recent_.erase(recent_.begin(), recent_.end() - keep);
  memory_.reset();  // its memory is what the next one takes
  memory_ = model_.begin(tape_, 1, room_);
  feed(recent_);
}

void Continuation::feed(std::span<const std::int32_t> tokens) {
  const nn::Tensor given = backend_.empty({1, static_cast<std::int64_t>(tokens.size())}, DType::kI32);
  backend_.upload(std::as_bytes(tokens), given);
  logits_ = nn::values_of(backend_, model_.next(tape_, given, *memory_).value());
  tape_.reset();
}

}  // namespace lockstep::inference
