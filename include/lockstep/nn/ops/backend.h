// A device as the operators see it: its memory and its kernels.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/device.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/nn/ops/attention.h"
#include "lockstep/nn/ops/conv.h"
#include "lockstep/nn/ops/embedding.h"
#include "lockstep/nn/ops/layer_norm.h"
#include "lockstep/nn/ops/linear.h"
#include "lockstep/nn/ops/loss.h"
#include "lockstep/nn/ops/norm.h"
#include "lockstep/nn/ops/operators.h"
#include "lockstep/nn/ops/optim.h"
#include "lockstep/nn/ops/pointwise.h"
#include "lockstep/nn/ops/pool.h"
#include "lockstep/nn/ops/rnn.h"

namespace lockstep::nn {

/// What Backend::capture() has captured: the kernels, their order and their addresses. What they read may change from
/// run to run, what was decided on the host while capturing does not. The backend, and all memory that the work
/// touches, must outlive it. The backend's thread uses it.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  /// Gives the work to the device, after what has been given before. Throws CudaError.
  virtual void run() = 0;
  /// How many kernels it starts on the device.
  virtual std::int64_t kernels() const = 0;
};

/// What computes an operation.
struct EngineChoice {
  std::string engine;        // "cuDNN …"
  std::string because = {};  // of a fallback: why it is not a faster one
};

/// What the operations of one kind took on the device.
struct OperationCost {
  std::string operation;  // "batch normalisation"
  std::int64_t calls = 0;
  double ms = 0;
  double bytes = 0;  // of their tensors, each counted once a call: the least that they have to read and write
  double flops = 0;  // of products and convolutions: 2 for each multiply-add
};

/// Brings a few numbers to the host without stopping the device: begin() in the order of the work that is given, then
/// later, when ready(), bytes(). One at a time; used again and again, by the backend's thread. The backend must outlive
/// its use. It may end while a download is on its way: it waits for a second at most (Note [Unwinding]).
class AsyncDownload {
 public:
  virtual ~AsyncDownload() = default;
  /// Takes `from`, contiguous, as it is when all work given before is done. The handle is not kept, and may go at once;
  /// a view's memory must stay until ready(). More bytes than it was made for are an InternalError.
  virtual void begin(const Tensor& from) = 0;
  /// Whether it has arrived. Throws what the device has failed with.
  virtual bool ready() = 0;
  /// What begin() took; only when ready(), until the next begin() or its end.
  virtual std::span<const std::byte> bytes() const = 0;
};

/// Note [Shapes alone]
/// Interfaces of kernels (lockstep/nn/ops/) are also the kernels of tensors that have shapes and no data
/// (nn/ops/meta_backend.h): what is declared there computes nothing unless a device overrides it. So a new kernel needs
/// no third version. tests/nn/cuda/twins_test.cpp fails for one that the CPU or CUDA does not override.

/// One device of this process. Operators, layers and optimizers reach memory and kernels through it alone, so that
/// another device is another Backend and nothing else. Kernels run in the order of their calls on one stream; one
/// thread calls them, which is not checked. Must outlive every tensor, parameter and tape made on it; a handle of a
/// tensor may be released later, and on any thread. What it returns by reference is its own.
///
/// Kernels keep no handle of what they are given. On a GPU they may not have run when they return: memory of the
/// allocator that is released by then is reused in the order of the stream alone; that of a view stays until the device
/// is done. Kernels look at types, and not at shapes and devices: operators (lockstep/nn/autograd/functions.h) do. They
/// throw UsageError where a tensor is read as another type, and CudaError for what CUDA refuses; a failure of a GPU may
/// show in any later call.
class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual Device device() const = 0;
  /// By operation ("attention, bf16"), as far as there has been a choice. Of a fallback it has warned.
  virtual std::map<std::string, EngineChoice> engines() const { return {}; }
  /// For people: "cpu, 2 threads, oneDNN 2.6.3, avx512_core".
  virtual std::string describe() const = 0;
  virtual CachingAllocator& allocator() = 0;

  /// How many bytes of a result the kernel that follows still finds close by. Chains of kernels may run in pieces of
  /// this size, so that what lies between them never goes to memory and back. Depends on the number of threads alone:
  /// where sums are cut decides on their last bits.
  virtual std::size_t cache_block_bytes() const = 0;

  virtual LinearKernels& linear() = 0;
  virtual ConvKernels& conv() = 0;
  virtual PoolKernels& pool() = 0;
  virtual NormKernels& norm() = 0;
  virtual LayerNormKernels& layer_norm() = 0;
  virtual EmbeddingKernels& embedding() = 0;
  virtual AttentionKernels& attention() = 0;
  virtual RnnKernels& rnn() = 0;
  virtual PointwiseKernels& pointwise() = 0;
  virtual OperatorKernels& operators() = 0;
  virtual LossKernels& loss() = 0;
  virtual OptimKernels& optim() = 0;

  /// How many elements the rows of a matrix of so many columns had best be apart, where matrix products write and read
  /// it (Note [Pitch]).
  virtual std::int64_t pitch_of(std::int64_t columns, DType dtype) const {
    static_cast<void>(dtype);
    return columns;
  }
  /// How many rows of zeros had best follow the last of a parameter of this shape (Note [Zero rows]).
  virtual std::int64_t zero_rows_of(const Shape& shape, DType dtype) const {
    static_cast<void>(shape), static_cast<void>(dtype);
    return 0;
  }
  /// `x`, the same memory, or where it has a pitch a copy of it without.
  virtual Tensor contiguous(const Tensor& x) {
    if (!x.is_contiguous()) throw InternalError(to_string(x.shape()) + " with a pitch");
    return x;
  }

  /// Another backend of this device for the calling thread, with its own stream and memory, so that the kernels of both
  /// run at the same time, and on the CPU with `threads` compute threads. It may read this one's tensors: all earlier
  /// work is done. Keep such tensors until it has read them: released memory is reused at once. Its kernels share
  /// packed weights with all other streams of this backend, which must outlive them. Several threads may call this at
  /// once. Throws as the function that makes such a backend.
  virtual std::unique_ptr<Backend> make_stream(int threads) = 0;

  /// The calling thread is the one that calls the kernels from now on: on the CPU, OpenMP's threads are set for it. The
  /// thread that has made it need not say so.
  virtual void move_to_this_thread() {}

  /// How many kernel objects have been built; constant in a steady state.
  virtual std::uint64_t primitives_created() const = 0;

  /// Where work given to this device goes.
  virtual StreamView stream() = 0;
  /// How many steps may be given to the device before the results of the first of them are read: 0 where work is done
  /// when a kernel returns.
  virtual int steps_ahead() const = 0;
  /// Whether activations may be of this type: f32 everywhere.
  virtual bool computes_in(DType dtype) const = 0;

  /// A copy of the host's values at `data`, dense and of this shape and type, as a tensor of this device. `data` has
  /// been read when it returns.
  Tensor from_host(const void* data, const Shape& shape, DType dtype) {
    Tensor made = empty(shape, dtype);
    upload({static_cast<const std::byte*>(data), made.bytes()}, made);
    return made;
  }

  /// A batch that stays the caller's, in memory of staging_memory(), as a tensor of this device without waiting. On the
  /// CPU the tensor is a view of `data`, which must stay valid and unchanged for as long as the tensor is used, on GPUs
  /// until finish_inputs(). The tensor is valid until the second following call for the same shape, type and `input`:
  /// arrays that a step takes together have different numbers.
  virtual Tensor stage(void* data, const Shape& shape, DType dtype, int input) = 0;
  /// Waits until everything given to stage() has been read.
  virtual void finish_inputs() = 0;
  /// Host memory that stage() reads fastest; for any thread, and it may outlive the backend.
  virtual std::shared_ptr<MemorySource> staging_memory() = 0;

  /// Blocking copies between the host's bytes and as many of a tensor's first ones, after all work given before. The
  /// tensor holds something and is contiguous; a GPU's download() copes with a pitch. More bytes than it has are an
  /// InternalError.
  virtual void upload(std::span<const std::byte> from, const Tensor& to) = 0;
  virtual void download(const Tensor& from, std::span<std::byte> to) = 0;
  /// The same for at most kMostWritten bytes, in the order of the work that is given, without waiting: `from` may be
  /// changed at once.
  virtual void write(std::span<const std::byte> from, const Tensor& to) = 0;
  static constexpr std::size_t kMostWritten = 64;
  /// For results of at most `bytes`.
  virtual std::unique_ptr<AsyncDownload> make_async_download(std::size_t bytes) = 0;

  /// How much memory of its own the device has left; nothing where it has the host's, or does not say.
  virtual std::optional<std::size_t> free_bytes() { return std::nullopt; }

  /// Whether capture() may succeed.
  virtual bool can_capture() const { return false; }
  /// Calls `work` and captures what it gives to this device; nothing of it is done. Returns nullptr if the device
  /// refuses, or if `work` cannot be captured (it waits, allocates memory, or causes an error of CUDA): `why_not` then
  /// has the reason, and nothing has changed on the device. Other errors pass through and end the capture. Only this
  /// thread's work is captured.
  virtual std::unique_ptr<CapturedGraph> capture(FunctionRef<void()> work, std::string& why_not) {
    static_cast<void>(work);
    why_not = "this device captures no graphs";
    return nullptr;
  }

  /// Calls `work` without capturing it, and times its operations on this device, the longest first. Nothing where the
  /// device cannot say. Waits for the device. What `work` throws passes through.
  virtual std::vector<OperationCost> profile(FunctionRef<void()> work) {
    work();
    return {};
  }
  /// What the device's memory can move in a second, reads and writes together; nothing where it is not known.
  virtual std::optional<double> peak_bytes_per_s() const { return std::nullopt; }

  Tensor empty(const Shape& shape, DType dtype = DType::kF32) { return Tensor::empty(allocator(), shape, dtype); }
  /// The same for a parameter, or its copy in another type: zeros follow where zero_rows_of() says so.
  Tensor empty_parameter(const Shape& shape, DType dtype = DType::kF32) {
    const std::int64_t more = zero_rows_of(shape, dtype);
    if (more == 0) return empty(shape, dtype);
    Shape whole = shape;
    whole[0] += more;
    const Tensor made = empty(whole, dtype);
    pointwise().fill(made.slice(shape[0], whole[0]), 0.0f);
    return made.slice(0, shape[0]).with_zero_rows(more);
  }
  Tensor zeros(const Shape& shape) {
    Tensor made = empty(shape);
    pointwise().fill(made, 0.0f);
    return made;
  }

 protected:
  Backend() = default;
};

/// What a CUDA device computes in, and how its kernels are chosen.
struct CudaOptions {
  int device = 0;              // CUDA's index, among those that this process may see
  bool tf32 = false;           // f32 products on matrix units, with 10 bits of mantissa
  bool deterministic = true;   // false: attention's gradient may have other bits each time, where that is faster
  std::string plan_file = {};  // where the fastest of the libraries' kernels are noted; empty: theirs without timing
};

/// Makes the device this thread's and opens cuBLASLt; cuDNN is opened at the first convolution. Throws CudaError; where
/// the build has no CUDA, or the machine no such GPU, or one that is too old, DeviceError.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

/// `threads` compute threads at most (at least 1), OpenMP's on the calling thread: the thread that makes the backend
/// is the one that calls its kernels. Throws UsageError where OpenMP gives fewer (OMP_THREAD_LIMIT), and DeviceError
/// where the system has no more threads, or such with small stacks (OMP_STACKSIZE).
std::unique_ptr<Backend> make_cpu_backend(int threads);
/// How many of `wanted` threads (at least 1) OpenMP's settings leave to make_cpu_backend(). Settings that may be
/// changed are, for the calling thread: OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS, OMP_NUM_THREADS.
int obtainable_threads(int wanted);

/// The instruction set that oneDNN uses here: "avx512_core_amx", "avx2"…; honours ONEDNN_MAX_CPU_ISA.
std::string cpu_kernel_isa();
/// How oneDNN multiplies bf16 in that instruction set: in tiles (AMX), with AVX512-BF16, with f32 instructions that
/// take longer than f32 itself (AVX-512 alone), or not at all.
enum class CpuBf16 : std::uint8_t { kNone, kEmulated, kAvx512, kAmx };
CpuBf16 cpu_bf16();
/// "AMX", "AVX512-BF16", "emulated, slower than f32" or "not on this CPU".
const char* name_of(CpuBf16 how);
/// "2.6.3"
std::string onednn_version();

}  // namespace lockstep::nn
