// The same contributions through messages and through shared memory: the same bits, on every rank.
#include <gtest/gtest.h>

#include <cstring>

#include "comm/mpi/mpi_group.h"
#include "comm/shm/shm_engine.h"
#include "comm/store.h"
#include "lockstep/comm/world.h"
#include "tests/comm/reference.h"
#include "tests/support/free_port.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

std::vector<reference::Bytes> reductions(ProcessGroup& group) {
  const auto arena = group.allocate(1 << 20);
  std::vector<reference::Bytes> results;
  std::uint64_t seed = 0;
  for (const DType dtype : reference::kDTypes)
    for (const ReduceOp op : reference::kReduceOps)
      for (const std::size_t count : {1u, 77u, 4097u, 100'000u}) {
        const Region region{arena.get(), 128, count, dtype};
        const auto mine = reference::contribution(dtype, count, ++seed, group.rank());
        std::memcpy(region.data(), mine.data(), mine.size());
        group.all_reduce(region, op).wait_host();
        results.emplace_back(region.data(), region.data() + region.bytes());
      }
  return results;
}

TEST(ShmAndMpi, TheSameBits) {
  const auto messages = make_mpi_group(testing::world(), testing::group_options());
  World world = testing::world();
  world.rendezvous.port = std::stoi(messages->all_gather_text(std::to_string(testing::free_port()))[0]);
  const auto timeout = messages->timeout();
  const auto shared = make_shm_group(make_tcp_store(world, Deadline::after(timeout)), timeout);
  EXPECT_EQ(shared->name(), "shm");
  EXPECT_TRUE(reductions(*shared) == reductions(*messages));
  shared->shutdown();
  messages->shutdown();
}

}  // namespace
}  // namespace lockstep::comm
