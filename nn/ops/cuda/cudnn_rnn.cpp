#include "nn/ops/cuda/cudnn_rnn.h"

#include <fmt/format.h>

#include <array>
#include <limits>

#include "base/cuda/runtime.h"
#include "base/error.h"

namespace lockstep::nn::cuda {
namespace {

// Since 9.13 ("[cuDNN][RNN] cuDNN RNN supports BFloat16 inputs since 9.13", pytorch/pytorch #164411).
constexpr std::size_t kVersionWithBf16 = 91300;

cudnnDataType_t native(DType dtype) {
  LOCKSTEP_ASSERT(dtype == DType::kF32 || is_half(dtype), "a recurrent layer of {}", name_of(dtype));
  return dtype == DType::kF32 ? CUDNN_DATA_FLOAT : dtype == DType::kF16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;
}

cudnnRNNMode_t mode_of(RnnCell cell) {
  switch (cell) {
    case RnnCell::kTanh: return CUDNN_RNN_TANH;
    case RnnCell::kRelu: return CUDNN_RNN_RELU;
    case RnnCell::kGru: return CUDNN_GRU;
    default: return CUDNN_LSTM;
  }
}

int narrow(std::int64_t value) {
  check_usage(value <= std::numeric_limits<int>::max(), "a recurrent layer that is too large for cuDNN",
              "use a smaller batch");
  return static_cast<int>(value);
}

template <class Pointer>
CudnnOwner<Pointer> make_descriptor(cudnnStatus_t (*create)(Pointer*), cudnnStatus_t (*destroy)(Pointer)) {
  Pointer made = nullptr;
  check_cudnn_rnn(create(&made), "making a descriptor");
  return {made, destroy};
}

}  // namespace

void check_cudnn_rnn(cudnnStatus_t status, const std::string& what, std::source_location where) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  std::array<char, 512> detail = {};
  cudnn_rnn().last_error(detail.data(), detail.size());
  std::string reason(detail.data());
  reason = reason.substr(0, reason.find('\n'));
  throw CudaError(fmt::format("{} failed in cuDNN {} on {}: {}{}{}", what, cudnn_rnn().version(), current_gpu_text(),
                              cudnn_rnn().status_text(status), reason.empty() ? "" : "; ", reason),
                  "set CUDNN_LOGLEVEL_DBG=2 and CUDNN_LOGDEST_DBG=stderr to see what cuDNN has against it", where);
}

CudnnOwner<cudnnHandle_t> make_cudnn_rnn_handle(StreamView stream) {
  cudnnHandle_t made = nullptr;
  check_cudnn_rnn(cudnn_rnn().create(&made), "starting cuDNN");
  CudnnOwner<cudnnHandle_t> handle(made, cudnn_rnn().destroy);
  check_cudnn_rnn(cudnn_rnn().set_stream(made, lockstep::native(stream)), "starting cuDNN");
  return handle;
}

PlanKey RnnProblem::key() const {
  return {static_cast<std::int64_t>(cell),
          static_cast<std::int64_t>(dtype),
          tf32 ? 1 : 0,
          training ? 1 : 0,
          samples,
          steps,
          inputs,
          width};
}

std::string RnnProblem::describe() const {
  return fmt::format("{} {} of {} to {} features over [{}, {}], {}", cell == RnnCell::kGru ? "a" : "an", name_of(cell),
                     inputs, width, samples, steps, name_of(dtype));
}

RnnPlan::RnnPlan(const RnnProblem& problem)
    : problem_(problem),
      dropout_(make_descriptor(cudnn_rnn().dropout_create, cudnn_rnn().dropout_destroy)),
      rnn_(make_descriptor(cudnn_rnn().rnn_create, cudnn_rnn().rnn_destroy)),
      x_(make_descriptor(cudnn_rnn().data_create, cudnn_rnn().data_destroy)),
      y_(make_descriptor(cudnn_rnn().data_create, cudnn_rnn().data_destroy)),
      state_(make_descriptor(cudnn_rnn().tensor_create, cudnn_rnn().tensor_destroy)) {}

std::optional<RnnPlan> RnnPlan::make(cudnnHandle_t handle, const RnnProblem& problem, CachingAllocator& allocator,
                                     const RnnAlgorithm& algorithm) {
  if (problem.dtype == DType::kBF16 && cudnn_rnn().version() < kVersionWithBf16) return std::nullopt;
  RnnPlan plan(problem);
  if (!plan.describe_to(handle, algorithm)) return std::nullopt;
  // cuDNN only gives addresses in a weight space.
  const Tensor space = Tensor::empty(allocator, {static_cast<std::int64_t>(plan.weight_bytes_)}, DType::kU8);
  plan.find_weights(handle, static_cast<std::byte*>(space.raw()));
  return plan;
}

// Note [cuDNN's recurrent layers]
// Each layer and direction is one of cuDNN's layers of its own: dropout between them is ours, which does not depend on
// how samples are shared out among ranks. Sequences are all of one length, batch outermost, which cuDNN calls unpacked
// and takes with CUDNN_RNN_PADDED_IO_ENABLED alone; since 8.9.1 it reads their lengths on the host, where ours are not
// (rnn_steps.h). Which algorithm is taken: Note [Recurrent algorithms] in rnn.cpp.
bool RnnPlan::describe_to(cudnnHandle_t handle, const RnnAlgorithm& algorithm) {
  const CudnnRnn& cudnn = cudnn_rnn();
  const RnnProblem& p = problem_;
  const std::string what = p.describe();
  const int samples = narrow(p.samples), steps = narrow(p.steps), inputs = narrow(p.inputs), width = narrow(p.width);
  narrow(p.samples * p.steps);
  check_cudnn_rnn(cudnn.dropout_set(dropout_.get(), handle, 0.0f, nullptr, 0, 0), what);
  const bool exact = p.dtype == DType::kF32 && !p.tf32;
  cudnnStatus_t status =
      cudnn.rnn_set(rnn_.get(), algorithm.native, mode_of(p.cell), CUDNN_RNN_DOUBLE_BIAS, CUDNN_UNIDIRECTIONAL,
                    CUDNN_LINEAR_INPUT, native(p.dtype), CUDNN_DATA_FLOAT, exact ? CUDNN_FMA_MATH : CUDNN_DEFAULT_MATH,
                    inputs, width, width, 1, dropout_.get(), CUDNN_RNN_PADDED_IO_ENABLED);
  if (status == CUDNN_STATUS_SUCCESS && algorithm.native == CUDNN_RNN_ALGO_PERSIST_DYNAMIC)
    status = cudnn.rnn_build_dynamic(handle, rnn_.get(), samples);
  const std::vector<int> lengths(static_cast<std::size_t>(samples), steps);
  if (status == CUDNN_STATUS_SUCCESS)
    status = cudnn.data_set(x_.get(), native(p.dtype), CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED, steps, samples,
                            inputs, lengths.data(), nullptr);
  if (status == CUDNN_STATUS_SUCCESS)
    status = cudnn.data_set(y_.get(), native(p.dtype), CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED, steps, samples,
                            width, lengths.data(), nullptr);
  const std::array<int, 3> dims = {1, samples, width}, strides = {narrow(p.samples * p.width), width, 1};
  if (status == CUDNN_STATUS_SUCCESS)
    status = cudnn.tensor_set(state_.get(), native(p.dtype), 3, dims.data(), strides.data());
  // Of inference it is asked, too: not every version takes a null pointer then.
  std::size_t reserve_bytes = 0;
  if (status == CUDNN_STATUS_SUCCESS)
    status = cudnn.temp_space(handle, rnn_.get(), p.training ? CUDNN_FWD_MODE_TRAINING : CUDNN_FWD_MODE_INFERENCE,
                              x_.get(), &workspace_bytes_, &reserve_bytes);
  if (p.training) reserve_bytes_ = reserve_bytes;
  if (status == CUDNN_STATUS_SUCCESS) status = cudnn.weight_space(handle, rnn_.get(), &weight_bytes_);
  // Of the standard algorithm f32 always is; what else it has against others is no error, since nobody needs those.
  const bool standard = algorithm.native == CUDNN_RNN_ALGO_STANDARD;
  if (status != CUDNN_STATUS_SUCCESS && !standard) return false;
  if (status == CUDNN_STATUS_NOT_SUPPORTED && p.dtype != DType::kF32) return false;
  check_cudnn_rnn(status, what);
  return true;
}

// cuDNN numbers the matrices of a layer 0 to G - 1 for its inputs and G to 2 G - 1 for its state; its order of the
// gates (of an LSTM i, f, g, o, of a GRU r, z, n) is PyTorch's; each has a bias. Rows are outputs.
void RnnPlan::find_weights(cudnnHandle_t handle, std::byte* space) {
  const CudnnRnn& cudnn = cudnn_rnn();
  const std::string what = problem_.describe();
  const std::int64_t gates = gates_of(problem_.cell);
  const auto matrix = make_descriptor(cudnn.tensor_create, cudnn.tensor_destroy);
  const auto bias = make_descriptor(cudnn.tensor_create, cudnn.tensor_destroy);
  const auto elements_of = [&](cudnnTensorDescriptor_t descriptor) {
    cudnnDataType_t type{};
    int count = 0;
    std::array<int, 8> dims{}, strides{};
    check_cudnn_rnn(
        cudnn.tensor_get(descriptor, static_cast<int>(dims.size()), &type, &count, dims.data(), strides.data()), what);
    LOCKSTEP_ASSERT(type == native(problem_.dtype), "weights of cuDNN's type {}", static_cast<int>(type));
    std::int64_t elements = 1;
    for (int axis = 0; axis < count; ++axis) elements *= dims[static_cast<std::size_t>(axis)];
    return elements;
  };
  const auto add = [&](std::size_t parameter, std::int64_t gate, std::int64_t count, const void* place,
                       cudnnTensorDescriptor_t descriptor) {
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(place) - space);
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(problem_.dtype);
    LOCKSTEP_ASSERT(place != nullptr && elements_of(descriptor) == count && offset + bytes <= weight_bytes_,
                    "cuDNN has {} elements for {} at {} of {}", elements_of(descriptor), count, offset, weight_bytes_);
    if (!pieces_.empty()) {
      WeightPiece& last = pieces_.back();
      if (last.parameter == parameter &&
          last.offset + static_cast<std::size_t>(last.count) * size_of(problem_.dtype) == offset) {
        last.count += count;
        return;
      }
    }
    pieces_.push_back({parameter, gate * count, count, offset});
  };
  for (const bool is_bias : {false, true})
    for (const bool of_state : {false, true})
      for (std::int64_t gate = 0; gate < gates; ++gate) {
        void *matrix_place = nullptr, *bias_place = nullptr;
        check_cudnn_rnn(cudnn.weight_params(handle, rnn_.get(), 0, weight_bytes_, space,
                                            static_cast<std::int32_t>(gate + (of_state ? gates : 0)), matrix.get(),
                                            &matrix_place, bias.get(), &bias_place),
                        what);
        const std::size_t parameter = (is_bias ? 2 : 0) + (of_state ? 1 : 0);
        if (is_bias)
          add(parameter, gate, problem_.width, bias_place, bias.get());
        else
          add(parameter, gate, problem_.width * (of_state ? problem_.width : problem_.inputs), matrix_place,
              matrix.get());
      }
}

void RnnPlan::forward(cudnnHandle_t handle, const RnnArrays& a) const {
  check_cudnn_rnn(cudnn_rnn().forward(
                      handle, rnn_.get(), problem_.training ? CUDNN_FWD_MODE_TRAINING : CUDNN_FWD_MODE_INFERENCE,
                      nullptr, x_.get(), a.x, y_.get(), a.y, state_.get(), a.h_first, a.h_last, state_.get(), a.c_first,
                      a.c_last, weight_bytes_, a.weights, workspace_bytes_, a.workspace, reserve_bytes_, a.reserve),
                  problem_.describe());
}

void RnnPlan::backward_data(cudnnHandle_t handle, const RnnArrays& a) const {
  check_cudnn_rnn(
      cudnn_rnn().backward_data(handle, rnn_.get(), nullptr, y_.get(), a.y, a.dy, x_.get(), a.dx, state_.get(),
                                a.h_first, nullptr, nullptr, state_.get(), a.c_first, nullptr, nullptr, weight_bytes_,
                                a.weights, workspace_bytes_, a.workspace, reserve_bytes_, a.reserve),
      problem_.describe());
}

void RnnPlan::backward_weights(cudnnHandle_t handle, const RnnArrays& a, void* gradients) const {
  check_cudnn_rnn(cudnn_rnn().backward_weights(handle, rnn_.get(), CUDNN_WGRAD_MODE_ADD, nullptr, x_.get(), a.x,
                                               state_.get(), a.h_first, y_.get(), a.y, weight_bytes_, gradients,
                                               workspace_bytes_, a.workspace, reserve_bytes_, a.reserve),
                  problem_.describe());
}

}  // namespace lockstep::nn::cuda
