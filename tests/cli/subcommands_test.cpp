#include "cli/commands.h"

#include <gmock/gmock.h>

#include <iterator>
#include <sstream>

#include "base/error.h"
#include "base/text.h"
#include "base/version.h"
#include "inference/export.h"
#include "inference/infer.h"
#include "lockstep/base/device.h"
#include "tests/support/json.h"
#include "tests/support/refusal.h"
#include "trainer/options.h"

namespace lockstep::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string complaint(std::vector<std::string> args) {
  return testing::thrown<UsageError>([&] { run(args); }).line();
}

Sources words(std::vector<std::string> args) {
  return {std::move(args), [](const std::string&) { return std::nullopt; }, {}};
}

TEST(Subcommands, UnknownOnesNameTheNearest) {
  EXPECT_THAT(complaint({"trian"}), HasSubstr("did you mean lockstep train?"));
  EXPECT_THAT(complaint({"fly-away"}),
              HasSubstr("one of launch, train, eval, infer, export, devices, doctor, bench, simulate, plan, "
                        "report, compare, watch, checkpoint, inspect, bugreport, version"));
  EXPECT_THAT(complaint({"help", "trian"}), HasSubstr("did you mean lockstep train?"));
  EXPECT_THAT(complaint({}), HasSubstr("needs a subcommand"));
  EXPECT_THAT(complaint({"--quiet"}), HasSubstr("unknown subcommand '--quiet'"));
}

TEST(Subcommands, FlagsOfAnotherSubcommandAreRecognised) {
  EXPECT_THAT(complaint({"launch", "--epochs", "3"}), HasSubstr("it is a flag of lockstep train"));
  EXPECT_THAT(complaint({"train", "cnn", "-n", "3"}), HasSubstr("it is a flag of lockstep launch"));
}

TEST(Subcommands, MissingParts) {
  EXPECT_THAT(complaint({"train"}), HasSubstr("needs a MODEL"));
  EXPECT_THAT(complaint({"train", "cnn"}), HasSubstr("give --data"));
  EXPECT_THAT(complaint({"launch", "-n", "2"}), HasSubstr("needs a program"));
  EXPECT_THAT(complaint({"launch", "-n", "2", "lockstep", "train"}), HasSubstr("put -- before the program"));
  EXPECT_THAT(complaint({"launch", "-n", "0", "--", "true"}), HasSubstr("--np 0"));
}

TEST(Subcommands, TheOverviewNamesThem) {
  for (const char* name : {"launch", "train", "eval", "infer", "export", "checkpoint", "inspect", "version"})
    EXPECT_THAT(overview(), HasSubstr(name));
}

TEST(ExportFlags, ReachTheConfiguration) {
  inference::ExportConfig config;
  parse_options(inference::export_onnx_options(config),
                words({"resnet18", "--weights=w.pt", "--weights-key=ema", "--non-strict", "--keep-prefix",
                       "--output=m.onnx", "--class-names=c.txt", "--image-size=64", "--log-level=warn"}));
  EXPECT_EQ(config.model.name, "resnet18");
  EXPECT_EQ(config.weights, "w.pt");
  EXPECT_EQ(config.weights_key, "ema");
  EXPECT_TRUE(config.non_strict);
  EXPECT_TRUE(config.keep_prefix);
  EXPECT_EQ(config.output, "m.onnx");
  EXPECT_EQ(config.class_names, "c.txt");
  EXPECT_EQ(config.image_size, 64);
  EXPECT_EQ(config.log_level, "warn");
}

TEST(InspectFlags, ReachTheOptions) {
  InspectOptions options;
  parse_options(inspect_options(options), words({"logs", "--last=7", "--json"}));
  EXPECT_EQ(options.path, "logs");
  EXPECT_EQ(options.last, 7);
  EXPECT_TRUE(options.json);
  EXPECT_THAT(complaint({"inspect"}), HasSubstr("needs a PATH"));
  EXPECT_THAT(complaint({"inspect", "logs", "--last", "1025"}), HasSubstr("give an integer from 0 to 1024"));
}

TEST(DevicesFlags, ReachTheOptions) {
  DevicesOptions options;
  parse_options(devices_options(options), words({"--json", "--measure"}));
  EXPECT_TRUE(options.json);
  EXPECT_TRUE(options.measure);
}

TEST(BenchStepFlags, PeaksAreNumbersOrMeasured) {
  const auto parsed = [](std::vector<std::string> flags) {
    bench::StepOptions options;
    flags.insert(flags.begin(), "mlp");
    parse_options(bench_step_options(options), words(std::move(flags)));
    return options;
  };
  EXPECT_FALSE(parsed({}).measure_peaks);
  EXPECT_TRUE(parsed({"--peak-tflops=measured"}).measure_peaks);
  EXPECT_FALSE(parsed({"--peak-tflops=measured"}).peak_tflops);
  EXPECT_FALSE(parsed({"--peak-tflops", "3.5"}).measure_peaks);
  EXPECT_EQ(parsed({"--peak-tflops", "3.5"}).peak_tflops, 3.5);
  for (const char* wrong : {"0", "-1", "measure", "nan"})
    EXPECT_THROW(parsed({"--peak-tflops", wrong}), UsageError) << wrong;
}

std::vector<std::string> flags_in(const std::string& line) {
  std::istringstream words(line);
  return {std::istream_iterator<std::string>(words), {}};
}

// Each set of flags is one that applies together.
inference::InferConfig infer_config(std::vector<std::string> flags) {
  inference::InferConfig config;
  parse_options(inference::infer_options(config), words(std::move(flags)));
  return config;
}

TEST(InferFlags, ReachTheConfiguration) {
  auto config =
      infer_config(flags_in("gpt --weights=w.safetensors --weights-key=ema.model --non-strict --keep-prefix --layers=2 "
                            "--heads=3 --width=6 --context=7 --input=to --lines --tokens=9 --samples=4 --top-k=11 "
                            "--temperature=0.5 --vocab=v.json --merges=m.txt --seed=12 --threads=3 --device=cuda:1 "
                            "--precision=bf16 --tf32 --json --output=o.jsonl --warmup=13 --log-level=warn --quiet"));
  EXPECT_EQ(config.model.name, "gpt");
  EXPECT_EQ(config.model.settings.integer("layers"), 2);
  EXPECT_EQ(config.model.settings.integer("heads"), 3);
  EXPECT_EQ(config.model.settings.integer("width"), 6);
  EXPECT_EQ(config.model.settings.integer("context"), 7);
  EXPECT_EQ(config.weights, "w.safetensors");
  EXPECT_EQ(config.weights_key, "ema.model");
  EXPECT_TRUE(config.non_strict && config.keep_prefix && config.lines && config.tf32 && config.json && config.quiet);
  EXPECT_EQ(config.input, "to");
  EXPECT_EQ(config.output, "o.jsonl");
  EXPECT_FALSE(config.prompt);
  EXPECT_EQ(config.tokens, 9);
  EXPECT_EQ(config.samples, 4);
  EXPECT_EQ(config.top_k, 11);
  EXPECT_EQ(config.temperature, 0.5);
  EXPECT_EQ(config.vocabulary, "v.json");
  EXPECT_EQ(config.merges, "m.txt");
  EXPECT_EQ(config.seed, 12u);
  EXPECT_EQ(config.threads, 3);
  EXPECT_EQ(config.device, "cuda:1");
  EXPECT_EQ(config.precision, inference::InferPrecision::kBF16);
  EXPECT_EQ(config.warmup, 13);
  EXPECT_EQ(config.log_level, "warn");
  EXPECT_EQ(infer_config({"gpt", "--prompt=to be"}).prompt, "to be");
  config = infer_config({"bert", "--input=t.csv", "--lines", "--text=a,b", "--quotes=no"});
  EXPECT_EQ(config.table.word("text"), "a,b");
  EXPECT_EQ(config.table.word("quotes"), "no");
  EXPECT_EQ(infer_config({"gpt", "--precision=int8w"}).precision, inference::InferPrecision::kInt8W);
  config =
      infer_config({"cnn", "--input", "a.png,b.png", "--top=2", "--class-names=c.txt", "--image-size=96", "--batch=8"});
  EXPECT_EQ(config.batch, 8);
  EXPECT_EQ(config.input, "a.png,b.png");
  EXPECT_EQ(config.top, 2);
  EXPECT_EQ(config.class_names, "c.txt");
  EXPECT_EQ(config.image_size, 96);
  EXPECT_THAT(infer_config({"mlp", "--hidden=5"}).model.settings.integers("hidden"), ElementsAre(5));
}

trainer::TrainConfig train_config(std::vector<std::string> flags) {
  trainer::TrainConfig config;
  parse_options(trainer::train_options(config), words(std::move(flags)));
  return config;
}

TEST(TrainFlags, ReachTheConfiguration) {
  auto config = train_config(
      flags_in("resnet18 --data images:x --classes=9 --augment=no --image-size=96 --max-corrupt=3 "
               "--global-batch 64 --tail=pad --workers=0 --steps 7 --eval-every=2 --loss=cross_entropy "
               "--label-smoothing=0.1 --opt sgd --lr 0.1 --min-lr=0.01 --momentum=0.8 --nesterov "
               "--weight-decay=0 --schedule=cosine --warmup=5 --clip-norm=1 --loss-scale=1024 --ema=0.99 "
               "--seed=42 --device=cuda:0,3 --share-devices --backend=nccl --precision=fp16 --tf32 "
               "--deterministic=yes --autotune=no --graphs=no --timeout-seconds=5 --stall-warning-seconds=0.5 "
               "--bucket-mb=0.5 --first-bucket-mb=0.25 --comm-hook=powersgd:4 --accumulate=4 --find-unused "
               "--no-broadcast-buffers --sync-batchnorm --check-replicas=1 --weights=w.safetensors "
               "--weights-key=ema.model --non-strict --keep-prefix --reset-head --freeze=conv1.*,bn1.* "
               "--zero-init-residual --save=s.safetensors --checkpoint-dir=c --checkpoint-every=17 "
               "--checkpoint-mirror=b:m --keep=4 --keep-best=2 --resume=auto --resume-data-changed --metrics=m.jsonl "
               "--trace=t.json --log-level=warn --log-every=3 --tensorboard=b --histogram-steps=5 --status-port=9100 "
               "--status-address=::1 --status-token-file=t"));
  EXPECT_EQ(config.model.name, "resnet18");
  EXPECT_EQ(config.data, "images:x");
  EXPECT_EQ(config.classes, 9);
  EXPECT_EQ(config.data_settings.flag("augment"), false);
  EXPECT_EQ(config.data_settings.integer("image-size"), 96);
  EXPECT_EQ(config.data_settings.integer("max-corrupt"), 3);
  EXPECT_FALSE(config.batch);
  EXPECT_EQ(config.global_batch, 64);
  EXPECT_EQ(config.tail, sampler::Tail::kPad);
  EXPECT_EQ(config.workers, 0);
  EXPECT_EQ(config.steps, 7);
  EXPECT_EQ(config.eval_every, 2);
  EXPECT_EQ(config.loss, "cross_entropy");
  EXPECT_EQ(config.loss_settings.number("label-smoothing"), 0.1);
  EXPECT_EQ(config.optimizer, "sgd");
  EXPECT_EQ(config.lr, 0.1);
  EXPECT_EQ(config.schedule_settings.number("min-lr"), 0.01);
  EXPECT_EQ(config.optimizer_settings.number("momentum"), 0.8);
  EXPECT_TRUE(config.optimizer_settings.flag("nesterov"));
  EXPECT_EQ(config.weight_decay, 0.0);
  EXPECT_EQ(config.schedule, "cosine");
  EXPECT_EQ(config.warmup, 5);
  EXPECT_EQ(config.clip_norm, 1);
  EXPECT_EQ(config.loss_scale, "1024");
  EXPECT_EQ(config.ema, 0.99);
  EXPECT_EQ(config.seed, 42u);
  EXPECT_EQ(config.device, "cuda:0,3");
  EXPECT_TRUE(config.share_devices);
  EXPECT_EQ(config.backend, "nccl");
  EXPECT_EQ(config.precision, Precision::kFp16);
  EXPECT_TRUE(config.tf32);
  EXPECT_EQ(config.autotune, false);
  EXPECT_EQ(config.graphs, false);
  EXPECT_EQ(config.timeout_seconds, 5);
  EXPECT_EQ(config.stall_warning_seconds, 0.5);
  EXPECT_FALSE(config.encrypt);
  EXPECT_EQ(config.bucket_mb, 0.5);
  EXPECT_EQ(config.first_bucket_mb, 0.25);
  EXPECT_EQ(config.comm_hook, "powersgd:4");
  EXPECT_EQ(config.accumulate, 4);
  EXPECT_TRUE(config.find_unused_parameters);
  EXPECT_FALSE(config.broadcast_buffers);
  EXPECT_TRUE(config.sync_batchnorm);
  EXPECT_EQ(config.check_replicas, 1);
  EXPECT_EQ(config.weights, "w.safetensors");
  EXPECT_EQ(config.weights_key, "ema.model");
  EXPECT_TRUE(config.non_strict && config.keep_prefix && config.reset_head &&
              config.model.settings.flag("zero-init-residual"));
  EXPECT_EQ(config.freeze, "conv1.*,bn1.*");
  EXPECT_EQ(config.save, "s.safetensors");
  EXPECT_EQ(config.checkpoint_dir, "c");
  EXPECT_EQ(config.checkpoint_mirror, "b:m");
  EXPECT_EQ(config.checkpoint_every, 17);
  EXPECT_EQ(config.keep, 4);
  EXPECT_EQ(config.keep_best, 2);
  EXPECT_EQ(config.resume, "auto");
  EXPECT_TRUE(config.resume_data_changed);
  EXPECT_EQ(config.metrics, "m.jsonl");
  EXPECT_EQ(config.trace, "t.json");
  EXPECT_EQ(config.tensorboard, "b");
  EXPECT_EQ(config.histogram_steps, 5);
  EXPECT_EQ(config.status_port, 9100);
  EXPECT_EQ(config.status_address, "::1");
  EXPECT_EQ(config.status_token_file, "t");
  EXPECT_EQ(config.log_level, "warn");
  EXPECT_EQ(config.log_every, 3);
  config = train_config(
      flags_in("linear --in=3 --out=4 --threads=2 --parallel=dp --quiet --encrypt --static-graph --batch=8 "
               "--epochs=3 --betas=0.8,0.9 --eps=1e-6"));
  EXPECT_EQ(config.model.settings.integer("in"), 3);
  EXPECT_EQ(config.model.settings.integer("out"), 4);
  EXPECT_EQ(config.threads, 2);
  EXPECT_EQ(config.parallel, trainer::Parallel::kDp);
  EXPECT_TRUE(config.static_graph);
  EXPECT_EQ(train_config({"linear", "--local-sgd=4"}).local_sgd, 4);
  EXPECT_EQ(train_config({"gpt", "--recompute=blocks"}).recompute, "blocks");
  EXPECT_EQ(train_config({"gpt", "--recompute=3"}).recompute, "3");
  EXPECT_EQ(train_config({"mlp", "--zero=1"}).zero, 1);
  EXPECT_THAT(complaint({"train", "gpt", "--recompute=some"}), HasSubstr("neither the word blocks nor"));
  EXPECT_TRUE(config.quiet);
  EXPECT_TRUE(config.encrypt);
  EXPECT_EQ(config.batch, 8);
  EXPECT_EQ(config.epochs, 3);
  EXPECT_THAT(config.optimizer_settings.numbers("betas"), ElementsAre(0.8, 0.9));
  EXPECT_EQ(config.optimizer_settings.number("eps"), 1e-6);
  EXPECT_EQ(train_config({"linear", "--device=cuda", "--graphs=yes"}).graphs, true);
  EXPECT_FALSE(train_config({"gpt2", "--device=cuda", "--precision=bf16", "--deterministic=no"}).deterministic);
  EXPECT_THAT(train_config({"mlp", "--hidden", "64,32"}).model.settings.integers("hidden"), ElementsAre(64, 32));
  config = train_config({"bert", "--max-length=9", "--inner=8", "--vocab=v.txt"});
  EXPECT_EQ(config.model.settings.integer("max-length"), 9);
  EXPECT_EQ(config.model.settings.integer("inner"), 8);
  EXPECT_EQ(config.vocabulary, "v.txt");
  config = train_config({"gpt", "--data=text:x", "--vocab=v.json", "--merges=m.txt"});
  EXPECT_EQ(config.vocabulary, "v.json");
  EXPECT_EQ(config.merges, "m.txt");
  EXPECT_EQ(train_config({"bert", "--vocab-size=77"}).vocabulary_size, 77);
  EXPECT_EQ(train_config({"bert", "--cased=yes"}).cased, true);
  EXPECT_EQ(infer_config({"bert", "--cased=no", "--prompt=x"}).cased, false);
  config = train_config({"bert", "--data=csv:x", "--text=a,b c", "--label=d", "--quotes=no"});
  EXPECT_EQ(config.data_settings.word("text"), "a,b c");
  EXPECT_EQ(config.data_settings.word("label"), "d");
  EXPECT_EQ(config.data_settings.word("quotes"), "no");
  config = train_config({"tabular", "--data=table:x", "--target=a", "--ignore=b,c", "--numeric=d", "--categorical=e",
                         "--quotes=yes", "--embedding-dim=3"});
  EXPECT_EQ(config.data_settings.word("target"), "a");
  EXPECT_EQ(config.data_settings.word("ignore"), "b,c");
  EXPECT_EQ(config.data_settings.word("numeric"), "d");
  EXPECT_EQ(config.data_settings.word("categorical"), "e");
  EXPECT_EQ(config.model.settings.integer("embedding-dim"), 3);
  EXPECT_EQ(train_config({"mlp", "--loss=huber", "--delta=0.5"}).loss_settings.number("delta"), 0.5);
  EXPECT_EQ(train_config({"mlp", "--loss=mse"}).loss, "squared_error");
  EXPECT_EQ(train_config({"mlp", "--loss=bce", "--pos-weight=3"}).loss_settings.number("pos-weight"), 3);
  EXPECT_EQ(train_config({"mlp", "--schedule=one-cycle", "--rise=0.4", "--start-divisor=5", "--end-divisor=7",
                          "--cycle-momentum=0.95,0.85"})
                .schedule_settings.number("rise"),
            0.4);
  EXPECT_EQ(train_config({"mlp", "--data=npy:x,y", "--channels=first"}).data_settings.word("channels"), "first");
  EXPECT_EQ(train_config({"gpt", "--data=tokens:x", "--token-type=u32"}).data_settings.word("token-type"), "u32");
  config = train_config({"rnn", "--data=text:x", "--stateful", "--bidirectional", "--nonlinearity=relu"});
  EXPECT_TRUE(config.stateful);
  EXPECT_TRUE(config.model.settings.flag("bidirectional"));
  EXPECT_EQ(config.model.settings.word("nonlinearity"), "relu");
  config = train_config({"gpt", "--layers=2", "--heads=3", "--width=6", "--context=7", "--dropout=0.5"});
  EXPECT_EQ(config.model.settings.integer("layers"), 2);
  EXPECT_EQ(config.model.settings.integer("heads"), 3);
  EXPECT_EQ(config.model.settings.integer("width"), 6);
  EXPECT_EQ(config.model.settings.integer("context"), 7);
  EXPECT_EQ(config.model.settings.number("dropout"), 0.5);
}

TEST(TrainFlags, OlderSpellings) {
  EXPECT_EQ(train_config({"cnn", "--data=images:x", "--most-damaged=4"}).data_settings.integer("max-corrupt"), 4);
}

TEST(TrainFlags, HelpShowsTheDefaults) {
  trainer::TrainConfig config;
  config.epochs = 123;
  EXPECT_THAT(trainer::train_options(config).help(), HasSubstr("(default 123)"));
}

TEST(LaunchFlags, ReachTheOptions) {
  launcher::LaunchOptions options;
  const auto parsed =
      parse_options(launch_options(options),
                    words({"-np", "3", "--bind-to", "none", "--log_dir=logs", "--grace-seconds", "2", "--no-prefix",
                           "--max-restarts", "5", "--min-ranks", "2", "--mpi", "--", "prog", "-n"}));
  EXPECT_EQ(options.ranks, 3);
  EXPECT_EQ(options.bind_to, launcher::BindTo::kNone);
  EXPECT_EQ(options.log_dir, "logs");
  EXPECT_EQ(options.grace_seconds, 2);
  EXPECT_TRUE(options.no_prefix);
  EXPECT_EQ(options.max_restarts, 5);
  EXPECT_EQ(options.min_ranks, 2);
  EXPECT_TRUE(options.mpi);
  EXPECT_THAT(parsed.program, ElementsAre("prog", "-n"));
}

TEST(LaunchFlags, NameHosts) {
  launcher::LaunchOptions options;
  parse_options(launch_options(options),
                words({"-H", "a:4,b:2", "--host-timeout-seconds", "20", "--host-return-seconds", "30", "-x", "MINE",
                       "-x", "YOURS=1", "--", "prog"}));
  EXPECT_THAT(options.hosts, ElementsAre(launcher::HostSpec{"a", "", 4}, launcher::HostSpec{"b", "", 2}));
  EXPECT_EQ(options.host_seconds, 20);
  EXPECT_EQ(options.host_return_seconds, 30);
  EXPECT_THAT(options.exports, ElementsAre("MINE", "YOURS=1"));
  EXPECT_THAT(complaint({"launch", "--hosts", "a:x", "--", "true"}), HasSubstr("'x' is no number of slots"));
  EXPECT_THAT(complaint({"launch", "--hosts", "a", "--hostfile", "f", "--", "true"}), HasSubstr("exclude each other"));
  EXPECT_THAT(complaint({"launch", "--hostfile", "/no/such", "--", "true"}), HasSubstr("/no/such"));
  EXPECT_THAT(complaint({"launch", "--export", "1A", "--", "true"}), HasSubstr("'1A' is no name of a variable"));
  EXPECT_THAT(complaint({"launch", "--host-timeout-seconds", "2", "--", "true"}),
              HasSubstr("--host-timeout-seconds 2"));
}

/// `count` GPUs, the last one in parts.
devices::Gpus gpus(int count, bool mig = false) {
  devices::Gpus made;
  for (int i = 0; i < count; ++i) made.list.emplace_back().index = i;
  if (mig) {
    made.list.back().mig = true;
    made.list.back().mig_devices.resize(2);
    made.list.back().mig_devices[1].index = 1;
  }
  return made;
}

EnvLookup variable(const std::string& name, const std::string& value) {
  return [=](const std::string& asked) { return asked == name ? std::optional<std::string>(value) : std::nullopt; };
}

TEST(LaunchAuto, ARankForEachGpu) {
  const std::vector<std::string> program = {"lockstep", "train", "cnn", "--device", "cuda"};
  const EnvLookup nothing = variable("", "");
  EXPECT_EQ(ranks_for_gpus(gpus(8), program, nothing), 8);
  EXPECT_EQ(ranks_for_gpus(gpus(8), program, variable("CUDA_VISIBLE_DEVICES", "2,5")), 2);
  EXPECT_EQ(ranks_for_gpus(gpus(8), program, variable("CUDA_VISIBLE_DEVICES", "")), 0);
  EXPECT_EQ(ranks_for_gpus(gpus(0), program, nothing), 0);
  EXPECT_EQ(ranks_for_gpus(gpus(3, /*mig=*/true), program, nothing), 1);
  auto closed = gpus(2);
  closed.list[0].compute_mode = devices::ComputeMode::kProhibited;
  EXPECT_EQ(ranks_for_gpus(closed, program, nothing), 1);
}

TEST(LaunchAuto, RanksOnTheCpuFollowCores) {
  using Words = std::vector<std::string>;
  const EnvLookup nothing = variable("", "");
  EXPECT_EQ(ranks_for_gpus(gpus(8), Words{"lockstep", "train", "--device", "cpu"}, nothing), 0);
  EXPECT_EQ(ranks_for_gpus(gpus(8), Words{"lockstep", "train", "--device=cpu"}, nothing), 0);
  EXPECT_EQ(ranks_for_gpus(gpus(8), Words{"lockstep", "train", "--device", "cpu:0,1"}, nothing), 0);
  EXPECT_EQ(ranks_for_gpus(gpus(8), Words{"lockstep", "train"}, variable("LOCKSTEP_DEVICE", "cpu")), 0);
  EXPECT_EQ(ranks_for_gpus(gpus(8), Words{"train", "--device", "auto"}, variable("LOCKSTEP_DEVICE", "cpu")), 8);
  EXPECT_EQ(ranks_for_gpus(gpus(8), Words{"lockstep", "train", "--device"}, nothing), 8);
}

TEST(Version, NamesWhatItComputesOn) {
  const std::string text = version_text();
  const bool cuda = probe_cuda().built;
  EXPECT_THAT(text, HasSubstr("\nbackends         cpu, "));
  for (const char* name : {"cuda, self", "nccl\n", "\nCUDA  ", "\ncuBLASLt  ", "\ncuDNN  ", "\nNCCL  "}) {
    if (cuda)
      EXPECT_THAT(text, HasSubstr(name));
    else
      EXPECT_THAT(text, Not(HasSubstr(name)));
  }
}

TEST(Version, JsonHasWhatTheTextHas) {
  const nlohmann::json json = testing::json_in(version_json());
  EXPECT_EQ(json["lockstep"], version());
  EXPECT_EQ(json["git"], git_revision());
  EXPECT_EQ(json["backends"][0], "cpu");
  EXPECT_TRUE(json["without"].is_array());
  for (const auto& line : split(version_text(), '\n')) {
    if (line.empty() || line.starts_with("without")) continue;
    const std::string name(trim(std::string_view(line).substr(0, 17)));
    ASSERT_TRUE(json.contains(name)) << line;
    if (name == "lockstep" || name == "backends") continue;
    EXPECT_THAT(line, HasSubstr(json[name].get<std::string>()));
  }
}

TEST(Version, NamesBuildAndLibraries) {
  const std::string text = version_text();
  EXPECT_THAT(text, HasSubstr(version()));
  EXPECT_THAT(text, HasSubstr(git_revision()));
  for (const char* name : {"instruction set", "backends", "oneDNN", "hwloc", "spdlog"})
    EXPECT_THAT(text, HasSubstr(name));
}

}  // namespace
}  // namespace lockstep::cli
