// NVIDIA's libraries, which are opened when the program first needs them; and how messages name the CUDA that this
// process has (probe_cuda()).
#pragma once

#include <dlfcn.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/device.h"

namespace lockstep {

/// An open library. NVIDIA's are opened this way: the program starts without them, and who computes on the CPU pays
/// nothing for them. Stays open until it is destroyed, which must come after the last call of its functions.
class SharedLibrary {
 public:
  /// Opens the first of `names` that there is ("libnccl.so.2"). Throws CudaError: "cannot load NCCL: libnccl.so.2: …
  /// → `remedy`", where `what` is the library's name for people.
  SharedLibrary(std::string what, std::span<const char* const> names, const std::string& remedy)
      : what_(std::move(what)) {
    std::vector<std::string> reasons;
    for (const char* name : names) {
      handle_.reset(::dlopen(name, RTLD_NOW | RTLD_LOCAL));
      if (handle_ != nullptr) return;
      reasons.emplace_back(::dlerror());
    }
    throw CudaError(fmt::format("cannot load {}: {}", what_, join(reasons, "; ")), remedy);
  }

  /// `name`'s address. Throws CudaError where the library has none.
  void* symbol(const char* name) const {
    void* const address = ::dlsym(handle_.get(), name);
    if (address == nullptr)
      throw CudaError(fmt::format("{} has no {}", what_, name), fmt::format("install a newer {}", what_));
    return address;
  }
  /// Sets a pointer of a function table: `library.bind(table.init, "ncclCommInitRankConfig")`.
  template <class Function>
  void bind(Function*& pointer, const char* name) const {
    pointer = reinterpret_cast<Function*>(symbol(name));
  }
  /// What dlopen() returned: for code that calls dlsym() itself.
  void* native() const { return handle_.get(); }

 private:
  struct Close {
    void operator()(void* handle) const { ::dlclose(handle); }
  };
  std::string what_;
  std::unique_ptr<void, Close> handle_;
};

/// The PCI address of this thread's current GPU, as in CudaProbe::bus_ids; empty where CUDA does not report it. Creates
/// no context.
std::string current_cuda_bus_id();

/// "13.0" for 13000.
inline std::string cuda_version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace lockstep
