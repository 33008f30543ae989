// The base of models: named parameters and buffers, and a forward pass.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/nn/autograd/functions.h"

namespace lockstep::nn {

/// Random numbers for initialisation: the same on every machine, whatever the number of threads.
///
/// A counter hashed with a seed. Each draw takes the next counter values, so results depend on the seed and on the
/// order of draws alone. Not thread-safe. A copy draws the same numbers.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : seed_(seed) {}
  /// Draws nothing: all values are 0. For modules whose parameters are loaded next.
  static Generator zeros() {
    Generator made(0);
    made.draws_ = false;
    return made;
  }

  /// Makes nothing: layers leave their first values alone. For modules on a backend of shapes (make_meta_backend).
  static Generator none() {
    Generator made = zeros();
    made.makes_values_ = false;
    return made;
  }
  bool makes_values() const { return makes_values_; }

  /// Fills `values` with uniform numbers in [low, high), rounded to f32.
  void uniform(std::span<float> values, double low, double high);
  /// Fills `values` with normal numbers of this mean and standard deviation (Box and Muller, 1958), rounded to f32.
  void normal(std::span<float> values, double mean, double deviation);

 private:
  double unit(std::uint64_t key);  // in [0, 1)

  std::uint64_t seed_;
  std::uint64_t next_ = 0;
  bool draws_ = true;
  bool makes_values_ = true;
};

/// The context of a module's construction: its device and the source of its first values. The module keeps a reference
/// to the backend alone.
struct Context {
  Backend& backend;
  Generator& generator;
};

/// Valid as long as the module that owns the parameter.
struct NamedParameter {
  std::string name;  // "fc1.weight"
  Parameter* parameter;
};

/// The places of those whose name fits `pattern`, in which * stands for any characters, ? for one, and [ab] for one of
/// these. Throws UsageError, naming `whose` ("--freeze fc.*"), where no name does, with the nearest one.
std::vector<std::size_t> find_parameters(const std::vector<NamedParameter>& parameters, const std::string& pattern,
                                         const std::string& whose);

/// State that is saved but not trained. Valid as long as the module that owns the tensor.
struct NamedBuffer {
  std::string name;  // "bn1.running_mean"
  Tensor* tensor;
  Backend* backend;
};

/// Base of layers and models. A module owns its parameters, buffers and children; their order is the order of
/// registration, their names are joined by dots, as in PyTorch. Registering throws UsageError for a name that is empty,
/// is another one's of the same module, or begins with that and a dot, and for nothing. Not copyable; one thread uses
/// it at a time (Note [One thread]). The backend it was built with must outlive it. References and pointers that it
/// returns are to what it owns: they are valid as long as it.
///
/// Note [Several inputs and outputs]
/// A module overrides one of two functions: forward(), of one input and one output, which most layers and models are,
/// or forward_all() of any number of both:
///
///   class Fusion final : public nn::Module {
///     nn::Vars forward_all(nn::Tape& tape, const nn::Vars& inputs) override {
///       const auto [image, mask] = take<2>(inputs);
///       …
///       return {classes, boxes};
///     }
///   };
///   const auto [classes, boxes] = model(tape, {image, mask}).as<2>();
///
/// Either may be called: each is made of the other one, where the numbers fit; else UsageError.
class Module {
 public:
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  virtual Var forward(Tape& tape, Var x);
  virtual Vars forward_all(Tape& tape, const Vars& inputs);
  /// The same: model(tape, x), model(tape, {x, mask}).
  Var operator()(Tape& tape, Var x) {
    return name_in_errors([&] { return forward(tape, x); });
  }
  Vars operator()(Tape& tape, const Vars& inputs) {
    return name_in_errors([&] { return forward_all(tape, inputs); });
  }
  /// The `loss` of what forward_all() returns for `inputs`. The losses of the registry may compute their gradient in
  /// the memory of the outputs: who has kept these as a Var reads value() before, or is refused. On several devices
  /// each computes that of its part (DataParallel). `loss` is called before it returns; what it throws comes out, and
  /// the tape is reset then.
  virtual Loss forward_loss(Tape& tape, const Vars& inputs, const Tensor& targets, const LossFunction& loss,
                            float scale);

  /// Builds another module like this one in `context`: the same parameters and buffers, with values of its own. The
  /// context is there during the call; what else it refers to must outlive the module and all copies of it.
  using Factory = std::function<std::unique_ptr<Module>(Context& context)>;
  /// How this one was built, for whoever needs copies of it on other devices; empty where nobody has said. nn::build
  /// says it.
  const Factory& factory() const { return factory_; }
  void set_factory(Factory factory) { factory_ = std::move(factory); }

  /// For people: the class's name, and what its layer was made with, as PyTorch prints them ("Linear",
  /// "in_features=10, out_features=1, bias=True").
  virtual std::string type_name() const;
  virtual std::string details() const { return ""; }
  /// Where it was registered: the names from the outermost module to this one, "layer1.0.conv1". Empty: nowhere.
  std::string path() const;

  /// This module and all below it, depth first; it itself has no name.
  std::vector<std::pair<std::string, Module*>> named_modules();
  /// All of this module and its children, depth first; its own come before its children's.
  std::vector<NamedParameter> named_parameters() const;
  std::vector<NamedBuffer> named_buffers() const;

  /// Training mode (the default) or evaluation mode, for this module and its children. Throws UsageError for training
  /// after fuse().
  void train(bool training);
  bool training() const { return training_; }
  /// This module and its children take the modes of `like` and its children; fused where that is. Both were built by
  /// one factory; another number of children is a UsageError.
  void take_modes(const Module& like);
  bool fused() const { return fused_; }

  /// Evaluation mode for good, with less to compute: a batch normalisation right after a convolution becomes part of
  /// the convolution, which gets a bias. So do not save the parameters afterwards; optimizers made before do not know
  /// the biases. Waits for the device.
  void fuse();

  /// The parts of a model whose activations backward can recompute instead of storing them, in the order of a pass
  /// (Note [Recomputation]): set_recomputed() of each. A model that has none returns nothing.
  virtual std::vector<Module*> blocks() { return {}; }
  bool recomputed() const { return recomputed_; }
  void set_recomputed(bool wanted) { recomputed_ = wanted; }

  /// Ends with it: for whoever keeps a reference.
  Lifetime::Ref lifetime() const { return lifetime_.ref(); }

 protected:
  Module() = default;

  /// For forward_all(): its inputs, where they are `kCount`; else UsageError.
  template <std::size_t kCount>
  std::array<Var, kCount> take(const Vars& inputs) const {
    if (inputs.size() != kCount) [[unlikely]]
      refuse_inputs(inputs.size(), kCount);
    return inputs.as<kCount>();
  }

  /// What `compute` returns. A UsageError of it names this module's path, unless it names that of a module in it: for
  /// forward passes. The layers of layers.h do so, Sequential for each step, and calls by operator().
  template <class Compute>
  std::invoke_result_t<const Compute&> name_in_errors(const Compute& compute) const {
    try {
      return compute();
    } catch (const UsageError& error) {
      rethrow_named(error);
    }
  }

  /// fuse() for this module's own children alone; theirs follow.
  virtual void fuse_children() {}

  /// Takes it over. What is returned never moves.
  Parameter& register_parameter(std::string name, std::unique_ptr<Parameter> parameter);
  /// `tensor` is one of `backend`, which must outlive the module.
  Tensor& register_buffer(std::string name, Backend& backend, Tensor tensor);
  /// register_module<Linear>("fc", context, 2, 64): makes the child too.
  template <class M, class... Args>
  M& register_module(std::string name, Context& context, Args&&... args) {
    return register_module(std::move(name), std::make_unique<M>(context, std::forward<Args>(args)...));
  }
  template <class M>
  M& register_module(std::string name, std::unique_ptr<M> child) {
    check_child(name, child.get());
    M& reference = *child;
    become_parent_of(reference, name);
    children_.emplace_back(std::move(name), std::move(child));
    return reference;
  }
  /// The same with a child that somebody else owns and keeps alive as long as this module is used. Its path() does not
  /// begin here.
  void register_borrowed(std::string name, Module& child) {
    check_child(name, &child);
    children_.emplace_back(std::move(name), std::shared_ptr<Module>(&child, [](Module*) {}));
  }

 private:
  friend std::string to_string(const Module& module);

  template <class Visit>
  void walk(const std::string& prefix, const Visit& visit) const;
  void check_name(const std::string& name, const char* what) const;
  void check_child(const std::string& name, const Module* child) const;
  [[noreturn]] void refuse_inputs(std::size_t given, std::size_t wanted) const;
  void become_parent_of(Module& child, const std::string& name) const;
  [[noreturn]] void rethrow_named(const UsageError& error) const;

  bool training_ = true;
  bool fused_ = false;
  bool recomputed_ = false;
  bool in_forward_ = false;  // as it is here
  std::vector<std::pair<std::string, std::unique_ptr<Parameter>>> parameters_;
  struct Buffer {
    std::string name;
    Backend* backend;
    std::unique_ptr<Tensor> tensor;
  };
  std::vector<Buffer> buffers_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  const Module* parent_ = nullptr;  // which owns it
  std::string name_;                // there
  Factory factory_;
  Lifetime lifetime_;
};

/// Base of modules that carry a state from pass to pass in training: row n of a batch follows row n of the batch
/// before, and starts with its final state. The state is a constant: no gradient flows from a pass into the one before.
class CarriesState {
 public:
  virtual ~CarriesState() = default;
  /// From now on passes in training mode on a tape that records carry a state of at most `rows` rows of `activations`,
  /// which begins with zeros. A pass of fewer rows changes the first of them alone.
  virtual void carry_state(std::int64_t rows, DType activations) = 0;
  /// It: (rows, …) each, always at the same addresses. Valid until the next carry_state(). None before the first.
  virtual std::vector<NamedBuffer> carried_state() = 0;
};

/// std::make_unique<M>(context, args…), with a factory that does the same again: so `args` are copied, and what they
/// refer to must outlive the module.
template <class M, class... Args>
std::unique_ptr<M> build(Context& context, Args... args) {
  auto made = std::make_unique<M>(context, args...);
  made->set_factory([args...](Context& other) { return std::make_unique<M>(other, args...); });
  return made;
}

/// A factory alone, which builds an M(context, args…) whenever it is called; `args` are copied.
template <class M, class... Args>
Module::Factory factory(Args... args) {
  return [args...](Context& context) -> std::unique_ptr<Module> { return build<M>(context, args...); };
}

/// What `factory` builds, and it: for modules that are put together rather than constructed. `factory` is called once,
/// returns a module, and is kept by that.
std::unique_ptr<Module> build_from(Context& context, Module::Factory factory);

/// The structure of a module, in lines, as PyTorch prints it.
std::string to_string(const Module& module);

}  // namespace lockstep::nn
