// Messages of one link, whole and altered on the way.
#include "comm/hosts/link.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::comm {
namespace {

struct SocketPair {
  SocketPair() {
    int ends[2];
    LOCKSTEP_ASSERT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    near.reset(ends[0]);
    far.reset(ends[1]);
    const int bytes = 1 << 20;
    ::setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    ::setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  UniqueFd near, far;
};

struct Altered {
  Link::Part part;
};

/// Keeps what arrives; takes it once `asked` has come down to zero.
class Keeper final : public Link::Sink {
 public:
  std::byte* room_for(Link&, const MessageHeader& header) override {
    if (asked-- > 0) return nullptr;
    room.assign(header.bytes + 1, std::byte{0});
    return room.data();
  }
  void arrived(Link&, const MessageHeader& header) override {
    headers.push_back(header);
    payloads.emplace_back(room.begin(), room.end() - 1);
  }
  [[noreturn]] void altered(Link&, Link::Part part, const MessageHeader&) override { throw Altered{part}; }

  int asked = 0;
  std::vector<std::byte> room;
  std::vector<MessageHeader> headers;
  std::vector<std::vector<std::byte>> payloads;
};

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t key) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(SplitMix64::word(key, i));
  return bytes;
}

MessageHeader header_of(std::size_t bytes) {
  MessageHeader header;
  header.op.op_index = 3;
  header.op.history = 0x123456789abcdef;
  header.op.count = 1000;
  header.bytes = static_cast<std::uint32_t>(bytes);
  return header;
}

enum class Mode { kClear, kEncrypted };

/// Every pair of ends gets the same keys, unlike real connections, so that tests can replay what was recorded.
std::optional<SessionCiphers> ciphers_of(Mode mode) {
  if (mode == Mode::kClear) return std::nullopt;
  const std::string key(Aead::kKeyBytes, 'k');
  return SessionCiphers{Aead(Aead::Use::kSeals, key), Aead(Aead::Use::kOpens, key)};
}

/// What a message has beside its payload, of which there are bytes.
std::size_t header_bytes(Mode mode) { return sizeof(MessageHeader) + (mode == Mode::kClear ? 0 : Aead::kTagBytes); }
std::size_t trailer_bytes(Mode mode) { return mode == Mode::kClear ? 0 : Aead::kTagBytes; }

/// The bytes of messages with these payloads, as they travel.
std::vector<std::byte> on_the_wire(const std::vector<std::vector<std::byte>>& payloads, Mode mode = Mode::kClear) {
  SocketPair sockets;
  Link link(std::move(sockets.near), 0, 0, ciphers_of(mode));
  std::vector<std::byte> all;
  for (const auto& payload : payloads) {
    link.begin(header_of(payload.size()), payload.data());
    while (link.sending()) {
      EXPECT_TRUE(link.send_some());
      std::vector<std::byte> some(1 << 16);
      const ssize_t got = ::recv(sockets.far.get(), some.data(), some.size(), 0);
      all.insert(all.end(), some.begin(), some.begin() + std::max<ssize_t>(got, 0));
    }
  }
  std::vector<std::byte> some(1 << 16);
  for (ssize_t got = 0; (got = ::recv(sockets.far.get(), some.data(), some.size(), 0)) > 0;)
    all.insert(all.end(), some.begin(), some.begin() + got);
  return all;
}

/// Gives `bytes` to a link, `piece` at a time.
void receive(const std::vector<std::byte>& bytes, std::size_t piece, Keeper& keeper, Mode mode = Mode::kClear) {
  SocketPair sockets;
  Link link(std::move(sockets.near), 1, 7, ciphers_of(mode));
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    const std::size_t count = std::min(piece, bytes.size() - at);
    ASSERT_EQ(::send(sockets.far.get(), bytes.data() + at, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
    try {
      while (link.receive_some(keeper) || link.is_held()) {
      }
    } catch (const Altered&) {
      // Nothing after it is believed.
      EXPECT_FALSE(link.receive_some(keeper));
      throw;
    }
  }
}

class BothLinks : public ::testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(Link, BothLinks, ::testing::Values(Mode::kClear, Mode::kEncrypted), [](const auto& one) {
  return std::string(one.param == Mode::kClear ? "clear" : "encrypted");
});

TEST_P(BothLinks, MessagesArriveIntactInAnyChunks) {
  const std::vector<std::vector<std::byte>> payloads = {random_bytes(1, 1),   {}, random_bytes(40'000, 2),
                                                        random_bytes(513, 3), {}, random_bytes(70'000, 4)};
  const Mode mode = GetParam();
  const auto bytes = on_the_wire(payloads, mode);
  ASSERT_EQ(bytes.size(), payloads.size() * header_bytes(mode) + 1 + 40'000 + 513 + 70'000 + 4 * trailer_bytes(mode));
  for (const std::size_t piece : {1u, 79u, 81u, 111u, 113u, 4096u, 50'000u}) {
    Keeper keeper;
    keeper.asked = 2;
    receive(bytes, piece, keeper, mode);
    EXPECT_EQ(keeper.payloads, payloads) << piece;
    EXPECT_EQ(keeper.headers.back().op.history, 0x123456789abcdefu);
  }
}

TEST_P(BothLinks, HeaderBitFlipsAreDetectedBeforeUse) {
  const Mode mode = GetParam();
  const auto sent = on_the_wire({random_bytes(100, 1)}, mode);
  for (std::size_t bit = 0; bit < 8 * header_bytes(mode); ++bit) {
    auto bytes = sent;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    Keeper keeper;
    try {
      receive(bytes, bytes.size(), keeper, mode);
      ADD_FAILURE() << "bit " << bit << " was missed";
    } catch (const Altered& found) {
      EXPECT_EQ(found.part, Link::Part::kHeader);
    }
    EXPECT_TRUE(keeper.room.empty()) << bit;
    EXPECT_TRUE(keeper.headers.empty()) << bit;
  }
}

TEST_P(BothLinks, PayloadChangesAreDetectedBeforeDelivery) {
  constexpr std::size_t kBytes = 20'000;
  const Mode mode = GetParam();
  const auto sent = on_the_wire({random_bytes(64, 5), random_bytes(kBytes, 1), random_bytes(64, 6)}, mode);
  const std::size_t begin = 2 * header_bytes(mode) + 64 + trailer_bytes(mode);
  const auto finds = [&](const std::vector<std::byte>& bytes, std::size_t piece) {
    Keeper keeper;
    try {
      receive(bytes, piece, keeper, mode);
    } catch (const Altered& found) {
      return found.part == Link::Part::kPayload && keeper.headers.size() == 1;
    }
    return false;
  };
  for (const std::size_t at : {0u, 1u, 7u, 8u, 511u, 512u, 9'999u, 19'998u, 19'999u})
    for (const std::size_t piece : {100u, 7'000u, 30'000u}) {
      auto bytes = sent;
      bytes[begin + at] ^= std::byte{0x10};
      EXPECT_TRUE(finds(bytes, piece)) << "byte " << at << " in pieces of " << piece;
    }
  // What TCP's checksum cannot see: two words that have changed places; and a packet of zeros.
  auto swapped = sent;
  for (std::size_t i = 0; i < 2; ++i) std::swap(swapped[begin + 100 + i], swapped[begin + 2'000 + i]);
  EXPECT_TRUE(finds(swapped, 30'000));
  auto zeroed = sent;
  std::fill_n(zeroed.begin() + begin + 4'096, 1'460, std::byte{0});
  EXPECT_TRUE(finds(zeroed, 30'000));
  // The tag.
  for (std::size_t at = 0; at < trailer_bytes(mode); ++at) {
    auto bytes = sent;
    bytes[begin + kBytes + at] ^= std::byte{1};
    EXPECT_TRUE(finds(bytes, 7'000)) << "byte " << at << " of the tag";
  }
}

// What checksums are no help against: messages that were sent, and are not the next one.
TEST(EncryptedLink, MessagesThatAreRepeatedOrSwappedAreFound) {
  const auto first = random_bytes(300, 1), second = random_bytes(300, 2);
  const auto sent = on_the_wire({first, second}, Mode::kEncrypted);
  const std::size_t length = sent.size() / 2;
  const std::vector<std::byte> one(sent.begin(), sent.begin() + static_cast<std::ptrdiff_t>(length)),
      two(sent.begin() + static_cast<std::ptrdiff_t>(length), sent.end());
  const auto arrives = [](std::vector<std::byte> bytes, const std::vector<std::byte>& more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
    Keeper keeper;
    try {
      receive(bytes, bytes.size(), keeper, Mode::kEncrypted);
    } catch (const Altered&) {
    }
    return keeper.payloads.size();
  };
  EXPECT_EQ(arrives(one, two), 2u);
  EXPECT_EQ(arrives(one, one), 1u);
  EXPECT_EQ(arrives(two, one), 0u);
  // In clear, from who does not know that it is to be encrypted, or says so.
  EXPECT_EQ(arrives(on_the_wire({first}), {}), 0u);
}

TEST(EncryptedLink, NothingOfAMessageIsToBeSeen) {
  std::vector<std::byte> payload(1000);
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::byte>("secret! "[i % 8]);
  const std::string_view word = "secret!";
  const auto shows = [&](Mode mode) {
    const auto bytes = on_the_wire({payload}, mode);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return text.find(word) != std::string_view::npos || text.find("LSM3") != std::string_view::npos ||
           text.find("2MSL") != std::string_view::npos;
  };
  EXPECT_TRUE(shows(Mode::kClear));
  EXPECT_FALSE(shows(Mode::kEncrypted));
}

// A socket that takes little at a time: pieces, tags and all.
TEST(EncryptedLink, ASlowSocketGetsEverything) {
  SocketPair sockets;
  const int bytes = 4096;
  ::setsockopt(sockets.near.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  Link sender(std::move(sockets.near), 0, 0, ciphers_of(Mode::kEncrypted));
  Link receiver(std::move(sockets.far), 1, 1, ciphers_of(Mode::kEncrypted));
  Keeper keeper;
  std::vector<std::vector<std::byte>> payloads;
  for (const std::size_t size : {131'072u, 65'536u, 65'537u, 1u, 300'000u}) {
    payloads.push_back(random_bytes(size, size));
    sender.begin(header_of(size), payloads.back().data());
    while (sender.sending() || keeper.payloads.size() < payloads.size()) {
      sender.send_some();
      receiver.receive_some(keeper);
    }
  }
  EXPECT_EQ(keeper.payloads, payloads);
}

}  // namespace
}  // namespace lockstep::comm
