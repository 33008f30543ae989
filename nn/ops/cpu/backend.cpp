#include "lockstep/nn/ops/backend.h"

#include <omp.h>

#include <cstring>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/spread_threads.h"

namespace lockstep::nn {
namespace {

/// What a kernel has returned is there.
class CpuAsyncDownload final : public AsyncDownload {
 public:
  explicit CpuAsyncDownload(std::size_t bytes) : memory_(bytes) {}
  void begin(const Tensor& from) override {
    LOCKSTEP_ASSERT(from.bytes() <= memory_.size(), "{} bytes for {}", from.bytes(), memory_.size());
    used_ = from.bytes();
    std::memcpy(memory_.data(), from.raw(), used_);
  }
  bool ready() override { return true; }
  std::span<const std::byte> bytes() const override { return {memory_.data(), used_}; }

 private:
  std::vector<std::byte> memory_;
  std::size_t used_ = 0;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads, std::shared_ptr<cpu::PackedWeights> shared = nullptr)
      : threads_(threads), spreader_(threads), shared_(std::move(shared)), allocator_(make_host_memory()) {
    check_usage(threads >= 1, "a CPU backend needs at least one thread");
    omp_set_num_threads(threads);
  }

  Device device() const override { return {}; }
  std::string describe() const override {
    return fmt::format("cpu, {} thread{}, oneDNN {}, {}", threads_, threads_ == 1 ? "" : "s", onednn_version(),
                       cpu_kernel_isa());
  }
  CachingAllocator& allocator() override { return allocator_; }
  StreamView stream() override { return {}; }
  int steps_ahead() const override { return 0; }
  bool computes_in(DType dtype) const override {
    return dtype == DType::kF32 || (dtype == DType::kBF16 && computes_in_bf16_);
  }
  using Backend::from_host;
  Tensor from_host(void* data, const Shape& shape, DType dtype, int) override {
    return Tensor::view_of(data, shape, dtype);
  }
  void finish_inputs() override { spreader_.spread(); }
  std::shared_ptr<MemorySource> staging_memory() override { return make_host_memory(); }
  void upload(std::span<const std::byte> from, const Tensor& to) override {
    LOCKSTEP_ASSERT(from.size() <= to.bytes(), "{} bytes into {}", from.size(), to.bytes());
    if (!from.empty()) std::memcpy(to.raw(), from.data(), from.size());
  }
  void download(const Tensor& from, std::span<std::byte> to) override {
    LOCKSTEP_ASSERT(to.size() <= from.bytes(), "{} bytes of {}", to.size(), from.bytes());
    if (!to.empty()) std::memcpy(to.data(), from.raw(), to.size());
  }
  void write(std::span<const std::byte> from, const Tensor& to) override {
    LOCKSTEP_ASSERT(from.size() <= kMostWritten, "{} bytes", from.size());
    upload(from, to);
  }
  std::unique_ptr<AsyncDownload> make_async_download(std::size_t bytes) override {
    return std::make_unique<CpuAsyncDownload>(bytes);
  }
  // Half of the second cache of a server's core, or all of a desktop's.
  std::size_t cache_block_bytes() const override { return static_cast<std::size_t>(threads_) << 19; }
  LinearKernels& linear() override { return *linear_; }
  ConvKernels& conv() override { return *conv_; }
  PoolKernels& pool() override { return *pool_; }
  NormKernels& norm() override { return *norm_; }
  LayerNormKernels& layer_norm() override { return *layer_norm_; }
  EmbeddingKernels& embedding() override { return *embedding_; }
  AttentionKernels& attention() override { return *attention_; }
  RnnKernels& rnn() override { return *rnn_; }
  PointwiseKernels& pointwise() override { return *pointwise_; }
  ElementwiseKernels& elementwise() override { return *elementwise_; }
  LossKernels& loss() override { return *loss_; }
  OptimKernels& optim() override { return *optim_; }
  std::unique_ptr<Backend> make_stream(int threads) override {
    return std::make_unique<CpuBackend>(threads, shared_ != nullptr ? shared_ : for_streams_);
  }
  void move_to_this_thread() override { omp_set_num_threads(threads_); }
  std::uint64_t primitives_created() const override { return onednn_.primitives_created(); }

 private:
  int threads_;
  const bool computes_in_bf16_ = cpu_bf16() != CpuBf16::kNone;
  cpu::ThreadSpreader spreader_;
  std::shared_ptr<cpu::PackedWeights> for_streams_ = std::make_shared<cpu::PackedWeights>();
  std::shared_ptr<cpu::PackedWeights> shared_;  // with the other streams; nullptr: this one packs for itself
  CachingAllocator allocator_;
  cpu::OneDnn onednn_;
  std::unique_ptr<PointwiseKernels> pointwise_ = cpu::make_pointwise_kernels();
  std::unique_ptr<LinearKernels> linear_ = cpu::make_linear_kernels(onednn_, allocator_, *pointwise_);
  std::unique_ptr<ConvKernels> conv_ = cpu::make_conv_kernels(onednn_, allocator_, *pointwise_, shared_.get());
  std::unique_ptr<PoolKernels> pool_ = cpu::make_pool_kernels(onednn_, allocator_);
  std::unique_ptr<NormKernels> norm_ = cpu::make_norm_kernels();
  std::unique_ptr<LayerNormKernels> layer_norm_ = cpu::make_layer_norm_kernels();
  std::unique_ptr<EmbeddingKernels> embedding_ = cpu::make_embedding_kernels();
  std::unique_ptr<AttentionKernels> attention_ = cpu::make_attention_kernels(allocator_);
  std::unique_ptr<RnnKernels> rnn_ = cpu::make_rnn_kernels(allocator_, *linear_, *pointwise_, shared_.get());
  std::unique_ptr<ElementwiseKernels> elementwise_ = cpu::make_elementwise_kernels();
  std::unique_ptr<LossKernels> loss_ = cpu::make_loss_kernels();
  std::unique_ptr<OptimKernels> optim_ = cpu::make_optim_kernels();
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) { return std::make_unique<CpuBackend>(threads); }

std::string cpu_kernel_isa() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41: return "sse41";
    case dnnl::cpu_isa::avx: return "avx";
    case dnnl::cpu_isa::avx2: return "avx2";
    case dnnl::cpu_isa::avx2_vnni: return "avx2_vnni";
    case dnnl::cpu_isa::avx512_core: return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni: return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16: return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_amx: return "avx512_core_amx";
    default: return cpu_instruction_set();  // newer than the names above
  }
}

CpuBf16 cpu_bf16() {
  const std::string isa = cpu_kernel_isa();
  if (isa.find("amx") != std::string::npos) return CpuBf16::kAmx;
  if (isa.find("bf16") != std::string::npos) return CpuBf16::kAvx512;
  return isa.starts_with("avx512") ? CpuBf16::kEmulated : CpuBf16::kNone;
}

const char* name_of(CpuBf16 how) {
  switch (how) {
    case CpuBf16::kAmx: return "AMX";
    case CpuBf16::kAvx512: return "AVX512-BF16";
    case CpuBf16::kEmulated: return "emulated, slower than f32";
    case CpuBf16::kNone: break;
  }
  return "not on this CPU";
}

std::string onednn_version() {
  const dnnl::version_t* version = dnnl::version();
  return fmt::format("{}.{}.{}", version->major, version->minor, version->patch);
}

}  // namespace lockstep::nn
