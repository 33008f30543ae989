#include "lockstep/ddp/comm_hook.h"

#include "base/error.h"
#include "lockstep/base/settings.h"

namespace lockstep::ddp {

const CommHookFamily& bf16_hook_family();
const CommHookFamily& fp16_hook_family();
const CommHookFamily& powersgd_hook_family();
const CommHookFamily& topk_hook_family();

namespace {

std::shared_ptr<CommHook> make_none(const std::string& argument) {
  if (!argument.empty()) throw UsageError(fmt::format("none takes no :{}", argument), "give none alone");
  return nullptr;
}

const Registry<CommHookFamily>& registry() {
  static const CommHookFamily none{
      .name = "none", .argument = "", .help = "an allreduce of f32", .on_gpus = true, .make = make_none};
  static const Registry<CommHookFamily> hooks("communication hook", {&none, &bf16_hook_family(), &fp16_hook_family(),
                                                                     &powersgd_hook_family(), &topk_hook_family()});
  return hooks;
}

}  // namespace

void CommHook::check(const comm::ProcessGroup&) const {}
void CommHook::lay_out(std::span<const SlotSpec>, const BucketPlan&, comm::ProcessGroup&) {}
CommHook::Memory CommHook::memory(std::span<const SlotSpec>, int) const { return {}; }
void CommHook::drop(const GradBucket&, std::span<const std::size_t>) {}
std::optional<double> CommHook::bytes_sent(std::size_t, int) const { return std::nullopt; }

const std::vector<const CommHookFamily*>& comm_hook_families() { return registry().all(); }

const CommHookFamily& comm_hook_family(const std::string& spec) {
  return registry().named(spec.substr(0, spec.find(':')));
}

std::string comm_hook_placeholder() {
  std::string all;
  for (const auto* family : comm_hook_families()) all += (all.empty() ? "" : "|") + family->name + family->argument;
  return all;
}

std::shared_ptr<CommHook> make_comm_hook(const std::string& spec) {
  const auto colon = spec.find(':');
  const CommHookFamily& family = comm_hook_family(spec);
  if (colon == std::string::npos) return family.make("");
  const std::string argument = spec.substr(colon + 1);
  if (argument.empty())
    throw UsageError(fmt::format("communication hook {} with nothing after the colon", spec),
                     fmt::format("give {}{}", family.name, family.argument));
  return family.make(argument);
}

}  // namespace lockstep::ddp
