#include "session/memory.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/resource_limits.h"
#include "base/text.h"
#include "comm/agree.h"
#include "lockstep/nn/optim/optimizers.h"

namespace lockstep::session {
namespace {

std::string human(std::uint64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

}  // namespace

MemoryNeed& MemoryNeed::operator+=(const MemoryNeed& other) {
  parameters += other.parameters;
  gradients += other.gradients;
  moments += other.moments;
  activations += other.activations;
  batches += other.batches;
  checkpoint += other.checkpoint;
  return *this;
}

std::string text_of(const MemoryNeed& need) {
  std::vector<std::string> parts;
  const std::pair<const char*, std::uint64_t> all[] = {
      {"parameters", need.parameters},   {"gradients", need.gradients}, {"moments", need.moments},
      {"activations", need.activations}, {"batches", need.batches},     {"checkpoint", need.checkpoint}};
  for (const auto& [what, bytes] : all)
    if (bytes > 0) parts.push_back(fmt::format("{} {}", what, human(bytes)));
  return join(parts, ", ");
}

namespace {

/// What several ranks share.
struct Shared {
  std::string name;
  std::uint64_t free_bytes = 0, needed = 0;
  std::vector<std::size_t> ranks;
};

std::string remedy_of(const MemoryNeed& need, std::size_t ranks) {
  std::vector<std::string> ways = {"use a smaller model"};
  if (need.activations + need.batches > need.parameters) ways.emplace_back("a smaller batch");
  if (need.moments > need.gradients / 2)
    for (const auto* family : nn::optimizer_families())
      if (!family->leanest.empty())
        ways.push_back(fmt::format("an optimizer with less state (--optimizer {} {})", family->name, family->leanest));
  if (ranks > 1) ways.emplace_back("fewer ranks here");
  return join(ways, ", ") + ", or more memory";
}

void check_host(comm::ProcessGroup& group, const MemoryNeed& mine) {
  // One line for what is needed, then one for each bound.
  std::string text = fmt::format("{}\n", mine.total());
  for (const MemoryBound& bound : memory_bounds())
    text += fmt::format("{}\t{}\t{}\n", bound.id, bound.free_bytes, bound.name);
  const auto texts = group.all_gather_text(text);
  std::map<std::string, Shared> all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto lines = split(texts[rank], '\n');
    const std::uint64_t needed = std::stoull(lines.front());
    for (const std::string& line : std::span(lines).subspan(1)) {
      const auto fields = split(line, '\t');
      if (fields.size() != 3) continue;  // after the last line's end
      const std::uint64_t free_bytes = std::stoull(fields[1]);
      Shared& shared =
          all.try_emplace(fields[0], Shared{.name = fields[2], .free_bytes = free_bytes, .ranks = {}}).first->second;
      shared.free_bytes = std::min(shared.free_bytes, free_bytes);
      shared.needed += needed;
      shared.ranks.push_back(rank);
    }
  }
  const Shared* tightest = nullptr;
  for (const auto& [id, shared] : all)
    if (shared.needed > shared.free_bytes && static_cast<int>(shared.ranks.front()) == group.rank() &&
        (tightest == nullptr || shared.free_bytes < tightest->free_bytes))
      tightest = &shared;
  comm::run_collectively(group, [&] {
    if (tightest == nullptr) return;
    const std::size_t ranks = tightest->ranks.size();
    throw OutOfMemoryError(fmt::format("this run needs at least {}{}: {}{}; {} has {} free", human(tightest->needed),
                                       ranks > 1 ? fmt::format(" for {} ranks", ranks) : "", text_of(mine),
                                       ranks > 1 ? " a rank" : "", tightest->name, human(tightest->free_bytes)),
                           remedy_of(mine, ranks));
  });
}

}  // namespace

void check_memory(comm::ProcessGroup& group, nn::Backend& backend, const MemoryNeeds& mine) {
  log_debug("memory: at least {} ({})", human(mine.host.total()), text_of(mine.host));
  check_host(group, mine.host);
  if (backend.device().kind == DeviceKind::kCpu) return;
  log_debug("memory of {}: at least {} ({})", to_string(backend.device()), human(mine.device.total()),
            text_of(mine.device));
  comm::run_collectively(group, [&] {
    const auto free_bytes = backend.free_bytes();
    if (!free_bytes || mine.device.total() <= *free_bytes) return;
    throw OutOfMemoryError(fmt::format("this run needs at least {} of {}: {}; {} are free", human(mine.device.total()),
                                       to_string(backend.device()), text_of(mine.device), human(*free_bytes)),
                           remedy_of(mine.device, 1));
  });
}

}  // namespace lockstep::session
