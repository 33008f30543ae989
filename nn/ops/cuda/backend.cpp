#include "nn/ops/cuda/backend.h"

#include <utility>

#include "base/cuda/library.h"
#include "base/error.h"
#include "base/log.h"
#include "base/version.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/memory.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/transfer.h"

namespace lockstep::nn {
namespace cuda {
namespace {

static_assert(kMostWritten == Backend::kMostWritten);

std::unique_ptr<DeviceMemory> make_memory(DeviceMemory*& kept, int device, cudaStream_t stream) {
  auto made = std::make_unique<DeviceMemory>(device, stream);
  kept = made.get();
  return made;
}

std::string name_of_gpu(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "asking for a GPU's name");
  return properties.name;
}

std::string describe_gpu(const CudaOptions& options) {
  const CudaProbe& probe = probe_cuda();
  return fmt::format("cuda:{}, {}, CUDA {}, driver for CUDA {}{}{}", options.device, name_of_gpu(options.device),
                     cuda_version_text(probe.runtime_version), cuda_version_text(probe.driver_version),
                     options.tf32 ? ", tf32" : "", options.deterministic ? "" : ", not deterministic");
}

// Note [Unwinding]
// An exception may leave collectives under way that the other ranks no longer take part in, and the GPU waits for them
// until their communicator is aborted, which comes last. Whatever is let go of before must not wait for the GPU: what
// it may still read or write stays where it is until the process ends. An exception that was caught before leaves the
// same, and a destructor cannot know: it waits for a second, and no longer.

/// Of the GPU that is current when it is made. Its stream must outlive it.
class CudaAsyncDownload final : public AsyncDownload {
 public:
  CudaAsyncDownload(StreamView stream, std::size_t bytes) : stream_(stream), memory_(bytes) {}
  /// See Note [Unwinding].
  ~CudaAsyncDownload() override {
    if (!arrived_.done_soon()) memory_.abandon();
  }
  CudaAsyncDownload(const CudaAsyncDownload&) = delete;
  CudaAsyncDownload& operator=(const CudaAsyncDownload&) = delete;

  void begin(const Tensor& from) override {
    LOCKSTEP_ASSERT(from.bytes() <= memory_.bytes(), "{} bytes for {}", from.bytes(), memory_.bytes());
    used_ = from.bytes();
    if (used_ > 0)
      check_cuda(cudaMemcpyAsync(memory_.data(), from.raw(), used_, cudaMemcpyDeviceToHost, native(stream_)),
                 "reading a result");
    arrived_.record(native(stream_));
  }
  bool ready() override { return arrived_.done(); }
  std::span<const std::byte> bytes() const override { return {memory_.data(), used_}; }

 private:
  StreamView stream_;
  PinnedMemory memory_;
  CudaEvent arrived_;
  std::size_t used_ = 0;
};

/// Puts back what a pointer was.
struct Restored {
  OpProfile*& pointer;
  OpProfile* const before = pointer;
  ~Restored() { pointer = before; }
};

}  // namespace

void Engines::use(const std::string& operation, const std::string& engine) {
  EngineChoice& chosen = chosen_[operation];
  if (chosen.because.empty()) chosen.engine = engine;
}

void Engines::fall_back(std::string_view operation, std::string_view engine, std::string_view why) {
  const auto known = chosen_.find(operation);
  if (known != chosen_.end() && !known->second.because.empty()) return;
  chosen_.insert_or_assign(std::string(operation), EngineChoice{std::string(engine), std::string(why)});
  log_warn("{}: computed by {}, which is slower: {}", operation, engine, why);
}

CudaBackend::CudaBackend(const CudaOptions& options)
    : choices_(options.plan_file.empty() ? nullptr : std::make_unique<PlanChoices>(options.plan_file)),
      allocator_(make_memory(memory_, options.device, stream_.get())),
      context_{.device = options.device,
               .stream = stream_.view(),
               .allocator = allocator_,
               .tf32 = options.tf32,
               .deterministic = options.deterministic,
               .choices = choices_.get(),
               .gpu = name_of_gpu(options.device)},
      plan_file_(options.plan_file),
      description_(describe_gpu(options)),
      stager_(context_),
      pointwise_(make_pointwise_kernels(context_)),
      linear_(make_linear_kernels(context_, *pointwise_)),
      conv_(make_conv_kernels(context_, *pointwise_, *linear_)),
      pool_(make_pool_kernels(context_)),
      norm_(make_norm_kernels(context_)),
      layer_norm_(make_layer_norm_kernels(context_)),
      embedding_(make_embedding_kernels(context_)),
      attention_(make_attention_kernels(context_)),
      rnn_(make_rnn_kernels(context_, *pointwise_)),
      operators_(make_operator_kernels(context_)),
      loss_(make_loss_kernels(context_)),
      optim_(make_optim_kernels(context_)) {}

CudaBackend::~CudaBackend() {
  cudaSetDevice(context_.device);
  cudaStreamSynchronize(stream_.get());
}

std::unique_ptr<Backend> CudaBackend::make_stream(int /*threads*/) {
  make_current(context_.device);
  check_cuda(cudaStreamSynchronize(stream_.get()), "waiting for what a stream beside this one will read");
  return std::make_unique<CudaBackend>(CudaOptions{.device = context_.device,
                                                   .tf32 = context_.tf32,
                                                   .deterministic = context_.deterministic,
                                                   .plan_file = plan_file_});
}

Tensor CudaBackend::contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  make_current(context_.device);
  const std::int64_t columns = x.size(x.shape().size() - 1);
  Tensor made = empty(x.shape(), x.dtype());
  if (x.count() > 0)
    copy_rows(context_, x.dtype(), 1, x.count() / columns, columns, {x.raw_rows(), 0, x.pitch()},
              {made.raw(), 0, columns});
  return made;
}

Tensor CudaBackend::stage(void* data, const Shape& shape, DType dtype, int input) {
  make_current(context_.device);
  return stager_.take(data, shape, dtype, input);
}

void CudaBackend::finish_inputs() {
  make_current(context_.device);
  stager_.finish();
}

std::shared_ptr<MemorySource> CudaBackend::staging_memory() {
  return std::make_shared<PinnedSource>(context_.device, stager_.all_read());
}

void CudaBackend::upload(std::span<const std::byte> from, const Tensor& to) {
  make_current(context_.device);
  copy_to_device(context_, from, to);
}

void CudaBackend::download(const Tensor& from, std::span<std::byte> to) {
  make_current(context_.device);
  copy_to_host(context_, contiguous(from), to);
}

void CudaBackend::write(std::span<const std::byte> from, const Tensor& to) {
  LOCKSTEP_ASSERT(from.size() <= kMostWritten && from.size() <= to.bytes(), "{} bytes into {}", from.size(),
                  to.bytes());
  make_current(context_.device);
  write_bytes(from, to.raw(), context_.stream);
}

std::unique_ptr<AsyncDownload> CudaBackend::make_async_download(std::size_t bytes) {
  make_current(context_.device);
  return std::make_unique<CudaAsyncDownload>(context_.stream, bytes);
}

std::optional<std::size_t> CudaBackend::free_bytes() {
  make_current(context_.device);
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

std::vector<OperationCost> CudaBackend::profile(FunctionRef<void()> work) {
  make_current(context_.device);
  OpProfile ops;
  const Restored restored{context_.profile};
  context_.profile = &ops;
  work();
  return ops.read();
}

std::optional<double> CudaBackend::peak_bytes_per_s() const {
  int clock_khz = 0, bus_bits = 0;
  if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, context_.device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, context_.device) != cudaSuccess)
    static_cast<void>(cudaGetLastError());  // it has been heard
  if (clock_khz == 0 || bus_bits == 0) return std::nullopt;
  return 2e3 * clock_khz * bus_bits / 8;  // two transfers a clock
}

std::unique_ptr<CapturedGraph> CudaBackend::capture(FunctionRef<void()> work, std::string& why_not) {
  make_current(context_.device);
  return capture_graph(context_.stream, work, why_not);
}

void copy_between(Backend& source, const Tensor& from, Backend& target, const Tensor& to) {
  if (from.bytes() == 0) return;
  const int source_device = source.device().index, target_device = target.device().index;
  dynamic_cast<CudaBackend&>(source).memory().share_with(target_device);

  make_current(source_device);
  CudaEvent made;  // by the source
  made.record(native(source.stream()));

  make_current(target_device);
  const cudaStream_t stream = native(target.stream());
  made.make_wait(stream);
  const cudaError_t status =
      target_device == source_device  // two backends of one GPU
          ? cudaMemcpyAsync(to.raw(), from.raw(), from.bytes(), cudaMemcpyDeviceToDevice, stream)
          : cudaMemcpyPeerAsync(to.raw(), target_device, from.raw(), source_device, from.bytes(), stream);
  check_cuda(status, "copying between GPUs");
  CudaEvent read;  // the source may overwrite `from` then
  read.record(stream);

  make_current(source_device);
  read.make_wait(native(source.stream()));
}

}  // namespace cuda

namespace {

/// Throws DeviceError for a GPU that the kernels, or this build of them, cannot run on.
void refuse_foreign_gpu(int device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for a GPU's age");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for a GPU's age");
  const std::string gpu = fmt::format("{} has compute capability {}.{}", current_gpu_text(), major, minor);
  if (major < 8)
    throw DeviceError(fmt::format("{}{}, too old for this program", gpu,
                                  major == 6   ? ", Pascal"
                                  : major == 7 ? ", Volta or Turing"
                                               : ""),
                      "use a GPU of compute capability 8.0 (A100) or later, or --device cpu");
  if (!cuda::kernels_run_here())
    throw DeviceError(
        fmt::format("{}, and this program was built for {}", gpu, cuda_targets()),
        fmt::format("build it with -DCMAKE_CUDA_ARCHITECTURES={}{}-real, or use --device cpu", major, minor));
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  const CudaProbe& probe = probe_cuda();
  if (probe.devices == 0) throw DeviceError(probe.problem, probe.remedy);
  if (options.device < 0 || options.device >= probe.devices)
    throw DeviceError(fmt::format("there is no cuda:{}: this process sees {} GPU{}", options.device, probe.devices,
                                  probe.devices == 1 ? "" : "s"),
                      "choose among those that `lockstep devices` shows; CUDA_VISIBLE_DEVICES may hide some");
  check_cuda(cudaSetDevice(options.device), "choosing a GPU");
  refuse_foreign_gpu(options.device);
  return std::make_unique<cuda::CudaBackend>(options);
}

}  // namespace lockstep::nn
