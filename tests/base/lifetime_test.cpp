#include "lockstep/base/misuse.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

TEST(Lifetime, ReferencesExpireWithTheirOwner) {
  EXPECT_FALSE(Lifetime::Ref().alive());
  Lifetime::Ref ref;
  {
    const Lifetime owner;
    ref = owner.ref();
    EXPECT_TRUE(ref.alive());
    EXPECT_EQ(ref, owner.ref());
  }
  EXPECT_FALSE(ref.alive());
  // Whoever comes next may have the same counter, which brings nothing back.
  for (int i = 0; i < 100; ++i) {
    const Lifetime next;
    EXPECT_TRUE(next.ref().alive());
    EXPECT_FALSE(ref.alive());
    EXPECT_NE(next.ref(), ref);
  }
}

TEST(Lifetime, RenewingExpiresEarlierReferences) {
  Lifetime owner;
  const auto before = owner.ref();
  owner.renew();
  EXPECT_FALSE(before.alive());
  EXPECT_TRUE(owner.ref().alive());
  EXPECT_NE(owner.ref(), before);
}

TEST(Lifetime, OwnersOnSeveralThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 2000; ++i) {
        std::optional<Lifetime> a(std::in_place), b(std::in_place);
        const auto of_a = a->ref(), of_b = b->ref();
        EXPECT_NE(of_a, of_b);
        a.reset();
        EXPECT_FALSE(of_a.alive());
        EXPECT_TRUE(of_b.alive());
      }
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace lockstep
