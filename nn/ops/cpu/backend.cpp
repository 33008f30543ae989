#include "lockstep/nn/ops/backend.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/signals.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/spread_threads.h"

namespace lockstep::nn {
namespace {

void* held(const Tensor& tensor) {
  check_usage(tensor.defined(), "a copy from or to a tensor that holds nothing", "ask Tensor::defined() before");
  return tensor.raw();
}

/// What a kernel has returned is there.
class CpuAsyncDownload final : public AsyncDownload {
 public:
  explicit CpuAsyncDownload(std::size_t bytes) : memory_(bytes) {}
  void begin(const Tensor& from) override {
    LOCKSTEP_ASSERT(from.bytes() <= memory_.size(), "{} bytes for {}", from.bytes(), memory_.size());
    used_ = from.bytes();
    if (used_ > 0) std::memcpy(memory_.data(), held(from), used_);
  }
  bool ready() override { return true; }
  std::span<const std::byte> bytes() const override { return {memory_.data(), used_}; }

 private:
  std::vector<std::byte> memory_;
  std::size_t used_ = 0;
};

// Kernels of ours and of oneDNN keep blocks of some KB there.
constexpr std::size_t kLeastStackBytes = 256 * 1024;

/// Note [Threads that OpenMP gives]
/// oneDNN divides its work by OpenMP's setting, but computes with the threads that a region gets. If these are fewer,
/// it leaves the rest undone, or waits for ever. So all settings are made before, in each thread that starts regions,
/// and the threads of a region are counted once: then only OMP_THREAD_LIMIT can make them fewer.
void set_threads(int threads) {
  omp_set_dynamic(0);
  omp_set_max_active_levels(std::max(omp_get_max_active_levels(), omp_get_active_level() + 1));
  omp_set_num_threads(threads);
}

/// Where the system has no more threads, libgomp ends the process.
void check_threads_can_start(int threads) {
  std::vector<std::thread> others;
  std::atomic<bool> end = false;
  std::optional<DeviceError> problem;
  try {
    for (int i = 1; i < threads; ++i) others.push_back(start_thread([&end] { end.wait(false); }));
  } catch (const DeviceError& error) {
    problem = error;
  }
  end = true;
  end.notify_all();
  for (std::thread& thread : others) thread.join();
  if (problem)
    throw DeviceError(
        fmt::format("compute thread {} of {} cannot start: {}", others.size() + 2, threads, problem->what()),
        fmt::format("give fewer threads (--threads), or {}", problem->remedy()));
}

std::size_t stack_bytes_of_this_thread() {
  pthread_attr_t attributes;
  if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) return std::numeric_limits<std::size_t>::max();
  std::size_t bytes = 0;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads, std::shared_ptr<cpu::PackedWeights> shared = nullptr)
      : threads_(threads), spreader_(threads), shared_(std::move(shared)), allocator_(make_host_memory()) {
    check_usage(threads >= 1, "a CPU backend needs at least one thread");
    if (const int got = obtainable_threads(threads); got < threads)
      throw UsageError(fmt::format("a CPU backend of {} threads, of which OpenMP gives this thread {}", threads, got),
                       fmt::format("unset OMP_THREAD_LIMIT, or use {}", got));
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
  Tensor stage(void* data, const Shape& shape, DType dtype, int) override {
    return Tensor::view_of(data, shape, dtype);
  }
  void finish_inputs() override { spreader_.spread(); }
  std::shared_ptr<MemorySource> staging_memory() override { return make_host_memory(); }
  void upload(std::span<const std::byte> from, const Tensor& to) override {
    LOCKSTEP_ASSERT(from.size() <= to.bytes(), "{} bytes into {}", from.size(), to.bytes());
    if (!from.empty()) std::memcpy(held(to), from.data(), from.size());
  }
  void download(const Tensor& from, std::span<std::byte> to) override {
    LOCKSTEP_ASSERT(to.size() <= from.bytes(), "{} bytes of {}", to.size(), from.bytes());
    if (!to.empty()) std::memcpy(to.data(), held(from), to.size());
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
  OperatorKernels& operators() override { return *operators_; }
  LossKernels& loss() override { return *loss_; }
  OptimKernels& optim() override { return *optim_; }
  std::unique_ptr<Backend> make_stream(int threads) override {
    return std::make_unique<CpuBackend>(threads, shared_ != nullptr ? shared_ : for_streams_);
  }
  void move_to_this_thread() override { set_threads(threads_); }
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
  std::unique_ptr<OperatorKernels> operators_ = cpu::make_operator_kernels();
  std::unique_ptr<LossKernels> loss_ = cpu::make_loss_kernels();
  std::unique_ptr<OptimKernels> optim_ = cpu::make_optim_kernels();
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) { return std::make_unique<CpuBackend>(threads); }

int obtainable_threads(int wanted) {
  check_threads_can_start(std::min(wanted, omp_get_thread_limit()));
  set_threads(wanted);
  int got = 1;
  std::atomic<std::size_t> least_stack = std::numeric_limits<std::size_t>::max();
  cpu::on_threads(wanted, [&](int thread, int threads) {
    use_alternate_signal_stack();
    if (thread == 0) {
      got = threads;
      return;
    }
    const std::size_t bytes = stack_bytes_of_this_thread();
    std::size_t least = least_stack;
    while (bytes < least && !least_stack.compare_exchange_weak(least, bytes)) {
    }
  });
  if (least_stack < kLeastStackBytes)
    throw DeviceError(fmt::format("OpenMP's threads have stacks of {} KB, and kernels need {}", least_stack / 1024,
                                  kLeastStackBytes / 1024),
                      "unset OMP_STACKSIZE and GOMP_STACKSIZE, or raise them and ulimit -s");
  return got;
}

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
