// NVIDIA's libraries, which are opened when the program first needs them; and how messages name the CUDA that this
// process has (probe_cuda()).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/device.h"

namespace lockstep {

/// An open library. NVIDIA's are opened this way: the program starts without them, and who computes on the CPU pays
/// nothing for them. Stays open until it is destroyed, which must come after the last call of its functions.
class SharedLibrary {
 public:
  /// Opens the first of `names` that there is ("libnccl.so.2"). Throws CudaError: "cannot load NCCL: libnccl.so.2: …
  /// → `remedy`", where `what` is the library's name for people.
  SharedLibrary(std::string what, std::span<const char* const> names, const std::string& remedy);

  /// `name`'s address. Throws CudaError where the library has none.
  void* symbol(const char* name) const;
  /// Sets a pointer of a function table: `library.bind(table.init, "ncclCommInitRankConfig")`.
  template <class Function>
  void bind(Function*& pointer, const char* name) const {
    pointer = reinterpret_cast<Function*>(symbol(name));
  }
  /// What dlopen() returned: for code that calls dlsym() itself.
  void* native() const { return handle_.get(); }

 private:
  struct Close {
    void operator()(void* handle) const;
  };
  std::string what_;
  std::unique_ptr<void, Close> handle_;
};

/// The PCI address of this thread's current GPU, as in CudaProbe::bus_ids; empty where CUDA does not report it. Creates
/// no context.
std::string current_cuda_bus_id();

/// "13.0" for 13000.
std::string cuda_version_text(int version);

}  // namespace lockstep
