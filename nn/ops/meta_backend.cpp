#include "nn/ops/meta_backend.h"

#include <utility>

namespace lockstep::nn {
namespace {

// Of all that it is asked for: an address that is never read or written.
class MetaMemory final : public MemorySource {
 public:
  explicit MetaMemory(Device device) : device_(device) {}
  std::byte* allocate(std::size_t) override { return static_cast<std::byte*>(meta_address()); }
  void free(std::byte*, std::size_t) noexcept override {}
  Device device() const override { return device_; }

 private:
  Device device_;
};

using T = const Tensor&;

// Computes nothing (Note [Shapes alone]), and has the kernels that `like` has of those that a device may lack.
class MetaLinear final : public LinearKernels {
 public:
  explicit MetaLinear(Backend& like) : like_(like) {}
  SavedPreactivation saved_preactivation_of(Epilogue epilogue, std::int64_t samples, std::int64_t out,
                                            DType dtype) const override {
    return like_.linear().saved_preactivation_of(epilogue, samples, out, dtype);
  }
  void forward_saved_preactivation(T, T, T, Epilogue, T, T) override {}
  void backward_input_through(T, T, Epilogue, T, T) override {}
  bool multiplies_int8_rows() const override { return like_.linear().multiplies_int8_rows(); }
  void to_int8_rows(T, const Int8Rows&) override {}
  void forward_int8_rows(T, const Int8Rows&, T, Epilogue, T) override {}

 private:
  Backend& like_;
};

class MetaNorm final : public NormKernels {
 public:
  explicit MetaNorm(Backend& like) : like_(like) {}
  bool adds_gradients() const override { return like_.norm().adds_gradients(); }
  void backward_relu_added(T, T, T, T, T, T, T, double, T, T, T) override {}
  bool counts_batches() const override { return like_.norm().counts_batches(); }

 private:
  Backend& like_;
};

class MetaLayerNorm final : public LayerNormKernels {
 public:
  explicit MetaLayerNorm(Backend& like) : like_(like) {}
  bool adds_to_gradients() const override { return like_.layer_norm().adds_to_gradients(); }
  void backward_input_added(T, T, T, T, T, T) override {}
  bool backward_reads_once(std::int64_t columns) const override {
    return like_.layer_norm().backward_reads_once(columns);
  }

 private:
  Backend& like_;
};

class MetaRnn final : public RnnKernels {
 public:
  MetaRnn(CachingAllocator& allocator, DeviceKind kind) : allocator_(allocator), kind_(kind) {}
  // The gates of all steps, which every implementation keeps; the CPU as f32.
  Tensor forward(const RnnOptions&, T x, const RnnWeights& weights, const RnnState&, T, const RnnState&,
                 bool keep) override {
    Tensor gates = Tensor::empty(allocator_, {x.size(0), x.size(1), weights.w_hh.size(0)},
                                 kind_ == DeviceKind::kCpu ? DType::kF32 : x.dtype());
    return keep ? gates : Tensor();
  }
  void backward(const RnnOptions&, T, const RnnWeights&, const RnnState&, T, T, T, const RnnGradients&, T,
                FunctionRef<void()> gradients_done) override {
    gradients_done();
  }

 private:
  CachingAllocator& allocator_;
  DeviceKind kind_;
};

class MetaAsyncDownload final : public AsyncDownload {
 public:
  void begin(T) override {}
  bool ready() override { return true; }
  std::span<const std::byte> bytes() const override { return {}; }
};

class MetaBackend final : public Backend {
 public:
  explicit MetaBackend(Backend& like)
      : like_(like),
        allocator_(std::make_unique<MetaMemory>(like.device())),
        linear_(like),
        norm_(like),
        layer_norm_(like) {}

  Device device() const override { return like_.device(); }
  std::string describe() const override { return "shapes of " + like_.describe(); }
  CachingAllocator& allocator() override { return allocator_; }
  std::size_t cache_block_bytes() const override { return like_.cache_block_bytes(); }
  LinearKernels& linear() override { return linear_; }
  ConvKernels& conv() override { return conv_; }
  PoolKernels& pool() override { return pool_; }
  NormKernels& norm() override { return norm_; }
  LayerNormKernels& layer_norm() override { return layer_norm_; }
  EmbeddingKernels& embedding() override { return embedding_; }
  AttentionKernels& attention() override { return attention_; }
  RnnKernels& rnn() override { return rnn_; }
  PointwiseKernels& pointwise() override { return pointwise_; }
  OperatorKernels& operators() override { return operators_; }
  LossKernels& loss() override { return loss_; }
  OptimKernels& optim() override { return optim_; }
  std::int64_t pitch_of(std::int64_t columns, DType dtype) const override { return like_.pitch_of(columns, dtype); }
  std::int64_t zero_rows_of(const Shape& shape, DType dtype) const override { return like_.zero_rows_of(shape, dtype); }
  Tensor contiguous(const Tensor& x) override { return x.is_contiguous() ? x : empty(x.shape(), x.dtype()); }
  std::unique_ptr<Backend> make_stream(int) override { return std::make_unique<MetaBackend>(like_); }
  std::uint64_t primitives_created() const override { return 0; }
  StreamView stream() override { return {}; }
  int steps_ahead() const override { return 0; }
  bool computes_in(DType dtype) const override { return like_.computes_in(dtype); }
  Tensor stage(void* data, const Shape& shape, DType dtype, int) override {
    return device().kind == DeviceKind::kCpu ? Tensor::view_of(data, shape, dtype) : empty(shape, dtype);
  }
  void finish_inputs() override {}
  std::shared_ptr<MemorySource> staging_memory() override { return std::make_shared<MetaMemory>(Device{}); }
  void upload(std::span<const std::byte>, T) override {}
  void download(T, std::span<std::byte>) override {}
  void write(std::span<const std::byte>, T) override {}
  std::unique_ptr<AsyncDownload> make_async_download(std::size_t) override {
    return std::make_unique<MetaAsyncDownload>();
  }

 private:
  Backend& like_;
  CachingAllocator allocator_;
  MetaLinear linear_;
  ConvKernels conv_;
  PoolKernels pool_;
  MetaNorm norm_;
  MetaLayerNorm layer_norm_;
  EmbeddingKernels embedding_;
  AttentionKernels attention_;
  MetaRnn rnn_{allocator_, device().kind};
  PointwiseKernels pointwise_;
  OperatorKernels operators_;
  LossKernels loss_;
  OptimKernels optim_;
};

}  // namespace

std::unique_ptr<Backend> make_meta_backend(Backend& like) { return std::make_unique<MetaBackend>(like); }

}  // namespace lockstep::nn
