#include <lockstep/lockstep.h>

#include <exception>
#include <mutex>
#include <new>
#include <string>

#include "bindings/handle.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::bindings {
namespace {

struct LastError {
  std::string line;
  bool of_peer = false;
};
thread_local LastError last_error;

int keep(int code, const char* line, bool of_peer = false) noexcept {
  last_error.of_peer = of_peer;
  try {
    last_error.line = line;
  } catch (const std::exception&) {  // no memory for words
    last_error.line.clear();
  }
  return code;
}

Shell* add(Shell* shell) {
  static std::mutex mutex;
  static Shell* first = nullptr;
  const std::lock_guard lock(mutex);
  return std::exchange(first, shell);
}

}  // namespace

Shell::Shell() : next_(add(this)) {}

int run(FunctionRef<void()> action) noexcept {
  try {
    action();
    return LOCKSTEP_OK;
  } catch (const PeerError& error) {
    return keep(error.code(), error.what(), true);
  } catch (const Error& error) {
    try {
      return keep(error.code(), error.line().c_str());
    } catch (const std::exception&) {
      return keep(error.code(), error.what());
    }
  } catch (const std::bad_alloc&) {
    return keep(LOCKSTEP_ERROR_DEVICE, "there is not as much memory");
  } catch (const std::exception& error) {
    return keep(LOCKSTEP_ERROR_INTERNAL, error.what());
  } catch (...) {
    return keep(LOCKSTEP_ERROR_INTERNAL, "the thrown object is no std::exception");
  }
}

}  // namespace lockstep::bindings

int lockstep_abi_version(void) { return LOCKSTEP_ABI_VERSION; }
const char* lockstep_last_error(void) { return lockstep::bindings::last_error.line.c_str(); }
int lockstep_last_error_is_of_peer(void) { return lockstep::bindings::last_error.of_peer ? 1 : 0; }
