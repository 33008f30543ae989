#include "devices/cpus.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "tests/support/temporary_directory.h"

namespace lockstep::devices {
namespace {

namespace fs = std::filesystem;

class Sysfs : public ::testing::Test {
 protected:
  void write(const std::string& bus_id, const std::string& file, const std::string& text) {
    directory_.write("bus/pci/devices/" + bus_id + "/" + file, text);
  }

  lockstep::testing::TemporaryDirectory directory_;
  const fs::path root_ = directory_.path();
};

TEST_F(Sysfs, ADeviceOfANode) {
  write("0000:1b:00.0", "numa_node", "1\n");
  write("0000:1b:00.0", "local_cpulist", "32-63,96-127\n");
  const Locality found = locality_of("0000:1b:00.0", root_);
  EXPECT_EQ(found.node, 1);
  EXPECT_EQ(found.cpus.count(), 64u);
  EXPECT_EQ(ranges_text(found.cpus), "32-63,96-127");
}

TEST_F(Sysfs, ADeviceOfNoNodeIsNowhere) {
  write("0000:1b:00.0", "numa_node", "-1\n");
  write("0000:1b:00.0", "local_cpulist", "0-63\n");
  const Locality found = locality_of("0000:1b:00.0", root_);
  EXPECT_EQ(found.node, -1);
  EXPECT_TRUE(found.cpus.none());
}

TEST_F(Sysfs, UnknownNodesAndCpus) {
  for (const char* bus_id : {"", "0000:1b:00.0"}) {
    const Locality found = locality_of(bus_id, root_);
    EXPECT_EQ(found.node, -1);
    EXPECT_TRUE(found.cpus.none());
  }
  write("0000:2b:00.0", "numa_node", "0\n");
  EXPECT_TRUE(locality_of("0000:2b:00.0", root_).cpus.none());
  write("0000:3b:00.0", "numa_node", "none\n");
  EXPECT_EQ(locality_of("0000:3b:00.0", root_).node, -1);
  // A node of memory alone.
  write("0000:4b:00.0", "numa_node", "2\n");
  write("0000:4b:00.0", "local_cpulist", "\n");
  EXPECT_TRUE(locality_of("0000:4b:00.0", root_).cpus.none());
}

TEST(Ranges, ThereAndBack) {
  for (const char* text : {"", "0", "4095", "0-3,8", "1,3,5-7", "0-4095"})
    EXPECT_EQ(ranges_text(parse_ranges(text)), text);
  EXPECT_EQ(ranges_text(parse_ranges(" 2-3 \n")), "2-3");
  EXPECT_EQ(ranges_text(parse_ranges("8,0-3,2")), "0-3,8");
  for (const char* text : {"x", "3-1", "-1", "1-", "1,,2", "4096", "0-99999999999999999999", "0 1"})
    EXPECT_TRUE(parse_ranges(text).none()) << text;
}

TEST(PreferMemory, OfANodeThatIsThere) {
  // In a thread of its own: the policy is a thread's.
  std::thread([] {
    prefer_memory_of(0);
    int mode = -1;
    unsigned long nodes[16] = {};
    if (::syscall(SYS_get_mempolicy, &mode, nodes, sizeof nodes * 8 + 1, nullptr, 0) != 0)
      GTEST_SKIP() << "the kernel has no memory policies, or hides them";
    if (mode == MPOL_DEFAULT) GTEST_SKIP() << "the kernel takes no memory policy";
    EXPECT_EQ(mode, MPOL_PREFERRED);
    EXPECT_EQ(nodes[0], 1u);
  }).join();
}

TEST(PreferMemory, OfOneThatIsNotChangesNothing) {
  for (const int node : {-1, 1023, 1 << 20}) EXPECT_NO_THROW(prefer_memory_of(node));
}

}  // namespace
}  // namespace lockstep::devices
