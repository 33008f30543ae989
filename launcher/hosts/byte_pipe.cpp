#include "launcher/hosts/byte_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace lockstep::launcher {
namespace {

constexpr std::size_t kChunkBytes = 64 * 1024;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

void make_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

BytePipe::BytePipe(UniqueFd in, UniqueFd out) : in_(std::move(in)), out_(std::move(out)), chunk_(kChunkBytes, '\0') {
  make_nonblocking(in_.get());
  make_nonblocking(out_.get());
}

void BytePipe::send(std::string_view bytes) {
  if (!out_) return;
  waiting_.append(bytes);
  flush();
}

void BytePipe::flush() {
  while (out_ && start_ < waiting_.size()) {
    const ssize_t sent = ::write(out_.get(), waiting_.data() + start_, waiting_.size() - start_);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && would_block(errno)) {
      waiting_.erase(0, start_);
      start_ = 0;
      return;
    }
    if (sent < 0) {
      out_.reset();
      break;
    }
    start_ += static_cast<std::size_t>(sent);
  }
  waiting_.clear();
  start_ = 0;
}

std::string_view BytePipe::receive() {
  while (in_) {
    const ssize_t got = ::read(in_.get(), chunk_.data(), chunk_.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) return {};
    if (got > 0) return std::string_view(chunk_).substr(0, static_cast<std::size_t>(got));
    in_.reset();
  }
  return {};
}

}  // namespace lockstep::launcher
