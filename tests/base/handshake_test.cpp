// Two sides of a connection, and what strangers make of it.
#include "base/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "base/codec.h"
#include "base/error.h"
#include "base/scope.h"
#include "tests/support/refusal.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Failure = Handshake::Failure;
using Port = Handshake::Port;
using State = Handshake::State;

/// Moves bytes between both until neither has any; what the caller said, as an eavesdropper has it.
std::string run(Handshake& caller, Handshake& listener, const std::string& answer = "welcome") {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd calling(ends[0]), listening(ends[1]);
  std::string said;
  for (int round = 0; round < 8; ++round) {
    caller.advance(calling.get());
    char chunk[4096];
    const ssize_t there = ::recv(listening.get(), chunk, sizeof chunk, MSG_PEEK | MSG_DONTWAIT);
    if (there > 0) said.append(chunk, static_cast<std::size_t>(there));
    if (listener.advance(listening.get()) == State::kAsked) listener.accept(answer);
    listener.flush(listening.get());
  }
  return said;
}

TEST(Handshake, BothKnowTheSecret) {
  for (const JobSecret& secret : {JobSecret(), JobSecret::random()}) {
    Handshake caller = Handshake::call(Port::kStore, secret, std::string("who\0I am", 8));
    Handshake listener = Handshake::listen(Port::kStore, secret);
    const std::string said = run(caller, listener);
    EXPECT_EQ(caller.state(), State::kDone) << caller.why();
    EXPECT_EQ(listener.state(), State::kDone) << listener.why();
    EXPECT_EQ(listener.identity(), std::string("who\0I am", 8));
    EXPECT_EQ(caller.answer(), "welcome");
    if (!secret.empty()) {
      EXPECT_THAT(said, Not(HasSubstr(secret.text())));
    }
  }
}

TEST(Handshake, EachDifferenceIsFound) {
  const JobSecret secret = JobSecret::random();
  const auto fails = [&](Port at, const JobSecret& with) {
    Handshake caller = Handshake::call(at, with, "me");
    Handshake listener = Handshake::listen(Port::kStore, secret);
    run(caller, listener);
    EXPECT_EQ(listener.failure(), Failure::kSecret);
    EXPECT_EQ(listener.identity(), "");
    EXPECT_EQ(caller.failure(), Failure::kRefused);
    return caller.why();
  };
  EXPECT_THAT(fails(Port::kStore, JobSecret::random()), HasSubstr("it does not know this job's secret"));
  EXPECT_THAT(fails(Port::kStore, {}), HasSubstr("LOCKSTEP_JOB_SECRET"));
  fails(Port::kData, secret);
  fails(Port::kLauncher, secret);
}

TEST(Handshake, BothEncryptOrNeitherDoes) {
  const JobSecret secret = JobSecret::random();
  for (const bool caller_does : {false, true})
    for (const bool listener_does : {false, true}) {
      Handshake caller = Handshake::call(Port::kStore, secret, "me", caller_does);
      Handshake listener = Handshake::listen(Port::kStore, secret, listener_does);
      run(caller, listener);
      if (caller_does == listener_does) {
        EXPECT_EQ(caller.state(), State::kDone) << caller.why();
        continue;
      }
      EXPECT_EQ(listener.failure(), Failure::kRefused);
      EXPECT_EQ(listener.identity(), "");
      EXPECT_EQ(caller.failure(), Failure::kRefused);
      EXPECT_THAT(caller.why(), HasSubstr(caller_does ? "it runs with --encrypt, and the others without it"
                                                      : "it runs without --encrypt, and the others with it"));
    }
  // If their secrets differ too, the error names only that: the other claims of the caller are not trusted.
  Handshake caller = Handshake::call(Port::kStore, JobSecret::random(), "me", true);
  Handshake listener = Handshake::listen(Port::kStore, secret, false);
  run(caller, listener);
  EXPECT_EQ(listener.failure(), Failure::kSecret);
}

// Somebody in the middle who changes what the caller says of encryption has changed what its proof is of.
TEST(Handshake, NobodyInBetweenTurnsEncryptionOff) {
  const JobSecret secret = JobSecret::random();
  for (const bool caller_does : {false, true}) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const UniqueFd near(ends[0]), far(ends[1]);
    Handshake caller = Handshake::call(Port::kStore, secret, "me", caller_does);
    Handshake listener = Handshake::listen(Port::kStore, secret, !caller_does);
    const auto said = [&](Handshake& who) {
      who.flush(near.get());
      char chunk[4096];
      const ssize_t got = ::recv(far.get(), chunk, sizeof chunk, MSG_DONTWAIT);
      return std::string(chunk, got < 0 ? 0 : static_cast<std::size_t>(got));
    };
    listener.feed(said(caller));
    caller.feed(said(listener));
    std::string prove = said(caller);
    // u32 length, u8 kind, text "me", u32, text proof
    char& claim = prove.at(4 + 1 + 4 + 2);
    ASSERT_EQ(claim, caller_does ? 1 : 0);
    claim = caller_does ? 0 : 1;
    EXPECT_EQ(listener.feed(prove), State::kFailed);
    EXPECT_EQ(listener.failure(), Failure::kSecret);
  }
}

// What one side encrypts the other decrypts; each direction and each connection has a key of its own.
TEST(Handshake, KeysAreOfOneConnectionAndOneDirection) {
  const JobSecret secret = JobSecret::random();
  std::vector<std::string> sealed;
  for (int connection = 0; connection < 2; ++connection) {
    Handshake caller = Handshake::call(Port::kData, secret, "me", true);
    Handshake listener = Handshake::listen(Port::kData, secret, true);
    run(caller, listener);
    ASSERT_EQ(caller.state(), State::kDone) << caller.why();
    SessionCiphers callers = caller.take_ciphers(), listeners = listener.take_ciphers();
    sealed.push_back(callers.out.seal_whole("the same"));
    sealed.push_back(listeners.out.seal_whole("the same"));
    EXPECT_EQ(listeners.in.open_whole(sealed[sealed.size() - 2]), "the same");
    EXPECT_EQ(callers.in.open_whole(sealed.back()), "the same");
  }
  for (std::size_t i = 0; i < sealed.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(sealed[i], sealed[j]) << i << " and " << j;
}

// What somebody has overheard opens no second connection: the listener's nonce is another one.
TEST(Handshake, AReplayProvesNothing) {
  const JobSecret secret = JobSecret::random();
  Handshake caller = Handshake::call(Port::kData, secret, "me");
  Handshake listener = Handshake::listen(Port::kData, secret);
  const std::string said = run(caller, listener);
  ASSERT_EQ(listener.state(), State::kDone);
  Handshake again = Handshake::listen(Port::kData, secret);
  EXPECT_EQ(again.feed(said), State::kFailed);
  EXPECT_EQ(again.failure(), Failure::kSecret);
}

// Nor does a caller's own proof, sent back to it as the listener's.
TEST(Handshake, AReflectionProvesNothing) {
  const JobSecret secret = JobSecret::random();
  Handshake caller = Handshake::call(Port::kData, secret, "");
  Handshake listener = Handshake::listen(Port::kData, secret);
  const std::string said = run(caller, listener);
  const std::string proof = said.substr(said.size() - 32);
  Handshake second = Handshake::call(Port::kData, secret, "");
  const auto frame = [](int kind, const Packer& body) {
    return Packer().number(static_cast<std::uint32_t>(body.bytes().size() + 1)).bytes() + static_cast<char>(kind) +
           body.bytes();
  };
  EXPECT_EQ(second.feed("lockstep" + frame(32, Packer().text(std::string(32, 'n'))) +
                        frame(34, Packer().text("").text(proof))),
            State::kFailed);
  EXPECT_EQ(second.failure(), Failure::kSecret);
}

TEST(Handshake, NothingIsReadBeyondIt) {
  const JobSecret secret = JobSecret::random();
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd calling(ends[0]), listening(ends[1]);
  Handshake caller = Handshake::call(Port::kData, secret, "me");
  Handshake listener = Handshake::listen(Port::kData, secret);
  while (listener.state() != State::kAsked) caller.advance(calling.get()), listener.advance(listening.get());
  listener.accept({});
  listener.flush(listening.get());
  ASSERT_EQ(::send(listening.get(), "data", 4, 0), 4);
  EXPECT_EQ(caller.advance(calling.get()), State::kDone);
  char chunk[16];
  ASSERT_EQ(::recv(calling.get(), chunk, sizeof chunk, MSG_DONTWAIT), 4);
  EXPECT_EQ(std::string(chunk, 4), "data");
}

TEST(Handshake, OtherBytesAreRejectedEarly) {
  const auto why = [](const std::string& bytes) {
    Handshake listener = Handshake::listen(Port::kStore, JobSecret::random());
    listener.feed(bytes);
    EXPECT_EQ(listener.state(), State::kFailed) << bytes;
    return listener.why();
  };
  EXPECT_EQ(why("GET / HTTP/1.1\r\n\r\n"), "it does not speak lockstep's protocol");
  EXPECT_EQ(why("locx"), "it does not speak lockstep's protocol");
  EXPECT_THAT(why(std::string("lockstep\xff\xff\xff\xff", 12)), HasSubstr("a hello of 4294967295 bytes"));
  EXPECT_THAT(why(std::string("lockstep\0\4\0\0\1", 13) + std::string(1023, 'x')), HasSubstr("protocol"));
  EXPECT_THAT(why(std::string("lockstep\1\4\0\0", 12)), HasSubstr("a hello of 1025 bytes, where 1024 are possible"));
  EXPECT_THAT(why(std::string("lockstep\0\0\0\0", 12)), HasSubstr("a hello of 0 bytes"));
  EXPECT_THAT(why(std::string("lockstep\5\0\0\0\1\1\0\0\0", 17)), HasSubstr("it speaks version 1 of the protocol"));
  EXPECT_THAT(why(std::string("lockstep\1\0\0\0\2", 13)), HasSubstr("it does not say hello"));
  // A listener's words reach no terminal as they are.
  Handshake caller = Handshake::call(Port::kStore, {}, "");
  caller.feed(std::string("lockstep\x0a\0\0\0\x41\5\0\0\0no\x1b[2", 22));
  EXPECT_EQ(caller.failure(), Failure::kRefused);
  EXPECT_EQ(caller.why(), "no [2");
}

TEST(JobSecret, IsRandomAndSigns) {
  const JobSecret one = JobSecret::random(), other = JobSecret::random();
  EXPECT_EQ(one.text().size(), 32u);
  EXPECT_NE(one.text(), other.text());
  EXPECT_NE(one.derive("a").text(), one.derive("b").text());
  // RFC 4231, test case 2.
  const std::string digest = JobSecret::of_text("Jefe").sign("what do ya want for nothing?");
  std::string text;
  for (const char byte : digest) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  EXPECT_EQ(text, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_TRUE(equal_in_constant_time("ab", "ab"));
  EXPECT_FALSE(equal_in_constant_time("ab", "ac"));
  EXPECT_FALSE(equal_in_constant_time("ab", "abc"));
}

TEST(JobSecret, OfTheEnvironment) {
  const auto of = [](const std::string& value) {
    return JobSecret::from(
        [&](const std::string& name) { return name == "LOCKSTEP_JOB_SECRET" ? std::optional(value) : std::nullopt; });
  };
  EXPECT_TRUE(JobSecret::from([](const std::string&) { return std::nullopt; }).empty());
  EXPECT_EQ(of("0123456789abcdef").text(), "0123456789abcdef");
  for (const std::string& wrong : {std::string(), std::string("hunter2"), std::string(1025, 'x')}) {
    const auto error = testing::thrown<UsageError>([&] { of(wrong); });
    EXPECT_THAT(error.line(), HasSubstr(fmt::format("has {} characters, where 16 to 1024", wrong.size())));
    EXPECT_THAT(error.line(), Not(HasSubstr("hunter2")));
  }
}

}  // namespace
}  // namespace lockstep
