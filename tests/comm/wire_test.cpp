// Frames of the store.
#include "comm/tcp/wire.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

namespace lockstep::comm {
namespace {

// A value that changes on its way is not handed out.
TEST(Wire, AlteredFramesAreFound) {
  const auto wire = [] { return Wire({}, Handshake::listen(Handshake::Port::kStore, {})); };
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd reader(ends[1]);
  Wire sender(UniqueFd(ends[0]), Handshake::listen(Handshake::Port::kStore, {}));
  sender.send(FrameKind::kSet, Packer().text("key").text("value"));
  std::array<char, 256> bytes;
  const ssize_t got = ::read(reader.get(), bytes.data(), bytes.size());
  ASSERT_GT(got, 0);
  const std::string frame(bytes.data(), static_cast<std::size_t>(got));
  Wire good = wire();
  good.feed(frame);
  EXPECT_EQ(good.next(1000)->kind, FrameKind::kSet);
  for (std::size_t bit = 0; bit < frame.size() * 8; ++bit) {
    std::string altered = frame;
    altered[bit / 8] = static_cast<char>(altered[bit / 8] ^ (1 << bit % 8));
    Wire one = wire();
    one.feed(altered);
    try {
      EXPECT_FALSE(one.next(1000)) << "bit " << bit;  // a length that makes it wait for more
    } catch (const Malformed&) {
    }
  }
}

}  // namespace
}  // namespace lockstep::comm
