#include "nn/models/decoder.h"

#include "base/error.h"

namespace lockstep::nn {

void check_tokens(const char* model, const Tensor& tokens) {
  if (tokens.dtype() != DType::kI32 || tokens.shape().size() != 2)
    throw UsageError(fmt::format("{} was given {} of {}", model, to_string(tokens.shape()), name_of(tokens.dtype())),
                     "it takes tokens (N, T): use it with text or tokens (--data text:FILE)");
}

Var extend_attention(Tape& tape, Var qkv, std::int64_t heads, std::int64_t past, const Tensor& cache) {
  const Tape::OpScope scope(tape, "extend_attention");
  const Shape& s = qkv.shape();
  LOCKSTEP_ASSERT(heads >= 1 && s.size() == 3 && s[2] % (3 * heads) == 0, "{} heads and {}", heads, to_string(s));
  LOCKSTEP_ASSERT(!tape.recording(), "extend_attention has no backward");
  LOCKSTEP_ASSERT(cache.dtype() == qkv.value().dtype(), "a cache of {} for {}", name_of(cache.dtype()),
                  name_of(qkv.value().dtype()));
  Tensor y = tape.backend().empty({s[0], s[1], s[2] / 3}, qkv.value().dtype());
  tape.backend().attention().extend(qkv.value(), heads, past, cache, y);
  return tape.make_var(std::move(y), false);
}

Var last_rows(Tape& tape, Var x) {
  const Shape& s = x.shape();
  LOCKSTEP_ASSERT(s.size() == 3 && s[1] > 0 && !tape.recording(), "the last rows of {}", to_string(s));
  const Tensor rows = x.value().reshaped({s[0] * s[1], s[2]});
  if (s[0] == 1) return tape.make_var(rows.slice(s[1] - 1, s[1]), false);
  const Tape::OpScope scope(tape, "last_rows");
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(s[0]));
  for (std::size_t n = 0; n < numbers.size(); ++n)
    numbers[n] = static_cast<std::int32_t>((static_cast<std::int64_t>(n) + 1) * s[1] - 1);
  const Tensor which = tape.backend().empty({s[0]}, DType::kI32);
  tape.backend().upload(std::as_bytes(std::span(numbers)), which);
  Tensor y = tape.backend().empty({s[0], s[2]}, rows.dtype());
  tape.backend().embedding().forward(rows, which, y);
  return tape.make_var(std::move(y), false);
}

KeyValueCache::KeyValueCache(const char* model, Tape& tape, std::int64_t layers, std::int64_t width, std::int64_t batch,
                             std::int64_t most, std::int64_t positions) {
  if (batch < 1 || most < 1 || most > positions)
    throw UsageError(fmt::format("{} texts of {} tokens for a {} of {} positions", batch, most, model, positions),
                     "give it as many tokens as it has positions, or fewer");
  for (std::int64_t i = 0; i < layers; ++i)
    layers_.push_back(tape.backend().empty({batch, most, 2 * width}, tape.activations()));
}

KeyValueCache& KeyValueCache::of(Memory& memory, const Tensor& tokens) {
  auto* const cache = dynamic_cast<KeyValueCache*>(&memory);
  LOCKSTEP_ASSERT(cache != nullptr, "the memory of another class of models");
  const std::int64_t batch = cache->layers_[0].size(0), most = cache->layers_[0].size(1);
  if (tokens.size(0) != batch || tokens.size(1) < 1 || tokens.size(1) > most - cache->seen())
    throw UsageError(fmt::format("tokens {} after {} of {} texts with memory for {}", to_string(tokens.shape()),
                                 cache->seen(), batch, most),
                     "begin with memory for more, or again with the last tokens alone");
  return *cache;
}

}  // namespace lockstep::nn
