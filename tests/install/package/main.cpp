#include <lockstep/comm.h>

#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"

// Values by which ranks and places differ, over more than one piece of the staging memory.
void sum(const std::string& mistake) {
  const auto group = lockstep::comm::make_group({.timeout_seconds = 30});
  const auto ranks = static_cast<std::size_t>(group->size());
  std::size_t wrong = 0;
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{2'000'003}}) {
    std::vector<std::int64_t> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::int64_t>(i) * (group->rank() + 1);
    group->all_reduce(std::span(values));
    for (std::size_t i = 0; i < count; ++i)
      if (values[i] != static_cast<std::int64_t>(i * ranks * (ranks + 1) / 2)) ++wrong;
  }
  std::vector<float> least(3, static_cast<float>(group->rank()));
  group->all_reduce(std::span(least), lockstep::comm::ReduceOp::kMin);
  for (const float value : least) wrong += value != 0.0f;

  if (mistake == "view") group->allocate(64)->view<float>(60, 2);
  if (mistake == "size") {
    std::vector<float> values(group->rank() == 0 ? 3 : 4);
    group->all_reduce(std::span(values));
  }
  if (group->rank() == 0) std::printf("%s: %zu wrong on %d ranks\n", kMine, wrong, group->size());
  group->shutdown();
}

int main(int count, char** words) {
  return lockstep::run_main([&] { sum(count > 1 ? words[1] : ""); });
}
