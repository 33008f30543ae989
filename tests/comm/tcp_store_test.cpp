// Ranks that join over TCP: threads of one process, and strangers.
#include "comm/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/tcp/socket.h"
#include "comm/tcp/wire.h"
#include "lockstep/comm/world.h"
#include "tests/support/free_port.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

Deadline soon() { return Deadline::after(10s); }

World world_of(int rank, int size, int port, const std::string& host = "127.0.0.1") {
  World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size, .starter = Starter::kTorchrun};
  world.rendezvous.host = host;
  world.rendezvous.port = port;
  return world;
}

/// The error that `action` throws, which must be an E.
template <class E, class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    EXPECT_EQ(error.line().find('\n'), std::string::npos);
    return error.line();
  } catch (const std::exception& error) {
    return fmt::format("another error: {}", error.what());
  }
  return "no error";
}

/// Runs `body` on threads, one per rank, and returns what each one throws, as text.
std::vector<std::string> on_ranks(int size, int port, const std::function<void(Store&)>& body,
                                  const std::string& host = "127.0.0.1") {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        // The highest ranks come first.
        std::this_thread::sleep_for(Millis(5 * (size - rank)));
        const auto store = make_tcp_store(world_of(rank, size, port, host), soon());
        body(*store);
      } catch (const PeerError& error) {
        errors[static_cast<std::size_t>(rank)] = fmt::format("peer error {}: {}", error.code(), error.what());
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.line();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// They are one job, to its end.
void work_and_leave(Store& first, Store& second) {
  second.set("a", "1");
  EXPECT_EQ(first.get("a", soon()), "1");
  std::thread leaving([&] { second.leave(soon()); });
  first.leave(soon());
  leaving.join();
}

/// Comes to the server as a rank would, byte by byte if need be.
class Stranger {
 public:
  explicit Stranger(int port) : socket_(connect_to(world_of(1, 2, port).rendezvous, soon())) {}

  int fd() const { return socket_.get(); }
  void say(const std::string& bytes) {
    ASSERT_EQ(::write(fd(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  /// Says who it is, and hears the answer: empty if it is let in.
  std::string hello(std::uint32_t size, std::uint32_t rank, const JobSecret& secret = {}, const std::string& job = "") {
    const StoreIdentity who{size, rank, 1, "h", job};
    wire_.emplace(std::move(socket_), Handshake::call(Handshake::Port::kStore, secret, pack(who)));
    const auto end = soon();
    while (wire_->advance() == Handshake::State::kInProgress && !end.expired()) wait(wire_->fd());
    EXPECT_NE(wire_->handshake().state(), Handshake::State::kInProgress);
    return wire_->handshake().why();
  }
  Wire& wire() { return *wire_; }
  /// All that the server says until it closes the connection; nothing if it does not.
  std::optional<std::string> last_words() {
    std::string words;
    const auto end = soon();
    while (!end.expired()) {
      wait(fd());
      std::array<char, 4096> chunk;
      const ssize_t got = ::recv(fd(), chunk.data(), chunk.size(), MSG_DONTWAIT);
      if (got > 0) words.append(chunk.data(), static_cast<std::size_t>(got));
      if (got == 0 || (got < 0 && errno != EAGAIN)) return words;
    }
    return std::nullopt;
  }

 private:
  static void wait(int fd) {
    pollfd look{fd, POLLIN, 0};
    ::poll(&look, 1, 100);
  }

  UniqueFd socket_;
  std::optional<Wire> wire_;
};

/// A frame of the handshake.
std::string hello_frame(int kind, const Packer& body) {
  return Packer().number(static_cast<std::uint32_t>(body.bytes().size() + 1)).bytes() + static_cast<char>(kind) +
         body.bytes();
}

TEST(TcpStore, ValuesBarriersAndTexts) {
  for (const int size : {1, 2, 3, 7}) {
    expect_no_errors(on_ranks(size, testing::free_port(), [&](Store& store) {
      ASSERT_EQ(store.size(), size);
      const int next = (store.rank() + 1) % size;
      store.set(fmt::format("key {}", store.rank()), std::to_string(store.rank() * 10));
      EXPECT_EQ(store.get(fmt::format("key {}", next), soon()), std::to_string(next * 10));
      store.wait(std::vector<std::string>{"key 0", fmt::format("key {}", size - 1)}, soon());
      store.barrier("first", soon());
      const auto texts =
          store.all_gather_text("ranks", std::string(static_cast<std::size_t>(store.rank()), 'x'), soon());
      for (int r = 0; r < size; ++r)
        EXPECT_EQ(texts[static_cast<std::size_t>(r)], std::string(static_cast<std::size_t>(r), 'x'));
      EXPECT_EQ(store.broadcast_text("id", store.rank() == size - 1 ? "the last one's" : "", size - 1, soon()),
                "the last one's");
      store.leave(soon());
      EXPECT_THAT(error_of<UsageError>([&] { store.set("k", "v"); }), HasSubstr("have shut this group down"));
    }));
  }
}

TEST(TcpStore, AnyBytesUpToTheLimits) {
  const std::string largest(Store::kMostValueBytes, '\xff');
  const std::string binary("\0\n\xfe lockstep", 12);
  const std::string long_key(Store::kMostKeyBytes, 'k');
  expect_no_errors(on_ranks(3, testing::free_port(), [&](Store& store) {
    if (store.rank() == 1) {
      store.set("largest", largest);
      store.set("empty", "");
      store.set(long_key, binary);
    }
    EXPECT_TRUE(store.get("largest", soon()) == largest);
    EXPECT_EQ(store.get("empty", soon()), "");
    EXPECT_EQ(store.get(long_key, soon()), binary);
    EXPECT_THAT(error_of<UsageError>([&] { store.set(long_key + "k", ""); }), HasSubstr("a key of 257 bytes"));
    EXPECT_THAT(error_of<UsageError>([&] { store.set("", ""); }), HasSubstr("a key of 0 bytes"));
    EXPECT_THAT(error_of<UsageError>([&] { store.set("k", largest + "x"); }), HasSubstr("1048577 bytes under key 'k'"));
    const auto all = store.all_gather_text("large", largest, soon());
    for (const std::string& one : all) EXPECT_TRUE(one == largest);
    store.leave(soon());
  }));
}

TEST(TcpStore, TryGetDoesNotWait) {
  expect_no_errors(on_ranks(2, testing::free_port(), [&](Store& store) {
    store.set(fmt::format("mine {}", store.rank()), "x");
    const std::vector<std::string> wanted = {"never", fmt::format("mine {}", store.rank())};
    for (int i = 0; i < 200; ++i)
      EXPECT_THAT(store.try_get(wanted, Deadline::after(0s)),
                  ElementsAre(std::nullopt, std::optional<std::string>("x")));
    EXPECT_THAT(store.try_get(wanted, Deadline::after(30ms)),
                ElementsAre(std::nullopt, std::optional<std::string>("x")));
    // Late answers to what was asked before are not taken for new ones.
    store.barrier("then", soon());
    store.set(fmt::format("late {}", store.rank()), "y");
    EXPECT_EQ(store.get(fmt::format("late {}", 1 - store.rank()), soon()), "y");
    store.leave(soon());
  }));
}

TEST(TcpStore, NamesAndIpv6) {
  for (const char* host : {"localhost", "::1", "ip6-localhost"}) {
    const int port = testing::free_port();
    try {
      listen_at(world_of(0, 2, port, host).rendezvous, false);
    } catch (const Error&) {
      continue;  // not on this machine
    }
    expect_no_errors(on_ranks(
        2, port,
        [](Store& store) {
          store.barrier("here", soon());
          store.leave(soon());
        },
        host));
  }
  EXPECT_EQ(text_of(Rendezvous{"::1", 7, ""}), "[::1]:7");
  EXPECT_EQ(text_of(Rendezvous{"a", 7, ""}), "a:7");
}

TEST(TcpStore, OneRendezvousAfterTheOther) {
  const int port = testing::free_port();
  for (int i = 0; i < 20; ++i)
    expect_no_errors(on_ranks(3, port, [&](Store& store) {
      EXPECT_EQ(store.broadcast_text("job", std::to_string(i), 0, soon()), std::to_string(i));
      store.leave(soon());
    }));
}

// A rank is in the next job before rank 0 has ended this one: it waits for the next rank 0.
TEST(TcpStore, ARankOfTheNextJobWaitsForItsRankZero) {
  const int port = testing::free_port();
  std::thread other([&] {
    for (int job = 0; job < 2; ++job) {
      const auto store = make_tcp_store(world_of(1, 2, port), soon());
      EXPECT_EQ(store->get("job", soon()), std::to_string(job));
      store->leave(soon());
    }
  });
  for (int job = 0; job < 2; ++job) {
    const auto store = make_tcp_store(world_of(0, 2, port), soon());
    store->set("job", std::to_string(job));
    std::this_thread::sleep_for(300ms);
    store->leave(soon());
  }
  other.join();
}

TEST(TcpStore, ARankThatNeverJoinsIsNamedAndAllEndAlike) {
  const int port = testing::free_port();
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  const auto begin = Clock::now();
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      const auto store = make_tcp_store(world_of(rank, 4, port), soon());
      const auto wait = Deadline::after(rank == 1 ? 300ms : 60s);
      if (rank == 1)
        errors[1] = error_of<TimeoutError>([&] { store->barrier("the start", wait); });
      else
        errors[static_cast<std::size_t>(rank)] = error_of<PeerError>([&] { store->barrier("the start", wait); });
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(Clock::now() - begin, 40s);
  EXPECT_THAT(errors[1],
              AllOf(HasSubstr("the start timed out after "), HasSubstr("waiting for rank 3, which has not joined"),
                    HasSubstr("start rank 3 with the same MASTER_ADDR")));
  for (const int rank : {0, 2})
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)], HasSubstr("rank 1: the start timed out")) << rank;
}

TEST(TcpStore, ARankThatDoesNotComeIsNamed) {
  const auto errors = on_ranks(3, testing::free_port(), [](Store& store) {
    store.barrier("all", soon());
    if (store.rank() == 2) {
      EXPECT_THAT(error_of<PeerError>([&] { store.get("nothing", soon()); }), HasSubstr("texts timed out"));
      return;
    }
    if (store.rank() == 0) std::this_thread::sleep_for(200ms);
    store.all_gather_text("texts", "x", Deadline::after(500ms));
  });
  EXPECT_THAT(errors[1], AllOf(HasSubstr("texts timed out after "), HasSubstr("waiting for rank 2 (host "),
                               HasSubstr("look at the log of rank 2")));
  EXPECT_THAT(errors[0], HasSubstr("peer error 5: rank 1: texts timed out"));
}

TEST(TcpStore, AKeyThatNobodySets) {
  const auto errors = on_ranks(2, testing::free_port(), [](Store& store) {
    store.barrier("all", soon());
    if (store.rank() == 0) store.wait(std::vector<std::string>{"a", "b"}, Deadline::after(100ms));
    error_of<PeerError>([&] { store.barrier("on", soon()); });
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("getting 'a', 'b' timed out after "), HasSubstr("all ranks have joined")));
}

TEST(TcpStore, RankZeroNeverComes) {
  const int port = testing::free_port();
  const auto begin = Clock::now();
  const std::string error =
      error_of<TimeoutError>([&] { make_tcp_store(world_of(1, 2, port), Deadline::after(400ms)); });
  EXPECT_THAT(error, AllOf(HasSubstr(fmt::format("rank 0 did not come to 127.0.0.1:{}", port)), HasSubstr("0.4"),
                           HasSubstr("Connection refused"), HasSubstr("MASTER_PORT")));
  EXPECT_LT(Clock::now() - begin, 10s);
}

TEST(TcpStore, PortInUse) {
  const int port = testing::free_port();
  const auto taken = listen_at(world_of(0, 2, port).rendezvous, false);
  EXPECT_THAT(error_of<UsageError>([&] { make_tcp_store(world_of(0, 2, port), soon()); }),
              AllOf(HasSubstr(fmt::format("127.0.0.1:{}: port {} is in use", port, port)), HasSubstr("MASTER_PORT")));
}

TEST(TcpStore, AHostWithoutAnAddress) {
  for (const int rank : {0, 1})
    EXPECT_THAT(error_of<UsageError>(
                    [&] { make_tcp_store(world_of(rank, 2, 29500, "no.such.host.invalid"), Deadline::after(0s)); }),
                AllOf(HasSubstr("MASTER_ADDR=\"no.such.host.invalid\" has no address"), HasSubstr("set MASTER_ADDR")));
}

// An address of somebody else's: the store does not fall back to all of this machine's.
TEST(TcpStore, AMasterAddressThatIsNotHere) {
  World world = world_of(0, 2, testing::free_port(), "192.0.2.1");
  EXPECT_THAT(error_of<UsageError>([&] { make_tcp_store(world, soon()); }),
              AllOf(HasSubstr("MASTER_ADDR=\"192.0.2.1\" (192.0.2.1) is no address of this machine"),
                    HasSubstr("LOCKSTEP_LISTEN")));
  // The user names the address if rank 0 is reached through a service or a router.
  world.rendezvous.listen = "127.0.0.1";
  const auto first = make_tcp_store(world, soon());
  const auto second = make_tcp_store(world_of(1, 2, world.rendezvous.port), soon());
  work_and_leave(*first, *second);
}

TEST(TcpStore, WhereToListen) {
  Rendezvous rendezvous{.host = "192.0.2.1", .port = testing::free_port(), .job = {}};
  for (const char* wrong : {"192.0.2.7", "no.such.host.invalid", " "}) {
    rendezvous.listen = wrong;
    EXPECT_THAT(error_of<UsageError>([&] { listen_at(rendezvous, true); }), HasSubstr("LOCKSTEP_LISTEN=\"")) << wrong;
  }
  rendezvous.listen = "127.0.0.1, 127.0.0.2";
  const auto two = listen_at(rendezvous, true);
  EXPECT_EQ(two.size(), 2u);
  EXPECT_TRUE(are_loopback(two));
  rendezvous.port = testing::free_port();
  rendezvous.listen = "0.0.0.0";
  EXPECT_FALSE(are_loopback(listen_at(rendezvous, true)));
  rendezvous = {.host = "127.0.0.1", .port = testing::free_port(), .job = {}};
  EXPECT_TRUE(are_loopback(listen_at(rendezvous, false)));
  rendezvous.port = testing::free_port();
  EXPECT_TRUE(are_loopback(listen_at(rendezvous, true)));  // it says what it is
}

/// Has taken rank 0's port, and says `words` to whoever comes first.
class Impostor {
 public:
  Impostor(int port, std::string words)
      : listeners_(listen_at(world_of(0, 2, port).rendezvous, false)), thread_([this, words = std::move(words)] {
          pollfd look{listeners_[0].get(), POLLIN, 0};
          ASSERT_EQ(::poll(&look, 1, 10'000), 1);
          const UniqueFd client(::accept4(listeners_[0].get(), nullptr, nullptr, SOCK_CLOEXEC));
          ASSERT_EQ(::write(client.get(), words.data(), words.size()), static_cast<ssize_t>(words.size()));
          std::this_thread::sleep_for(300ms);
        }) {}

 private:
  const std::vector<UniqueFd> listeners_;
  const std::jthread thread_;
};

TEST(TcpStore, SomethingElseListens) {
  const int port = testing::free_port();
  const Impostor server(port, "HTTP/1.1 400 Bad Request\r\n\r\n");
  EXPECT_THAT(error_of<UsageError>([&] { make_tcp_store(world_of(1, 2, port), soon()); }),
              AllOf(HasSubstr("is no rank 0 of lockstep"), HasSubstr("MASTER_PORT")));
}

TEST(TcpStore, SomethingListensAndSaysNothing) {
  const int port = testing::free_port();
  const auto listeners = listen_at(world_of(0, 2, port).rendezvous, false);
  EXPECT_THAT(error_of<TimeoutError>([&] { make_tcp_store(world_of(1, 2, port), Deadline::after(300ms)); }),
              HasSubstr("has not answered within "));
}

// A rejected peer gets the reason, and the job continues.
TEST(TcpStore, StrangersAreRejected) {
  const int port = testing::free_port();
  const auto first = make_tcp_store(world_of(0, 2, port), soon());
  Stranger silent(port);
  const auto last_words = [&](const std::string& bytes) {
    Stranger stranger(port);
    stranger.say(bytes);
    return stranger.last_words().value_or("still open");
  };
  // Without an answer.
  EXPECT_EQ(last_words("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "");
  EXPECT_EQ(last_words("locx"), "");
  EXPECT_EQ(last_words(std::string("lockstep\xff\xff\xff\xff", 12)), "");
  EXPECT_EQ(last_words(std::string("lockstep\0\0\0\0", 12)), "");
  EXPECT_EQ(last_words("lockstep" + hello_frame(1, Packer().number(kProtocolVersion))), "");
  EXPECT_EQ(last_words("lockstep" + hello_frame(2, Packer().text("a").text("b"))), "");
  // Of the first version: it understands the refusal.
  EXPECT_THAT(
      last_words("lockstep" + hello_frame(1, Packer().number(1).number(2).number(1).number(7).text("h").text(""))),
      HasSubstr("it speaks version 1 of the protocol"));
  const auto refusal = [&](std::uint32_t size, std::uint32_t rank, const JobSecret& secret = {},
                           const std::string& job = "") { return Stranger(port).hello(size, rank, secret, job); };
  EXPECT_THAT(refusal(3, 1), HasSubstr("rank 1 of 3 (WORLD_SIZE), and rank 0 is one of 2"));
  EXPECT_THAT(refusal(2, 2), HasSubstr("rank 2 of 2"));
  EXPECT_THAT(refusal(2, 0), HasSubstr("rank 0 has joined already"));
  EXPECT_THAT(refusal(2, 1, {}, "b"), HasSubstr("it is of job 'b'"));
  EXPECT_THAT(refusal(2, 1, JobSecret::random()),
              HasSubstr("it has a secret (LOCKSTEP_JOB_SECRET), and this side has none"));

  const auto second = make_tcp_store(world_of(1, 2, port), soon());
  EXPECT_THAT(refusal(2, 1), HasSubstr("rank 1 has joined already (host "));
  EXPECT_THAT(error_of<UsageError>([&] { make_tcp_store(world_of(2, 3, port), soon()); }),
              HasSubstr("it is rank 2 of 3 (WORLD_SIZE), and rank 0 is one of 2"));
  work_and_leave(*first, *second);
}

// A rank that turns out not to speak the protocol ends the job, with its name.
TEST(TcpStore, ARankThatSendsGarbage) {
  const int port = testing::free_port();
  for (const std::string& garbage : {std::string("\xff\xff\xff\x7f\0\0\0\0", 8), std::string("\1\0\0\0\0\0\0\0\x63", 9),
                                     std::string("\2\0\0\0\0\0\0\0\2x", 10)}) {
    const auto first = make_tcp_store(world_of(0, 2, port), soon());
    Stranger stranger(port);
    ASSERT_EQ(stranger.hello(2, 1), "");
    ASSERT_EQ(::write(stranger.wire().fd(), garbage.data(), garbage.size()), static_cast<ssize_t>(garbage.size()));
    EXPECT_THAT(error_of<DeviceError>([&] { first->get("a", soon()); }),
                HasSubstr("rank 1 (host h, pid 1) is no longer understood"));
  }
}

// Nobody's word makes a rank end as if it had done its work: neither zero, nor what becomes zero as an exit code.
TEST(TcpStore, AnExitCodeFromTheWireIsNeverSuccess) {
  for (const std::uint32_t code : {0u, 256u, 0x80000000u}) {
    const int port = testing::free_port();
    const auto first = make_tcp_store(world_of(0, 2, port), soon());
    Stranger stranger(port);
    ASSERT_EQ(stranger.hello(2, 1), "");
    stranger.wire().send(FrameKind::kGiveUp, pack(GivenUp{code, "all is well"}));
    EXPECT_THAT(error_of<DeviceError>([&] { first->get("a", soon()); }),
                AllOf(HasSubstr("rank 1 (host h, pid 1) is no longer understood"),
                      HasSubstr(fmt::format("it gives up with exit code {}", code))));
  }
}

World with_secret(World world, const JobSecret& secret, bool encrypts = false) {
  world.rendezvous.secret = secret;
  world.rendezvous.encrypts = encrypts;
  return world;
}

TEST(TcpStore, OnlyThoseWhoKnowTheSecretJoin) {
  const int port = testing::free_port();
  const auto secret = JobSecret::random();
  const auto first = make_tcp_store(with_secret(world_of(0, 2, port), secret), soon());
  EXPECT_THAT(Stranger(port).hello(2, 1), HasSubstr("it does not know this job's secret"));
  EXPECT_THAT(Stranger(port).hello(2, 1, JobSecret::random()), HasSubstr("it does not know this job's secret"));
  EXPECT_THAT(error_of<UsageError>([&] { make_tcp_store(world_of(1, 2, port), soon()); }),
              AllOf(HasSubstr("has refused this process: it does not know this job's secret (LOCKSTEP_JOB_SECRET)"),
                    HasSubstr("LOCKSTEP_JOB_SECRET (or none)"), ::testing::Not(HasSubstr(secret.text()))));
  const auto second = make_tcp_store(with_secret(world_of(1, 2, port), secret), soon());
  work_and_leave(*first, *second);
}

// All ranks of a job encrypt, or none: the one that differs gets an error, and the job continues.
TEST(TcpStore, ARankThatEncryptsWhereOthersDoNotIsRefused) {
  const JobSecret secret = JobSecret::random();
  for (const bool job_does : {false, true}) {
    const int port = testing::free_port();
    const auto rank_of = [&](int rank, bool encrypts) {
      return with_secret(world_of(rank, 2, port), secret, encrypts);
    };
    std::thread first([&] {
      const auto store = make_tcp_store(rank_of(0, job_does), soon());
      EXPECT_EQ(store->all_gather_text("names", "zero", soon()), (std::vector<std::string>{"zero", "one"}));
      store->leave(soon());
    });
    EXPECT_THAT(error_of<UsageError>([&] { make_tcp_store(rank_of(1, !job_does), soon()); }),
                HasSubstr(job_does ? "has refused this process: it runs without --encrypt, and the others with it"
                                   : "has refused this process: it runs with --encrypt, and the others without it"));
    const auto store = make_tcp_store(rank_of(1, job_does), soon());
    EXPECT_EQ(store->all_gather_text("names", "one", soon()), (std::vector<std::string>{"zero", "one"}));
    store->leave(soon());
    first.join();
  }
}

TEST(TcpStore, NothingIsSentToAnImpostor) {
  const int port = testing::free_port();
  const Impostor welcoming(port,
                           "lockstep" + hello_frame(32, Packer().text(std::string(32, 'n'))) +
                               hello_frame(34, Packer().text(pack(StoreAnswer{0, "h"})).text(std::string(32, 'x'))));
  EXPECT_THAT(
      error_of<UsageError>([&] { make_tcp_store(with_secret(world_of(1, 2, port), JobSecret::random()), soon()); }),
      HasSubstr("is not this job's rank 0: it does not know this job's secret"));
}

// 64 strangers and the ranks fit: the silent ones are closed, those who speak stay, and no rank waits for them.
TEST(TcpStore, SilentStrangersKeepNobodyOut) {
  const int port = testing::free_port();
  const auto first = make_tcp_store(world_of(0, 3, port), soon());
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(std::make_unique<Stranger>(port));
  const auto second = make_tcp_store(world_of(1, 3, port), soon());
  for (int i = 0; i < 200; ++i) silent.push_back(std::make_unique<Stranger>(port));
  const auto third = make_tcp_store(world_of(2, 3, port), soon());
  EXPECT_EQ(silent.front()->last_words().value_or("still open"), "");
  third->set("a", "1");
  EXPECT_EQ(first->get("a", soon()), "1");
  EXPECT_EQ(second->get("a", soon()), "1");
}

// A byte at a time does not keep a place either.
TEST(TcpStore, WhoTricklesIsClosed) {
  const int port = testing::free_port();
  const auto first = make_tcp_store(world_of(0, 2, port), soon());
  Stranger stranger(port);
  const auto end = soon();
  bool open = true;
  for (const char byte : "lockstep" + hello_frame(1, Packer().number(kProtocolVersion).text(std::string(32, 'n')))) {
    if (!open || end.expired()) break;
    open = ::send(stranger.fd(), &byte, 1, MSG_NOSIGNAL) == 1;
    std::this_thread::sleep_for(200ms);
  }
  EXPECT_FALSE(open);
}

TEST(TcpStore, ARankThatEndsIsNamedAtOnce) {
  for (const int doomed : {0, 2}) {
    const int port = testing::free_port();
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      const auto store = make_tcp_store(world_of(doomed, 3, port), soon());
      store->barrier("all", soon());
      std::this_thread::sleep_for(200ms);
      ::kill(::getpid(), SIGKILL);
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == doomed) continue;
      threads.emplace_back([&, rank] {
        const auto store = make_tcp_store(world_of(rank, 3, port), soon());
        store->barrier("all", soon());
        const auto begin = Clock::now();
        EXPECT_THAT(error_of<DeviceError>([&] { store->barrier("never", soon()); }),
                    AllOf(HasSubstr(fmt::format("rank {} (host ", doomed)), HasSubstr("has ended")));
        EXPECT_LT(Clock::now() - begin, 7s) << "it is seen, not waited for until soon()";
        EXPECT_THAT(error_of<DeviceError>([&] { store->set("a", "b"); }), HasSubstr("has ended"));
      });
    }
    for (std::thread& thread : threads) thread.join();
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFSIGNALED(status));
  }
}

// Rank 0 keeps the server until all have left.
TEST(TcpStore, LeavingWaitsForTheSlowest) {
  expect_no_errors(on_ranks(3, testing::free_port(), [](Store& store) {
    store.barrier("all", soon());
    if (store.rank() == 0) {
      store.set("last word", "bye");
    } else {
      std::this_thread::sleep_for(Millis(150 * store.rank()));
      EXPECT_EQ(store.get("last word", soon()), "bye");
    }
    store.leave(soon());
  }));
  const auto errors = on_ranks(2, testing::free_port(), [](Store& store) {
    store.barrier("all", soon());
    if (store.rank() == 0)
      store.leave(Deadline::after(200ms));
    else
      std::this_thread::sleep_for(800ms);
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("leaving timed out after "), HasSubstr("waiting for rank 1 (host ")));
}

TEST(TcpStore, NothingIsLeftOpen) {
  const auto descriptors = [] {
    const int next = ::dup(0);
    ::close(next);
    return next;
  };
  const int port = testing::free_port();  // which has one
  const int before = descriptors();
  expect_no_errors(on_ranks(4, port, [](Store& store) {
    store.barrier("all", soon());
    store.leave(soon());
  }));
  EXPECT_EQ(descriptors(), before);
}

}  // namespace
}  // namespace lockstep::comm
