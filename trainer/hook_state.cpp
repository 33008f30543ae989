#include "trainer/carried_state.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

#include "base/error.h"
#include "base/log.h"
#include "comm/agree.h"
#include "trainer/resume.h"

namespace lockstep::trainer {
namespace {

/// Those that hold numbers.
std::vector<ddp::CommHook::State> states_of(ddp::CommHook* hook) {
  std::vector<ddp::CommHook::State> states;
  if (hook != nullptr) states = hook->state();
  std::erase_if(states, [](const auto& state) { return state.values.empty(); });
  return states;
}

std::string tensor_name(const ddp::CommHook& hook, const ddp::CommHook::State& state) {
  return fmt::format("{}.{}", hook.name(), state.name);
}

std::span<const float> floats_of(const nn::HostTensor& tensor) {
  return {reinterpret_cast<const float*>(tensor.bytes.data()), tensor.bytes.size() / sizeof(float)};
}

/// The file's, by their names. Empty where it is of another hook, or there is none.
std::map<std::string, nn::HostTensor> read(const checkpoint::Resumed& resumed, ddp::CommHook& hook) {
  std::map<std::string, nn::HostTensor> tensors;
  if (!resumed.manifest.files.contains(checkpoint::kHookFile)) return tensors;
  const std::string file = fmt::format("{}/{}", resumed.path, checkpoint::kHookFile);
  for (auto& tensor : nn::read_safetensors(file)) tensors.emplace(tensor.name, std::move(tensor));
  const auto states = states_of(&hook);
  if (std::ranges::none_of(states, [&](const auto& state) { return tensors.contains(tensor_name(hook, state)); }))
    return {};
  for (const auto& state : states) {
    const auto found = tensors.find(tensor_name(hook, state));
    const auto count = static_cast<std::int64_t>(state.values.size());
    std::vector<std::int64_t> wanted = {count};
    if (state.of_rank) wanted.insert(wanted.begin(), resumed.manifest.world_size);
    if (found == tensors.end() || found->second.dtype != DType::kF32 || found->second.shape != wanted)
      throw IoError(fmt::format("{}: it has no {} of {} numbers", file, tensor_name(hook, state), count), "");
  }
  return tensors;
}

/// What rank `rank` of `ranks` takes of a state that each of `before` ranks had for itself.
std::vector<float> share_of(std::span<const float> all, std::size_t count, int before, int rank, int ranks) {
  std::vector<float> mine(count);
  if (before == ranks) {
    std::ranges::copy(all.subspan(static_cast<std::size_t>(rank) * count, count), mine.begin());
    return mine;
  }
  for (int other = 0; other < before; ++other)
    for (std::size_t i = 0; i < count; ++i) mine[i] += all[static_cast<std::size_t>(other) * count + i];
  for (float& value : mine) value /= static_cast<float>(ranks);
  return mine;
}

}  // namespace

std::vector<nn::HostTensor> gather_hook_state(ddp::CommHook* hook, comm::ProcessGroup& group, int root) {
  std::vector<nn::HostTensor> all;
  for (const auto& state : states_of(hook)) {
    const auto mine = std::as_bytes(std::span<const float>(state.values));
    const auto count = static_cast<std::int64_t>(state.values.size());
    const auto ranks = state.of_rank ? group.gather_objects(mine, root) : std::vector<std::vector<std::byte>>();
    if (group.rank() != root) continue;
    auto& tensor = all.emplace_back(nn::HostTensor{.name = tensor_name(*hook, state), .shape = {count}, .bytes = {}});
    if (!state.of_rank) {
      tensor.bytes.assign(mine.begin(), mine.end());
      continue;
    }
    tensor.shape.insert(tensor.shape.begin(), group.size());
    for (const auto& bytes : ranks) tensor.bytes.insert(tensor.bytes.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void resume_hook_state(const checkpoint::Resumed& resumed, ddp::CommHook* hook, comm::ProcessGroup& group) {
  const auto states = states_of(hook);
  if (states.empty()) return;
  std::map<std::string, nn::HostTensor> tensors;
  const bool reads = group.rank() == resumed.reader;
  comm::run_collectively(group, [&] {
    if (reads) run_on_checkpoint(resumed.path, [&] { tensors = read(resumed, *hook); });
  });
  const int before = resumed.manifest.world_size;
  const bool there = group.all_gather_numbers(tensors.empty() ? 0 : 1)[static_cast<std::size_t>(resumed.reader)] != 0;
  bool any_of_rank = false;
  if (there) {
    for (const auto& state : states) {
      any_of_rank = any_of_rank || state.of_rank;
      const std::size_t count = state.values.size();
      const auto all = reads ? floats_of(tensors.at(tensor_name(*hook, state))) : std::span<const float>();
      // One rank's at a time: all of them may be many times the gradients.
      std::vector<float> values(count);
      for (int rank = 0; rank < (state.of_rank ? group.size() : 1); ++rank) {
        if (reads && state.of_rank)
          values = share_of(all, count, before, rank, group.size());
        else if (reads)
          values.assign(all.begin(), all.end());
        group.broadcast(std::span(values), resumed.reader);
        if (!state.of_rank || rank == group.rank()) std::ranges::copy(values, state.values.begin());
      }
    }
  }
  if (group.rank() != 0) return;
  if (!there)
    log_info("checkpoint {} is of a run without communication hook {}, which starts without state", resumed.path,
             hook->name());
  else if (any_of_rank && before != group.size())
    log_info("{}: gradients that {} rank{} had not sent yet are divided among {}: the sum stays", hook->name(), before,
             before == 1 ? "" : "s", group.size());
}

}  // namespace lockstep::trainer
