#include "trainer/clocks.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/kernel.h"

namespace lockstep::trainer {
namespace {

constexpr int kRounds = 16;

/// Names the kernel that this process's clock belongs to: a boot, and a time namespace of it.
std::string clock_identity() { return boot_id() + namespace_id("time"); }

struct Readings {
  Clock::time_point sent;      // this round's
  Clock::time_point received;  // when the round before had ended
};
static_assert(std::is_trivially_copyable_v<Readings>);

}  // namespace

ClockBounds clock_bounds(const std::vector<ClockExchange>& exchanges) {
  LOCKSTEP_ASSERT(!exchanges.empty());
  ClockBounds bounds{Clock::duration::min(), Clock::duration::max()};
  for (const auto& e : exchanges) {
    bounds.least = std::max(bounds.least, e.sent_by_0 - e.received);
    bounds.most = std::min(bounds.most, e.received_by_0 - e.sent);
  }
  return bounds;
}

std::vector<ClockExchange> exchange_clocks(comm::ProcessGroup& group, int rounds) {
  std::vector<ClockExchange> exchanges(static_cast<std::size_t>(rounds));
  Clock::time_point received{};
  // One more: each round also shows when the one before had ended.
  for (int round = 0; round <= rounds; ++round) {
    group.barrier().wait_host();
    const Readings mine{Clock::now(), received};
    const auto all = group.all_gather_objects(std::as_bytes(std::span(&mine, 1)));
    received = Clock::now();
    Readings first;
    LOCKSTEP_ASSERT(all[0].size() == sizeof(first));
    std::memcpy(&first, all[0].data(), sizeof(first));
    if (round > 0) exchanges[static_cast<std::size_t>(round - 1)].received_by_0 = first.received;
    if (round == rounds) break;
    auto& exchange = exchanges[static_cast<std::size_t>(round)];
    exchange.sent_by_0 = first.sent;
    exchange.sent = mine.sent;
    exchange.received = received;
  }
  return exchanges;
}

Clock::duration ahead_of_this_clock(comm::ProcessGroup& group) {
  const auto identities = group.all_gather_text(clock_identity());
  const auto same = [&](const std::string& identity) { return identity == identities[0] && identity.size() > 1; };
  if (std::ranges::all_of(identities, same)) return {};
  const ClockBounds bounds = clock_bounds(exchange_clocks(group, kRounds));
  return bounds.least + (bounds.most - bounds.least) / 2;
}

}  // namespace lockstep::trainer
