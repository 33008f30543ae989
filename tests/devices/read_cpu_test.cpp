#include "devices/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace lockstep::devices {
namespace {

TEST(ReadCpu, AgreesWithTheSystem) {
  const Cpu cpu = read_cpu();
  ASSERT_TRUE(cpu.processors && cpu.usable_processors && cpu.memory_bytes);
  EXPECT_EQ(*cpu.processors, ::sysconf(_SC_NPROCESSORS_ONLN));
  EXPECT_GE(*cpu.usable_processors, 1);
  EXPECT_LE(*cpu.usable_processors, *cpu.processors);
  EXPECT_GE(*cpu.memory_bytes, std::int64_t{1} << 28);
  EXPECT_LE(cpu.sockets.value_or(1), cpu.cores.value_or(1));
  EXPECT_LE(cpu.cores.value_or(1), *cpu.processors);
}

TEST(ReadCpu, FeaturesBuildOnEachOther) {
  const CpuFeatures has = cpu_features();
  EXPECT_TRUE(!has.avx512 || has.avx2);
  EXPECT_TRUE(has.avx512 || !(has.avx512_vnni || has.avx512_bf16 || has.avx512_fp16));
  EXPECT_EQ(cpu_instruction_set() == "avx512_amx", has.avx512 && has.amx_bf16);
}

}  // namespace
}  // namespace lockstep::devices
