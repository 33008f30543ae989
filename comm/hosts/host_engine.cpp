#include "comm/hosts/host_engine.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace lockstep::comm {

HostEngine::HostEngine(HostMeeting met, Clock::duration timeout)
    : met_(std::move(met)),
      rank_(met_.rank),
      here_(met_.peers.hosts()[static_cast<std::size_t>(met_.host)]),
      timeout_(timeout),
      sync_(met_.local, static_cast<int>(here_.size()), met_.channels, met_.board, std::move(met_.pipes)),
      texts_here_(here_.size() * kTextBytes),
      silent_since_(met_.links.size()) {
  if (sync_.drives()) channel_.emplace(met_.local, met_.host, met_.peers, sync_, met_.tuning, std::move(met_.links));
  entries_.reserve(512);
  entries_to_poll_.reserve(silent_since_.size() + 1);
  missing_.reserve(64);
}

// ---- Operations ----

void HostEngine::submit(const Order& order) {
  history_ = digest(order.op, history_);
  Entry& entry = entries_.emplace_back(Entry{order.op, order.part_bytes, order.here});
  entry.op.op_index = submitted_ + 1;
  entry.op.history = history_;
  ++submitted_;
}

bool HostEngine::advance() {
  if (idle()) return false;
  bool moved = post_all();
  if (channel_) moved |= channel_->advance();
  moved |= finish_all();
  moved |= retire();
  return moved;
}

bool HostEngine::post_all() {
  const std::uint64_t posted = posted_;
  while (posted_ < submitted_ && posted_ - completed_ < Channel::kWindow && sync_.may_post(posted_ + 1)) {
    const Entry& entry = entry_of(++posted_);
    sync_.post(posted_, entry.op, entry.here ? std::string_view(own_text_) : std::string_view());
    if (channel_) channel_->open(posted_, entry.op, entry.part_bytes);
  }
  if (posted_ != posted) sync_.wake_all();
  return posted_ != posted;
}

bool HostEngine::finish_all() {
  const std::uint64_t finished = finished_;
  while (finished_ < posted_) {
    const std::uint64_t index = finished_ + 1;
    const Entry& entry = entry_of(index);
    if (!sync_.all_posted(index, entry.op) || (channel_ && !channel_->is_done(index))) break;
    if (entry.here)
      for (int i = 0; i < sync_.size(); ++i)
        std::memcpy(texts_here_.data() + static_cast<std::size_t>(i) * kTextBytes, sync_.text_of(i, index), kTextBytes);
    if (channel_) channel_->close(index);
    finished_ = index;
    sync_.finish(index);
  }
  if (finished_ != finished) sync_.wake_all();
  return finished_ != finished;
}

bool HostEngine::retire() {
  const std::uint64_t completed = completed_;
  while (completed_ < finished_ && sync_.drivers_have_finished(completed_ + 1)) {
    const Entry& entry = entry_of(completed_ + 1);
    if (entry.op.sequence > 0) completed_sequence_ = entry.op.sequence;
    ++completed_;
    ++head_;
  }
  // Done with a stretch: move what is left to the front, which costs less than has been taken since the last time.
  if (head_ > 0 && head_ * 2 >= entries_.size()) {
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
  return completed_ != completed;
}

void HostEngine::sleep(Clock::duration at_most, FunctionRef<bool()> awake) {
  sync_.announce_sleep();
  if (!advance() && !awake()) {
    entries_to_poll_.clear();
    // What comes for later operations can wait until this rank has come to them.
    if (channel_ && !idle()) channel_->listen_to(entries_to_poll_);
    const std::size_t links = entries_to_poll_.size();
    entries_to_poll_.push_back({sync_.wakeup_fd(), POLLIN, 0});
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(at_most).count();
    const timespec nap{static_cast<std::time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    if (::ppoll(entries_to_poll_.data(), entries_to_poll_.size(), &nap, nullptr) > 0 && links > 0)
      channel_->found(entries_to_poll_.data());
  }
  sync_.end_sleep();
}

// ---- Texts ----

std::byte* HostEngine::all_texts() const { return met_.board.part(met_.local) + align_up(sizeof(NodeControlBlock)); }

HostEngine::Order HostEngine::order_for_all_texts() {
  const auto ranks = met_.ranks;
  std::byte* const own = all_texts() + static_cast<std::size_t>(rank_) * kTextBytes;
  std::memset(own, 0, kTextBytes);
  std::memcpy(own, own_text_.data(), own_text_.size());
  Order order;
  order.op.kind = OpKind::kAllGather;
  order.op.count = static_cast<std::size_t>(ranks) * kTextBytes;
  order.op.dtype = DType::kU8;
  order.op.data = all_texts();
  order.part_bytes = met_.board.part_bytes();
  return order;
}

HostEngine::Order HostEngine::order_for_texts_here() {
  own_text_.resize(kTextBytes, '\0');
  Order order;
  order.op.kind = OpKind::kAllGather;
  order.op.dtype = DType::kU8;
  order.here = true;
  return order;
}

std::string HostEngine::text_here(int local) const {
  return reinterpret_cast<const char*>(texts_here_.data() + static_cast<std::size_t>(local) * kTextBytes);
}

}  // namespace lockstep::comm
