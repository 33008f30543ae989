// The gradient reducer alone: gradients that a program computes itself are summed over the ranks meanwhile.
#include <lockstep/ddp.h>

#include <cstdio>
#include <vector>

using namespace lockstep;

// Each rank has one sample x, and all of them fit w · x to 3 · x: the loss is the mean of their (w x − 3 x)².
void fit() {
  const auto group = comm::make_group();
  ddp::Reducer reducer(*group, {{.name = "w", .count = 4}}, {});
  std::vector<float> w(4, 0.0f);
  const float x = 1.0f / static_cast<float>(group->rank() + 1);
  for (int step = 0; step < 300; ++step) {
    reducer.begin_step(step);
    const auto gradient = reducer.gradient<float>(0);
    for (std::size_t i = 0; i < w.size(); ++i) gradient[i] = 2 * (w[i] - 3) * x * x / static_cast<float>(group->size());
    reducer.mark_ready(0);  // of the last gradient of a bucket: its sum begins
    reducer.finish({}, [&](std::span<const std::size_t>) {
      for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.3f * gradient[i];
    });
  }
  if (group->rank() == 0) std::printf("w = %.3f on %d ranks\n", double{w[0]}, group->size());
  group->shutdown();
}

int main() { return run_main(fit); }
