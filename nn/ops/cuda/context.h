// What all kernels of one GPU share.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "lockstep/base/device.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/nn/tensor/allocator.h"

namespace lockstep::nn::cuda {

/// Backend::engines(). Plans are made once for each shape; where shapes of one operation differ, a fallback is what
/// stays.
class Engines {
 public:
  void use(const std::string& operation, const std::string& engine);
  /// `engine` computes it in place of a faster one, because of `why`: warns, once for each operation. Cheap enough for
  /// each call of an operation.
  void fall_back(std::string_view operation, std::string_view engine, std::string_view why);
  std::map<std::string, EngineChoice> all() const { return {chosen_.begin(), chosen_.end()}; }

 private:
  std::map<std::string, EngineChoice, std::less<>> chosen_;  // by operation
};

class PlanChoices;
class OpProfile;

/// Owned by the backend, which outlives its kernels. `device` is the calling thread's whenever a kernel is called.
struct Context {
  int device = 0;     // CUDA's index, among those that this process may see
  StreamView stream;  // all kernels of the backend run in it, in the order of their calls
  /// Blocks of `device`'s memory. One that is freed may be handed out again at once: what was started before in
  /// `stream` is done before what is started then.
  CachingAllocator& allocator;
  bool tf32 = false;                     // f32 products on matrix units, with 10 bits of mantissa
  bool deterministic = true;             // false: attention's gradient may have other bits each time
  PlanChoices* choices = nullptr;        // of the libraries' kernels; nullptr: their first ones (Note [Autotuning])
  std::string gpu = {};                  // its name
  std::uint64_t primitives_created = 0;  // plans and handles built so far; whoever builds one adds 1
  Engines engines = {};
  OpProfile* profile = nullptr;  // while somebody profiles: OpProfileScope notes each operation
};

}  // namespace lockstep::nn::cuda
