#include "session/opening.h"

#include "base/text.h"
#include "comm/backends.h"
#include "options/values.h"

namespace lockstep::session {

using options::Agree;
using options::Applies;
using options::boolean;
using options::choice;
using options::integer;
using options::number;
using options::Option;
using options::OptionKind;
using options::OptionTable;
using options::text;
using options::when;

bool is_on_cpu(const std::string& device) { return device.starts_with("cpu"); }
std::string device_text(const std::string& device) { return "this run has --device " + device; }

namespace {

/// What carries `what`.
Option backend_option(std::string& backend, const char* what) {
  std::vector<std::string> names = {comm::kAutoBackend}, helps = {"the fastest that the ranks can use"};
  for (const auto* family : comm::backend_families()) {
    names.push_back(family->name);
    helps.push_back(fmt::format("{}: {}", family->name, family->about));
  }
  std::vector<std::pair<std::string, std::string>> choices;
  for (const auto& name : names) choices.emplace_back(name, name);
  options::Binding value = choice(backend, std::move(choices));
  value.set = [set = std::move(value.set)](const std::string& text) -> std::optional<options::Complaint> {
    if (text == "gloo")
      return options::Complaint{"Gloo is PyTorch's",
                                "leave it out: then it is memory on one host, sockets between hosts, NCCL among GPUs"};
    return set(text);
  };
  return {.name = "backend",
          .placeholder = join(names, "|"),
          .help = fmt::format("what carries the {}: {}", what, join(helps, "; ")),
          .default_text = backend,
          .value = std::move(value)};
}

}  // namespace

Applies to_gpus(const std::string& device) {
  return {.to = "GPUs", .unless = [&device] { return when(is_on_cpu(device), device_text(device)); }};
}

Option encrypt_option(bool& encrypt) {
  return {.name = "encrypt",
          .kind = OptionKind::kFlag,
          .help = "encrypt everything that ranks send to other hosts; on all ranks or none",
          .value = boolean(encrypt)};
}

Option precision_option(Precision& precision, const char* help) {
  return {
      .name = "precision",
      .placeholder = "f32|bf16|fp16",
      .help = help,
      .default_text = name_of(precision),
      .value = choice(precision, {{"f32", Precision::kF32}, {"bf16", Precision::kBF16}, {"fp16", Precision::kFp16}}),
      .agree = Agree::kValue,
      .may_change = true};
}

Option tf32_option(bool& tf32, const std::string& device) {
  return {.name = "tf32",
          .kind = OptionKind::kFlag,
          .help = "on GPUs, multiply f32 with 10 bits of mantissa, several times faster",
          .value = boolean(tf32),
          .applies = to_gpus(device),
          .agree = Agree::kValue,
          .may_change = true};
}

Option log_level_option(std::string& level, const char* help) {
  return {.name = "log-level",
          .placeholder = "debug|info|warn|error",
          .help = help,
          .default_text = level,
          .value = text(level)};
}

namespace {

/// The device, and who carries `what` between devices.
void add_device_choice(OptionTable& table, SessionOptions& config, const char* what) {
  table.add({.name = "device",
             .placeholder = "auto|cpu|cpu:0,1|cuda|cuda:0,3|cuda:free",
             .help = "device to compute on; cuda: the GPU with the local rank's number; cuda:0,3: the local rank's "
                     "entry in this list; cuda:free: the GPU with most free memory; numbers count the GPUs in "
                     "CUDA_VISIBLE_DEVICES; auto: one GPU per rank if there are enough, else the CPU",
             .default_text = config.device,
             .value = text(config.device)});
  table.add({.name = "share-devices",
             .kind = OptionKind::kFlag,
             .help = "several ranks may compute on one GPU, which alternates between them",
             .value = boolean(config.share_devices),
             .applies = {.to = "GPUs, and CPU devices that are listed",
                         .unless = [&config] { return when(config.device == "cpu", device_text(config.device)); }}});
  table.add(backend_option(config.backend, what));
}

/// How long others are waited for, and who may listen.
void add_waits(OptionTable& table, SessionOptions& config) {
  table.add({.name = "timeout-seconds",
             .placeholder = "S",
             .help = "longest wait for another rank, in seconds",
             .default_text = fmt::to_string(config.timeout_seconds),
             .value = number(config.timeout_seconds, {.low = 0, .high = comm::kMostTimeoutSeconds, .open_low = true})});
  table.add(
      {.name = "stall-warning-seconds",
       .placeholder = "S",
       .help = "warn after waiting this long for a rank, and name it; again after twice as long, and so on; 0: never",
       .default_text = fmt::to_string(config.stall_warning_seconds),
       .value = number(config.stall_warning_seconds, {.low = 0, .high = comm::kMostTimeoutSeconds})});
  Option encrypt = encrypt_option(config.encrypt);
  encrypt.applies = {.to = "what lockstep itself sends between hosts",
                     .unless = [&config]() -> std::optional<std::string> {
                       const auto* const family = comm::backend_family(config.backend);
                       if (family == nullptr || family->encrypts) return std::nullopt;
                       return fmt::format("{} (--backend {}) does not encrypt", family->title, family->name);
                     },
                     .remedy = "leave one of them out"};
  table.add(std::move(encrypt));
}

}  // namespace

void add_device_options(OptionTable& table, SessionOptions& config) {
  table.group("Ranks and devices");
  add_device_choice(table, config, "gradients");
  table.add(precision_option(
      config.precision,
      "type of activations and products; parameters, gradients and sums stay f32. bf16 on the CPU needs AVX-512, and "
      "is faster than f32 with AVX512-BF16 or AMX; fp16 is for GPUs, and scales losses in training"));
  table.add(tf32_option(config.tf32, config.device));
  table.add({.name = "threads",
             .placeholder = "N",
             .help = "compute threads per device, on the CPU",
             .default_text = "its share of the cores",
             .value = integer(config.threads, 1, 4096, /*unset=*/0),
             .applies = {.to = "the CPU", .unless = [&config] {
                           return when(config.device.starts_with("cuda"), device_text(config.device));
                         }}});
  add_waits(table, config);
}

void add_rank_options(OptionTable& table, SessionOptions& config, const char* what) {
  table.group("Ranks and devices");
  add_device_choice(table, config, what);
  add_waits(table, config);
}

}  // namespace lockstep::session
