// Frames of the store.
#include "comm/tcp/wire.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <optional>
#include <string>

#include "tests/support/golden_bytes.h"

namespace lockstep::comm {
namespace {

// A value that changes on its way is not handed out.
TEST(Wire, AlteredFramesAreFound) {
  const auto wire = [] { return Wire({}, Handshake::listen(Handshake::Port::kStore, {})); };
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd reader(ends[1]);
  Wire sender(UniqueFd(ends[0]), Handshake::listen(Handshake::Port::kStore, {}));
  sender.send(SetValue{"key", "value"});
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

template <class Message>
void expect_golden(const std::string& golden, const Message& message) {
  testing::expect_golden(golden.c_str(), message, pack<Message>, unpack<Message>);
}

TEST(StoreMessages, BytesAreThoseOfEarlierVersions) {
  const std::string key("k\0\xff", 3);
  expect_golden("03000000020000006712000006000000686f73742d61030000006a6f62",
                StoreIdentity{3, 2, 4711, "host-a", "job"});
  expect_golden("0000000006000000686f73742d61", StoreAnswer{0, "host-a"});
  expect_golden("0100000000000000", StoreAnswer{1, ""});
  expect_golden("030000006b00ff0500000076616c7565", SetValue{key, "value"});
  expect_golden("07000000020000000100000061020000006263", AwaitValues{7, {"a", "bc"}});
  expect_golden("090000000b0000006f7574206f662074696d65", GivenUp{9, "out of time"});
  expect_golden("07000000010000000500000076616c7565", FoundValue{7, 1, "value"});
  expect_golden("07000000", Answered{7});
  using State = RankAttendance::State;
  expect_golden("020000000100000006000000686f73742d610000000000000000",
                Attendances{{{State::kHere, "host-a"}, {State::kAbsent, ""}}});
  expect_golden("1000000072616e6b20312068617320656e646564", PeerGone{"rank 1 has ended"});
}

TEST(StoreMessages, LongNamesAreCutAndLongTextsRefused) {
  const std::string cut(256, 'h'), longer(300, 'h');
  EXPECT_EQ(pack(StoreIdentity{3, 2, 1, longer, longer}), pack(StoreIdentity{3, 2, 1, cut, cut}));
  const std::string wrong = Packer().number(0).text(longer).bytes();
  EXPECT_THROW(unpack<StoreAnswer>(wrong), Malformed);
  EXPECT_THROW(unpack<Answered>(std::string(5, '\0')), Malformed);
}

/// Two ends of a connection that encrypts.
struct Encrypted {
  Encrypted() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    const auto secret = JobSecret::random();
    caller.emplace(UniqueFd(ends[0]), Handshake::call(Handshake::Port::kStore, secret, "me", true));
    listener.emplace(UniqueFd(ends[1]), Handshake::listen(Handshake::Port::kStore, secret, true));
    for (int round = 0; round < 8; ++round) {
      caller->advance();
      if (listener->advance() == Handshake::State::kAsked) listener->handshake().accept("");
      listener->flush();
    }
    EXPECT_EQ(caller->handshake().state(), Handshake::State::kDone);
  }
  /// What the caller has sent, taken out of the socket.
  std::string taken() const {
    std::array<char, 4096> bytes;
    const ssize_t got = ::read(listener->fd(), bytes.data(), bytes.size());
    return {bytes.data(), got < 0 ? 0 : static_cast<std::size_t>(got)};
  }
  std::optional<Wire> caller, listener;
};

TEST(Wire, EncryptedFramesArriveAndShowNothing) {
  Encrypted pair;
  const std::string value(1000, 'v');
  for (int round = 0; round < 3; ++round) {
    pair.caller->send(SetValue{"key", value});
    const std::string sent = pair.taken();
    EXPECT_EQ(sent.find("vvvv"), std::string::npos);
    EXPECT_EQ(sent.find("key"), std::string::npos);
    for (const char byte : sent) {  // in the smallest pieces
      EXPECT_FALSE(pair.listener->next(2000));
      pair.listener->feed({&byte, 1});
    }
    const auto frame = pair.listener->next(2000);
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->kind, FrameKind::kSet);
    EXPECT_EQ(frame->body, pack(SetValue{"key", value}));
    pair.listener->send(FrameKind::kGoodbye);
    EXPECT_EQ(pair.caller->receive(), Wire::Received::kBytes);
    EXPECT_EQ(pair.caller->next(2000)->kind, FrameKind::kGoodbye);
  }
}

TEST(Wire, AlteredRepeatedAndForeignFramesAreFound) {
  const auto is_found = [](const auto& change) {
    Encrypted pair;
    pair.caller->send(SetValue{"key", "value"});
    pair.listener->feed(change(pair.taken()));
    try {
      pair.listener->next(1000);
      return false;
    } catch (const Malformed& error) {
      return std::string(error.what()).find("altered on its way, or comes from somebody else") != std::string::npos;
    }
  };
  std::size_t length = 0;
  EXPECT_FALSE(is_found([&](const std::string& sent) { return length = sent.size(), sent; }));
  for (std::size_t bit = 0; bit < length * 8; bit += 3)
    EXPECT_TRUE(is_found([&](std::string sent) {
      sent[bit / 8] = static_cast<char>(sent[bit / 8] ^ (1 << bit % 8));
      return sent;
    })) << bit;
  Encrypted pair;
  pair.caller->send(FrameKind::kLeave);
  const std::string sent = pair.taken();
  pair.listener->feed(sent + sent);
  EXPECT_EQ(pair.listener->next(1000)->kind, FrameKind::kLeave);
  EXPECT_THROW(pair.listener->next(1000), Malformed);
  // In clear, as a job that does not encrypt has them.
  Encrypted other;
  Wire clear(UniqueFd(::dup(other.caller->fd())), Handshake::listen(Handshake::Port::kStore, {}));
  clear.send(SetValue{"key", std::string(100, 'v')});
  other.listener->feed(other.taken());
  EXPECT_THROW(other.listener->next(1000), Malformed);
}

}  // namespace
}  // namespace lockstep::comm
