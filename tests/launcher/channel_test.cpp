#include "launcher/channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <future>

#include "base/error.h"
#include "tests/support/golden_bytes.h"
#include "tests/support/temporary_directory.h"

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
                            encode(StopNotice{15}) + encode(Ended{{ExitStatus::How::kSignalled, 9}, true, now, 2}) +
                            encode(Output{1, ""}) + encode(Signal{10}) +
                            encode(Status{{.kind = StatusReport::Kind::kMissingRanks, .ranks = {1, 2}, .text = "x"}}) +
                            encode(Flight{-5, std::string("\0z", 2)});
  for (std::size_t step = 1; step <= bytes.size(); ++step) {
    Decoder decoder;
    std::vector<Message> messages;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
      decoder.feed(std::string_view(bytes).substr(at, step));
      while (auto message = decoder.next()) messages.push_back(std::move(*message));
    }
    ASSERT_EQ(messages.size(), 8u) << "pieces of " << step;
    EXPECT_EQ(std::get<Hello>(messages[0]).rank, 3);
    EXPECT_EQ(std::get<Hello>(messages[0]).pid, 4711);
    EXPECT_EQ(std::get<Hello>(messages[0]).host, "host-a");
    EXPECT_EQ(std::get<Output>(messages[1]).stream, 2);
    EXPECT_EQ(std::get<Output>(messages[1]).bytes, std::string("a\0\xff\n", 4));
    EXPECT_EQ(std::get<StopNotice>(messages[2]).signal_number, 15);
    EXPECT_EQ(std::get<Ended>(messages[3]).exit_status, (ExitStatus{ExitStatus::How::kSignalled, 9}));
    EXPECT_TRUE(std::get<Ended>(messages[3]).stop_requested);
    EXPECT_EQ(std::get<Ended>(messages[3]).at, now);
    EXPECT_EQ(std::get<Ended>(messages[3]).memory_kills, 2);
    EXPECT_EQ(std::get<Signal>(messages[5]).signal_number, 10);
    EXPECT_EQ(std::get<Status>(messages[6]).report,
              (StatusReport{.kind = StatusReport::Kind::kMissingRanks, .ranks = {1, 2}, .text = "x"}));
    EXPECT_EQ(std::get<Flight>(messages[7]).at_ns, -5);
    EXPECT_EQ(std::get<Flight>(messages[7]).bytes, std::string("\0z", 2));
  }
}

TEST(DecoderTest, BytesAreThoseOfEarlierVersions) {
  const Clock::time_point at{std::chrono::nanoseconds(1234567890123)};
  const std::pair<const char*, Message> golden[] = {
      {"0e000000000300000067120000686f73742d61", Hello{3, 4711, "host-a"}},
      {"0500000001026100ff0a", Output{2, std::string("a\0\xff\n", 4)}},
      {"04000000020f000000", StopNotice{15}},
      {"1600000003010900000001cb04fb711f0100000200000000000000", Ended{{ExitStatus::How::kSignalled, 9}, true, at, 2}},
      {"04000000040a000000", Signal{10}},
      {"110000000506000000686f73742d626f727465642078", StartDaemon{"host-b", "orted x"}},
      {"2100000006050201000000000000000000000000000000000000000000010000000200000078",
       Status{{.kind = StatusReport::Kind::kMissingRanks, .ranks = {1, 2}, .text = "x"}}},
      {"180000000609000000feffffff0000000000010000000000000000d03f",
       Status{{.kind = StatusReport::Kind::kProgress, .number = -2, .step = 1ll << 40, .seconds = 0.25}}},
      {"0a00000007fbffffffffffffff007a", Flight{-5, std::string("\0z", 2)}},
      {"1600000003020200000000cb04fb711f010000ffffffffffffffff", Ended{{ExitStatus::How::kNotStarted, 2}, false, at}},
  };
  for (const auto& [bytes, message] : golden)
    testing::expect_golden(bytes, message, encode, [](const std::string& arrived) {
      Decoder decoder;
      decoder.feed(arrived);
      return decoder.next().value();
    });
}

TEST(DecoderTest, UntrustedBytesAreErrors) {
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

TEST(ChannelTest, UnsentBytesAreQueued) {
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

TEST(ChannelTest, BytesSentBeforeExitArrive) {
  auto [from, to] = connected();
  from.send(Ended{{ExitStatus::How::kExited, 3}, false, Clock::now()});
  from.close();
  EXPECT_EQ(to.receive(), Channel::Received::kBytes);
  EXPECT_EQ(std::get<Ended>(*to.next()).exit_status.value, 3);
  EXPECT_EQ(to.receive(), Channel::Received::kGone);
  to.send(Signal{15});  // nobody is there: dropped, no SIGPIPE
  EXPECT_EQ(to.pending_bytes(), 0u);
}

TEST(ChannelTest, AddressesThatLeadNowhere) {
  EXPECT_THROW(connect_to("tcp:host:1", {}), DeviceError);
  EXPECT_THROW(connect_to("unix:/nonexistent/socket", {}), DeviceError);
  EXPECT_THROW(listen_at("/tmp/" + std::string(200, 'a')), DeviceError);
}

/// A listener in a directory of its own, and threads that connect to it.
class ListenerTest : public ::testing::Test {
 protected:
  ListenerTest() : path_(directory_.path().string() + "/s") {}
  /// What connect_to() does in a thread: nothing, or its error.
  std::future<std::string> connect(const JobSecret& secret) {
    return std::async(std::launch::async, [this, secret]() -> std::string {
      try {
        Channel channel(connect_to("unix:" + path_, secret));
        channel.send(Signal{7});
        return {};
      } catch (const DeviceError& error) {
        return error.what();
      }
    });
  }
  UniqueFd stranger() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return socket;
  }
  static UniqueFd wait_for(AuthenticatedListener& listener, Deadline deadline = Deadline::after_seconds(20)) {
    while (!deadline.expired()) {
      if (UniqueFd socket = accept_from(listener)) return socket;
      pollfd look = {listener.fd(), POLLIN, 0};
      ::poll(&look, 1, 50);
    }
    return {};
  }

  testing::TemporaryDirectory directory_;
  std::string path_;
};

TEST_F(ListenerTest, OnlyThoseWhoKnowTheSecretGetIn) {
  const JobSecret secret = JobSecret::random();
  AuthenticatedListener listener = listen_for_job(path_, secret, 2);
  auto impostor = connect(JobSecret::random());
  EXPECT_FALSE(wait_for(listener, Deadline::after_seconds(0.3)));
  EXPECT_THAT(impostor.get(), ::testing::HasSubstr("does not let this process in: it does not know this job's secret"));
  // Who skips the handshake is not heard.
  const UniqueFd loud = stranger();
  const std::string lie = encode(Hello{0, 1, "h"}) + encode(Ended{{ExitStatus::How::kExited, 0}, false, Clock::now()});
  ASSERT_EQ(::send(loud.get(), lie.data(), lie.size(), 0), static_cast<ssize_t>(lie.size()));
  auto rank = connect(secret);
  Channel channel(wait_for(listener));
  EXPECT_EQ(rank.get(), "");
  ASSERT_EQ(channel.receive(), Channel::Received::kBytes);
  EXPECT_EQ(std::get<Signal>(*channel.next()).signal_number, 7);
  EXPECT_THAT(*listener.next_complaint(), ::testing::HasSubstr("it does not know this job's secret"));
  EXPECT_THAT(*listener.next_complaint(), ::testing::HasSubstr("it does not speak lockstep's protocol"));
  EXPECT_FALSE(listener.next_complaint());
}

TEST_F(ListenerTest, SilentStrangersKeepNobodyOutAndAreClosed) {
  const JobSecret secret = JobSecret::random();
  AuthenticatedListener listener = listen_for_job(path_, secret, 1);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 300; ++i) {
    silent.push_back(stranger());
    EXPECT_FALSE(accept_from(listener));
  }
  auto rank = connect(secret);
  EXPECT_TRUE(wait_for(listener));
  EXPECT_EQ(rank.get(), "");
  // Whoever is left is closed when its time is over, though nothing else happens.
  pollfd last = {silent.back().get(), POLLIN, 0};
  const auto end = Deadline::after_seconds(20);
  while (::poll(&last, 1, 50) == 0 && !end.expired()) accept_from(listener);
  char byte = 0;
  EXPECT_EQ(::recv(silent.back().get(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(ListenerTest, ALauncherThatIsNone) {
  UniqueFd listener = listen_at(path_);
  auto rank = connect(JobSecret::random());
  pollfd look = {listener.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&look, 1, 10'000), 1);
  const UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const std::string lie = encode(Signal{9});
  ASSERT_EQ(::send(socket.get(), lie.data(), lie.size(), 0), static_cast<ssize_t>(lie.size()));
  EXPECT_THAT(rank.get(), ::testing::HasSubstr("it does not speak lockstep's protocol"));
}

}  // namespace
}  // namespace lockstep::launcher
