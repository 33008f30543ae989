#include "launcher/channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

std::pair<Channel, Channel> connected() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Channel(UniqueFd(ends[0])), Channel(UniqueFd(ends[1]))};
}

TEST(DecoderTest, MessagesSurviveAnyCutting) {
  const Clock::time_point now = Clock::now();
  const std::string bytes = encode(Hello{3, 4711, "host-a"}) + encode(Output{2, std::string("a\0\xff\n", 4)}) +
                            encode(Told{15}) + encode(Ended{{Ending::How::kSignalled, 9}, true, now}) +
                            encode(Output{1, ""}) + encode(Signal{10}) +
                            encode(Status{{.kind = StatusReport::Kind::kMissingRanks, .ranks = {1, 2}, .text = "x"}});
  for (std::size_t step = 1; step <= bytes.size(); ++step) {
    Decoder decoder;
    std::vector<Message> messages;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
      decoder.feed(std::string_view(bytes).substr(at, step));
      while (auto message = decoder.next()) messages.push_back(std::move(*message));
    }
    ASSERT_EQ(messages.size(), 7u) << "pieces of " << step;
    EXPECT_EQ(std::get<Hello>(messages[0]).rank, 3);
    EXPECT_EQ(std::get<Hello>(messages[0]).pid, 4711);
    EXPECT_EQ(std::get<Hello>(messages[0]).host, "host-a");
    EXPECT_EQ(std::get<Output>(messages[1]).stream, 2);
    EXPECT_EQ(std::get<Output>(messages[1]).bytes, std::string("a\0\xff\n", 4));
    EXPECT_EQ(std::get<Told>(messages[2]).signal_number, 15);
    EXPECT_EQ(std::get<Ended>(messages[3]).ending, (Ending{Ending::How::kSignalled, 9}));
    EXPECT_TRUE(std::get<Ended>(messages[3]).told);
    EXPECT_EQ(std::get<Ended>(messages[3]).at, now);
    EXPECT_EQ(std::get<Signal>(messages[5]).signal_number, 10);
    EXPECT_EQ(std::get<Status>(messages[6]).report,
              (StatusReport{.kind = StatusReport::Kind::kMissingRanks, .ranks = {1, 2}, .text = "x"}));
  }
}

TEST(DecoderTest, ForeignBytesAreErrors) {
  Decoder huge;
  huge.feed("GET / HTTP/1.1\r\n");
  EXPECT_THROW(huge.next(), MpiError);
  Decoder unknown;
  unknown.feed(std::string("\0\0\0\0\x09", 5));
  EXPECT_THROW(unknown.next(), MpiError);
  Decoder cut;
  cut.feed(std::string("\2\0\0\0\0ab", 7));
  EXPECT_THROW(cut.next(), MpiError);
  Decoder status;
  status.feed(std::string("\2\0\0\0\6ab", 7));
  EXPECT_THROW(status.next(), MpiError);
}

TEST(ChannelTest, WhatTheSocketDoesNotTakeWaits) {
  auto [from, to] = connected();
  const std::string piece(50'000, 'x');
  constexpr int kPieces = 100;
  for (int i = 0; i < kPieces; ++i) from.send(Output{1, piece});
  EXPECT_GT(from.pending_bytes(), 0u);
  int received = 0;
  while (received < kPieces) {
    ASSERT_NE(to.receive(), Channel::Received::kGone);
    while (auto message = to.next()) {
      EXPECT_EQ(std::get<Output>(*message).bytes, piece);
      ++received;
    }
    from.flush();
  }
  EXPECT_EQ(from.pending_bytes(), 0u);
  EXPECT_EQ(to.receive(), Channel::Received::kNothing);
}

TEST(ChannelTest, WhatWasSentBeforeDeathArrives) {
  auto [from, to] = connected();
  from.send(Ended{{Ending::How::kExited, 3}, false, Clock::now()});
  from.close();
  EXPECT_EQ(to.receive(), Channel::Received::kBytes);
  EXPECT_EQ(std::get<Ended>(*to.next()).ending.value, 3);
  EXPECT_EQ(to.receive(), Channel::Received::kGone);
  to.send(Signal{15});  // nobody is there: dropped, no SIGPIPE
  EXPECT_EQ(to.pending_bytes(), 0u);
}

TEST(ChannelTest, AddressesThatLeadNowhere) {
  EXPECT_THROW(connect_to("tcp:host:1"), DeviceError);
  EXPECT_THROW(connect_to("unix:/nonexistent/socket"), DeviceError);
  EXPECT_THROW(listen_at("/tmp/" + std::string(200, 'a')), DeviceError);
}

}  // namespace
}  // namespace lockstep::launcher
