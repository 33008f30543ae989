// The nodes that a kernel becomes: what the classes of kernels below have in common.
#pragma once

#include "nn/onnx/recorder.h"

namespace lockstep::nn::onnx {

/// See Note [Recorded kernels]. Kernels that only backward or an optimizer calls have no nodes: what they write is the
/// content of no value.
class NodeMaker {
 public:
  explicit NodeMaker(Recorder& recorder) : r_(recorder), g_(recorder.graph()) {}

 protected:
  /// y is x with `id` in the place of x's value.
  void set_like(const Tensor& y, const Content& x, const Content::Form& form, Id id) {
    r_.set(y, Content(x.shape, form.order, id));
  }
  void set_plain(const Tensor& y, Id id) { r_.set(y, Content::plain(y.shape(), id)); }
  /// Of images (N, H, W, C), which are (N, C, H, W) in the graph.
  static Extents image_extents(const Tensor& y) { return {y.size(0), y.size(3), y.size(1), y.size(2)}; }
  void set_image(const Tensor& y, Id id) { r_.set(y, Content(y.shape(), channels_second(4), id)); }

  Id relu(Id x) { return g_.map("Relu", {x}); }
  Id relu6(Id x) { return g_.map("Clip", {x, g_.scalar(0.0f), g_.scalar(6.0f)}); }
  /// GeluKind::kTanh, in the form that onnxruntime knows as one operator.
  Id gelu_tanh(Id x);
  Id gelu_erf(Id x);
  Id activated(Id x, Epilogue epilogue);
  /// 0, 1, …, count − 1.
  Id range(std::int64_t count);

  Recorder& r_;
  Graph& g_;
};

std::unique_ptr<AttentionKernels> make_attention_nodes(Recorder& recorder);
std::unique_ptr<EmbeddingKernels> make_embedding_nodes(Recorder& recorder);
std::unique_ptr<RnnKernels> make_rnn_nodes(Recorder& recorder);
std::unique_ptr<PointwiseKernels> make_pointwise_nodes(Recorder& recorder);

}  // namespace lockstep::nn::onnx
