// A row of a few values.
#pragma once

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace lockstep {

/// A vector whose first kFew values need no memory of their own. T has a default value. Pointers to values are good
/// until push_back(). A list that was moved from keeps up to kFew values of no meaning: assign it before it is used.
template <class T>
class ShortList {
 public:
  static constexpr std::size_t kFew = 8;

  void push_back(T value) {
    if (many_.empty() && count_ < kFew) {
      few_[count_++] = std::move(value);
      return;
    }
    if (many_.empty())
      for (T& one : few_) many_.push_back(std::exchange(one, T()));
    many_.push_back(std::move(value));
  }

  std::size_t size() const { return many_.empty() ? count_ : many_.size(); }
  bool empty() const { return size() == 0; }
  T* data() { return many_.empty() ? few_.data() : many_.data(); }
  const T* data() const { return many_.empty() ? few_.data() : many_.data(); }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size(); }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size(); }

 private:
  std::array<T, kFew> few_{};
  std::size_t count_ = 0;  // in few_
  std::vector<T> many_;    // all of them, where they are more
};

}  // namespace lockstep
