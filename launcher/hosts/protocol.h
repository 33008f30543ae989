// What the launcher and its helper on another host say to each other once they have found that they are the same
// binary: frames over the remote agent's standard input and output. Each knows the other by ssh; the job's secret comes
// to the host this way.
//
// Launcher → helper, for each attempt: JobSetup, then FileRequest, StartRank or Run, ToRank, CloseConnection, Hold,
// EndRanks in any number, then Conclude. Ping and Pause at any time, Finish at the end. Helper → launcher: Ready or
// Refused, then FileReply, ConnectionOpened, FromRank, ConnectionClosed, Notice, RunOutput, RunEnded, RankEnded, then
// Concluded. Pong at any time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launcher/frame.h"
#include "launcher/process.h"

namespace lockstep::launcher {

/// Make the job's directories and be ready for `ranks` ranks. `name`: what this host is called in messages.
struct JobSetup {
  std::int32_t ranks = 0;
  double silence_seconds = 10;  // without a word from the launcher after which the helper ends the job on its host
  bool finds_port = false;      // Ready names a port that is free there
  std::string name;
  std::string token;      // of the job: goes into the directories
  std::string secret;     // of the job (lockstep/base/job_secret.h)
  std::string program;    // that the ranks will run
  std::string directory;  // in which

  void fields(auto& io) { io(ranks, silence_seconds, finds_port, name, token, secret, program, rest(directory)); }
};
/// Bytes for the wrapper on connection `id`.
struct ToRank {
  std::uint32_t id = 0;
  std::string bytes;

  void fields(auto& io) { io(id, rest(bytes)); }
};
/// Close connection `id`: its wrapper then ends, and its program if it still runs.
struct CloseConnection {
  std::uint32_t id = 0;

  void fields(auto& io) { io(id); }
};
/// Run this shell command, which starts Open MPI's daemon.
struct Run {
  std::string command;

  void fields(auto& io) { io(rest(command)); }
};
/// Start this command, the wrapper of `rank`, with these variables besides those of the host.
struct StartRank {
  std::int32_t rank = 0;
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>> set_env;
  std::vector<std::string> unset_env;

  void fields(auto& io) { io(rank, argv, unset_env, rest(set_env)); }
};
/// Create, look for or remove a file, whose path may be relative to JobSetup::directory.
struct FileRequest {
  enum class What : unsigned char { kCreate, kExists, kRemove };
  What what = What::kExists;
  std::string path;

  void fields(auto& io) { io(what, rest(path)); }
};
/// Kill the wrappers that still run.
struct EndRanks {};
/// Stop the daemon: it has begun to end the ranks, and the launcher gives them more time.
struct Hold {};
struct Ping {
  std::int64_t launcher_ns = 0;  // the launcher's steady clock

  void fields(auto& io) { io(launcher_ns); }
};
/// The launcher is being stopped (Ctrl-Z): its silence means nothing until it speaks again.
struct Pause {};
/// The attempt has ended: clean up, and be ready for another JobSetup.
struct Conclude {};
/// The job has ended: clean up and go.
struct Finish {};

struct Ready {
  std::int32_t port = 0;
  std::string directory, shm_directory;  // of the job there
  std::string warning;                   // for the user; empty: none

  void fields(auto& io) { io(port, directory, shm_directory, rest(warning)); }
};
/// Cannot take part; "what → remedy".
struct Refused {
  std::string why;

  void fields(auto& io) { io(rest(why)); }
};
/// A wrapper has connected.
struct ConnectionOpened {
  std::uint32_t id = 0;

  void fields(auto& io) { io(id); }
};
struct FromRank {
  std::uint32_t id = 0;
  std::string bytes;

  void fields(auto& io) { io(id, rest(bytes)); }
};
/// Its connection has ended, and all that it sent has been passed on.
struct ConnectionClosed {
  std::uint32_t id = 0;

  void fields(auto& io) { io(id); }
};
/// Nothing of the attempt is left there, and nothing more will be said of it.
struct Concluded {};
/// For the user, from that host.
struct Notice {
  std::string text;

  void fields(auto& io) { io(rest(text)); }
};
struct RunOutput {
  std::string bytes;

  void fields(auto& io) { io(rest(bytes)); }
};
struct RunEnded {
  ExitStatus exit_status;

  void fields(auto& io) { io(exit_status); }
};
/// The file was created or removed, or it exists.
struct FileReply {
  bool done = false;

  void fields(auto& io) { io(done); }
};
/// A wrapper has ended, or could not be started.
struct RankEnded {
  std::int32_t rank = 0;
  ExitStatus exit_status;

  void fields(auto& io) { io(rank, exit_status); }
};
struct Pong {
  std::int64_t launcher_ns = 0;  // of the Ping
  std::int64_t helper_ns = 0;    // the helper's steady clock

  void fields(auto& io) { io(launcher_ns, helper_ns); }
};

using HostMessage = std::variant<JobSetup, ToRank, Run, Hold, Ping, Pause, Finish, Ready, Refused, ConnectionOpened,
                                 FromRank, ConnectionClosed, RunOutput, RunEnded, Pong, Notice, StartRank, EndRanks,
                                 RankEnded, Conclude, Concluded, FileRequest, FileReply, CloseConnection>;

inline std::string encode_host(const HostMessage& message) { return encode_frame(message); }
using HostDecoder = FrameDecoder<HostMessage>;

}  // namespace lockstep::launcher
