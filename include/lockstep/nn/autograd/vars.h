// Several values of a tape: what modules take and return that have more than one.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <span>

#include "lockstep/base/short_list.h"
#include "lockstep/nn/autograd/tape.h"

namespace lockstep::nn {

/// Values in a row, in place of the tuples that PyTorch's modules take and return. One value is a row of one, and a row
/// of one is a value:
///
///   const auto [mean, variance] = model(tape, {image, mask}).as<2>();
///   const Var y = other(tape, {image, mask});  // a UsageError where it returns several
///
/// Copying costs as much as copying the values, and up to ShortList::kFew of them no memory. Pointers into it are valid
/// until the next push_back(). One that was moved from is only assigned to.
class Vars {
 public:
  Vars() = default;
  template <std::same_as<Var>... More>
  Vars(Var first, More... more) {  // NOLINT(google-explicit-constructor): {a, b} where Vars are expected
    push_back(first);
    (push_back(more), ...);
  }
  explicit Vars(std::span<const Var> all) {
    for (const Var one : all) push_back(one);
  }

  void push_back(Var one) { vars_.push_back(one); }
  std::size_t size() const { return vars_.size(); }
  bool empty() const { return vars_.empty(); }
  /// Throws UsageError where there are fewer.
  Var operator[](std::size_t i) const {
    if (i >= size()) [[unlikely]]
      refuse_number(i);
    return vars_[i];
  }
  const Var* begin() const { return vars_.begin(); }
  const Var* end() const { return vars_.end(); }

  /// The only one; else UsageError.
  operator Var() const {  // NOLINT(google-explicit-constructor): a row of one is a value
    if (size() != 1) [[unlikely]]
      refuse_count(1);
    return vars_[0];
  }
  /// All of them, which are `kCount`; else UsageError.
  template <std::size_t kCount>
  std::array<Var, kCount> as() const {
    if (size() != kCount) [[unlikely]]
      refuse_count(kCount);
    std::array<Var, kCount> all;
    for (std::size_t i = 0; i < kCount; ++i) all[i] = vars_[i];
    return all;
  }

 private:
  [[noreturn]] void refuse_number(std::size_t i) const;
  [[noreturn]] void refuse_count(std::size_t wanted) const;

  ShortList<Var> vars_;
};

}  // namespace lockstep::nn
