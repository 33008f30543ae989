#include "trainer/session.h"

#include <algorithm>
#include <utility>

#include "base/cuda/probe.h"
#include "base/env.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"
#include "comm/nccl/nccl_group.h"
#include "devices/read_gpus.h"
#include "trainer/data_parallel.h"
#include "trainer/device_choice.h"
#include "trainer/device_request.h"
#include "trainer/device_view.h"
#include "trainer/options.h"
#include "trainer/output_files.h"

namespace lockstep::trainer {
namespace {

void set_log_level_named(const std::string& name) {
  // "info" is the default, and only rank 0's: the others speak up when something is wrong.
  if (name == "debug") set_log_level(LogLevel::kDebug);
  if (name == "warn") set_log_level(LogLevel::kWarn);
  if (name == "error") set_log_level(LogLevel::kError);
}

Session meet(const comm::GroupOptions& options, const std::function<void()>& check) {
  Session session;
  session.world = comm::discover_world(env);
  set_log_identity(session.world.rank, session.world.size, host_name());
  session.group = comm::make_group(session.world, options);
  comm::run_collectively(*session.group, check);
  return session;
}

void bind(Session& session, const devices::Locality& device) {
  session.binding = comm::bind_to_share(*session.group, env, device);
  session.threads = session.binding.cores;
}

/// Note [One context]
/// A CUDA context costs a process some 500 MB on its GPU, so it has one, on the GPU that it computes on. What decides
/// on that GPU makes none: NVML, the number of devices, their places on the bus. The first call that makes one is the
/// backend's, which has been told its GPU by then.
RankView view_of(const TrainConfig& config, const Session& session) {
  RankView view{.machine = machine_id(),
                .host = host_name(),
                .local_rank = session.world.local_rank,
                .device = config.device,
                .share = config.share_devices,
                .sight = {}};
  if (parse_device(config.device).kind != DeviceRequest::Kind::kCpu)
    view.sight = see_gpus(probe_cuda(), devices::read_gpus(devices::Detail::kChoice), env, view.machine);
  return view;
}

/// What is about to be refused on all ranks, once they have met and in one line, is no reason for a line of each.
bool may_encrypt(const TrainConfig& config) {
  TrainConfig same = config;
  return config.encrypt && !options::inapplicable(*train_options(same).find("encrypt"));
}

void mention_encryption(bool wanted, const Session& session) {
  if (wanted && !session.group->encrypts() && session.group->rank() == 0)
    log_info("--encrypt changes nothing: {}",
             session.group->size() == 1 ? "there is one rank" : "all ranks are on this host");
}

/// Collective. Every rank knows what all of them see, and comes to the same conclusions.
DeviceChoice choose_together(const TrainConfig& config, const Session& session) {
  comm::ProcessGroup& group = *session.group;
  std::vector<RankView> views;
  for (const auto& text : group.all_gather_text(encode(view_of(config, session)))) views.push_back(decode_view(text));
  DeviceChoice choice;
  comm::run_collectively(group, [&] {
    choice = choose_device(views, group.rank());
    check_kind(config, choice.device.kind, choice.why_cpu);
    check_encryption(config, choice.device.kind, session.group->encrypts());
  });
  comm::compare_manifests(group, {{"device", choice.device.kind == DeviceKind::kCpu ? "cpu" : "cuda"}});
  if (choice.tell && !config.quiet && group.rank() == 0) log_info("computing on the CPU: {}", choice.why_cpu);
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

/// Collective. A device that cannot be opened must not leave the other ranks waiting for this one.
void open_device(const TrainConfig& config, const DeviceChoice& choice, Session& session) {
  comm::ProcessGroup& group = *session.group;
  const bool gpu = choice.device.kind == DeviceKind::kCuda;
  comm::run_collectively(group, [&] {
    if (!gpu) {
      session.backend = nn::make_cpu_backend(session.threads);
      return;
    }
    session.backend = nn::make_cuda_backend({.device = choice.device.index, .tf32 = config.tf32});
    check_place(choice);
  });
  if (!gpu) return;
  const comm::NcclOptions options{
      .device = choice.device.index, .producer = session.backend->stream(), .timeout = group.timeout()};
  session.gradient_group =
      group.size() > 1 ? comm::make_nccl_group(group, options) : comm::make_device_self_group(options);
}

/// What has no effect because of the machine and the number of ranks: the same command shall run on others.
void warn_of_unused(const TrainConfig& config, const Session& session) {
  if (!config.quiet) mention_encryption(config.encrypt, session);
  if (config.threads > 0 && session.device.kind == DeviceKind::kCuda)
    log_warn("--threads {} changes nothing: this run computes on GPUs", config.threads);
  const std::size_t listed = parse_device(config.device).indices.size();
  if (config.parallel == Parallel::kDdp && std::cmp_greater(listed, session.world.local_size))
    log_warn("--device {} names {} devices, and this host has {} rank{}: the others stay unused → start {} ranks there",
             config.device, listed, session.world.local_size, session.world.local_size == 1 ? "" : "s", listed);
}

}  // namespace

void Session::shutdown() {
  if (gradient_group != nullptr) gradient_group->shutdown();
  group->shutdown();
}

void Session::leave() {
  if (gradient_group != nullptr) gradient_group->shutdown();
  group->barrier().wait_host();
}

Session join_session(const comm::GroupOptions& options, const std::function<void()>& check) {
  Session session = meet(options, check);
  mention_encryption(options.encrypt, session);
  bind(session, {});
  return session;
}

Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal) {
  Session session = open_session(config, [&] {
    if (refusal) throw *refusal;
    validate(config);
    check_alone(config);
    if (comm::discover_world(env).rank == 0) check_output_files(config);
  });
  if (session.group->rank() == 0) warn_of_unused(config, session);
  return session;
}

Session open_session(const TrainConfig& config, const std::function<void()>& check) {
  set_log_level_named(config.log_level);
  // Before there are threads. NVML has this order too, so what people read in its tables holds here.
  set_env("CUDA_DEVICE_ORDER", "PCI_BUS_ID", /*overwrite=*/false);
  comm::GroupOptions options;
  options.timeout_seconds = config.timeout_seconds;
  options.stall_warning_seconds = config.stall_warning_seconds;
  options.backend = config.backend;
  options.encrypt = may_encrypt(config);
  options.spare_core =
      config.threads > 0 && devices::expected_cores(comm::discover_world(env).local_size) > config.threads;
  Session session = meet(options, check);
  const DeviceChoice choice = choose_together(config, session);
  session.device = choice.device;
  bind(session, devices::locality_of(choice.gpu.bus_id));
  if (config.parallel == Parallel::kDp && choice.device.kind == DeviceKind::kCpu)
    session.threads = std::max(1, session.threads / static_cast<int>(device_ids_of(config, choice.device).size()));
  if (config.threads > 0) session.threads = config.threads;
  open_device(config, choice, session);
  log_debug("{}, {}, GOMP_SPINCOUNT {}", session.backend->describe(), session.binding.text,
            env("GOMP_SPINCOUNT").value_or("not set"));
  return session;
}

Session open_session(const std::string& device) {
  TrainConfig config;
  config.device = device;
  return open_session(config, [&] { check_cpu_numbers(device, parse_device(device)); });
}

}  // namespace lockstep::trainer
