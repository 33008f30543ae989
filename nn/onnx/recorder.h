// Records a forward pass as a graph: which tensor holds what, and which operator made it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/nn/autograd/tape.h"
#include "lockstep/nn/layers/module.h"
#include "nn/onnx/contents.h"
#include "nn/onnx/graph.h"

namespace lockstep::nn::onnx {

/// Note [Recorded kernels]
/// The graph of an export is what the kernels of a Backend are called with (nn/onnx/kernels.cpp) while the module
/// computes on it, on tensors without values (Note [Shapes alone]). The other seam would have been the functions of
/// lockstep/nn/autograd/functions.h: there are twice as many of them, a recorder would have to be called in each, and
/// an operator of a program that uses kernels would be unknown. What the kernels do not say, which tensors are views of
/// one memory, follows from addresses: each tensor has its own, which are never given out again. So
///
/// - a model needs nothing; a kernel needs its nodes, in one place, and tests/nn/cuda/twins_test.cpp fails for one
///   that has neither nodes nor a refusal;
/// - what an unknown kernel writes, or a loop of a program, is the content of no value: whoever reads it is refused,
///   by the name of the operator that made it. No node is guessed;
/// - parameters, buffers and other tensors that the module holds are constants, as they are during the export.
///
/// Extents are those of one pass. The exporter records several, with other batches and lengths, and compares them
/// (Note [Free extents]).
class Recorder final : public TapeObserver {
 public:
  /// `like`: where the module's tensors lie; `entries`: its state. Both, and `module`, must outlive it.
  Recorder(Backend& like, const Module& module, const std::vector<StateEntry>& entries);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  Graph& graph() { return graph_; }
  Backend& like() { return like_; }
  /// Of tensors without values, at addresses of their own.
  CachingAllocator& allocator() { return allocator_; }

  /// In the tensor's shape. Throws UsageError for content that is not known.
  Content content(const Tensor& x);
  /// The same in the shape that it was made with, where that ends with x's last `last` axes.
  Content natural_content(const Tensor& x, int last);
  /// In plain order.
  Id value(const Tensor& x) {
    Content known = content(x);
    return in_plain_order(graph_, known);
  }

  /// What x, all of it, holds from now on.
  void set(const Tensor& x, Content content);
  /// What x holds at the indices of an axis from `begin` on. All of x is known when its parts are.
  void set_part(const Tensor& x, int axis, std::int64_t begin, Content content);
  void set_constant(const Tensor& x, std::span<const std::byte> bytes);

  /// Numbers of rows, which are no values: those of EmbeddingKernels::row_indices().
  struct RowPlaces {
    Tensor positions;  // undefined: all are `position`
    std::int64_t position = 0, rows = 0;
  };
  void set_rows(const Tensor& indices, RowPlaces places);
  const RowPlaces* find_rows(const Tensor& indices);

  /// Throws UsageError: the operator that computes now is none of ONNX's, because it `does` so.
  [[noreturn]] void refuse(const std::string& does);

  void op_begins() override;
  void op_ended(const OpLabel& label, bool backward) override;
  /// After an exception: 'operator "randn"', which is none of ONNX's. Empty: there is none.
  std::string culprit() const;

 private:
  class Memory;
  struct Part {
    std::int64_t begin;
    Content content;
  };
  struct Entry {
    std::size_t bytes = 0;
    Tensor holder = {};  // so that nobody else gets the memory
    const StateEntry* state = nullptr;
    std::optional<Content> content = {};  // nothing: nobody knows it, or not all of it
    int axis = 0;                         // of the parts
    std::vector<Part> parts = {};
    std::optional<RowPlaces> rows = {};
  };
  using Entries = std::map<std::uintptr_t, Entry>;

  Entries::iterator find(const Tensor& x);
  Entry& begin_writing(const Tensor& x);
  Content content_of(const Tensor& x, Entry& entry);
  Content part_of(std::uintptr_t begin, Content whole, const Tensor& x);
  Content constant_content(const Tensor& x, std::span<const std::byte> bytes);
  [[noreturn]] void refuse_unknown(const Tensor& x);

  Backend& like_;
  Graph graph_;
  Entries entries_;
  std::map<const Parameter*, std::string> layers_;  // the names of the modules that have them
  std::map<std::uintptr_t, std::string> makers_;    // which operator has asked for the memory that begins there
  std::size_t first_node_ = 0;                      // of the operator that computes
  std::vector<std::uintptr_t> asked_;               // by it
  int exceptions_ = 0;                              // under way when it began
  std::string culprit_;
  bool refused_ = false;
  CachingAllocator allocator_;
};

/// A backend whose kernels add nodes to the recorder's graph; it says that it is the device of recorder.like(). The
/// recorder must outlive it.
std::unique_ptr<Backend> make_recording_backend(Recorder& recorder);

}  // namespace lockstep::nn::onnx
