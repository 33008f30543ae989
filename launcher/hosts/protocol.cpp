#include "launcher/hosts/protocol.h"

#include "base/error.h"

namespace lockstep::launcher {
namespace {

std::string body_of(const JobSetup& m) {
  return Writer()
      .put(m.ranks)
      .put(m.silence_seconds)
      .put(m.finds_port)
      .put_sized(m.name)
      .put_sized(m.token)
      .put_sized(m.secret)
      .put_sized(m.program)
      .put_text(m.directory)
      .take();
}
std::string body_of(const ToRank& m) { return Writer().put(m.id).put_text(m.bytes).take(); }
std::string body_of(const CloseConnection& m) { return Writer().put(m.id).take(); }
std::string body_of(const Run& m) { return m.command; }
void put_all(Writer& out, const std::vector<std::string>& texts) {
  out.put(static_cast<std::uint32_t>(texts.size()));
  for (const auto& text : texts) out.put_sized(text);
}
std::string body_of(const StartRank& m) {
  Writer out;
  out.put(m.rank);
  put_all(out, m.argv);
  put_all(out, m.unset_env);
  for (const auto& [name, value] : m.set_env) out.put_sized(name).put_sized(value);
  return out.take();
}
std::string body_of(const FileRequest& m) { return Writer().put(m.what).put_text(m.path).take(); }
std::string body_of(const FileReply& m) { return Writer().put(m.done).take(); }
std::string body_of(const EndRanks&) { return {}; }
std::string body_of(const Conclude&) { return {}; }
std::string body_of(const Concluded&) { return {}; }
std::string body_of(const RankEnded& m) {
  return Writer().put(m.rank).put(m.exit_status.how).put<std::int32_t>(m.exit_status.value).take();
}
std::string body_of(const Hold&) { return {}; }
std::string body_of(const Ping& m) { return Writer().put(m.launcher_ns).take(); }
std::string body_of(const Pause&) { return {}; }
std::string body_of(const Finish&) { return {}; }
std::string body_of(const Ready& m) {
  return Writer().put(m.port).put_sized(m.directory).put_sized(m.shm_directory).put_text(m.warning).take();
}
std::string body_of(const Refused& m) { return m.why; }
std::string body_of(const ConnectionOpened& m) { return Writer().put(m.id).take(); }
std::string body_of(const FromRank& m) { return Writer().put(m.id).put_text(m.bytes).take(); }
std::string body_of(const ConnectionClosed& m) { return Writer().put(m.id).take(); }
std::string body_of(const Notice& m) { return m.text; }
std::string body_of(const RunOutput& m) { return m.bytes; }
std::string body_of(const RunEnded& m) {
  return Writer().put(m.exit_status.how).put<std::int32_t>(m.exit_status.value).take();
}
std::string body_of(const Pong& m) { return Writer().put(m.launcher_ns).put(m.helper_ns).take(); }

void read(Reader& in, JobSetup& m) {
  m.ranks = in.take<std::int32_t>();
  m.silence_seconds = in.take<double>();
  m.finds_port = in.take<bool>();
  m.name = in.take_sized();
  m.token = in.take_sized();
  m.secret = in.take_sized();
  m.program = in.take_sized();
  m.directory = in.rest();
}
template <class WithBytes>
void read_bytes(Reader& in, WithBytes& m) {
  m.id = in.take<std::uint32_t>();
  m.bytes = in.rest();
}
void read(Reader& in, ToRank& m) { read_bytes(in, m); }
void read(Reader& in, FromRank& m) { read_bytes(in, m); }
void read(Reader& in, CloseConnection& m) { m.id = in.take<std::uint32_t>(); }
void read(Reader& in, ConnectionOpened& m) { m.id = in.take<std::uint32_t>(); }
void read(Reader& in, ConnectionClosed& m) { m.id = in.take<std::uint32_t>(); }
void read(Reader& in, Run& m) { m.command = in.rest(); }
void read(Reader&, Hold&) {}
/// Each takes four bytes at least, so a wrong number takes no memory.
void read_all(Reader& in, std::vector<std::string>& texts) {
  for (auto left = in.take<std::uint32_t>(); left > 0; --left) texts.push_back(in.take_sized());
}
void read(Reader& in, StartRank& m) {
  m.rank = in.take<std::int32_t>();
  read_all(in, m.argv);
  read_all(in, m.unset_env);
  while (!in.empty()) {
    auto name = in.take_sized();
    m.set_env.emplace_back(std::move(name), in.take_sized());
  }
}
void read(Reader& in, FileRequest& m) {
  m.what = in.take<FileRequest::What>();
  m.path = in.rest();
}
void read(Reader& in, FileReply& m) { m.done = in.take<bool>(); }
void read(Reader&, EndRanks&) {}
void read(Reader&, Conclude&) {}
void read(Reader&, Concluded&) {}
void read(Reader& in, RankEnded& m) {
  m.rank = in.take<std::int32_t>();
  m.exit_status.how = in.take<ExitStatus::How>();
  m.exit_status.value = in.take<std::int32_t>();
}
void read(Reader&, Pause&) {}
void read(Reader&, Finish&) {}
void read(Reader& in, Ping& m) { m.launcher_ns = in.take<std::int64_t>(); }
void read(Reader& in, Ready& m) {
  m.port = in.take<std::int32_t>();
  m.directory = in.take_sized();
  m.shm_directory = in.take_sized();
  m.warning = in.rest();
}
void read(Reader& in, Refused& m) { m.why = in.rest(); }
void read(Reader& in, Notice& m) { m.text = in.rest(); }
void read(Reader& in, RunOutput& m) { m.bytes = in.rest(); }
void read(Reader& in, RunEnded& m) {
  m.exit_status.how = in.take<ExitStatus::How>();
  m.exit_status.value = in.take<std::int32_t>();
}
void read(Reader& in, Pong& m) {
  m.launcher_ns = in.take<std::int64_t>();
  m.helper_ns = in.take<std::int64_t>();
}

/// The alternative with this index, filled.
template <std::size_t kIndex = 0>
HostMessage parse(std::size_t kind, Reader& in) {
  if constexpr (kIndex < std::variant_size_v<HostMessage>) {
    if (kind != kIndex) return parse<kIndex + 1>(kind, in);
    std::variant_alternative_t<kIndex, HostMessage> message;
    read(in, message);
    return message;
  } else {
    throw MpiError(fmt::format("message of unknown kind {} between hosts", kind));
  }
}

}  // namespace

std::string encode_host(const HostMessage& message) {
  return frame(message.index(), std::visit([](const auto& m) { return body_of(m); }, message));
}

std::optional<HostMessage> HostDecoder::next() {
  const auto frame = frames_.next();
  if (!frame) return std::nullopt;
  Reader in(frame->body);
  return parse(frame->kind, in);
}

}  // namespace lockstep::launcher
