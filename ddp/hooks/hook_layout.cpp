#include "ddp/hooks/hook_layout.h"

#include "base/error.h"

namespace lockstep::ddp {

void owe_again(const HookLayout& layout, const GradBucket& bucket, std::span<const std::size_t> slots, int ranks,
               SlotMemory& owed) {
  const float share = 1.0f / static_cast<float>(ranks);
  for (const std::size_t slot : slots) {
    const auto kept = owed.of(slot);
    const auto dropped = layout.values_of(bucket, slot);
    for (std::size_t i = 0; i < kept.size(); ++i) kept[i] += dropped[i] * share;
  }
}

void check_on_cpu(const CommHook& hook, const comm::ProcessGroup& group) {
  if (group.device().kind == DeviceKind::kCpu) return;
  throw UsageError(fmt::format("communication hook {} on {}: its arithmetic is the CPU's, and a GPU would wait for the "
                               "host in every bucket",
                               hook.name(), to_string(group.device())),
                   "leave it out there, or train on the CPU");
}

}  // namespace lockstep::ddp
