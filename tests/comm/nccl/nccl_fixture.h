// An NCCL group in a world of one, over the software NCCL.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "comm/nccl/nccl_group.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::comm {

/// What happened, on whatever thread.
class Log {
 public:
  void add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    all_.push_back(what);
  }
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> all_;
};

class NcclGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_nccl::reset();
    soft_cuda::set_streams(soft_cuda::Streams::kEager);
  }
  void TearDown() override {
    arena_.reset();
    group_.reset();
    soft_cuda::set_streams(soft_cuda::Streams::kEager);
    EXPECT_EQ(fake_nccl::counts().calls_in_progress, 0);
    EXPECT_LE(fake_nccl::counts().aborts + fake_nccl::counts().destroys, 1);
    EXPECT_EQ(fake_nccl::counts().aborts + fake_nccl::counts().destroys, fake_nccl::counts().inits);
  }

  void make(Clock::duration timeout = std::chrono::seconds(60)) {
    group_ = make_nccl_group(control_, {.producer = producer_.view(), .timeout = timeout}, &fake_nccl::api());
    arena_ = group_->allocate(4096);
  }

  Region region(std::size_t count = 16) const { return {arena_.get(), 0, count, DType::kF32}; }
  Work all_reduce(std::size_t count = 16) { return group_->all_reduce(region(count), ReduceOp::kSum); }

  /// The error that `action` throws, and every call after it.
  template <class E, class Action>
  std::string broken_by(Action&& action) {
    std::string what;
    try {
      action();
      ADD_FAILURE() << "nothing was thrown";
      return what;
    } catch (const E& error) {
      what = error.what();
      remedy_ = error.remedy();
    }
    const auto same = [&](auto&& call) {
      try {
        call();
        ADD_FAILURE() << "a broken group took a call";
      } catch (const E& error) {
        EXPECT_EQ(error.what(), what);
      }
    };
    same([&] { all_reduce(); });
    same([&] { group_->barrier(); });
    same([&] { group_->poll(); });
    same([&] { group_->copy(&what, &what, 1); });
    same([&] { group_->all_gather_text("x"); });
    same([&] { group_->allocate(1); });
    same([&] { group_->shutdown(); });
    return what;
  }

  SelfGroup control_{std::chrono::seconds(60)};
  CudaStream producer_;
  std::unique_ptr<DeviceGroup> group_;
  std::unique_ptr<Arena> arena_;
  std::string remedy_;
};

}  // namespace lockstep::comm
