// The main() of a program whose ranks belong together.
#pragma once

#include <functional>
#include <type_traits>

namespace lockstep {

namespace detail {
int run_main(const std::function<int()>& program);
}

/// Runs `program`, which may return an exit code, and returns that: `int main() { return lockstep::run_main(train); }`.
/// What it throws becomes one line on standard error, "what → remedy", and the process ends with Error::code(), or with
/// ExitCode::kInternal for other exceptions. It ends at once, without handlers of exit(): they might wait for ranks
/// that are gone. Errors that another rank has reported (PeerError) print nothing.
template <class F>
int run_main(F&& program) {
  return detail::run_main([&]() -> int {
    if constexpr (std::is_void_v<std::invoke_result_t<F&>>) {
      program();
      return 0;
    } else {
      return program();
    }
  });
}

}  // namespace lockstep
