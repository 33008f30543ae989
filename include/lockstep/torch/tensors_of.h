// The tensors in what a module's forward() returns.
#pragma once

#include <torch/types.h>

#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lockstep::torch {

/// How to find the tensors in a type of the program's own, which a module returns: a specialisation with
///   static void visit(T& value, auto&& see) { see(value.logits); see(value.loss); }
/// `see` takes tensors that are parts of `value`: their addresses are used, and they may be replaced, after visit() has
/// returned.
template <class T>
struct TensorsOf;

namespace detail {

template <class T>
concept HasTensorsOf = requires(T& value) {
  TensorsOf<T>::visit(value, [](::torch::Tensor&) {});
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

}  // namespace detail

/// Calls see(::torch::Tensor&) for each tensor in `value`: a tensor, an optional, a pair, a tuple, an array, a vector,
/// a map, any of these in one another, or what TensorsOf is specialised for. Numbers and strings have none.
template <class T, class See>
void for_each_tensor(T& value, See&& see) {
  if constexpr (std::is_same_v<T, ::torch::Tensor>) {
    if (value.defined()) see(value);
  } else if constexpr (detail::HasTensorsOf<T>) {
    TensorsOf<T>::visit(value, see);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string>) {
  } else if constexpr (detail::IsOptional<T>::value) {
    if (value) for_each_tensor(*value, see);
  } else if constexpr (std::ranges::range<T&>) {
    if constexpr (!std::is_arithmetic_v<std::ranges::range_value_t<T&>>)  // also of std::vector<bool>, which has no
                                                                          // elements
      for (auto& element : value) for_each_tensor(element, see);
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](auto&... elements) { (for_each_tensor(elements, see), ...); }, value);
  } else if constexpr (std::is_const_v<T>) {
    for_each_tensor(const_cast<std::remove_const_t<T>&>(value), see);  // the key of a map
  } else {
    static_assert(detail::HasTensorsOf<T>, "specialise lockstep::torch::TensorsOf for what forward() returns");
  }
}

}  // namespace lockstep::torch
