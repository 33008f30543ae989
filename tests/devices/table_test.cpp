#include "devices/machine.h"

#include <gmock/gmock.h>

#include "base/text.h"
#include "tests/devices/recorded.h"

namespace lockstep::devices {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::machine_with;
using ::testing::Not;
using testing::recorded_gpus;
using testing::recordings;

std::vector<std::string> lines_of(const std::string& text) {
  auto lines = split(text, '\n');
  EXPECT_EQ(lines.back(), "");  // the text ends with a newline
  lines.pop_back();
  return lines;
}

TEST(Table, OfOneGpu) {
  Gpus gpus = recorded_gpus("one_gpu");
  gpus.list[0].numa_node = 1;
  EXPECT_EQ("\n" + table_of(machine_with(gpus)), R"(
┌──────────────────────────────────────────────────────────────────────────────┐
│ NVIDIA driver 570.124.06, CUDA 12.8                                    1 GPU │
├──────┬────────────────────────────────────┬──────────────┬───────────────────┤
│  GPU │ name                               │  memory used │ busy      compute │
│      │ bus id                   NUMA node │  memory free │ ECC        errors │
│      │ temp   perf   fan      power / cap │ memory total │ persist.  display │
╞══════╪════════════════════════════════════╪══════════════╪═══════════════════╡
│    0 │ NVIDIA H100 80GB HBM3              │    68664 MiB │ 97 %      default │
│      │ 0000:1b:00.0                     1 │    12344 MiB │ on              0 │
│      │ 54 °C  P0     N/A      612 / 700 W │    81559 MiB │ on            off │
├──────┼────────────┬──────┬────────────┬───┴──────────────┴───────────────────┤
│  GPU │ process id │ type │     memory │ name                                 │
╞══════╪════════════╪══════╪════════════╪══════════════════════════════════════╡
│    0 │      28413 │ C    │  68650 MiB │ /usr/local/bin/lockstep              │
├──────┼────────────┴──────┴────────────┴──────────────────────────────────────┤
│  CPU │ AMD EPYC 9554 64-Core Processor                                       │
│      │ 2 sockets, 128 cores, 256 processors (64 usable)                      │
│      │ 2 NUMA nodes, 1546188 MiB of memory                                   │
│      │ AVX2 with FMA; AVX-512 with int8 (VNNI), bf16; no AMX                 │
└──────┴───────────────────────────────────────────────────────────────────────┘
)");
}

TEST(Table, EndsWithWhatWasMeasured) {
  Machine machine = machine_with(recorded_gpus("one_gpu"));
  machine.measured = {
      {.device = "cuda:0", .copy_bytes = 1 << 30, .copy_bytes_per_s = 4.265e12, .products = {{"bf16", 8192, 799}}},
      {.device = "cpu", .problem = Problem{"no threads", "wait"}, .threads = 2}};
  EXPECT_THAT(table_of(machine), ::testing::EndsWith(R"(
│ cuda:0: measured 4265 GB/s in a copy of 1.1 GB, 799 TFLOP/s in bf16 products │
│ of 8192 x 8192                                                               │
│ cpu, 2 threads: measured nothing: no threads → wait                          │
└──────────────────────────────────────────────────────────────────────────────┘
)"));
}

TEST(Table, WithoutADriver) {
  Gpus gpus;
  gpus.problem = Problem{"no NVIDIA driver on this machine (libnvidia-ml.so.1 is not there)", ""};
  EXPECT_EQ("\n" + table_of(machine_with(gpus)), R"(
┌──────────────────────────────────────────────────────────────────────────────┐
│ no GPUs: no NVIDIA driver on this machine (libnvidia-ml.so.1 is not there)   │
├──────┬───────────────────────────────────────────────────────────────────────┤
│  CPU │ AMD EPYC 9554 64-Core Processor                                       │
│      │ 2 sockets, 128 cores, 256 processors (64 usable)                      │
│      │ 2 NUMA nodes, 1546188 MiB of memory                                   │
│      │ AVX2 with FMA; AVX-512 with int8 (VNNI), bf16; no AMX                 │
└──────┴───────────────────────────────────────────────────────────────────────┘
)");
}

// Whatever names, numbers and problems a machine has.
TEST(Table, EveryLineFillsItsColumns) {
  ASSERT_GE(recordings().size(), 10u);
  for (const auto& recording : recordings()) {
    for (const auto& line : lines_of(table_of(machine_with(recorded_gpus(recording)))))
      EXPECT_EQ(columns_of(line), kTableColumns) << recording << "\n" << line;
  }
  for (const auto& line : lines_of(table_of(Machine{}))) EXPECT_EQ(columns_of(line), kTableColumns) << line;
}

TEST(Table, NamesCannotControlTheTerminal) {
  const std::string text = table_of(machine_with(recorded_gpus("long_names")));
  for (const unsigned char c : text) EXPECT_TRUE(c >= ' ' || c == '\n');
  EXPECT_THAT(text, HasSubstr("evil?[2Jname?second line??txt"));
  EXPECT_THAT(text, HasSubstr("bin/python3.11 │"));  // the end of a path says more than its start
  EXPECT_THAT(text, HasSubstr("訓練 │"));
}

TEST(Table, ProblemsOfTheDriverAreOneLineWithARemedy) {
  for (const char* recording : {"driver_not_loaded", "version_mismatch"}) {
    const auto lines = lines_of(table_of(machine_with(recorded_gpus(recording))));
    EXPECT_THAT(lines[1], HasSubstr("no GPUs: ")) << recording;
    EXPECT_THAT(lines[1], HasSubstr(" → ")) << recording;
    EXPECT_THAT(lines[2], HasSubstr("├")) << recording;
  }
}

TEST(Table, CardsInTroubleSaySo) {
  const std::string text = table_of(machine_with(recorded_gpus("trouble")));
  EXPECT_THAT(text, HasSubstr("│    1 │ lost: "));
  EXPECT_THAT(text, HasSubstr("│    2 │ NVIDIA H100 80GB HBM3, 0000:3b:00.0: lost: "));
  EXPECT_THAT(text, HasSubstr("│    3 │ NVIDIA H100 80GB HBM3, 0000:4b:00.0: the card needs a reset"));
  EXPECT_THAT(text, HasSubstr("│    4 │ no permission → "));
  EXPECT_THAT(text, HasSubstr("│    6 │ NVIDIA H100 80GB HBM3"));
  EXPECT_THAT(text, HasSubstr("no permission to read: power, processes"));
}

TEST(Table, MigDevicesStandUnderTheirCard) {
  const std::string text = table_of(machine_with(recorded_gpus("mig")));
  EXPECT_THAT(text, HasSubstr("0000:1b:00.0  MIG on"));
  EXPECT_THAT(text, HasSubstr("│  0:2 │ NVIDIA A100-SXM4-80GB MIG 1g.10gb  │      125 MiB │"));
  EXPECT_THAT(text, HasSubstr("no MIG devices: nothing runs here"));
  EXPECT_THAT(text, HasSubstr("│  0:2 │       5152 │ C    │     17 MiB │ train_b"));
}

TEST(Table, UnknownValuesAreNa) {
  const std::string text = table_of(machine_with(recorded_gpus("tells_little")));
  EXPECT_THAT(text, HasSubstr("│ 41 °C  N/A    35 %     N/A / N/A W │     2000 MiB │ off            on │"));
  EXPECT_THAT(text, HasSubstr("│    1 │ N/A                                │          N/A │ N/A           N/A │"));
  EXPECT_THAT(table_of(Machine{}),
              AllOf(HasSubstr("sockets N/A, cores N/A, processors N/A"), HasSubstr("NUMA nodes N/A, memory N/A")));
}

TEST(Table, ADriverWithoutGpus) {
  const std::string text = table_of(machine_with(recorded_gpus("no_gpus")));
  EXPECT_THAT(text, HasSubstr("no GPU │"));
  EXPECT_THAT(text, Not(HasSubstr("process id")));
}

}  // namespace
}  // namespace lockstep::devices
