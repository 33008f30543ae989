#include "parallel/pass.h"

#include <gmock/gmock.h>

#include <numeric>

#include "base/error.h"

namespace lockstep::parallel {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> counts(std::int64_t total, std::int64_t most) {
  std::vector<std::int64_t> found;
  std::int64_t at = 0;
  for (const Chunk& chunk : chunks_of(total, most)) {
    EXPECT_EQ(chunk.begin, at);
    at += chunk.count;
    found.push_back(chunk.count);
  }
  EXPECT_EQ(at, total);
  return found;
}

// What len(t.chunk(n)) and its pieces are in PyTorch 2.
TEST(Chunks, FollowTorchsRule) {
  EXPECT_THAT(counts(30, 1), ElementsAre(30));
  EXPECT_THAT(counts(30, 2), ElementsAre(15, 15));
  EXPECT_THAT(counts(30, 3), ElementsAre(10, 10, 10));
  EXPECT_THAT(counts(10, 3), ElementsAre(4, 4, 2));
  EXPECT_THAT(counts(30, 8), ElementsAre(4, 4, 4, 4, 4, 4, 4, 2));
  EXPECT_THAT(counts(10, 8), ElementsAre(2, 2, 2, 2, 2));
  EXPECT_THAT(counts(5, 4), ElementsAre(2, 2, 1));
  EXPECT_THAT(counts(9, 4), ElementsAre(3, 3, 3));
  EXPECT_THAT(counts(1, 4), ElementsAre(1));
  EXPECT_THAT(counts(0, 4), ElementsAre(0));
}

TEST(Chunks, AxesCountFromTheEndToo) {
  const nn::Shape shape = {2, 3, 4};
  EXPECT_EQ(axis_of(shape, 0), 0);
  EXPECT_EQ(axis_of(shape, 2), 2);
  EXPECT_EQ(axis_of(shape, -1), 2);
  EXPECT_EQ(axis_of(shape, -3), 0);
  EXPECT_THROW(axis_of(shape, 3), UsageError);
  EXPECT_THROW(axis_of(shape, -4), UsageError);
  EXPECT_THROW(axis_of({}, 0), UsageError);
}

TEST(Chunks, CutAndPutTogetherAlongEveryAxis) {
  const auto here = nn::make_cpu_backend(1), there = nn::make_cpu_backend(1);
  for (const nn::Shape& shape : {nn::Shape{5}, {1, 7}, {4, 5, 3}, {1, 1, 6, 2}, {2, 9, 1}}) {
    for (int axis = 0; axis < shape.size(); ++axis) {
      SCOPED_TRACE(to_string(shape) + " along " + std::to_string(axis));
      const nn::Tensor x = here->empty(shape, DType::kI32), y = there->empty(shape, DType::kI32);
      std::iota(x.span<std::int32_t>().begin(), x.span<std::int32_t>().end(), 1);
      std::int64_t inner = 1;
      for (int i = axis + 1; i < shape.size(); ++i) inner *= shape[i];
      for (const Chunk& chunk : chunks_of(shape[axis], 3)) {
        const nn::Tensor part = narrow(*here, x, axis, chunk);
        ASSERT_EQ(part.shape()[axis], chunk.count);
        // Element by element, as an index would find it.
        for (std::int64_t i = 0; i < part.count(); ++i) {
          const std::int64_t outer = i / (chunk.count * inner), rest = i % (chunk.count * inner);
          ASSERT_EQ(part.span<std::int32_t>()[static_cast<std::size_t>(i)],
                    1 + (outer * shape[axis] + chunk.begin) * inner + rest);
        }
        put(*there, y, axis, chunk, part, *here);
      }
      EXPECT_TRUE(std::ranges::equal(x.span<std::int32_t>(), y.span<std::int32_t>()));
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel
