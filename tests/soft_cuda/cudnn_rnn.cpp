// In place of nn/ops/cuda/cudnn_rnn_library.cpp: layers of LSTM in plain loops, and complaints about calls that cuDNN
// would not accept.
#include "tests/soft_cuda/cudnn_rnn.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

#include "lockstep/base/dtype.h"
#include "nn/ops/cuda/cudnn_rnn.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::soft_cuda {
namespace {

constexpr std::int64_t kGates = 4, kMatrices = 8;

std::mutex rnn_mutex;
CudnnRnnSettings rnn_settings;
CudnnRnnCounts rnn_counted;

struct Handle {
  cudaStream_t stream = nullptr;
};
struct TensorDesc {
  cudnnDataType_t type{};
  std::vector<int> dims, strides;
};
struct Dropout {
  bool set = false;
};
struct Data {
  cudnnDataType_t type{};
  int steps = 0, samples = 0, width = 0;
};
struct Rnn {
  cudnnDataType_t type{};
  std::int64_t inputs = 0, width = 0;
  bool scattered = false;

  std::size_t element() const { return type == CUDNN_DATA_FLOAT ? 4 : 2; }
  std::int64_t elements_of(std::int64_t matrix) const { return width * (matrix < kGates ? inputs : width); }
  static constexpr std::size_t kGap = 48;

  // In bytes, of matrix 0 to 7 or of its bias; of 8: what all take.
  std::size_t place(std::int64_t wanted, bool bias) const {
    const std::size_t gap = scattered ? kGap : 0;
    std::size_t at = gap;
    for (const bool biases : {false, true})
      for (std::int64_t i = 0; i < kMatrices; ++i) {
        const std::int64_t matrix = scattered ? kMatrices - 1 - i : i;
        if (matrix == wanted && biases == bias) return at;
        at += static_cast<std::size_t>(biases ? width : elements_of(matrix)) * element() + gap;
      }
    return at;
  }
  std::size_t space() const { return place(kMatrices, false); }
};

template <class T, class Pointer>
T& as(Pointer pointer) {
  return *reinterpret_cast<T*>(pointer);
}

template <class T, class Pointer>
cudnnStatus_t create(Pointer* to) {
  *to = reinterpret_cast<Pointer>(new T);
  const std::lock_guard lock(rnn_mutex);
  ++rnn_counted.live;
  return CUDNN_STATUS_SUCCESS;
}

template <class T, class Pointer>
cudnnStatus_t destroy(Pointer pointer) {
  delete reinterpret_cast<T*>(pointer);
  const std::lock_guard lock(rnn_mutex);
  --rnn_counted.live;
  return CUDNN_STATUS_SUCCESS;
}

std::size_t version() {
  const std::lock_guard lock(rnn_mutex);
  return rnn_settings.version;
}

const char* status_text(cudnnStatus_t status) {
  return status == CUDNN_STATUS_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_BAD_PARAM";
}

void last_error(char* message, std::size_t size) {
  if (size > 0) message[0] = '\0';
}

cudnnStatus_t set_stream(cudnnHandle_t handle, cudaStream_t stream) {
  as<Handle>(handle).stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t tensor_set(cudnnTensorDescriptor_t desc, cudnnDataType_t type, int count, const int* dims,
                         const int* strides) {
  if (count != 3) return CUDNN_STATUS_BAD_PARAM;
  as<TensorDesc>(desc) = {type, {dims, dims + count}, {strides, strides + count}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t tensor_get(const cudnnTensorDescriptor_t desc, int wanted, cudnnDataType_t* type, int* count, int* dims,
                         int* strides) {
  const TensorDesc& tensor = as<const TensorDesc>(desc);
  if (wanted < static_cast<int>(tensor.dims.size())) return CUDNN_STATUS_BAD_PARAM;
  *type = tensor.type;
  *count = static_cast<int>(tensor.dims.size());
  std::copy(tensor.dims.begin(), tensor.dims.end(), dims);
  std::copy(tensor.strides.begin(), tensor.strides.end(), strides);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t dropout_set(cudnnDropoutDescriptor_t desc, cudnnHandle_t handle, float p, void*, std::size_t,
                          unsigned long long) {
  if (handle == nullptr || p != 0.0f) return CUDNN_STATUS_BAD_PARAM;
  as<Dropout>(desc).set = true;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t rnn_set(cudnnRNNDescriptor_t desc, cudnnRNNAlgo_t, cudnnRNNMode_t mode, cudnnRNNBiasMode_t bias,
                      cudnnDirectionMode_t direction, cudnnRNNInputMode_t input, cudnnDataType_t type,
                      cudnnDataType_t math, cudnnMathType_t, std::int32_t inputs, std::int32_t width,
                      std::int32_t projection, std::int32_t layers, cudnnDropoutDescriptor_t dropout,
                      std::uint32_t flags) {
  if (mode != CUDNN_LSTM || bias != CUDNN_RNN_DOUBLE_BIAS || direction != CUDNN_UNIDIRECTIONAL ||
      input != CUDNN_LINEAR_INPUT || math != CUDNN_DATA_FLOAT || inputs < 1 || width < 1 || projection != width ||
      layers != 1 || !as<Dropout>(dropout).set || flags != CUDNN_RNN_PADDED_IO_ENABLED)
    return CUDNN_STATUS_BAD_PARAM;
  const std::lock_guard lock(rnn_mutex);
  if (type == CUDNN_DATA_BFLOAT16 && rnn_settings.version < 91300) return CUDNN_STATUS_NOT_SUPPORTED;
  as<Rnn>(desc) = {type, inputs, width, rnn_settings.scattered};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t data_set(cudnnRNNDataDescriptor_t desc, cudnnDataType_t type, cudnnRNNDataLayout_t layout, int steps,
                       int samples, int width, const int* lengths, void*) {
  if (layout != CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED || steps < 1 || samples < 1 || width < 1)
    return CUDNN_STATUS_BAD_PARAM;
  for (int i = 0; i < samples; ++i)
    if (lengths[i] != steps) return CUDNN_STATUS_BAD_PARAM;
  as<Data>(desc) = {type, steps, samples, width};
  return CUDNN_STATUS_SUCCESS;
}

constexpr std::size_t kWorkspace = 512;

// What a reserve space begins with: what has been done with it.
enum Stage : std::int32_t { kForward = 0x464f5257, kData = 0x44415441 };
constexpr std::size_t kHeader = 64;

std::size_t reserve_of(const Rnn& rnn, const Data& x) {
  return kHeader + static_cast<std::size_t>(x.samples) * static_cast<std::size_t>(x.steps) *
                       static_cast<std::size_t>(rnn.width) * 5 * sizeof(float);
}

cudnnStatus_t temp_space(cudnnHandle_t, cudnnRNNDescriptor_t desc, cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t x,
                         std::size_t* workspace, std::size_t* reserve) {
  *workspace = kWorkspace;
  if (reserve != nullptr) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? reserve_of(as<Rnn>(desc), as<Data>(x)) : 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t weight_space(cudnnHandle_t, cudnnRNNDescriptor_t desc, std::size_t* bytes) {
  *bytes = as<Rnn>(desc).space();
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t weight_params(cudnnHandle_t, cudnnRNNDescriptor_t desc, std::int32_t layer, std::size_t bytes,
                            const void* space, std::int32_t matrix, cudnnTensorDescriptor_t matrix_desc,
                            void** matrix_place, cudnnTensorDescriptor_t bias_desc, void** bias_place) {
  const Rnn& rnn = as<Rnn>(desc);
  if (layer != 0 || bytes != rnn.space() || matrix < 0 || matrix >= kMatrices) return CUDNN_STATUS_BAD_PARAM;
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(space));
  const int width = static_cast<int>(rnn.width), columns = static_cast<int>(matrix < kGates ? rnn.inputs : rnn.width);
  as<TensorDesc>(matrix_desc) = {rnn.type, {1, width, columns}, {width * columns, columns, 1}};
  as<TensorDesc>(bias_desc) = {rnn.type, {1, width, 1}, {width, 1, 1}};
  *matrix_place = begin + rnn.place(matrix, false);
  *bias_place = begin + rnn.place(matrix, true);
  return CUDNN_STATUS_SUCCESS;
}

// Numbers of either type.
struct Numbers {
  std::byte* data;
  cudnnDataType_t type;

  double get(std::int64_t i) const {
    return type == CUDNN_DATA_FLOAT ? static_cast<double>(reinterpret_cast<const float*>(data)[i])
                                    : static_cast<double>(reinterpret_cast<const BFloat16*>(data)[i].to_float());
  }
  void set(std::int64_t i, double value) const {
    if (type == CUDNN_DATA_FLOAT)
      reinterpret_cast<float*>(data)[i] = static_cast<float>(value);
    else
      reinterpret_cast<BFloat16*>(data)[i] = BFloat16::from_float(static_cast<float>(value));
  }
  void add(std::int64_t i, double value) const { set(i, get(i) + value); }
  explicit operator bool() const { return data != nullptr; }
};

// One call, with all it needs by value: streams run it later.
struct Layer {
  Layer(cudnnRNNDescriptor_t rnn_desc, cudnnRNNDataDescriptor_t x_desc)
      : rnn(as<Rnn>(rnn_desc)), samples(as<Data>(x_desc).samples), steps(as<Data>(x_desc).steps), width(rnn.width) {}

  Numbers numbers(const void* data) const { return {static_cast<std::byte*>(const_cast<void*>(data)), rnn.type}; }
  Numbers matrix(const void* space, std::int64_t i) const { return part(space, i, false); }
  Numbers bias(const void* space, std::int64_t i) const { return part(space, i, true); }
  float& gate(void* reserve, std::int64_t b, std::int64_t t, std::int64_t k, std::int64_t u) const {
    return kept(reserve)[((b * steps + t) * 5 + k) * width + u];
  }
  float& cell(void* reserve, std::int64_t b, std::int64_t t, std::int64_t u) const { return gate(reserve, b, t, 4, u); }
  static Stage& stage(void* reserve) { return *static_cast<Stage*>(reserve); }

  Rnn rnn;
  std::int64_t samples, steps, width;

 private:
  Numbers part(const void* space, std::int64_t i, bool is_bias) const {
    return {static_cast<std::byte*>(const_cast<void*>(space)) + rnn.place(i, is_bias), rnn.type};
  }
  static float* kept(void* reserve) { return reinterpret_cast<float*>(static_cast<std::byte*>(reserve) + kHeader); }
};

bool described(const Layer& layer, cudnnRNNDataDescriptor_t x, cudnnRNNDataDescriptor_t y,
               cudnnTensorDescriptor_t state, std::size_t weights, std::size_t workspace) {
  const Data &xs = as<Data>(x), &ys = as<Data>(y);
  const TensorDesc& s = as<TensorDesc>(state);
  const auto is = [](int value, std::int64_t wanted) { return value == wanted; };
  return xs.type == layer.rnn.type && ys.type == layer.rnn.type && s.type == layer.rnn.type &&
         is(xs.width, layer.rnn.inputs) && is(ys.width, layer.width) && is(ys.samples, layer.samples) &&
         is(ys.steps, layer.steps) && s.dims == std::vector<int>{1, xs.samples, ys.width} &&
         s.strides == std::vector<int>{xs.samples * ys.width, ys.width, 1} && weights == layer.rnn.space() &&
         workspace >= kWorkspace;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

cudnnStatus_t forward(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, cudnnForwardMode_t mode, const std::int32_t*,
                      cudnnRNNDataDescriptor_t x_desc, const void* x_data, cudnnRNNDataDescriptor_t y_desc,
                      void* y_data, cudnnTensorDescriptor_t h_desc, const void* hx, void* hy,
                      cudnnTensorDescriptor_t c_desc, const void* cx, void* cy, std::size_t weight_bytes,
                      const void* weights, std::size_t workspace_bytes, void* workspace, std::size_t reserve_bytes,
                      void* reserve) {
  const Layer layer(rnn, x_desc);
  const bool training = mode == CUDNN_FWD_MODE_TRAINING;
  if (!described(layer, x_desc, y_desc, h_desc, weight_bytes, workspace_bytes) ||
      !described(layer, x_desc, y_desc, c_desc, weight_bytes, workspace_bytes) || workspace == nullptr ||
      (training && reserve_bytes < reserve_of(layer.rnn, as<Data>(x_desc))))
    return CUDNN_STATUS_BAD_PARAM;
  {
    const std::lock_guard lock(rnn_mutex);
    ++rnn_counted.forwards;
    if (layer.rnn.type == CUDNN_DATA_BFLOAT16) ++rnn_counted.bf16;
  }
  const cudaError_t error = submit(as<Handle>(handle).stream, [=] {
    std::memset(workspace, 0xee, kWorkspace);
    const Numbers x = layer.numbers(x_data), y = layer.numbers(y_data), h_first = layer.numbers(hx),
                  c_first = layer.numbers(cx), h_last = layer.numbers(hy), c_last = layer.numbers(cy);
    const std::int64_t width = layer.width, inputs = layer.rnn.inputs;
    if (training) Layer::stage(reserve) = kForward;
    std::vector<double> h(static_cast<std::size_t>(width)), c(h), next(h);
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    for (std::int64_t b = 0; b < layer.samples; ++b) {
      for (std::int64_t u = 0; u < width; ++u) {
        h[at(u)] = h_first ? h_first.get(b * width + u) : 0.0;
        c[at(u)] = c_first ? c_first.get(b * width + u) : 0.0;
      }
      for (std::int64_t t = 0; t < layer.steps; ++t) {
        for (std::int64_t u = 0; u < width; ++u) {
          double sums[kGates];
          for (std::int64_t k = 0; k < kGates; ++k) {
            sums[k] = layer.bias(weights, k).get(u) + layer.bias(weights, k + kGates).get(u);
            for (std::int64_t i = 0; i < inputs; ++i)
              sums[k] += x.get((b * layer.steps + t) * inputs + i) * layer.matrix(weights, k).get(u * inputs + i);
            for (std::int64_t i = 0; i < width; ++i)
              sums[k] += h[at(i)] * layer.matrix(weights, k + kGates).get(u * width + i);
          }
          const double gates[] = {sigmoid(sums[0]), sigmoid(sums[1]), std::tanh(sums[2]), sigmoid(sums[3])};
          c[at(u)] = gates[1] * c[at(u)] + gates[0] * gates[2];
          next[at(u)] = gates[3] * std::tanh(c[at(u)]);
          y.set((b * layer.steps + t) * width + u, next[at(u)]);
          if (!training) continue;
          for (std::int64_t k = 0; k < kGates; ++k) layer.gate(reserve, b, t, k, u) = static_cast<float>(gates[k]);
          layer.cell(reserve, b, t, u) = static_cast<float>(c[at(u)]);
        }
        h = next;
      }
      for (std::int64_t u = 0; u < width; ++u) {
        if (h_last) h_last.set(b * width + u, h[at(u)]);
        if (c_last) c_last.set(b * width + u, c[at(u)]);
      }
    }
  });
  return error == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

cudnnStatus_t backward_data(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, const std::int32_t*,
                            cudnnRNNDataDescriptor_t y_desc, const void*, const void* dy_data,
                            cudnnRNNDataDescriptor_t x_desc, void* dx_data, cudnnTensorDescriptor_t h_desc, const void*,
                            const void* dhy, void* dhx, cudnnTensorDescriptor_t, const void* cx, const void* dcy,
                            void* dcx, std::size_t weight_bytes, const void* weights, std::size_t workspace_bytes,
                            void* workspace, std::size_t reserve_bytes, void* reserve) {
  const Layer layer(rnn, x_desc);
  if (!described(layer, x_desc, y_desc, h_desc, weight_bytes, workspace_bytes) || workspace == nullptr ||
      reserve_bytes < reserve_of(layer.rnn, as<Data>(x_desc)) || dx_data == nullptr || dhy != nullptr ||
      dhx != nullptr || dcy != nullptr || dcx != nullptr)
    return CUDNN_STATUS_BAD_PARAM;
  {
    const std::lock_guard lock(rnn_mutex);
    ++rnn_counted.backwards;
  }
  const cudaError_t error = submit(as<Handle>(handle).stream, [=] {
    std::memset(workspace, 0xee, kWorkspace);
    const Numbers dy = layer.numbers(dy_data), dx = layer.numbers(dx_data), c_first = layer.numbers(cx);
    const std::int64_t width = layer.width, inputs = layer.rnn.inputs;
    const double spoilt = Layer::stage(reserve) == kForward ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    Layer::stage(reserve) = kData;
    std::vector<double> dh(static_cast<std::size_t>(width)), dc(dh);
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    for (std::int64_t b = 0; b < layer.samples; ++b) {
      std::fill(dc.begin(), dc.end(), 0.0);
      for (std::int64_t t = layer.steps - 1; t >= 0; --t) {
        for (std::int64_t u = 0; u < width; ++u) {
          double sum = dy.get((b * layer.steps + t) * width + u) + spoilt;
          for (std::int64_t k = 0; k < kGates && t + 1 < layer.steps; ++k)
            for (std::int64_t v = 0; v < width; ++v)
              sum += static_cast<double>(layer.gate(reserve, b, t + 1, k, v)) *
                     layer.matrix(weights, k + kGates).get(v * width + u);
          dh[at(u)] = sum;
        }
        for (std::int64_t u = 0; u < width; ++u) {
          const auto gate = [&](std::int64_t k) -> float& { return layer.gate(reserve, b, t, k, u); };
          const double i = static_cast<double>(gate(0)), f = static_cast<double>(gate(1)),
                       g = static_cast<double>(gate(2)), o = static_cast<double>(gate(3));
          const double tanh_c = std::tanh(static_cast<double>(layer.cell(reserve, b, t, u)));
          const double before = t > 0     ? static_cast<double>(layer.cell(reserve, b, t - 1, u))
                                : c_first ? c_first.get(b * width + u)
                                          : 0.0;
          const double d = dc[at(u)] + dh[at(u)] * o * (1 - tanh_c * tanh_c);
          gate(0) = static_cast<float>(d * g * i * (1 - i));
          gate(1) = static_cast<float>(d * before * f * (1 - f));
          gate(2) = static_cast<float>(d * i * (1 - g * g));
          gate(3) = static_cast<float>(dh[at(u)] * tanh_c * o * (1 - o));
          dc[at(u)] = d * f;
        }
        for (std::int64_t i = 0; i < inputs; ++i) {
          double sum = 0;
          for (std::int64_t k = 0; k < kGates; ++k)
            for (std::int64_t u = 0; u < width; ++u)
              sum +=
                  static_cast<double>(layer.gate(reserve, b, t, k, u)) * layer.matrix(weights, k).get(u * inputs + i);
          dx.set((b * layer.steps + t) * inputs + i, sum);
        }
      }
    }
  });
  return error == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

cudnnStatus_t backward_weights(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, cudnnWgradMode_t mode,
                               const std::int32_t*, cudnnRNNDataDescriptor_t x_desc, const void* x_data,
                               cudnnTensorDescriptor_t h_desc, const void* hx, cudnnRNNDataDescriptor_t y_desc,
                               const void* y_data, std::size_t weight_bytes, void* gradients,
                               std::size_t workspace_bytes, void* workspace, std::size_t reserve_bytes, void* reserve) {
  const Layer layer(rnn, x_desc);
  if (mode != CUDNN_WGRAD_MODE_ADD || !described(layer, x_desc, y_desc, h_desc, weight_bytes, workspace_bytes) ||
      workspace == nullptr || reserve_bytes < reserve_of(layer.rnn, as<Data>(x_desc)))
    return CUDNN_STATUS_BAD_PARAM;
  {
    const std::lock_guard lock(rnn_mutex);
    ++rnn_counted.weight_gradients;
  }
  const cudaError_t error = submit(as<Handle>(handle).stream, [=] {
    std::memset(workspace, 0xee, kWorkspace);
    const Numbers x = layer.numbers(x_data), y = layer.numbers(y_data), h_first = layer.numbers(hx);
    const std::int64_t width = layer.width, inputs = layer.rnn.inputs;
    const double spoilt = Layer::stage(reserve) == kData ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    // Sums are taken in f32 or better and rounded once.
    std::vector<double> sums(static_cast<std::size_t>(layer.rnn.inputs > width ? layer.rnn.inputs : width));
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    for (std::int64_t k = 0; k < kMatrices; ++k)
      for (std::int64_t u = 0; u < width; ++u) {
        const std::int64_t columns = k < kGates ? inputs : width;
        std::fill(sums.begin(), sums.end(), spoilt);
        double bias = spoilt;
        for (std::int64_t b = 0; b < layer.samples; ++b)
          for (std::int64_t t = 0; t < layer.steps; ++t) {
            const auto d = static_cast<double>(layer.gate(reserve, b, t, k % kGates, u));
            bias += d;
            for (std::int64_t i = 0; i < columns; ++i) {
              const double from = k < kGates ? x.get((b * layer.steps + t) * inputs + i)
                                  : t > 0    ? y.get((b * layer.steps + t - 1) * width + i)
                                  : h_first  ? h_first.get(b * width + i)
                                             : 0.0;
              sums[at(i)] += d * from;
            }
          }
        layer.bias(gradients, k).add(u, bias);
        for (std::int64_t i = 0; i < columns; ++i) layer.matrix(gradients, k).add(u * columns + i, sums[at(i)]);
      }
  });
  return error == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

}  // namespace

void set_cudnn_rnn(const CudnnRnnSettings& wanted) {
  const std::lock_guard lock(rnn_mutex);
  rnn_settings = wanted;
}

CudnnRnnCounts cudnn_rnn_counts() {
  const std::lock_guard lock(rnn_mutex);
  return rnn_counted;
}

}  // namespace lockstep::soft_cuda

namespace lockstep::nn::cuda {

const CudnnRnn& cudnn_rnn() {
  using namespace soft_cuda;
  static const CudnnRnn functions = {
      .version = version,
      .status_text = status_text,
      .last_error = last_error,
      .create = create<Handle, cudnnHandle_t>,
      .destroy = destroy<Handle, cudnnHandle_t>,
      .set_stream = set_stream,
      .tensor_create = create<TensorDesc, cudnnTensorDescriptor_t>,
      .tensor_destroy = destroy<TensorDesc, cudnnTensorDescriptor_t>,
      .tensor_set = tensor_set,
      .tensor_get = tensor_get,
      .dropout_create = create<Dropout, cudnnDropoutDescriptor_t>,
      .dropout_destroy = destroy<Dropout, cudnnDropoutDescriptor_t>,
      .dropout_set = dropout_set,
      .rnn_create = create<Rnn, cudnnRNNDescriptor_t>,
      .rnn_destroy = destroy<Rnn, cudnnRNNDescriptor_t>,
      .rnn_set = rnn_set,
      .data_create = create<Data, cudnnRNNDataDescriptor_t>,
      .data_destroy = destroy<Data, cudnnRNNDataDescriptor_t>,
      .data_set = data_set,
      .temp_space = temp_space,
      .weight_space = weight_space,
      .weight_params = weight_params,
      .forward = forward,
      .backward_data = backward_data,
      .backward_weights = backward_weights,
  };
  return functions;
}

}  // namespace lockstep::nn::cuda
