// How a batch is cut along one axis and put together again; what a DataParallel has on its devices, and what it puts on
// the caller's tape. Private to it, but for chunks_of().
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/parallel/data_parallel.h"

namespace lockstep::parallel {

/// Entries [begin, begin + count) of an axis.
struct Chunk {
  std::int64_t begin = 0, count = 0;
  friend bool operator==(const Chunk&, const Chunk&) = default;
};

/// torch.chunk's rule: pieces of ceil(total / most), the last one smaller where that does not come out even, so there
/// may be fewer than `most`: 10 over 3 is 4, 4, 2, and 5 over 4 is 2, 2, 1. Of nothing there is one empty piece.
/// `most` is at least 1.
std::vector<Chunk> chunks_of(std::int64_t total, std::int64_t most);

/// The axis that `dim` names, counted from the end where it is negative. Throws UsageError where `shape` has none such.
int axis_of(const nn::Shape& shape, int dim);

/// These entries of x's axis: its own memory where they lie there in one piece, else a copy on `backend`, which x is
/// on.
nn::Tensor narrow(nn::Backend& backend, const nn::Tensor& x, int axis, const Chunk& chunk);

/// Copies `part`, which is on `source`, to these entries of y's axis, which is on `target`.
void put(nn::Backend& target, const nn::Tensor& y, int axis, const Chunk& chunk, const nn::Tensor& part,
         nn::Backend& source);

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
  explicit Pass(DataParallel& owner) : owner_(owner), lifetime_(owner.lifetime()) {}

  struct Part {
    std::unique_ptr<nn::Tape> tape;
    nn::Tensor dropout_state = {};
    Chunk in = {};
    std::vector<nn::Tensor> pieces = {};  // of the inputs, and of targets, where those are
    nn::Vars inputs = {}, outputs = {};
    nn::Var loss = {};                       // in place of outputs
    std::vector<Chunk> out = {};             // by output
    std::vector<nn::Tensor> gradients = {};  // likewise, on the output device; undefined: there is none
  };
  struct Output {
    int axis = 0;              // along which it is cut
    bool scalars = false;      // pieces have no axis and become a vector
    nn::Tensor gradient = {};  // on the output device
  };
  std::vector<Part> parts;      // by place in device_ids
  std::vector<int> axes;        // along which inputs are cut, and targets
  std::vector<Output> outputs;  // of the module
  nn::Vars inputs;              // of the caller's tape; none where they are tensors
  nn::Var reached;              // of the caller's tape: the result of Replicas
  bool is_reached = false;      // by the gradient of an output
  std::vector<nn::Var> marks;   // of the caller's tape: results of its AddUp nodes
  std::size_t count = 0;        // parts that are used
  bool has_loss = false;

  void forget() {
    for (std::size_t i = 0; i < count; ++i) {
      Part& part = parts[i];
      part.tape->reset();
      part.pieces.clear();
      part.gradients.clear();
      part.out.clear();
      part.inputs = part.outputs = {};
      part.loss = {};
    }
    count = 0;
    axes.clear();
    outputs.clear();
    marks.clear();
    inputs = {};
    reached = {};
    is_reached = has_loss = false;
  }

  /// For a backward pass, which needs it; else UsageError.
  DataParallel& owner() const {
    check_usage(lifetime_.alive(), "backward comes to a DataParallel that is gone",
                "keep it until backward is through");
    return owner_;
  }
  /// nullptr: it is gone.
  DataParallel* owner_if_there() const { return lifetime_.alive() ? &owner_ : nullptr; }

 private:
  DataParallel& owner_;
  Lifetime::Ref lifetime_;
};

/// A pass that somebody uses. Goes back to its owner, if that is still there.
class DataParallel::Lease {
 public:
  explicit Lease(DataParallel& owner) {
    if (!owner.idle_.empty()) {
      pass_ = std::move(owner.idle_.back());
      owner.idle_.pop_back();
      return;
    }
    owner.idle_.reserve(++owner.passes_);  // giving it back must not fail
    pass_ = std::make_unique<Pass>(owner);
    for (const auto& copy : owner.copies_) pass_->parts.push_back({.tape = std::make_unique<nn::Tape>(*copy->backend)});
  }
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease() {
    if (pass_ == nullptr) return;
    pass_->forget();
    if (DataParallel* const owner = pass_->owner_if_there()) owner->idle_.push_back(std::move(pass_));
  }
  Pass& operator*() const { return *pass_; }
  Pass* operator->() const { return pass_.get(); }

 private:
  std::unique_ptr<Pass> pass_;
};

/// Has the devices' tapes walked, when the gradients of all outputs are there, or from their losses.
class DataParallel::Replicas final : public nn::Node {
 public:
  Replicas(nn::Var output, Lease pass) : Node(output), pass_(std::move(pass)) {}
  void backward(nn::Tape& tape) override {
    DataParallel& owner = pass_->owner();
    owner.run_backward(tape, *pass_);
    for (const nn::Var mark : pass_->marks) tape.contribute(mark, owner.mark_);
  }

 private:
  Lease pass_;
};

/// Keeps the gradient of an output for Replicas, which comes before it on the tape, and owns the pass.
class DataParallel::Gather final : public nn::Node {
 public:
  Gather(nn::Var output, Pass& pass, std::size_t number) : Node(output), pass_(pass), number_(number) {}
  void backward(nn::Tape& tape) override {
    const DataParallel& owner = pass_.owner();
    pass_.outputs[number_].gradient = tape.take_grad(output());
    if (!std::exchange(pass_.is_reached, true)) tape.contribute(pass_.reached, owner.mark_);
  }

 private:
  Pass& pass_;
  std::size_t number_;
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
