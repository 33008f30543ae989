// A trainable tensor and its gradient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "lockstep/base/misuse.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {

/// How PyTorch stores what we keep as `value`: what weight files and checksums use.
enum class FileLayout : std::uint8_t {
  kSame,
  kOhwiToOihw,  // convolution weights: we keep (O, Kh, Kw, I) or (O, K, I), files have (O, I, …)
  kTransposed,  // GPT-2's products: we keep (out, in), files have (in, out)
};

/// What brings values of parameters from elsewhere, while the thread that uses them does other work.
class ValueSource {
 public:
  virtual ~ValueSource() = default;
  /// Returns when the parameters are complete that were given with `key` to Parameter::expect_value(), and has called
  /// Parameter::end_expectation() of each. Called on the thread that asks for a value. What it throws comes out of
  /// Parameter::value(), of the next call too.
  virtual void wait_for_values(std::size_t key) = 0;
};

/// Belongs to one module and never moves: tapes and optimizers keep pointers to it, and ask lifetime() before they use
/// them. One thread uses it at a time (Note [One thread]); several may read it while nobody changes it, its value is
/// complete, and as() has made what they ask for. References that it returns are valid as long as it; some functions
/// below replace the tensors they refer to.
///
/// The gradient lives where `bind_gradient` says (a reducer's arena) or, unbound, in memory of its own. The first
/// contribution after `clear_grad` overwrites it and later ones are added, so it is never zeroed. When the last
/// contribution of a backward pass has landed, `on_ready` is called.
class Parameter {
 public:
  /// f32, with unspecified content. `backend` must outlive it.
  Parameter(Backend& backend, const Shape& shape, FileLayout layout = FileLayout::kSame)
      : backend_(&backend), value_(backend.empty_parameter(shape)), layout_(layout) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  Backend& backend() const { return *backend_; }
  /// Waits for what expect_value() has announced. A tensor that was taken before that is complete when this has
  /// returned.
  const Tensor& value() const {
    if (source_ != nullptr) [[unlikely]]
      source_->wait_for_values(source_key_);
    return value_;
  }
  FileLayout layout() const { return layout_; }

  /// Changes whenever `value`'s content does, and is never that of another parameter (whose memory this one may have
  /// got); never 0. Whoever writes the value calls `changed`.
  std::uint64_t version() const { return version_; }
  void changed() { version_ = next_version(); }

  /// The value in the type of activations: for f32 the value itself, else its copy in bf16 or f16. The parameter's
  /// backend makes the copy again after the value has changed. Valid until the next change, or until it is asked for in
  /// another type. Throws InternalError for types that activations never have.
  const Tensor& as(DType dtype);
  /// The copy's place, none where nobody has asked for it: who changes the value may write it along, and then calls
  /// changed_with_copy(). Valid as as() is.
  HalfCopy copy() const { return copy_.defined() ? HalfCopy{copy_.raw(), copy_.dtype()} : HalfCopy(); }
  void changed_with_copy() {
    changed();
    copy_version_ = version_;
  }

  /// For inference: makes the value's Int8Rows, which linear() and logits() multiply with from now on where nothing is
  /// recorded, until the value changes. (out, in) f32, of a device that has them (LinearKernels::multiplies_int8_rows);
  /// else InternalError.
  void quantize_rows();
  /// nullptr: there are none of this value.
  const Int8Rows* int8_rows() const { return int8_version_ == version_ ? &int8_rows_ : nullptr; }

  /// The value's content is on its way: whoever asks for it waits for `source`, which must be there until it calls
  /// end_expectation().
  void expect_value(ValueSource& source, std::size_t key) {
    source_ = &source;
    source_key_ = key;
  }
  void end_expectation() { source_ = nullptr; }

  /// From now on this one's value is the other's, in the same memory: for a copy of a module that several threads
  /// compute with while nobody changes it. Whoever changes it calls changed() of both. Either may end first, but for a
  /// value that move_value() has put into memory that others own. Throws UsageError for another shape or type.
  void share_value(const Parameter& other);

  /// From now on the value lies in `storage`, which takes its content. The parameter keeps a handle; the memory of a
  /// view must stay valid until the next call, or its end. Throws UsageError unless `storage` has its shape and type,
  /// without gaps.
  void move_value(const Tensor& storage);

  /// For optimizers that move matrices as a whole (Note [Matrices]): whether this is one, of the first dimension by all
  /// others. Not with one dimension, and not where somebody has said otherwise: a table, of whose rows a step touches
  /// some, and the weights of a model's outputs are better moved element by element.
  bool is_matrix() const { return !elementwise_ && value_.shape().size() > 1; }
  void set_elementwise() { elementwise_ = true; }

  bool requires_grad() const { return requires_grad_; }
  void set_requires_grad(bool wanted) { requires_grad_ = wanted; }

  /// Moves the gradient's place to `storage` (content is not carried over), and keeps a handle; the memory of a view
  /// must stay valid until the next bind, or the parameter's end. Throws UsageError unless it has the parameter's type
  /// and shape, without gaps.
  void bind_gradient(const Tensor& storage);
  /// The gradient has no place, and is none, until backward makes one or the next bind_gradient().
  void unbind_gradient() {
    gradient_ = {};
    clear_grad();
  }
  bool has_gradient() const { return has_gradient_; }
  /// Valid if has_gradient(). Its place stays until the next bind_gradient().
  const Tensor& gradient() const { return gradient_; }
  /// The next contribution overwrites.
  void clear_grad() { has_gradient_ = is_partial_ = is_sliced_ = false; }
  /// Somebody else has written the bound gradient: a sum over ranks, of whom this one may have contributed nothing.
  void mark_grad_valid() {
    has_gradient_ = true;
    is_partial_ = is_sliced_ = false;
  }
  /// The gradient is this rank's part of a sum over ranks that is still due (DistributedDataParallel::no_sync()): an
  /// optimizer refuses it. Until mark_grad_valid() or clear_grad().
  bool is_partial() const { return is_partial_; }
  void mark_partial() { is_partial_ = true; }
  /// The gradient is a sum over ranks in one slice of it, and unspecified elsewhere: for an optimizer of that slice
  /// (Note [Slices]); another one refuses it. Until mark_grad_valid() or clear_grad().
  bool is_sliced() const { return is_sliced_; }
  void mark_sliced() { is_sliced_ = true; }
  /// Whether operators that a tape has recorded, and backward has not walked yet, contribute to it.
  bool awaits_backward() const { return pending_uses_ > 0; }

  /// Where an operator's backward puts its contribution: writes, or adds when `accumulate`. Refers to the parameter.
  struct Target {
    const Tensor& gradient;
    bool accumulate;
  };
  Target contribute();

  /// Ends with it: for whoever keeps a pointer.
  Lifetime::Ref lifetime() const { return lifetime_.ref(); }

  /// Called by the tape on the thread that runs backward, once in each pass that contributes. What it throws comes out
  /// of Tape::backward(). It may neither use that tape nor end a parameter of the pass. Who sets it clears it before
  /// what it refers to ends.
  std::function<void()> on_ready;

 private:
  friend class Recomputation;
  friend class Tape;
  static std::uint64_t next_version();

  Backend* backend_;
  Tensor value_;
  Tensor gradient_;
  ValueSource* source_ = nullptr;  // nullptr: the value is complete
  std::size_t source_key_ = 0;
  FileLayout layout_;
  std::uint64_t version_ = next_version();
  Tensor copy_;  // bf16 or f16; undefined until it is asked for
  static constexpr std::uint64_t kNoVersion = 0;
  std::uint64_t copy_version_ = kNoVersion;  // of the value that it holds
  Int8Rows int8_rows_;
  std::uint64_t int8_version_ = kNoVersion;
  int pending_uses_ = 0;             // recorded on a tape and not yet walked by backward
  ThreadId owner_thread_ = nullptr;  // whose tapes those are
  bool requires_grad_ = true;
  bool elementwise_ = false;
  bool has_gradient_ = false;
  bool is_partial_ = false;
  bool is_sliced_ = false;
  bool touched_ = false;  // has contributed in the backward pass under way
  Lifetime lifetime_;
};

}  // namespace lockstep::nn
