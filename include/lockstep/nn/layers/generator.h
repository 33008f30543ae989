// Random numbers for initialisation: the same on every machine, whatever the number of threads.
#pragma once

#include <cstdint>
#include <span>

namespace lockstep::nn {

/// A counter hashed with a seed. Each draw takes the next counter values, so results depend on the seed and on the
/// order of draws alone. Not thread-safe. A copy draws the same numbers.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : seed_(seed) {}
  /// Draws nothing: all values are 0. For modules whose parameters are loaded next.
  static Generator zeros() {
    Generator made(0);
    made.draws_ = false;
    return made;
  }

  /// Makes nothing: layers leave their first values alone. For modules on a backend of shapes (make_meta_backend).
  static Generator none() {
    Generator made = zeros();
    made.makes_values_ = false;
    return made;
  }
  bool makes_values() const { return makes_values_; }

  /// Fills `values` with uniform numbers in [low, high), rounded to f32.
  void uniform(std::span<float> values, double low, double high);
  /// Fills `values` with normal numbers of this mean and standard deviation (Box and Muller, 1958), rounded to f32.
  void normal(std::span<float> values, double mean, double deviation);

 private:
  double unit(std::uint64_t key);  // in [0, 1)

  std::uint64_t seed_;
  std::uint64_t next_ = 0;
  bool draws_ = true;
  bool makes_values_ = true;
};

}  // namespace lockstep::nn
