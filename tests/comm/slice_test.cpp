#include "lockstep/comm/op.h"

#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

TEST(Slice, CoversEverythingInOrderOnCacheLines) {
  for (const std::size_t element : {1u, 2u, 4u, 8u})
    for (int n = 1; n <= 9; ++n)
      for (const std::size_t count :
           {0u, 1u, 2u, 3u, 7u, 8u, 15u, 16u, 17u, 63u, 64u, 65u, 127u, 129u, 1000u, 100003u}) {
        std::size_t next = 0, largest = 0;
        for (int r = 0; r < n; ++r) {
          const Slice slice = slice_of(count, element, r, n);
          ASSERT_EQ(slice.begin, next);
          if (slice.count > 0) {
            ASSERT_EQ(slice.begin * element % 64, 0u);
          }
          next += slice.count;
          largest = std::max(largest, slice.count);
        }
        ASSERT_EQ(next, count);
        // No slice is more than a cache line above its fair part.
        ASSERT_LE(largest * element, count * element / static_cast<std::size_t>(n) + 64);
      }
}

}  // namespace
}  // namespace lockstep::comm
