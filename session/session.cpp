#include "lockstep/session/session.h"

#include <algorithm>
#include <utility>

#include "base/cuda/library.h"
#include "base/error.h"
#include "base/log.h"
#include "base/resource_limits.h"
#include "base/text.h"
#include "comm/agree.h"
#include "comm/backends.h"
#include "devices/cpus.h"
#include "devices/nvml.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/device_group.h"
#include "session/device_choice.h"
#include "session/device_view.h"
#include "session/opening.h"

namespace lockstep::session {
namespace {

void require(bool ok, const std::string& what, const std::string& remedy) {
  if (!ok) throw UsageError(what, remedy);
}

void set_log_level_named(const std::string& name) {
  // "info" is only rank 0's: the others speak up when something is wrong.
  if (name == "info") choose_log_level(LogLevel::kInfo);
  if (name == "debug") set_log_level(LogLevel::kDebug);
  if (name == "warn") set_log_level(LogLevel::kWarn);
  if (name == "error") set_log_level(LogLevel::kError);
}

Session connect(const comm::GroupOptions& options, const std::function<void()>& check) {
  Session session;
  session.world = comm::discover_world(env);
  set_log_identity(session.world.rank, session.world.size, host_name());
  session.group = comm::make_group(session.world, options);
  comm::run_collectively(*session.group, check);
  return session;
}

void bind(Session& session, const devices::Locality& device) {
  const devices::Binding binding = comm::bind_to_share(*session.group, env, device);
  session.threads = session.cores = binding.cores;
  session.binding = binding.text;
}

/// Note [One context]
/// A CUDA context costs a process some 500 MB on its GPU, so it has one, on the GPU that it computes on. What decides
/// on that GPU makes none: NVML, the number of devices, their places on the bus. The first call that makes one is the
/// backend's, which has been given its GPU by then.
RankView view_of(const SessionOptions& options, const Session& session) {
  RankView view{.machine = machine_id(),
                .host = host_name(),
                .local_rank = session.world.local_rank,
                .device = options.device,
                .share_devices = options.share_devices,
                .all_devices = options.all_devices,
                .visible = {}};
  if (parse_device(options.device).kind != DeviceRequest::Kind::kCpu)
    view.visible = list_visible_gpus(probe_cuda(), devices::read_gpus(devices::Detail::kChoice), env, view.machine);
  return view;
}

/// What is about to be refused on all ranks, once they are connected and in one line, is no reason for a line of each.
bool may_encrypt(const SessionOptions& options) {
  const auto* const family = comm::backend_family(options.backend);
  return options.encrypt && (family == nullptr || family->encrypts);
}

void mention_encryption(bool wanted, const Session& session) {
  if (wanted && !session.group->encrypts() && session.group->rank() == 0)
    log_info("--encrypt changes nothing: {}",
             session.group->size() == 1 ? "there is one rank" : "all ranks are on this host");
}

void mention_emulation(const SessionOptions& options, const Session& session) {
  if (options.precision == Precision::kBF16 && session.device.kind == DeviceKind::kCpu && session.group->rank() == 0 &&
      nn::cpu_bf16() == nn::CpuBf16::kEmulated)
    log_warn(
        "this CPU has no instructions for bf16 ({}): oneDNN emulates them, which is slower than f32 → --precision f32, "
        "unless the results of bf16 are what you want",
        nn::cpu_kernel_isa());
}

/// Collective. Every rank knows what all of them see, and comes to the same conclusions.
DeviceChoice choose_together(const SessionOptions& options, const SessionChecks& checks, const Session& session) {
  comm::ProcessGroup& group = *session.group;
  std::vector<RankView> views;
  for (const auto& text : group.all_gather_text(encode(view_of(options, session)))) views.push_back(decode_view(text));
  DeviceChoice choice;
  comm::run_collectively(group, [&] {
    choice = choose_device(views, group.rank());
    check_kind(options, choice.device.kind, choice.why_cpu);
    checks.device(choice.device.kind, choice.why_cpu);
    check_encryption(options, choice.device.kind, session.group->encrypts());
  });
  comm::compare_manifests(group, {{"device", choice.device.kind == DeviceKind::kCpu ? "cpu" : "cuda"}});
  if (choice.tell && !options.quiet && group.rank() == 0) log_info("computing on the CPU: {}", choice.why_cpu);
  return choice;
}

/// CUDA has not been asked to compute before: should its numbering be another now, this is the last moment to find out.
void check_place(const DeviceChoice& choice) {
  const std::string there = plain_bus_id(current_cuda_bus_id());
  if (choice.gpu.bus_id.empty() || there == choice.gpu.bus_id) return;
  throw DeviceError(fmt::format("{} was chosen, and CUDA has opened the one at {}",
                                to_string(choice.gpu, choice.device.index), there),
                    "leave CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES alone while it runs");
}

/// A quota counts the time of processors, whichever this process may run on, and all ranks of the host share it.
void keep_to_quota(const SessionOptions& options, Session& session) {
  const auto quota = cpu_quota();
  const int wanted = options.threads > 0 ? options.threads : options.default_threads;
  const int ranks = std::max(1, session.world.local_size), all = threads_within(quota, session.cores * ranks);
  const int devices = options.all_devices ? static_cast<int>(session.devices.size()) : 1;
  const int each = std::max(1, all / ranks / devices), threads = wanted > 0 ? wanted : session.threads;
  if (!quota || threads <= each) return;
  const bool speaks = session.world.local_rank == 0;
  const auto cpus = fmt::format("{} allows this host's ranks {:.3g} CPU{} in all", quota->name, quota->cpus,
                                quota->cpus == 1 ? "" : "s");
  if (wanted > 0) {
    if (speaks)
      log_warn(
          "{}, and {} rank{} of {} thread{} take more: all are stopped for a part of every period → give --threads "
          "{}, or raise the quota",
          cpus, ranks, ranks == 1 ? "" : "s", wanted, wanted == 1 ? "" : "s", each);
    return;
  }
  if (speaks) log_info("{}: each computes with {} thread{}, not {}", cpus, each, each == 1 ? "" : "s", threads);
  session.threads = each;
}

/// What was asked for, or where nothing was, what OpenMP gives of `session.threads`.
int obtain_threads(const SessionOptions& options, const Session& session) {
  const int got = nn::obtainable_threads(session.threads);
  if (got == session.threads) return got;
  const std::string what = fmt::format("{} compute threads, and OpenMP gives this process {} (OMP_THREAD_LIMIT={})",
                                       session.threads, got, env("OMP_THREAD_LIMIT").value_or("?"));
  // The results of shards depend on how many threads compute one.
  if (options.threads > 0) throw UsageError("--threads " + what, fmt::format("unset it, or give --threads {}", got));
  if (options.default_threads > 0) throw UsageError(what, "unset it");
  if (session.world.local_rank == 0) log_warn("{} → unset it to use all", what);
  return got;
}

/// Collective. A device that cannot be opened must not leave the other ranks waiting for this one.
void open_device(const SessionOptions& options, const DeviceChoice& choice, Session& session) {
  comm::ProcessGroup& group = *session.group;
  const bool gpu = choice.device.kind == DeviceKind::kCuda;
  comm::run_collectively(group, [&] {
    if (!gpu) {
      session.threads = obtain_threads(options, session);
      session.backend = nn::make_cpu_backend(session.threads);
      return;
    }
    session.backend = nn::make_cuda_backend(cuda_options(options, choice.device.index));
    check_place(choice);
  });
  if (!gpu) return;
  session.gradient_group = comm::make_device_group(
      group, {.device = choice.device.index, .producer = session.backend->stream()}, options.backend);
}

}  // namespace

double Session::mean(double value) {
  group->all_reduce(std::span(&value, 1));
  return value / group->size();
}

void Session::shutdown() {
  if (gradient_group != nullptr) gradient_group->shutdown();
  group->shutdown();
}

void Session::leave() {
  if (gradient_group != nullptr) gradient_group->shutdown();
  group->barrier().wait_host();
}

std::function<void()> keep_processors() {
  return [cpus = devices::allowed_cpus()] { devices::set_allowed_cpus(cpus); };
}

std::string place_of_process() {
  return fmt::format("{}, processors {}", host_name(), devices::ranges_text(devices::allowed_cpus()));
}

Session join_session(const comm::GroupOptions& options, const std::function<void()>& check) {
  Session session = connect(options, check);
  mention_encryption(options.encrypt, session);
  bind(session, {});
  return session;
}

std::string file_of_kernels(const EnvLookup& lookup) {
  const std::string cache = lookup("XDG_CACHE_HOME").value_or(""), home = lookup("HOME").value_or("");
  const std::string directory = cache.starts_with('/') ? cache : home.starts_with('/') ? home + "/.cache" : "";
  if (directory.empty()) {
    log_warn(
        "kernels are not timed: neither HOME nor XDG_CACHE_HOME is set, so there is no place to store the fastest → "
        "set one of them, or give --autotune no");
    return {};
  }
  return directory + "/lockstep/kernels.txt";
}

nn::CudaOptions cuda_options(const SessionOptions& options, int index) {
  return {.device = index,
          .tf32 = options.tf32,
          .deterministic = options.deterministic,
          .plan_file = options.autotune.value_or(false) ? file_of_kernels(env) : ""};
}

Session open_session(const SessionOptions& options, const SessionChecks& checks) {
  set_log_level_named(options.log_level);
  // Before there are threads. NVML has this order too, so what people read in its tables holds here.
  set_env("CUDA_DEVICE_ORDER", "PCI_BUS_ID", /*overwrite=*/false);
  comm::GroupOptions group = options;
  group.encrypt = may_encrypt(options);
  group.spare_core =
      options.threads > 0 && devices::expected_cores(comm::discover_world(env).local_size) > options.threads;
  Session session = connect(group, checks.before);
  const DeviceChoice choice = choose_together(options, checks, session);
  session.device = choice.device;
  session.devices = choice.devices;
  // Several GPUs may be close to different cores.
  bind(session, choice.devices.size() == 1 ? devices::locality_of(choice.gpu.bus_id) : devices::Locality{});
  if (options.all_devices && choice.device.kind == DeviceKind::kCpu)
    session.threads = std::max(1, session.threads / static_cast<int>(choice.devices.size()));
  if (session.device.kind == DeviceKind::kCpu) keep_to_quota(options, session);
  if (const int wanted = options.threads > 0 ? options.threads : options.default_threads; wanted > 0)
    session.threads = wanted;
  open_device(options, choice, session);
  log_debug("{}, {}, GOMP_SPINCOUNT {}", session.backend->describe(), session.binding,
            env("GOMP_SPINCOUNT").value_or("not set"));
  return session;
}

Session open_session(const SessionOptions& options) {
  return open_session(options, {.before = [&] {
                        check_log_level(options.log_level);
                        check_cpu_numbers(options.device, parse_device(options.device));
                      }});
}

Session open_session(const std::string& device) {
  SessionOptions options;
  options.device = device;
  return open_session(options);
}

// The same command shall run on other machines and with other numbers of ranks.
void warn_of_unused(const SessionOptions& options, const Session& session) {
  if (!options.quiet) mention_encryption(options.encrypt, session);
  if (!options.quiet) mention_emulation(options, session);
  if (options.threads > 0 && session.device.kind == DeviceKind::kCuda)
    log_warn("--threads {} changes nothing: this run computes on GPUs", options.threads);
  const std::size_t listed = parse_device(options.device).indices.size();
  if (!options.all_devices && std::cmp_greater(listed, session.world.local_size))
    log_warn("--device {} names {} devices, and this host has {} rank{}: the others stay unused → start {} ranks there",
             options.device, listed, session.world.local_size, session.world.local_size == 1 ? "" : "s", listed);
}

void check_log_level(const std::string& level) {
  const std::vector<std::string> levels = {"debug", "info", "warn", "error"};
  if (std::ranges::find(levels, level) == levels.end())
    throw UsageError(fmt::format("unknown log level '{}'", level), "use debug, info, warn or error");
}

void check_kind(const SessionOptions& options, DeviceKind kind, const std::string& why) {
  const auto* const family = comm::backend_family(options.backend);
  const std::string because = why.empty() ? std::string() : fmt::format(" ({})", why);
  if (kind == DeviceKind::kCpu) {
    require(family == nullptr || family->memory == DeviceKind::kCpu,
            fmt::format("--backend {} is for GPUs, and this run is on the CPU{}", options.backend, because),
            "leave --backend out, or use --device cuda");
    require(options.precision != Precision::kFp16,
            fmt::format("--precision fp16 is for GPUs, and this run is on the CPU{}: no kernel there computes in f16",
                        because),
            "use --precision bf16, or --device cuda");
    require(options.precision == Precision::kF32 || nn::cpu_bf16() != nn::CpuBf16::kNone,
            fmt::format("--precision bf16 on this CPU, which computes with {}: bf16 needs AVX-512 at least{}",
                        nn::cpu_kernel_isa(), because),
            "use --precision f32, or --device cuda");
    require(!options.tf32, fmt::format("--tf32 is for GPUs, and this run is on the CPU{}", because),
            "leave --tf32 out, or use --device cuda");
    return;
  }
  require(family == nullptr || family->memory == kind,
          fmt::format("--backend {} on GPUs: gradients on a GPU travel over {}", options.backend,
                      comm::device_backend().title),
          "leave --backend out, or use --device cpu");
}

void check_encryption(const SessionOptions& options, DeviceKind kind, bool several_hosts) {
  if (!options.encrypt || kind == DeviceKind::kCpu || !several_hosts) return;
  if (const auto& family = comm::device_backend(options.backend); !family.encrypts)
    throw UsageError(
        fmt::format("--encrypt: gradients on GPUs travel between hosts over {}, which does not encrypt", family.title),
        "leave it out and connect the hosts by a network that encrypts (WireGuard, IPsec), or use --device cpu");
}

}  // namespace lockstep::session
