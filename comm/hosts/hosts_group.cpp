#include "comm/hosts/make_hosts_group.h"

#include <limits>
#include <new>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "comm/hosts/host_engine.h"
#include "comm/hosts/host_meeting.h"
#include "comm/hosts/inline_hosts.h"
#include "comm/hosts/thread_hosts.h"
#include "comm/shm/shm_arena.h"

namespace lockstep::comm {

HostsGroup::HostsGroup(std::unique_ptr<Store> store, HostMeeting met, Clock::duration timeout)
    : ProcessGroup(store->rank(), store->size(), timeout), engine_(std::move(met), timeout), store_(std::move(store)) {}

std::unique_ptr<Arena> HostsGroup::map_arena(std::size_t bytes) {
  // The same sizes are too large on all hosts, however many ranks each has.
  constexpr std::size_t kPages = 1 << 16;
  if (bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) / static_cast<std::size_t>(size()) - kPages)
    throw std::bad_alloc();
  // Segment::map asks twice, but for a host that fails in between: all hosts take part in both.
  int rounds = 0;
  const auto exchange_here = [&](const std::string& mine) {
    ++rounds;
    engine_.set_own_text(mine);
    run(engine_.order_for_texts_here());
    std::vector<std::string> texts;
    for (int i = 0; i < engine_.local_size(); ++i) texts.push_back(engine_.text_here(i));
    return texts;
  };
  std::optional<DeviceError> mine;
  Segment segment;
  try {
    segment = Segment::map(engine_.local(), engine_.local_size(), bytes, exchange_here);
  } catch (const DeviceError& error) {
    // Of the group itself, or of the memory: only the latter lets the ranks go on.
    failure_.throw_if_any();
    mine = error;
  } catch (const PeerError&) {
    failure_.throw_if_any();
  }
  while (rounds < 2) exchange_here("");

  const auto texts = exchange(mine ? std::string(utf8_prefix(mine->what(), Segment::kMostText)) : std::string());
  for (int r = 0; r < size(); ++r) {
    const std::string& text = texts[static_cast<std::size_t>(r)];
    if (text.empty()) continue;
    if (r == rank()) throw *mine;
    throw PeerError(static_cast<int>(ExitCode::kDevice), fmt::format("rank {}: {}", r, text));
  }
  return std::make_unique<ShmArena>(std::move(segment), engine_.local(), bytes);
}

std::vector<std::string> HostsGroup::exchange(const std::string& mine) {
  static_assert(kMostText < HostEngine::kTextBytes);
  engine_.set_own_text(mine);
  run(engine_.order_for_all_texts());
  std::vector<std::string> texts;
  for (int r = 0; r < size(); ++r)
    texts.emplace_back(
        reinterpret_cast<const char*>(engine_.all_texts() + static_cast<std::size_t>(r) * HostEngine::kTextBytes));
  return texts;
}

void HostsGroup::run(const HostEngine::Order& order) { wait_for_index(hand_over(order), Deadline::after(timeout())); }

void HostsGroup::start(const Op& op) {
  HostEngine::Order order;
  order.op = op;
  order.part_bytes = op.stride_bytes;
  hand_over(order);
}

std::unique_ptr<ProcessGroup> make_hosts_group(std::unique_ptr<Store>&& store, Peers&& peers,
                                               const MeetingPoint& meeting, Clock::duration timeout, bool threaded) {
  HostMeeting met = meet_hosts(*store, peers, meeting, timeout);
  if (threaded) return std::make_unique<ThreadHosts>(std::move(store), std::move(met), timeout);
  return std::make_unique<InlineHosts>(std::move(store), std::move(met), timeout);
}

}  // namespace lockstep::comm
