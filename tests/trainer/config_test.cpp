#include "lockstep/trainer/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <functional>
#include <limits>
#include <map>

#include "base/error.h"
#include "checkpoint/checkpoints.h"
#include "lockstep/nn/ops/backend.h"
#include "session/opening.h"
#include "tests/support/refusal.h"
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

/// What changes a configuration: `c`.
using Change = std::function<void(TrainConfig&)>;
#define SET(...) [](TrainConfig& c) { __VA_ARGS__; }

TrainConfig good() {
  TrainConfig config;
  config.model.name = "cnn";
  config.data = "digits";
  return config;
}

/// The text of a refusal, which has a remedy; empty for none.
std::string why_not(const std::function<void()>& check) {
  const std::string line = lockstep::testing::refusal_of(check);
  return line.substr(0, line.find(" → "));
}
std::string why_not(const TrainConfig& config) {
  return why_not([&] { validate(config); });
}

TEST(TrainConfig, DefaultsAreValid) { EXPECT_NO_THROW(validate(good())); }

TEST(TrainConfig, ContradictionsAreRefused) {
  const std::vector<Change> faults = {
      SET(c.model.name.clear()),
      SET(c.data.clear()),
      SET(c.batch = 8, c.global_batch = 16),
      SET(c.lr = -1),
      SET(c.schedule_settings = {{"min-lr", 1.0}}, c.schedule = "cosine"),
      SET(c.optimizer_settings = {{"nesterov", true}}),
      SET(c.optimizer = "sgd", c.optimizer_settings = {{"nesterov", true}, {"momentum", 0.0}}),
      SET(c.optimizer_settings = {{"betas", {1.0, 0.9}}}),
      SET(c.optimizer_settings = {{"eps", -1e-8}}),
      SET(c.weight_decay = -0.1),
      SET(c.clip_norm = -1),
      SET(c.loss = "entropy"),
      SET(c.loss_settings = {{"label-smoothing", 1.0}}),
      SET(c.save = "dir/"),
      SET(c.log_level = "loud"),
      SET(c.batch = 0),
      SET(c.global_batch = -1),
      SET(c.epochs = 0),
      SET(c.steps = 0),
      SET(c.log_every = 0),
      SET(c.workers = -1),
      SET(c.threads = -1),
      SET(c.lr = std::numeric_limits<double>::infinity()),
      SET(c.lr = std::numeric_limits<double>::quiet_NaN()),
      SET(c.clip_norm = std::numeric_limits<double>::quiet_NaN()),
      SET(c.optimizer_settings = {{"momentum", 1.5}}),
      SET(c.optimizer_settings = {{"betas", {0.9, std::numeric_limits<double>::quiet_NaN()}}}),
      SET(c.bucket_mb = 1e300),
      SET(c.tune_bucket_mb = true, c.zero = 1),
      SET(c.tune_bucket_mb = true, c.local_sgd = 2),
      SET(c.first_bucket_mb = 0),
      SET(c.device = "tpu"),
      SET(c.device = "cuda:1,0,1"),
      SET(c.device = "cpu:0,0"),
      SET(c.device = "cuda:0,0", c.parallel = Parallel::kDp),
      SET(c.device = "cuda:0,1", c.parallel = Parallel::kDp, c.share_devices = true),
      SET(c.device = "cpu", c.backend = "nccl"),
      SET(c.device = "cpu", c.tf32 = true),
      SET(c.device = "cuda", c.backend = "mpi"),
      SET(c.device = "cuda:0", c.backend = "shm")};
  for (std::size_t i = 0; i < faults.size(); ++i) {
    auto config = good();
    faults[i](config);
    EXPECT_FALSE(why_not(config).empty()) << "fault " << i << " was accepted";
  }
}

TEST(TrainConfig, Devices) {
  for (const char* device : {"auto", "cpu", "cpu:0,1", "cuda", "cuda:0,3", "cuda:free"}) {
    auto config = good();
    config.device = device;
    EXPECT_NO_THROW(validate(config)) << device;
  }
  auto config = good();
  config.device = "cuda:free";
  config.parallel = Parallel::kDp;
  EXPECT_NO_THROW(validate(config));
  config = good();
  config.device = "cuda:0,0";
  config.share_devices = true;
  config.backend = "nccl";
  config.precision = Precision::kBF16;
  config.tf32 = true;
  EXPECT_NO_THROW(validate(config));
  // Of `auto` it turns out later what it is.
  config.device = "auto";
  EXPECT_NO_THROW(validate(config));
  config.backend = "shm";
  EXPECT_NO_THROW(validate(config));
}

bool inapplicable(TrainConfig config, const char* setting) {
  return options::inapplicable(*train_options(config).find(setting)).has_value();
}

TEST(TrainConfig, UnknownModelIsReportedBeforeMissingData) {
  TrainConfig config;
  config.model.name = "nosuch";
  EXPECT_EQ(why_not(config), "unknown model 'nosuch'");
  config.model.name = "cnn";
  EXPECT_EQ(why_not(config), "no data was named");
}

// What a program sets and what would have no effect, and the same where it has one.
TEST(TrainConfig, SettingsWithoutEffectAreRefused) {
  struct Case {
    const char* setting;
    Change set, applies;
  };
  const auto model = [](const char* name) { return [name](TrainConfig& c) { c.model.name = name; }; };
  const Change sgd = SET(c.optimizer = "sgd");
  const Change weights = SET(c.weights = "w");
  const Change directory = SET(c.checkpoint_dir = "d");
  const Change tokens = SET(c.model.name = "lstm", c.data = "text:t");
  const Change cuda = SET(c.device = "cuda");
  const Case cases[] = {
      {"in", SET(c.model.settings = {{"in", 64}}), model("linear")},
      {"out", SET(c.model.settings = {{"out", 10}}), model("linear")},
      {"hidden", SET(c.model.settings = {{"hidden", {8}}}), model("mlp")},
      {"layers", SET(c.model.settings = {{"layers", 2}}), model("lstm")},
      {"heads", SET(c.model.settings = {{"heads", 2}}), model("gpt")},
      {"width", SET(c.model.settings = {{"width", 8}}), model("gpt2")},
      {"context", SET(c.model.settings = {{"context", 8}}), tokens},
      {"zero-init-residual", SET(c.model.settings = {{"zero-init-residual", true}}), model("resnet50")},
      {"dropout", SET(c.model.settings = {{"dropout", 0.5}}), model("lstm")},
      {"weights-key", SET(c.weights_key = "model"), weights},
      {"non-strict", SET(c.non_strict = true), weights},
      {"keep-prefix", SET(c.keep_prefix = true), weights},
      {"reset-head", SET(c.reset_head = true), weights},
      {"momentum", SET(c.optimizer_settings = {{"momentum", 0.9}}), sgd},
      {"nesterov", SET(c.optimizer_settings = {{"nesterov", true}}), sgd},
      {"betas", SET(c.model.name = "resnet18", c.optimizer_settings = {{"betas", {0.9, 0.99}}}),
       SET(c.optimizer = "adamw")},
      {"min-lr", SET(c.schedule_settings = {{"min-lr", 1e-6}}), SET(c.schedule = "step")},
      {"share-devices", SET(c.device = "cpu", c.share_devices = true), SET(c.device = "cpu:0,0")},
      {"graphs", SET(c.device = "cuda", c.graphs = true, c.find_unused_parameters = true),
       SET(c.find_unused_parameters = false)},
      {"graphs", SET(c.device = "cuda", c.graphs = true, c.parallel = Parallel::kDp), SET(c.parallel = Parallel::kDdp)},
      {"static-graph", SET(c.static_graph = c.find_unused_parameters = true), SET(c.find_unused_parameters = false)},
      {"static-graph", SET(c.static_graph = true, c.shards = 2), SET(c.shards = 0)},
      {"recompute", SET(c.recompute = "blocks"), model("resnet18")},
      {"recompute", SET(c.model.name = "resnet18", c.recompute = "2", c.sync_batchnorm = true),
       SET(c.sync_batchnorm = false)},
      {"local-sgd", SET(c.local_sgd = 2, c.shards = 2), SET(c.shards = 0)},
      {"local-sgd", SET(c.local_sgd = 2, c.comm_hook = "bf16"), SET(c.comm_hook = "none")},
      {"local-sgd", SET(c.local_sgd = 2, c.parallel = Parallel::kDp), SET(c.parallel = Parallel::kDdp)},
      {"local-sgd", SET(c.local_sgd = 4, c.checkpoint_dir = "d", c.checkpoint_every = 6), SET(c.checkpoint_every = 8)},
      {"local-sgd", SET(c.local_sgd = 4, c.check_replicas = 1), SET(c.check_replicas = 4)},
      {"autotune", SET(c.device = "cpu", c.autotune = true), SET(c.device = "cuda")},
      {"deterministic", SET(c.device = "cuda", c.deterministic = false, c.precision = Precision::kBF16),
       SET(c.model.name = "gpt", c.data = "random:tokens,9")},
      {"loss-scale", SET(c.loss_scale = "1024"), SET(c.precision = Precision::kFp16)},
      {"loss-scale", SET(c.loss_scale = "dynamic", c.precision = Precision::kBF16),
       SET(c.precision = Precision::kFp16)},
      {"threads", SET(c.device = "cuda:0", c.threads = 2), SET(c.device = "auto")},
      {"no-broadcast-buffers", SET(c.broadcast_buffers = false), model("resnet18-cifar")},
      {"sync-batchnorm", SET(c.sync_batchnorm = true), model("resnet18")},
      {"checkpoint-every", SET(c.checkpoint_every = 0), directory},
      {"checkpoint-mirror", SET(c.checkpoint_mirror = "b:m"), directory},
      {"keep", SET(c.keep = checkpoint::kDefaultKeep), directory},
      {"keep-best", SET(c.keep_best = 1), directory},
      {"save-best", SET(c.save_best = "loss"), SET(c.patience = 1)},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.setting);
    auto config = good();
    each.set(config);
    EXPECT_THAT(why_not(config), ::testing::StartsWith(fmt::format("--{}: it applies to ", each.setting)));
    EXPECT_TRUE(inapplicable(config, each.setting));
    each.applies(config);
    EXPECT_EQ(why_not(config), "");
    EXPECT_FALSE(inapplicable(config, each.setting));
  }
  // Unsetting is no setting.
  auto config = good();
  config.graphs = config.autotune = false;
  config.device = "cpu";
  EXPECT_EQ(why_not(config), "");
  cuda(config);
  EXPECT_EQ(why_not(config), "");
}

TEST(TrainConfig, CpuDevicesAreThoseThatAreNamed) {
  for (const char* device : {"cpu:1", "cpu:99", "cpu:0,2", "cpu:1,2"}) {
    auto config = good();
    config.device = device;
    EXPECT_THAT(why_not(config), ::testing::HasSubstr("there is no CPU device")) << device;
  }
  auto config = good();
  config.device = "cpu:2,0,1";
  EXPECT_EQ(why_not(config), "");
}

// NCCL between hosts; on one host nothing leaves it.
TEST(TrainConfig, GpusOfSeveralHostsDoNotEncrypt) {
  auto config = good();
  EXPECT_NO_THROW(session::check_encryption(config, DeviceKind::kCuda, true));
  config.encrypt = true;
  EXPECT_NO_THROW(session::check_encryption(config, DeviceKind::kCuda, false));
  EXPECT_NO_THROW(session::check_encryption(config, DeviceKind::kCpu, true));
  EXPECT_THROW(session::check_encryption(config, DeviceKind::kCuda, true), UsageError);
  for (const auto backend : {"mpi", "nccl"}) {
    config.backend = backend;
    EXPECT_TRUE(inapplicable(config, "encrypt"));
  }
  config.backend = "shm";
  EXPECT_FALSE(inapplicable(config, "encrypt"));
}

std::string refusal_of(const TrainConfig& config, DeviceKind kind, const std::string& why = {}) {
  return why_not([&] {
    session::check_kind(config, kind, why);
    check_gpu_options(config, kind, why);
  });
}

TEST(TrainConfig, OptionsThatADeviceLacks) {
  for (const auto kind : {DeviceKind::kCpu, DeviceKind::kCuda}) EXPECT_EQ(refusal_of(good(), kind), "");
  auto config = good();
  config.backend = "nccl";
  EXPECT_EQ(refusal_of(config, DeviceKind::kCuda), "");
  EXPECT_EQ(refusal_of(config, DeviceKind::kCpu, "no driver"),
            "--backend nccl is for GPUs, and this run is on the CPU (no driver)");
  config.backend = "mpi";
  EXPECT_EQ(refusal_of(config, DeviceKind::kCpu), "");
  EXPECT_EQ(refusal_of(config, DeviceKind::kCuda), "--backend mpi on GPUs: gradients on a GPU travel over NCCL");
  config.backend = "shm";
  EXPECT_EQ(refusal_of(config, DeviceKind::kCuda), "--backend shm on GPUs: gradients on a GPU travel over NCCL");
  config = good();
  config.precision = Precision::kBF16;
  EXPECT_EQ(refusal_of(config, DeviceKind::kCuda), "");
  EXPECT_EQ(refusal_of(config, DeviceKind::kCpu),
            nn::cpu_bf16() != nn::CpuBf16::kNone ? ""
                                                 : fmt::format("--precision bf16 on this CPU, which computes with {}: "
                                                               "bf16 needs AVX-512 at least",
                                                               nn::cpu_kernel_isa()));
  config.precision = Precision::kFp16;
  EXPECT_EQ(refusal_of(config, DeviceKind::kCuda), "");
  EXPECT_EQ(refusal_of(config, DeviceKind::kCpu),
            "--precision fp16 is for GPUs, and this run is on the CPU: no kernel there computes in f16");
  config = good();
  config.tf32 = true;
  EXPECT_EQ(refusal_of(config, DeviceKind::kCuda), "");
  EXPECT_EQ(refusal_of(config, DeviceKind::kCpu), "--tf32 is for GPUs, and this run is on the CPU");
}

TEST(TrainConfig, KernelsAreNotedInTheUsersCache) {
  const auto file = [](const std::map<std::string, std::string>& variables) {
    return session::file_of_kernels([&](const std::string& name) {
      const auto at = variables.find(name);
      return at == variables.end() ? std::nullopt : std::optional(at->second);
    });
  };
  EXPECT_EQ(file({{"HOME", "/home/a"}}), "/home/a/.cache/lockstep/kernels.txt");
  EXPECT_EQ(file({{"HOME", "/home/a"}, {"XDG_CACHE_HOME", "/c"}}), "/c/lockstep/kernels.txt");
  EXPECT_EQ(file({{"HOME", "/home/a"}, {"XDG_CACHE_HOME", "c"}}), "/home/a/.cache/lockstep/kernels.txt");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(file({{"HOME", ""}}), "");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::HasSubstr("--autotune no"));
  session::SessionOptions options;
  EXPECT_EQ(session::cuda_options(options, 1).plan_file, "") << "programs of one's own ask for it";
  options.autotune = true;
  EXPECT_NE(session::cuda_options(options, 1).plan_file, "");
}

// What the ranks compare: a field that changes numbers and is not described would let ranks drift apart unnoticed.
TEST(TrainConfig, DescribesWhatChangesNumbers) {
  const std::vector<Change> changes = {SET(c.model.name = "mlp"),
                                       SET(c.model.settings = {{"hidden", {7}}}),
                                       SET(c.data = "random:5,100"),
                                       SET(c.classes = 3),
                                       SET(c.data_settings = {{"augment", false}}),
                                       SET(c.data_settings = {{"image-size", 64}}),
                                       SET(c.data_settings = {{"mixup", 0.2}}),
                                       SET(c.data_settings = {{"cutmix", 1.0}}),
                                       SET(c.data_settings = {{"randaugment", {2, 9}}}),
                                       SET(c.batch = 7),
                                       SET(c.global_batch = 7),
                                       SET(c.tail = sampler::Tail::kDrop),
                                       SET(c.epochs = 3),
                                       SET(c.steps = 3),
                                       SET(c.eval_every = 3),
                                       SET(c.loss = "another"),
                                       SET(c.loss_settings = {{"label-smoothing", 0.1}}),
                                       SET(c.loss_settings = {{"ignore-index", std::vector<std::int64_t>{3}}}),
                                       SET(c.optimizer = "sgd"),
                                       SET(c.lr = 0.2),
                                       SET(c.schedule_settings = {{"min-lr", 1e-9}}),
                                       SET(c.optimizer_settings = {{"momentum", 0.1}}),
                                       SET(c.optimizer_settings = {{"nesterov", true}}),
                                       SET(c.optimizer_settings = {{"betas", {0.9, 0.5}}}),
                                       SET(c.optimizer_settings = {{"eps", 1e-6}}),
                                       SET(c.weight_decay = 0.5),
                                       SET(c.schedule = "step"),
                                       SET(c.warmup = 3),
                                       SET(c.clip_norm = 3),
                                       SET(c.seed = 3),
                                       SET(c.bucket_mb = 3),
                                       SET(c.tune_bucket_mb = true),
                                       SET(c.first_bucket_mb = 3),
                                       SET(c.comm_hook = "bf16"),
                                       SET(c.check_replicas = 3),
                                       SET(c.precision = Precision::kBF16),
                                       SET(c.precision = Precision::kFp16),
                                       SET(c.loss_scale = "2"),
                                       SET(c.tf32 = true),
                                       SET(c.deterministic = false),
                                       SET(c.autotune = false)};
  const auto before = describe(good());
  for (std::size_t i = 0; i < changes.size(); ++i) {
    auto config = good();
    changes[i](config);
    EXPECT_NE(describe(config), before) << "change " << i << " is not described";
  }
}

TEST(TrainConfig, ScalesOfLossesAreDynamicOrPositiveNumbers) {
  auto config = good();
  config.precision = Precision::kFp16;
  for (const char* scale : {"", "dynamic", "1", "0.5", "65536", "1e30"}) {
    config.loss_scale = scale;
    EXPECT_NO_THROW(validate(config)) << scale;
  }
  for (const char* scale : {"0", "-1", "nan", "inf", "1e39", "1e-40", "static", "Dynamic", "2x", " "}) {
    config.loss_scale = scale;
    EXPECT_THAT(why_not(config), ::testing::HasSubstr(fmt::format("'{}' is no scale of losses", scale)));
  }
}

// One scale, and one decision for all that moves.
TEST(TrainConfig, ScaledLossesAreOfOneProcessForEachDeviceAndOfSummedGradients) {
  auto config = good();
  config.precision = Precision::kFp16;
  config.local_sgd = 2;
  EXPECT_THAT(why_not(config), ::testing::HasSubstr("--precision fp16 with --local-sgd"));
  config.local_sgd = 0;
  config.parallel = Parallel::kDp;
  EXPECT_THAT(why_not(config), ::testing::HasSubstr("--precision fp16 with --parallel dp"));
}

TEST(TrainConfig, DefaultsOfAModelsNameAreWhatRanksCompare) {
  TrainConfig config;
  config.model.name = "gpt2";
  config.data = "random:tokens,40";
  EXPECT_THAT(describe(config), ::testing::IsSupersetOf(std::vector<std::pair<std::string, std::string>>{
                                    {"layers", "12"}, {"width", "768"}, {"dropout", "0"}}));
  config.model.settings = {{"layers", 2}, {"dropout", 0.25}};
  EXPECT_THAT(describe(config), ::testing::IsSupersetOf(std::vector<std::pair<std::string, std::string>>{
                                    {"layers", "2"}, {"width", "768"}, {"dropout", "0.25"}}));
  EXPECT_EQ(dropout_of(config.model), 0.25);
  EXPECT_EQ(dropout_of({.name = "gpt2", .settings = {}}), 0.0);
  EXPECT_EQ(dropout_of({.name = "cnn", .settings = {}}), 0.0);
  config.model = {.name = "vgg11", .settings = {}};
  EXPECT_EQ(dropout_of(config.model), 0.5);
  EXPECT_THAT(describe(config), ::testing::Contains(::testing::Pair("dropout", "0.5")));
  config.model.settings = {{"dropout", 0.0}};
  EXPECT_EQ(dropout_of(config.model), 0.0);
}

}  // namespace
}  // namespace lockstep::trainer
