// A group whose collectives can be replaced by nothing.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::bench {

/// Passes everything on to `inner`, unless it is bypassed: operations issued then are complete at once and change
/// nothing. All ranks bypass it alike, and only while nothing is under way. What ranks write into each other's copies
/// of an arena (comm: Note [Copies of other ranks]) is no operation: they write it all the same, in no order. `inner`
/// must outlive it, and nobody else may issue operations on it between two of this group's. One thread uses it.
class BypassGroup final : public comm::ProcessGroup {
 public:
  explicit BypassGroup(comm::ProcessGroup& inner);

  void set_bypass(bool bypassed);
  /// Called with every operation, bypassed or not, right before it is issued; none if empty.
  void set_observer(std::function<void(const comm::Op&)> observer) { observer_ = std::move(observer); }

  std::string name() const override { return inner_.name(); }
  Device device() const override { return inner_.device(); }
  StreamView producer_stream() const override { return inner_.producer_stream(); }
  std::size_t preferred_bucket_bytes() const override { return inner_.preferred_bucket_bytes(); }
  std::unique_ptr<comm::Arena> allocate(std::size_t bytes) override { return inner_.allocate(bytes); }
  bool has(const comm::Arena* arena) const override { return inner_.has(arena); }
  void copy(void* to, const void* from, std::size_t bytes) override { inner_.copy(to, from, bytes); }
  void zero(const comm::Region& region) override { inner_.zero(region); }
  std::vector<std::vector<std::byte>> all_gather_objects(std::span<const std::byte> mine) override;
  void begin_capture() override { inner_.begin_capture(); }
  std::uint64_t end_capture() override { return inner_.end_capture(); }
  void replayed(std::uint64_t count) override { inner_.replayed(count); }
  void poll() override;
  void watch_peers() override { inner_.watch_peers(); }
  void check_in_step() override { inner_.check_in_step(); }
  /// Does nothing: `inner` belongs to somebody else.
  void shutdown() override {}

 protected:
  // Arenas are `inner`'s, who asks the ranks for their sizes.
  std::unique_ptr<comm::Arena> map_arena(std::size_t bytes) override;
  std::vector<std::string> exchange(const std::string& mine) override;
  bool has_let_go(std::uint64_t) const noexcept override { return true; }
  void start(const comm::Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;
  void make_wait(std::uint64_t sequence, StreamView stream) override;

 private:
  comm::Work forward(const comm::Op& op);

  comm::ProcessGroup& inner_;
  bool bypassed_ = false;
  std::function<void(const comm::Op&)> observer_;
  std::deque<std::pair<std::uint64_t, comm::Work>> under_way_;  // by this group's sequence numbers, in their order
};

}  // namespace lockstep::bench
