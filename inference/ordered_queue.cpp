#include "inference/ordered_queue.h"

#include "base/error.h"

namespace lockstep::inference {

OrderedQueue::OrderedQueue(std::uint64_t count, std::uint64_t window) : count_(count), results_(window) {
  LOCKSTEP_ASSERT(window >= 1);
}

std::optional<std::uint64_t> OrderedQueue::take() {
  std::unique_lock lock(mutex_);
  room_.wait(lock, [&] { return closed_ || next_ == count_ || next_ < first_ + results_.size(); });
  if (closed_ || next_ == count_) return std::nullopt;
  return next_++;
}

bool OrderedQueue::put(std::uint64_t job, std::string_view piece) {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  result_of(job).text += piece;
  if (job == first_) news_.notify_one();
  return true;
}

void OrderedQueue::finish(std::uint64_t job) {
  const std::lock_guard lock(mutex_);
  result_of(job).finished = true;
  if (job == first_) news_.notify_one();
}

void OrderedQueue::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
  }
  close();
}

OrderedQueue::Read OrderedQueue::read(std::string& piece, std::chrono::milliseconds patience) {
  piece.clear();
  std::unique_lock lock(mutex_);
  const auto is_new = [&] {
    return error_ != nullptr || first_ == count_ || !result_of(first_).text.empty() || result_of(first_).finished;
  };
  news_.wait_for(lock, patience, is_new);
  while (first_ < count_) {
    Result& result = result_of(first_);
    piece += result.text;
    result.text.clear();
    if (!result.finished) break;
    result.finished = false;
    ++first_;
    room_.notify_one();
  }
  if (!piece.empty()) return Read::kPiece;
  if (error_ != nullptr) std::rethrow_exception(error_);
  return first_ == count_ ? Read::kEnd : Read::kNothingYet;
}

void OrderedQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  room_.notify_all();
  news_.notify_all();
}

}  // namespace lockstep::inference
