// What a stranger may say to a port: the first byte chooses the side, and how the rest is cut. And what one who knows
// the secret may say to the store, and to the launcher.
#include "base/handshake.h"
#include "comm/tcp/wire.h"
#include "launcher/channel.h"
#include "launcher/hosts/protocol.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace lockstep;

/// Takes all frames, or says why not.
template <class Stream>
void take_all(Stream& stream, std::string_view bytes) {
  try {
    stream.feed(bytes);
    while (stream.next()) {
    }
  } catch (const MpiError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const int choice = data[0] & 7;
  const std::size_t piece = data[0] / 8 + 1;
  const std::string_view rest = fuzz::text_of(data + 1, size - 1);
  if (choice <= 1) {
    const auto secret = JobSecret::of_text("0123456789abcdef");
    Handshake handshake = choice == 0 ? Handshake::listen(Handshake::Port::kStore, secret)
                                      : Handshake::call(Handshake::Port::kStore, secret, "me");
    for (std::size_t at = 0; at < rest.size(); at += piece) handshake.feed(rest.substr(at, piece));
    // Nobody gets through without the secret, whatever they say.
    if (handshake.state() == Handshake::State::kAsked || handshake.state() == Handshake::State::kDone) std::abort();
  } else if (choice == 2) {
    comm::Wire wire({}, Handshake::listen(Handshake::Port::kStore, {}));
    try {
      for (std::size_t at = 0; at < rest.size(); at += piece) {
        wire.feed(rest.substr(at, piece));
        while (wire.next(1 << 20)) {
        }
      }
    } catch (const Malformed&) {
    }
  } else if (choice == 3) {
    using Any = std::variant<comm::StoreIdentity, comm::StoreAnswer, comm::SetValue, comm::AwaitValues,
                             comm::FoundValue, comm::GivenUp, comm::Attendances, comm::PeerGone>;
    for (std::size_t kind = 0; kind < std::variant_size_v<Any>; ++kind) try {
        unpack_alternative<Any>(kind, rest);
      } catch (const Malformed&) {
      }
  } else if (choice == 4) {
    launcher::Decoder decoder;
    take_all(decoder, rest);
  } else {
    launcher::HostDecoder decoder;
    take_all(decoder, rest);
  }
  return 0;
}
