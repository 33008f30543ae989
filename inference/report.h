// How long inference took, and how much of it there was.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::inference {

/// What one stream, or all of them together, have done.
struct Tally {
  std::uint64_t results = 0;  // that are whole
  std::uint64_t corrupt = 0;  // inputs that could not be read
  std::uint64_t tokens = 0;   // generated
  // Milliseconds from when a stream takes an input up to its result; of texts, to the first token of each, and from
  // each token to the next.
  std::vector<double> result_ms, first_token_ms, token_ms;

  void add(const Tally& other);
};

/// The smallest of `values` that at least `percent` % of them do not exceed (nearest rank); 0 of none. Sorts them.
double percentile(std::vector<double>& values, double percent);

struct InferReport {
  enum class Kind { kImages, kTexts, kRows, kTensors, kReadTexts };
  Kind kind = Kind::kImages;
  std::string device;  // or several: "cuda:0,1"
  int streams = 1;
  std::int64_t batch = 1;  // inputs of a forward pass
  double wall_s = 0;       // of measured work alone, without loading
  Tally tally;
};

/// For people, without a newline: "8 images in 0.31 s on cpu, 2 streams: 25.8 images/s, latency p50 76.1 ms  p90 …".
std::string text_of(InferReport report);
/// One JSON object: event "report", device, streams, batch, wall_s, results, corrupt, results_per_s, latency_ms {p50,
/// p90, p99}; of texts also tokens, tokens_per_s, first_token_ms and token_ms.
std::string json_of(InferReport report);

}  // namespace lockstep::inference
