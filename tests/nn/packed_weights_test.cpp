// Packed weights that several backends share, and kernels that streams run on few rows.
#include "nn/ops/cpu/onednn.h"

#include <gtest/gtest.h>

#include "tests/nn/gradient_backend.h"
#include "tests/nn/values.h"

namespace lockstep::nn {

namespace cpu {
namespace {

using Tag = dnnl::memory::format_tag;

TEST(PackedWeights, AreMadeOnceForEachVersionAndLayout) {
  PackedWeights packed;
  const float w[4] = {1, 2, 3, 4};
  const auto wide = f32_desc({2, 2}, Tag::ab), tall = f32_desc({4, 1}, Tag::ab);
  int made = 0;
  const auto fill = [&](const Tensor& memory) {
    ++made;
    memory.f32()[0] = static_cast<float>(made);
  };
  const Tensor first = packed.get(w, 1, wide, fill);
  EXPECT_EQ(packed.get(w, 1, wide, fill).raw(), first.raw());
  EXPECT_EQ(made, 1);
  EXPECT_NE(packed.get(w, 1, tall, fill).raw(), first.raw());
  EXPECT_EQ(packed.get(w + 1, 1, wide, fill).f32()[0], 3);
  EXPECT_EQ(packed.count(), 3u);
  // Another version takes its place, and who holds the one before keeps it.
  const Tensor second = packed.get(w, 2, wide, fill);
  EXPECT_EQ(second.f32()[0], 4);
  EXPECT_EQ(first.f32()[0], 1);
  EXPECT_EQ(packed.count(), 3u);
}

}  // namespace
}  // namespace cpu
}  // namespace lockstep::nn
