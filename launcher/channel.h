// What a rank's wrapper and the launcher say to each other over a stream socket, as framed messages, once they have
// shown each other that they are of the same job (Note [Handshake]).
//
// Wrapper → launcher: Hello, then Output, StopNotice and Status in any number, perhaps Flight, then Ended.
// Launcher → wrapper: Signal and Rejoin. A connection that ends without Ended means that the wrapper itself died.
// `_rsh`, which mpirun starts in the place of ssh, sends StartDaemon and gets Output and Ended.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/authenticated_listener.h"
#include "base/scope.h"
#include "base/status_report.h"
#include "launcher/frame.h"
#include "launcher/process.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::launcher {

/// The program of `rank` is starting; pid is its process, 0 if it could not be started.
struct Hello {
  std::int32_t rank = 0;
  std::int32_t pid = 0;
  std::string host;

  void fields(auto& io) { io(rank, pid, rest(host)); }
};
/// Bytes that the program wrote, to stdout (1) or stderr (2).
struct Output {
  std::uint8_t stream = 1;
  std::string bytes;

  void fields(auto& io) { io(stream, rest(bytes)); }
};
/// Somebody other than the launcher is about to end this rank: mpirun (SIGCONT) or whoever sent that signal.
struct StopNotice {
  std::int32_t signal_number = 0;

  void fields(auto& io) { io(signal_number); }
};
/// The program ended. `stop_requested`: a signal had asked it to.
struct Ended {
  ExitStatus exit_status;
  bool stop_requested = false;
  Clock::time_point at;  // the steady clock is the same in all processes of a host
  /// Processes of that host that the kernel has ended for lack of memory while the program ran; -1: it does not say.
  std::int64_t memory_kills = -1;

  void fields(auto& io) { io(exit_status, stop_requested, at, memory_kills); }
};
/// Send this signal to the program.
struct Signal {
  std::int32_t signal_number = 0;

  void fields(auto& io) { io(signal_number); }
};
/// Give the program, which is stranded, this place (base/status_report.h).
struct Rejoin {
  std::string place;

  void fields(auto& io) { io(rest(place)); }
};
/// Run this shell command, which starts Open MPI's daemon, on `host`.
struct StartDaemon {
  std::string host;
  std::string command;

  void fields(auto& io) { io(host, rest(command)); }
};
/// What the program, or its wrapper, says of itself. In the order of Output: what was written after it comes after it.
struct Status {
  StatusReport report;

  template <class Io>
  void fields(Io& io) {
    std::string body = Io::kReads ? std::string() : encode_status(report);
    io(rest(body));
    if constexpr (Io::kReads) {
      auto read = decode_status(body);
      if (!read) throw Malformed("a status that cannot be read");
      report = *std::move(read);
    }
  }
};
/// The flight record of a program before it failed, or before a stop request.
struct Flight {
  std::int64_t at_ns = 0;  // on the clock of that host
  std::string bytes;

  void fields(auto& io) { io(at_ns, rest(bytes)); }
};
using Message = std::variant<Hello, Output, StopNotice, Ended, Signal, StartDaemon, Status, Flight, Rejoin>;

inline std::string encode(const Message& message) { return encode_frame(message); }
using Decoder = FrameDecoder<Message>;

/// One end of a connection. Never blocks: what the socket does not take waits in memory. Not thread-safe.
class Channel {
 public:
  explicit Channel(UniqueFd socket);

  int fd() const { return socket_.get(); }
  /// Queues and sends as much as goes. After the peer has gone messages are dropped.
  void send(const Message& message);
  void flush();
  std::size_t pending_bytes() const { return out_.size() - out_start_; }
  /// Reads some of what has arrived. kGone: the peer has gone and all that it sent has been read.
  enum class Received { kBytes, kNothing, kGone };
  Received receive();
  std::optional<Message> next() { return decoder_.next(); }
  void close() { socket_.reset(); }

 private:
  UniqueFd socket_;
  Decoder decoder_;
  std::string out_;
  std::size_t out_start_ = 0;
};

/// "unix:/path" ↔ a socket. Both throw DeviceError; connect_to() where the launcher is not there, or does not let this
/// process in: each proves to the other that it knows `secret` (Note [Handshake]) before anything is said.
UniqueFd listen_at(const std::string& path);
UniqueFd connect_to(const std::string& address, const JobSecret& secret);

/// At `path`, for `ranks` processes that know the secret.
AuthenticatedListener listen_for_job(const std::string& path, const JobSecret& secret, int ranks);
/// The next of them; none where none is ready.
UniqueFd accept_from(AuthenticatedListener& listener);

}  // namespace lockstep::launcher
