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

class MetaLinear final : public LinearKernels {
 public:
  explicit MetaLinear(Backend& like) : like_(like) {}
  void forward(T, T, T, Epilogue, T) override {}
  void backward_input(T, T, T) override {}
  void backward_weight(T, T, bool, T) override {}
  void backward_bias(T, bool, T) override {}
  void backward_weight_and_bias(T, T, bool, T, bool, T) override {}
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

class MetaConv final : public ConvKernels {
 public:
  void forward(T, T, std::uint64_t, T, const Window&, Epilogue, T) override {}
  void backward_input(T, T, std::uint64_t, const Window&, T) override {}
  void backward_weight(T, T, const Window&, bool, T, bool, T) override {}
};

class MetaPool final : public PoolKernels {
 public:
  void max_forward(T, const Window&, Epilogue, T, T) override {}
  void max_backward(T, T, const Window&, T) override {}
  void average_forward(T, const Window&, T) override {}
  void average_backward(T, const Window&, T) override {}
  void adaptive_average_forward(T, T) override {}
  void adaptive_average_backward(T, T) override {}
};

class MetaNorm final : public NormKernels {
 public:
  explicit MetaNorm(Backend& like) : like_(like) {}
  void forward_train(T, T, T, double, T, T, T) override {}
  void forward_train_relu(T, T, T, double, T, T, T, T) override {}
  void forward_infer(T, T, T, T, T, double, T) override {}
  void backward(T, T, T, T, T, bool, double, T, T, T) override {}
  void backward_relu(T, T, bool, T, T, T, T, T, double, T, T, T) override {}
  bool adds_gradients() const override { return like_.norm().adds_gradients(); }
  bool counts_batches() const override { return like_.norm().counts_batches(); }
  void update_running(T, T, std::int64_t, double, T, T) override {}
  void forward_train_moving(T, T, T, double, bool, T, const Running&, T, T, T) override {}
  void moments(T, T) override {}
  void join_moments(T, double, T, T, T, T, T) override {}
  void backward_sums(T, T, T, T, double, T) override {}
  void backward_input(T, T, T, T, T, T, T, double, T) override {}

 private:
  Backend& like_;
};

class MetaLayerNorm final : public LayerNormKernels {
 public:
  explicit MetaLayerNorm(Backend& like) : like_(like) {}
  void forward(T, T, T, double, T, T, T) override {}
  void forward_added(T, T, T, T, double, T, T, T, T) override {}
  void backward_input(T, T, T, T, T, T) override {}
  bool adds_to_gradients() const override { return like_.layer_norm().adds_to_gradients(); }
  void backward_input_added(T, T, T, T, T, T) override {}
  void backward_parameters(T, T, T, T, bool, T, bool, T) override {}
  bool backward_reads_once(std::int64_t columns) const override {
    return like_.layer_norm().backward_reads_once(columns);
  }

 private:
  Backend& like_;
};

class MetaElementwise final : public ElementwiseKernels {
 public:
  void affine(T, float, float, T) override {}
  void sum_rows(T, T) override {}
  void broadcast_rows(T, T) override {}
  void total(T, T) override {}
};

class MetaEmbedding final : public EmbeddingKernels {
 public:
  void forward(T, T, T) override {}
  void backward(T, T, bool, T) override {}
  void add_rows(T, T, std::int64_t, T) override {}
  void add_rows_backward(T, std::int64_t, bool, T) override {}
  void row_indices(T, std::int64_t, std::int64_t, T) override {}
};

class MetaAttention final : public AttentionKernels {
 public:
  void forward(const AttentionInputs&, std::int64_t, const AttentionOptions&, T, T) override {}
  void backward(const AttentionInputs&, std::int64_t, const AttentionOptions&, T, T, T,
                const AttentionInputs&) override {}
  void extend(T, std::int64_t, std::int64_t, T, T) override {}
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

class MetaPointwise final : public PointwiseKernels {
 public:
  void fill(T, float) override {}
  void copy(T, T) override {}
  void copy_rows(T, T) override {}
  void cast(T, T) override {}
  void increment(T) override {}
  void add_to(T, float, T) override {}
  void unary(UnaryOp, T, T) override {}
  void unary_backward(UnaryOp, T, T, T, T) override {}
  void binary(BinaryOp, T, T, T) override {}
  void binary_backward(BinaryOp, T, T, T, T, T) override {}
  void dropout(T, double, T, std::int64_t, T) override {}
  void swap_last_axes(T, T) override {}
};

class MetaLoss final : public LossKernels {
 public:
  void cross_entropy(T, T, const LossScale&, float, T, T) override {}
  void count_in_top(T, T, std::int64_t, T) override {}
  void squared_error(T, T, const LossScale&, T, T) override {}
};

class MetaOptim final : public OptimKernels {
 public:
  void update(const UpdateRule&, T, std::span<const UpdateArrays>, T, std::span<const std::ptrdiff_t>) override {}
  void prepare(const UpdateRule&, T, std::span<const UpdateArrays>) override {}
  void compute_factors(const UpdateRule&, std::span<const UpdateArrays>, T) override {}
  void squares(std::span<const UpdateArrays>) override {}
  void add_up(T, T) override {}
  void compute_update_scale(T, T, double, T) override {}
  void compute_scaled_update(const ScaledStep&, T, T) override {}
  void count_step(T, T) override {}
  void update_loss_scale(const LossScaleRule&, T) override {}
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
  ElementwiseKernels& elementwise() override { return elementwise_; }
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
  MetaConv conv_;
  MetaPool pool_;
  MetaNorm norm_;
  MetaLayerNorm layer_norm_;
  MetaEmbedding embedding_;
  MetaAttention attention_;
  MetaRnn rnn_{allocator_, device().kind};
  MetaPointwise pointwise_;
  MetaElementwise elementwise_;
  MetaLoss loss_;
  MetaOptim optim_;
};

}  // namespace

std::unique_ptr<Backend> make_meta_backend(Backend& like) { return std::make_unique<MetaBackend>(like); }

}  // namespace lockstep::nn
