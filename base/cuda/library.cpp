#include "base/cuda/library.h"

#include <dlfcn.h>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {

void SharedLibrary::Close::operator()(void* handle) const { ::dlclose(handle); }

SharedLibrary::SharedLibrary(std::string what, std::span<const char* const> names, const std::string& remedy)
    : what_(std::move(what)) {
  std::vector<std::string> reasons;
  for (const char* name : names) {
    handle_.reset(::dlopen(name, RTLD_NOW | RTLD_LOCAL));
    if (handle_ != nullptr) return;
    reasons.emplace_back(::dlerror());
  }
  throw CudaError(fmt::format("cannot load {}: {}", what_, join(reasons, "; ")), remedy);
}

void* SharedLibrary::symbol(const char* name) const {
  void* const address = ::dlsym(handle_.get(), name);
  if (address == nullptr)
    throw CudaError(fmt::format("{} has no {}", what_, name), fmt::format("install a newer {}", what_));
  return address;
}

std::string cuda_version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace lockstep
