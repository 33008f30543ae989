// Bytes in through one descriptor and out through another, never blocking.
#pragma once

#include <string>
#include <string_view>

#include "base/scope.h"

namespace lockstep::launcher {

/// What the other end does not take waits in memory. Not thread-safe.
class BytePipe {
 public:
  BytePipe() = default;
  /// Both are made non-blocking, for whoever else holds them too.
  BytePipe(UniqueFd in, UniqueFd out);

  int in() const { return in_.get(); }    // -1 once the other end has closed it
  int out() const { return out_.get(); }  // -1 once nobody reads it
  void send(std::string_view bytes);
  void flush();
  std::size_t pending_bytes() const { return waiting_.size() - start_; }
  /// What has arrived, at most 64 KiB; valid until the next call. Empty: nothing now, or nothing ever if in() is -1.
  std::string_view receive();
  void close() { in_.reset(), out_.reset(); }

 private:
  UniqueFd in_, out_;
  std::string waiting_;
  std::size_t start_ = 0;
  std::string chunk_;
};

}  // namespace lockstep::launcher
