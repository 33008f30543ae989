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
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

TrainConfig good() {
  TrainConfig config;
  config.model.name = "cnn";
  config.data = "digits";
  return config;
}

TEST(TrainConfig, DefaultsAreValid) { EXPECT_NO_THROW(validate(good())); }

TEST(TrainConfig, ContradictionsAreRefused) {
  const std::vector<std::function<void(TrainConfig&)>> faults = {
      [](auto& c) { c.model.name.clear(); },
      [](auto& c) { c.data.clear(); },
      [](auto& c) { c.batch = 8, c.global_batch = 16; },
      [](auto& c) { c.lr = -1; },
      [](auto& c) {
        c.schedule_settings = {{"min-lr", 1.0}}, c.schedule = "cosine";
      },
      [](auto& c) {
        c.optimizer_settings = {{"nesterov", true}};
      },
      [](auto& c) {
        c.optimizer = "sgd", c.optimizer_settings = {{"nesterov", true}, {"momentum", 0.0}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"betas", {1.0, 0.9}}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"eps", -1e-8}};
      },
      [](auto& c) { c.weight_decay = -0.1; },
      [](auto& c) { c.clip_norm = -1; },
      [](auto& c) { c.loss = "entropy"; },
      [](auto& c) {
        c.loss_settings = {{"label-smoothing", 1.0}};
      },
      [](auto& c) { c.save = "dir/"; },
      [](auto& c) { c.log_level = "loud"; },
      [](auto& c) { c.batch = 0; },
      [](auto& c) { c.global_batch = -1; },
      [](auto& c) { c.epochs = 0; },
      [](auto& c) { c.steps = 0; },
      [](auto& c) { c.log_every = 0; },
      [](auto& c) { c.workers = -1; },
      [](auto& c) { c.threads = -1; },
      [](auto& c) { c.lr = std::numeric_limits<double>::infinity(); },
      [](auto& c) { c.lr = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& c) { c.clip_norm = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& c) {
        c.optimizer_settings = {{"momentum", 1.5}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"betas", {0.9, std::numeric_limits<double>::quiet_NaN()}}};
      },
      [](auto& c) { c.bucket_mb = 1e300; },
      [](auto& c) { c.tune_bucket_mb = true, c.zero = 1; },
      [](auto& c) { c.tune_bucket_mb = true, c.local_sgd = 2; },
      [](auto& c) { c.first_bucket_mb = 0; },
      [](auto& c) { c.device = "tpu"; },
      [](auto& c) { c.device = "cuda:1,0,1"; },
      [](auto& c) { c.device = "cpu:0,0"; },
      [](auto& c) { c.device = "cuda:0,0", c.parallel = Parallel::kDp; },
      [](auto& c) { c.device = "cuda:0,1", c.parallel = Parallel::kDp, c.share_devices = true; },
      [](auto& c) { c.device = "cpu", c.backend = "nccl"; },
      [](auto& c) { c.device = "cpu", c.tf32 = true; },
      [](auto& c) { c.device = "cuda", c.backend = "mpi"; },
      [](auto& c) { c.device = "cuda:0", c.backend = "shm"; },
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    auto config = good();
    faults[i](config);
    try {
      validate(config);
      ADD_FAILURE() << "fault " << i << " was accepted";
    } catch (const UsageError& error) {
      EXPECT_FALSE(error.remedy().empty()) << error.what();
    }
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

std::string why_not(const TrainConfig& config) {
  try {
    validate(config);
  } catch (const UsageError& error) {
    EXPECT_FALSE(error.remedy().empty()) << error.what();
    return error.what();
  }
  return "";
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
  using Change = std::function<void(TrainConfig&)>;
  struct Case {
    const char* setting;
    Change set, applies;
  };
  const auto model = [](const char* name) { return [name](TrainConfig& c) { c.model.name = name; }; };
  const auto sgd = [](TrainConfig& c) { c.optimizer = "sgd"; };
  const auto weights = [](TrainConfig& c) { c.weights = "w"; };
  const auto directory = [](TrainConfig& c) { c.checkpoint_dir = "d"; };
  const auto tokens = [](TrainConfig& c) { c.model.name = "lstm", c.data = "text:t"; };
  const auto cuda = [](TrainConfig& c) { c.device = "cuda"; };
  const Case cases[] = {
      {"in",
       [](auto& c) {
         c.model.settings = {{"in", 64}};
       },
       model("linear")},
      {"out",
       [](auto& c) {
         c.model.settings = {{"out", 10}};
       },
       model("linear")},
      {"hidden",
       [](auto& c) {
         c.model.settings = {{"hidden", {8}}};
       },
       model("mlp")},
      {"layers",
       [](auto& c) {
         c.model.settings = {{"layers", 2}};
       },
       model("lstm")},
      {"heads",
       [](auto& c) {
         c.model.settings = {{"heads", 2}};
       },
       model("gpt")},
      {"width",
       [](auto& c) {
         c.model.settings = {{"width", 8}};
       },
       model("gpt2")},
      {"context",
       [](auto& c) {
         c.model.settings = {{"context", 8}};
       },
       tokens},
      {"zero-init-residual",
       [](auto& c) {
         c.model.settings = {{"zero-init-residual", true}};
       },
       model("resnet50")},
      {"dropout",
       [](auto& c) {
         c.model.settings = {{"dropout", 0.5}};
       },
       model("lstm")},
      {"weights-key", [](auto& c) { c.weights_key = "model"; }, weights},
      {"non-strict", [](auto& c) { c.non_strict = true; }, weights},
      {"keep-prefix", [](auto& c) { c.keep_prefix = true; }, weights},
      {"reset-head", [](auto& c) { c.reset_head = true; }, weights},
      {"momentum",
       [](auto& c) {
         c.optimizer_settings = {{"momentum", 0.9}};
       },
       sgd},
      {"nesterov",
       [](auto& c) {
         c.optimizer_settings = {{"nesterov", true}};
       },
       sgd},
      {"betas",
       [](auto& c) {
         c.model.name = "resnet18", c.optimizer_settings = {{"betas", {0.9, 0.99}}};
       },
       [](auto& c) { c.optimizer = "adamw"; }},
      {"min-lr",
       [](auto& c) {
         c.schedule_settings = {{"min-lr", 1e-6}};
       },
       [](auto& c) { c.schedule = "step"; }},
      {"share-devices", [](auto& c) { c.device = "cpu", c.share_devices = true; },
       [](auto& c) { c.device = "cpu:0,0"; }},
      {"graphs", [](auto& c) { c.device = "cuda", c.graphs = true, c.find_unused_parameters = true; },
       [](auto& c) { c.find_unused_parameters = false; }},
      {"graphs", [](auto& c) { c.device = "cuda", c.graphs = true, c.parallel = Parallel::kDp; },
       [](auto& c) { c.parallel = Parallel::kDdp; }},
      {"static-graph", [](auto& c) { c.static_graph = c.find_unused_parameters = true; },
       [](auto& c) { c.find_unused_parameters = false; }},
      {"static-graph", [](auto& c) { c.static_graph = true, c.shards = 2; }, [](auto& c) { c.shards = 0; }},
      {"recompute", [](auto& c) { c.recompute = "blocks"; }, model("resnet18")},
      {"recompute", [](auto& c) { c.model.name = "resnet18", c.recompute = "2", c.sync_batchnorm = true; },
       [](auto& c) { c.sync_batchnorm = false; }},
      {"local-sgd", [](auto& c) { c.local_sgd = 2, c.shards = 2; }, [](auto& c) { c.shards = 0; }},
      {"local-sgd", [](auto& c) { c.local_sgd = 2, c.comm_hook = "bf16"; }, [](auto& c) { c.comm_hook = "none"; }},
      {"local-sgd", [](auto& c) { c.local_sgd = 2, c.parallel = Parallel::kDp; },
       [](auto& c) { c.parallel = Parallel::kDdp; }},
      {"local-sgd", [](auto& c) { c.local_sgd = 4, c.checkpoint_dir = "d", c.checkpoint_every = 6; },
       [](auto& c) { c.checkpoint_every = 8; }},
      {"local-sgd", [](auto& c) { c.local_sgd = 4, c.check_replicas = 1; }, [](auto& c) { c.check_replicas = 4; }},
      {"autotune", [](auto& c) { c.device = "cpu", c.autotune = true; }, [](auto& c) { c.device = "cuda"; }},
      {"deterministic", [](auto& c) { c.device = "cuda", c.deterministic = false, c.precision = Precision::kBF16; },
       [](auto& c) { c.model.name = "gpt", c.data = "random:tokens,9"; }},
      {"loss-scale", [](auto& c) { c.loss_scale = "1024"; }, [](auto& c) { c.precision = Precision::kFp16; }},
      {"loss-scale", [](auto& c) { c.loss_scale = "dynamic", c.precision = Precision::kBF16; },
       [](auto& c) { c.precision = Precision::kFp16; }},
      {"threads", [](auto& c) { c.device = "cuda:0", c.threads = 2; }, [](auto& c) { c.device = "auto"; }},
      {"no-broadcast-buffers", [](auto& c) { c.broadcast_buffers = false; }, model("resnet18-cifar")},
      {"sync-batchnorm", [](auto& c) { c.sync_batchnorm = true; }, model("resnet18")},
      {"checkpoint-every", [](auto& c) { c.checkpoint_every = 0; }, directory},
      {"checkpoint-mirror", [](auto& c) { c.checkpoint_mirror = "b:m"; }, directory},
      {"keep", [](auto& c) { c.keep = checkpoint::kDefaultKeep; }, directory},
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
  try {
    session::check_kind(config, kind, why);
    check_gpu_options(config, kind, why);
  } catch (const UsageError& error) {
    EXPECT_FALSE(error.remedy().empty()) << error.what();
    return error.what();
  }
  return "";
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
  const std::vector<std::function<void(TrainConfig&)>> changes = {
      [](auto& c) { c.model.name = "mlp"; },
      [](auto& c) {
        c.model.settings = {{"hidden", {7}}};
      },
      [](auto& c) { c.data = "random:5,100"; },
      [](auto& c) { c.classes = 3; },
      [](auto& c) {
        c.data_settings = {{"augment", false}};
      },
      [](auto& c) {
        c.data_settings = {{"image-size", 64}};
      },
      [](auto& c) { c.batch = 7; },
      [](auto& c) { c.global_batch = 7; },
      [](auto& c) { c.tail = sampler::Tail::kDrop; },
      [](auto& c) { c.epochs = 3; },
      [](auto& c) { c.steps = 3; },
      [](auto& c) { c.eval_every = 3; },
      [](auto& c) { c.loss = "another"; },
      [](auto& c) {
        c.loss_settings = {{"label-smoothing", 0.1}};
      },
      [](auto& c) { c.optimizer = "sgd"; },
      [](auto& c) { c.lr = 0.2; },
      [](auto& c) {
        c.schedule_settings = {{"min-lr", 1e-9}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"momentum", 0.1}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"nesterov", true}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"betas", {0.9, 0.5}}};
      },
      [](auto& c) {
        c.optimizer_settings = {{"eps", 1e-6}};
      },
      [](auto& c) { c.weight_decay = 0.5; },
      [](auto& c) { c.schedule = "step"; },
      [](auto& c) { c.warmup = 3; },
      [](auto& c) { c.clip_norm = 3; },
      [](auto& c) { c.seed = 3; },
      [](auto& c) { c.bucket_mb = 3; },
      [](auto& c) { c.tune_bucket_mb = true; },
      [](auto& c) { c.first_bucket_mb = 3; },
      [](auto& c) { c.comm_hook = "bf16"; },
      [](auto& c) { c.check_replicas = 3; },
      [](auto& c) { c.precision = Precision::kBF16; },
      [](auto& c) { c.precision = Precision::kFp16; },
      [](auto& c) { c.loss_scale = "2"; },
      [](auto& c) { c.tf32 = true; },
      [](auto& c) { c.deterministic = false; },
      [](auto& c) { c.autotune = false; },
  };
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
