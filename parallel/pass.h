// What a DataParallel has on its devices, and what it puts on the caller's tape. Private to it.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/parallel/data_parallel.h"
#include "parallel/chunks.h"

namespace lockstep::parallel {

/// A device and what it runs.
struct DataParallel::Copy {
  nn::Backend* backend = nullptr;
  nn::Module* module = nullptr;
  std::unique_ptr<nn::Module> built;  // nullptr: it is the one that was given, or not built yet
  std::vector<nn::NamedParameter> parameters;
  std::vector<nn::NamedBuffer> buffers;
  std::vector<std::uint64_t> versions;   // of the given module's parameters, whose values it has; 0: none
  std::uint64_t received = 0;            // bytes of parameters, in the forward under way
  std::unique_ptr<DeviceThread> thread;  // nullptr: the caller's
  DeviceUse use;
};

/// The devices' tapes for one forward.
struct DataParallel::Pass {
  struct Part {
    std::unique_ptr<nn::Tape> tape;
    nn::Tensor dropout_state = {};
    Chunk in = {}, out = {};
    nn::Tensor x = {};  // its piece of the input, where that is
    nn::Var input = {}, output = {};
    nn::Tensor gradient = {};  // of its output, on the output device
  };
  std::vector<Part> parts;     // by place in device_ids
  std::vector<nn::Var> marks;  // of the caller's tape: results of its AddUp nodes
  std::size_t count = 0;       // parts that are used
  int axis = 0, out_axis = 0;  // along which input and output are cut
  bool scalars = false;        // outputs have no axis and become a vector

  void forget() {
    for (std::size_t i = 0; i < count; ++i) {
      parts[i].tape->reset();
      parts[i].x = parts[i].gradient = nn::Tensor();
    }
    count = 0;
    marks.clear();
    scalars = false;
  }
};

/// A pass that somebody uses. Goes back to its owner, if that is still there.
class DataParallel::Lease {
 public:
  explicit Lease(DataParallel& owner) : owner_(&owner), lifetime_(owner.lifetime()) {
    if (!owner.idle_.empty()) {
      pass_ = std::move(owner.idle_.back());
      owner.idle_.pop_back();
      return;
    }
    owner.idle_.reserve(++owner.passes_);  // giving it back must not fail
    pass_ = std::make_unique<Pass>();
    for (const auto& copy : owner.copies_) pass_->parts.push_back({.tape = std::make_unique<nn::Tape>(*copy->backend)});
  }
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease() {
    if (pass_ == nullptr) return;
    pass_->forget();
    if (lifetime_.alive()) owner_->idle_.push_back(std::move(pass_));
  }
  Pass& operator*() const { return *pass_; }
  Pass* operator->() const { return pass_.get(); }
  void check_owner() const {
    check_usage(lifetime_.alive(), "backward comes to a DataParallel that is gone",
                "keep it until backward is through");
  }

 private:
  DataParallel* owner_;
  Lifetime::Ref lifetime_;
  std::unique_ptr<Pass> pass_;
};

/// Has the devices' tapes walked.
class DataParallel::Gather final : public nn::Node {
 public:
  Gather(nn::Var output, DataParallel& owner, Lease pass, std::optional<nn::Var> x)
      : Node(output), owner_(owner), pass_(std::move(pass)), x_(x) {}
  void backward(nn::Tape& tape) override {
    pass_.check_owner();
    owner_.run_backward(tape, *pass_, output(), x_ ? &*x_ : nullptr);
    for (const nn::Var mark : pass_->marks) tape.contribute(mark, owner_.mark_);
  }

 private:
  DataParallel& owner_;
  Lease pass_;
  std::optional<nn::Var> x_;
};

/// Adds the copies' gradients of a few parameters to the module's own.
class DataParallel::AddUp final : public nn::Node {
 public:
  struct Group {
    Parameters parameters = {};
    std::array<std::size_t, std::tuple_size_v<Parameters>> numbers = {};
    std::size_t count = 0;
  };
  AddUp(nn::Var output, DataParallel& owner, const Group& group, std::size_t copies)
      : Node(output, group.parameters), owner_(owner), lifetime_(owner.lifetime()), group_(group), copies_(copies) {}
  void backward(nn::Tape& /*tape*/) override {
    for (std::size_t i = 0; i < group_.count; ++i) owner_.add_up(group_.numbers[i], copies_);
    walked_ = true;
  }
  ~AddUp() override {
    if (!walked_ && lifetime_.alive()) owner_.clear_grads();
  }

 private:
  DataParallel& owner_;
  Lifetime::Ref lifetime_;
  Group group_;
  std::size_t copies_;
  bool walked_ = false;
};

}  // namespace lockstep::parallel
