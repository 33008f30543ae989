// The flags of torchrun, horovodrun, mpirun and PyTorch's examples: each works, or says what to type.
#include <gmock/gmock.h>

#include <cstdlib>

#include "base/error.h"
#include "cli/commands.h"
#include "launcher/options.h"
#include "lockstep/trainer/config.h"
#include "tests/support/refusal.h"
#include "trainer/options.h"

namespace lockstep::options {
namespace {

using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Sources typed(std::vector<std::string> args) {
  return {.args = std::move(args), .env = [](const std::string&) { return std::nullopt; }, .environment_names = {}};
}

launcher::LaunchOptions launched(std::vector<std::string> args) {
  for (const char* const word : {"--", "prog", "--nnodes", "7"}) args.emplace_back(word);  // the program's own
  launcher::LaunchOptions options;
  options.program = parse_options(cli::launch_options(options), typed(std::move(args))).program;
  return options;
}

std::string launch_refusal(std::vector<std::string> args) {
  return refusal_of([&] { launched(std::move(args)); });
}

std::string train_refusal(std::vector<std::string> args) {
  args.insert(args.begin(), "mlp");
  trainer::TrainConfig config;
  return refusal_of([&] { parse_options(trainer::train_options(config), typed(std::move(args))); });
}

TEST(OtherProgramsFlags, OfLaunchersThatAskForWhatIsDoneAnyway) {
  // torchrun's single host, as its documentation has it, and torch.distributed.launch's.
  for (const auto& args : std::vector<std::vector<std::string>>{
           {"--standalone", "--nnodes=1", "--nproc-per-node=4", "--no-python"},
           {"--nnodes", "1:1", "--nproc_per_node", "4", "--node_rank=0", "--max-restarts=0"},
           {"-np", "4", "-H", "localhost:4"},  // horovodrun's
           {"-np", "4", "--oversubscribe", "--allow-run-as-root"}}) {
    const launcher::LaunchOptions options = launched(args);
    EXPECT_EQ(options.ranks, 4);
    EXPECT_THAT(options.program, ElementsAre("prog", "--nnodes", "7"));
  }
  EXPECT_EQ(launched({"--nproc-per-node=gpu"}).ranks_for, launcher::RanksFor::kGpus);
  EXPECT_EQ(launched({"--nproc-per-node", "cpu"}).ranks_for, launcher::RanksFor::kCores);
  EXPECT_EQ(launched({"--nproc-per-node", "auto"}).ranks_for, launcher::RanksFor::kAny);
}

TEST(OtherProgramsFlags, OfLaunchersThatSayWhatToType) {
  EXPECT_THAT(launch_refusal({"--nnodes", "2"}),
              AllOf(HasSubstr("--nnodes 2 on the command line: one command starts the ranks of all hosts"),
                    HasSubstr("lockstep launch --hosts a:4,b:4 -- PROGRAM")));
  EXPECT_THAT(launch_refusal({"--node_rank=1"}), HasSubstr("--hosts a:4,b:4"));
  for (const char* const flag : {"--master_addr=10.0.0.1", "--master-port=29500", "--rdzv-endpoint=a:29400",
                                 "--rdzv_backend=c10d", "--rdzv-id=7", "--rdzv-conf=timeout=9", "--local-addr=a"})
    EXPECT_THAT(launch_refusal({flag}), HasSubstr("find each other through it → leave it out")) << flag;
  EXPECT_THAT(launch_refusal({"-m", "pkg.train"}), HasSubstr("python3 -m MODULE"));
  EXPECT_THAT(launch_refusal({"--tee", "3"}), HasSubstr("--log-dir DIR"));
  EXPECT_THAT(launch_refusal({"--min-np", "2"}), HasSubstr("--max-restarts K --min-ranks M"));
  EXPECT_THAT(launch_refusal({"--network-interface", "eth1"}), HasSubstr("LOCKSTEP_SOCKET_IFNAME"));
  EXPECT_THAT(launch_refusal({"--gloo"}), HasSubstr("--backend"));
  EXPECT_THAT(launch_refusal({"--map-by", "slot"}), HasSubstr("mpirun -np 2 lockstep train"));
  EXPECT_THAT(launch_refusal({"--nproc-per-node", "xpu"}), HasSubstr("or auto, gpu or cpu"));
}

TEST(OtherProgramsFlags, OfTrainingScripts) {
  trainer::TrainConfig config;
  parse_options(trainer::train_options(config), typed({"mlp", "--find_unused_parameters", "--learning-rate", "0.25",
                                                       "-b", "7", "-j", "2", "--wd", "0.5"}));
  EXPECT_TRUE(config.find_unused_parameters);
  EXPECT_EQ(config.lr, 0.25);
  EXPECT_EQ(config.batch, 7);
  EXPECT_EQ(config.workers, 2);
  EXPECT_EQ(config.weight_decay, 0.5);

  EXPECT_THAT(train_refusal({"--backend", "gloo"}), AllOf(HasSubstr("Gloo is PyTorch's"), HasSubstr("leave it out")));
  EXPECT_THAT(train_refusal({"--backend", "glo"}), Not(HasSubstr("PyTorch")));
  EXPECT_THAT(train_refusal({"--world-size", "2"}), HasSubstr("lockstep launch -n 2 -- lockstep train"));
  EXPECT_THAT(train_refusal({"--dist-url", "tcp://a:1"}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(train_refusal({"--dist-backend", "nccl"}), HasSubstr("--backend"));
  EXPECT_THAT(train_refusal({"--gpu", "0"}), HasSubstr("--device cuda:0,3"));
  EXPECT_THAT(train_refusal({"--no-cuda"}), HasSubstr("--device cpu"));
  EXPECT_THAT(train_refusal({"--amp"}), HasSubstr("--precision bf16"));
  EXPECT_THAT(train_refusal({"--pretrained"}), HasSubstr("--weights FILE"));
  EXPECT_THAT(train_refusal({"--evaluate"}), HasSubstr("lockstep eval"));
}

// torch.distributed.launch passes it to the program, beside the environment.
TEST(OtherProgramsFlags, TheLocalRankOfTheEnvironment) {
  const std::pair<const char*, const char*> variables[] = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  trainer::TrainConfig config;
  for (const char* const word : {"--local_rank=1", "--local-rank=1"})
    EXPECT_NO_THROW(parse_options(trainer::train_options(config), typed({"mlp", word}))) << word;
  EXPECT_THAT(train_refusal({"--local-rank=0"}),
              AllOf(HasSubstr("--local-rank 0 on the command line: the launcher's variables say another one"),
                    HasSubstr("leave it out")));
  for (const auto& [name, value] : variables) ::unsetenv(name);
}

TEST(OtherProgramsFlags, AreInNoHelp) {
  launcher::LaunchOptions options;
  EXPECT_THAT(cli::launch_options(options).help(), Not(HasSubstr("nnodes")));
}

}  // namespace
}  // namespace lockstep::options
