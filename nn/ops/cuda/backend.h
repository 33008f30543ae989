// One GPU.
#pragma once

#include <memory>
#include <string>

#include "base/cuda/runtime.h"
#include "lockstep/nn/ops/backend.h"
#include "nn/ops/cuda/context.h"
#include "nn/ops/cuda/input_stager.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/memory.h"
#include "nn/ops/cuda/plan_choices.h"
#include "nn/ops/cuda/product.h"

namespace lockstep::nn::cuda {

/// Each call makes its GPU the calling thread's, so that a thread may have several backends.
class CudaBackend final : public Backend {
 public:
  /// The GPU exists, and is this thread's.
  explicit CudaBackend(const CudaOptions& options);
  ~CudaBackend() override;

  Device device() const override { return {DeviceKind::kCuda, context_.device}; }
  std::string describe() const override { return description_; }
  CachingAllocator& allocator() override { return allocator_; }
  /// Caches of a GPU do not hold what a kernel leaves for the next: everything is one piece.
  std::size_t cache_block_bytes() const override { return std::size_t{1} << 40; }

  LinearKernels& linear() override { return *on_gpu(linear_); }
  ConvKernels& conv() override { return *on_gpu(conv_); }
  PoolKernels& pool() override { return *on_gpu(pool_); }
  NormKernels& norm() override { return *on_gpu(norm_); }
  LayerNormKernels& layer_norm() override { return *on_gpu(layer_norm_); }
  EmbeddingKernels& embedding() override { return *on_gpu(embedding_); }
  AttentionKernels& attention() override { return *on_gpu(attention_); }
  RnnKernels& rnn() override { return *on_gpu(rnn_); }
  PointwiseKernels& pointwise() override { return *on_gpu(pointwise_); }
  OperatorKernels& operators() override { return *on_gpu(operators_); }
  LossKernels& loss() override { return *on_gpu(loss_); }
  OptimKernels& optim() override { return *on_gpu(optim_); }
  std::int64_t pitch_of(std::int64_t columns, DType dtype) const override {
    return pitch_of_rows(columns, static_cast<std::int64_t>(size_of(dtype)));
  }
  std::int64_t zero_rows_of(const Shape& shape, DType dtype) const override {
    // Weights of fully connected layers and their biases: up to the pitch that rows of their results have.
    return shape.size() == 1 || shape.size() == 2 ? pitch_of(shape[0], dtype) - shape[0] : 0;
  }
  Tensor contiguous(const Tensor& x) override;
  std::unique_ptr<Backend> make_stream(int threads) override;
  std::map<std::string, EngineChoice> engines() const override { return context_.engines.all(); }
  std::uint64_t primitives_created() const override { return context_.primitives_created; }

  StreamView stream() override { return context_.stream; }
  int steps_ahead() const override { return 1; }
  bool computes_in(DType dtype) const override { return dtype == DType::kF32 || is_half(dtype); }

  Tensor stage(void* data, const Shape& shape, DType dtype, int input) override;
  void finish_inputs() override;
  std::shared_ptr<MemorySource> staging_memory() override;
  void upload(std::span<const std::byte> from, const Tensor& to) override;
  void download(const Tensor& from, std::span<std::byte> to) override;
  void write(std::span<const std::byte> from, const Tensor& to) override;
  std::unique_ptr<AsyncDownload> make_async_download(std::size_t bytes) override;

  std::optional<std::size_t> free_bytes() override;
  bool can_capture() const override { return true; }
  std::vector<OperationCost> profile(FunctionRef<void()> work) override;
  std::optional<double> peak_bytes_per_s() const override;
  std::unique_ptr<CapturedGraph> capture(FunctionRef<void()> work, std::string& why_not) override;

  DeviceMemory& memory() { return *memory_; }

 private:
  template <class Kernels>
  Kernels* on_gpu(const std::unique_ptr<Kernels>& kernels) {
    make_current(context_.device);
    return kernels.get();
  }

  CudaStream stream_;
  DeviceMemory* memory_;  // the allocator's
  std::unique_ptr<PlanChoices> choices_;
  CachingAllocator allocator_;
  Context context_;
  std::string plan_file_, description_;
  InputStager stager_;
  std::unique_ptr<PointwiseKernels> pointwise_;
  std::unique_ptr<LinearKernels> linear_;
  std::unique_ptr<ConvKernels> conv_;
  std::unique_ptr<PoolKernels> pool_;
  std::unique_ptr<NormKernels> norm_;
  std::unique_ptr<LayerNormKernels> layer_norm_;
  std::unique_ptr<EmbeddingKernels> embedding_;
  std::unique_ptr<AttentionKernels> attention_;
  std::unique_ptr<RnnKernels> rnn_;
  std::unique_ptr<OperatorKernels> operators_;
  std::unique_ptr<LossKernels> loss_;
  std::unique_ptr<OptimKernels> optim_;
};

/// Backend::capture(): captures what `work` gives to `stream`, and to streams that wait for it and come back to it, as
/// a graph. The capture is this thread's alone: what others do meanwhile neither joins nor breaks it.
std::unique_ptr<CapturedGraph> capture_graph(StreamView stream, FunctionRef<void()> work, std::string& why_not);

}  // namespace lockstep::nn::cuda
