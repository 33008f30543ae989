// A callable that somebody else owns.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

template <class Signature>
class FunctionRef;

/// For parameters that a function calls before it returns. std::function allocates for what does not fit its few bytes,
/// once for each call of the function; this never does. The callable must outlive it: a temporary lives to the end of
/// the call that it is an argument of. Do not keep one.
template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <class Callable>
  requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef> &&
           std::is_invocable_r_v<Result, Callable&, Args...>)
      FunctionRef(Callable&& callable)  // NOLINT(*-forwarding-reference-overload): FunctionRefs are copied
      : callable_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* target, Args... args) -> Result {
          return (*static_cast<std::add_pointer_t<Callable>>(target))(std::forward<Args>(args)...);
        }) {}

  Result operator()(Args... args) const { return call_(callable_, std::forward<Args>(args)...); }

 private:
  void* callable_;
  Result (*call_)(void*, Args...);
};

}  // namespace lockstep
