// In place of nn/ops/cuda/cudnn_rnn_library.cpp: recurrent layers in plain loops, and complaints about calls that cuDNN
// would not accept.
#include "tests/soft_cuda/libraries.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/base/dtype.h"
#include "nn/ops/cuda/cudnn_rnn.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::soft_cuda {
namespace {

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
  cudnnRNNMode_t mode{};
  std::int64_t inputs = 0, width = 0;
  bool scattered = false;
  int algorithm = 0;
  int built_for = 0;  // samples, where kernels are compiled

  std::int64_t gates() const { return mode == CUDNN_LSTM ? 4 : mode == CUDNN_GRU ? 3 : 1; }
  std::int64_t matrices() const { return 2 * gates(); }
  std::size_t element() const { return type == CUDNN_DATA_FLOAT ? 4 : 2; }
  std::int64_t elements_of(std::int64_t matrix) const { return width * (matrix < gates() ? inputs : width); }
  static constexpr std::size_t kGap = 48;

  // In bytes, of a matrix or of its bias; of one more than there are: what all take.
  std::size_t place(std::int64_t wanted, bool bias) const {
    const std::size_t gap = scattered ? kGap : 0;
    std::size_t at = gap;
    for (const bool biases : {false, true})
      for (std::int64_t i = 0; i < matrices(); ++i) {
        const std::int64_t matrix = scattered ? matrices() - 1 - i : i;
        if (matrix == wanted && biases == bias) return at;
        at += static_cast<std::size_t>(biases ? width : elements_of(matrix)) * element() + gap;
      }
    return at;
  }
  std::size_t space() const { return place(matrices(), false); }
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
  switch (status) {
    case CUDNN_STATUS_NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER: return "CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER";
    default: return "CUDNN_STATUS_BAD_PARAM";
  }
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

cudnnStatus_t rnn_set(cudnnRNNDescriptor_t desc, cudnnRNNAlgo_t algorithm, cudnnRNNMode_t mode, cudnnRNNBiasMode_t bias,
                      cudnnDirectionMode_t direction, cudnnRNNInputMode_t input, cudnnDataType_t type,
                      cudnnDataType_t math, cudnnMathType_t, std::int32_t inputs, std::int32_t width,
                      std::int32_t projection, std::int32_t layers, cudnnDropoutDescriptor_t dropout,
                      std::uint32_t flags) {
  const bool known = mode == CUDNN_LSTM || mode == CUDNN_GRU || mode == CUDNN_RNN_TANH || mode == CUDNN_RNN_RELU;
  if (!known || bias != CUDNN_RNN_DOUBLE_BIAS || direction != CUDNN_UNIDIRECTIONAL || input != CUDNN_LINEAR_INPUT ||
      math != CUDNN_DATA_FLOAT || inputs < 1 || width < 1 || projection != width || layers != 1 ||
      !as<Dropout>(dropout).set || flags != CUDNN_RNN_PADDED_IO_ENABLED)
    return CUDNN_STATUS_BAD_PARAM;
  const std::lock_guard lock(rnn_mutex);
  if (type == CUDNN_DATA_BFLOAT16 && rnn_settings.version < 91300) return CUDNN_STATUS_NOT_SUPPORTED;
  if ((rnn_settings.algorithms >> algorithm & 1) == 0) return CUDNN_STATUS_NOT_SUPPORTED;
  as<Rnn>(desc) = {type, mode, inputs, width, rnn_settings.scattered, algorithm};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t rnn_build_dynamic(cudnnHandle_t handle, cudnnRNNDescriptor_t desc, int samples) {
  if (handle == nullptr || as<Rnn>(desc).algorithm != CUDNN_RNN_ALGO_PERSIST_DYNAMIC) return CUDNN_STATUS_BAD_PARAM;
  as<Rnn>(desc).built_for = samples;
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
  if (layer != 0 || bytes != rnn.space() || matrix < 0 || matrix >= rnn.matrices()) return CUDNN_STATUS_BAD_PARAM;
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(space));
  const int width = static_cast<int>(rnn.width),
            columns = static_cast<int>(matrix < rnn.gates() ? rnn.inputs : rnn.width);
  as<TensorDesc>(matrix_desc) = {rnn.type, {1, width, columns}, {width * columns, columns, 1}};
  as<TensorDesc>(bias_desc) = {rnn.type, {1, width, 1}, {width, 1, 1}};
  *matrix_place = begin + rnn.place(matrix, false);
  *bias_place = begin + rnn.place(matrix, true);
  return CUDNN_STATUS_SUCCESS;
}

// Numbers of any of the types.
struct Numbers {
  std::byte* data;
  cudnnDataType_t type;

  double get(std::int64_t i) const {
    if (type == CUDNN_DATA_HALF) return static_cast<double>(reinterpret_cast<const Float16*>(data)[i].to_float());
    return type == CUDNN_DATA_FLOAT ? static_cast<double>(reinterpret_cast<const float*>(data)[i])
                                    : static_cast<double>(reinterpret_cast<const BFloat16*>(data)[i].to_float());
  }
  void set(std::int64_t i, double value) const {
    if (type == CUDNN_DATA_FLOAT)
      reinterpret_cast<float*>(data)[i] = static_cast<float>(value);
    else if (type == CUDNN_DATA_HALF)
      reinterpret_cast<Float16*>(data)[i] = Float16::from_float(static_cast<float>(value));
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
  // After the backward pass of the data: of what matrix k contributes to.
  float& gradient(void* reserve, std::int64_t b, std::int64_t t, std::int64_t matrix, std::int64_t u) const {
    const std::int64_t gates = rnn.gates();
    const bool apart = rnn.mode == CUDNN_GRU && matrix == 5;
    return gate(reserve, b, t, apart ? 3 : matrix % gates, u);
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
         workspace >= kWorkspace &&
         (layer.rnn.algorithm != CUDNN_RNN_ALGO_PERSIST_DYNAMIC || layer.rnn.built_for == xs.samples);
}

// See Note [Alignment for cuDNN].
bool lie_well(std::initializer_list<const void*> places) {
  return std::ranges::all_of(places,
                             [](const void* place) { return reinterpret_cast<std::uintptr_t>(place) % 16 == 0; });
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// h of one feature; c is first that of the step before. `kept`: what run_cell_backward() needs.
double run_cell(cudnnRNNMode_t mode, const double* of_inputs, const double* of_state, double h, double& c,
                double* kept) {
  const auto sum = [&](int k) { return of_inputs[k] + of_state[k]; };
  switch (mode) {
    case CUDNN_LSTM:
      for (int k = 0; k < 4; ++k) kept[k] = k == 2 ? std::tanh(sum(k)) : sigmoid(sum(k));
      kept[4] = c = kept[1] * c + kept[0] * kept[2];
      return kept[3] * std::tanh(c);
    case CUDNN_GRU:
      kept[0] = sigmoid(sum(0));
      kept[1] = sigmoid(sum(1));
      kept[2] = std::tanh(of_inputs[2] + kept[0] * of_state[2]);
      kept[3] = of_state[2];
      return (1.0 - kept[1]) * kept[2] + kept[1] * h;
    case CUDNN_RNN_RELU: return kept[0] = sum(0) < 0.0 ? 0.0 : sum(0);
    default: return kept[0] = std::tanh(sum(0));
  }
}

// The gradients of the gates take their place in `kept`; of a GRU those of what inputs contribute, and in the fourth
// what the state contributes to the third. dh is first the gradient of h, then what of it reaches that of the step
// before by no gate; dc likewise that of c and of the one before.
void run_cell_backward(cudnnRNNMode_t mode, double h_before, double c_before, double& dh, double& dc, double* kept) {
  const double d = dh;
  dh = 0.0;
  switch (mode) {
    case CUDNN_LSTM: {
      const double i = kept[0], f = kept[1], g = kept[2], o = kept[3], tanh_c = std::tanh(kept[4]);
      const double of_c = dc + d * o * (1 - tanh_c * tanh_c);
      kept[0] = of_c * g * i * (1 - i);
      kept[1] = of_c * c_before * f * (1 - f);
      kept[2] = of_c * i * (1 - g * g);
      kept[3] = d * tanh_c * o * (1 - o);
      dc = of_c * f;
      return;
    }
    case CUDNN_GRU: {
      const double r = kept[0], z = kept[1], n = kept[2], dn = d * (1 - z) * (1 - n * n);
      kept[0] = dn * kept[3] * r * (1 - r);
      kept[1] = d * (h_before - n) * z * (1 - z);
      kept[2] = dn;
      kept[3] = dn * r;
      dh = d * z;
      return;
    }
    case CUDNN_RNN_RELU: kept[0] = kept[0] > 0.0 ? d : 0.0; return;
    default: kept[0] = d * (1 - kept[0] * kept[0]);
  }
}

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
  if (!lie_well({x_data, y_data, hx, hy, cx, cy, weights, workspace, reserve}))
    return CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
  bool slow = false;
  double off = 0.0;
  {
    const std::lock_guard lock(rnn_mutex);
    if (rnn_settings.refusing >> layer.rnn.algorithm & 1) return CUDNN_STATUS_NOT_SUPPORTED;
    ++rnn_counted.forwards;
    rnn_counted.last_algorithm = layer.rnn.algorithm;
    slow = rnn_settings.slow >> layer.rnn.algorithm & 1;
    // One unit in the last place of a bf16: of the first result, every other time.
    if (rnn_settings.unrepeatable >> layer.rnn.algorithm & 1) off = rnn_counted.forwards % 2 == 0 ? 0x1p-8 : 0.0;
    if (layer.rnn.type == CUDNN_DATA_BFLOAT16) ++rnn_counted.bf16;
  }
  const cudaError_t error = submit(as<Handle>(handle).stream, [=] {
    if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::memset(workspace, 0xee, kWorkspace);
    const Numbers x = layer.numbers(x_data), y = layer.numbers(y_data), h_first = layer.numbers(hx),
                  c_first = layer.numbers(cx), h_last = layer.numbers(hy), c_last = layer.numbers(cy);
    const std::int64_t width = layer.width, inputs = layer.rnn.inputs;
    if (training) Layer::stage(reserve) = kForward;
    std::vector<double> h(static_cast<std::size_t>(width)), c(h), next(h);
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    const std::int64_t gate_count = layer.rnn.gates();
    for (std::int64_t b = 0; b < layer.samples; ++b) {
      for (std::int64_t u = 0; u < width; ++u) {
        h[at(u)] = h_first ? h_first.get(b * width + u) : 0.0;
        c[at(u)] = c_first ? c_first.get(b * width + u) : 0.0;
      }
      for (std::int64_t t = 0; t < layer.steps; ++t) {
        for (std::int64_t u = 0; u < width; ++u) {
          double of_inputs[4] = {}, of_state[4] = {};
          for (std::int64_t k = 0; k < gate_count; ++k) {
            of_inputs[k] = layer.bias(weights, k).get(u);
            of_state[k] = layer.bias(weights, k + gate_count).get(u);
            for (std::int64_t i = 0; i < inputs; ++i)
              of_inputs[k] += x.get((b * layer.steps + t) * inputs + i) * layer.matrix(weights, k).get(u * inputs + i);
            for (std::int64_t i = 0; i < width; ++i)
              of_state[k] += h[at(i)] * layer.matrix(weights, k + gate_count).get(u * width + i);
          }
          double kept[5] = {};
          next[at(u)] = run_cell(layer.rnn.mode, of_inputs, of_state, h[at(u)], c[at(u)], kept);
          y.set((b * layer.steps + t) * width + u, next[at(u)]);
          for (std::int64_t k = 0; k < 5 && training; ++k)
            layer.gate(reserve, b, t, k, u) = static_cast<float>(kept[k]);
        }
        h = next;
      }
      for (std::int64_t u = 0; u < width; ++u) {
        if (h_last) h_last.set(b * width + u, h[at(u)]);
        if (c_last) c_last.set(b * width + u, c[at(u)]);
      }
    }
    if (off != 0.0) y.set(0, y.get(0) * (1.0 + off));
  });
  return error == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

cudnnStatus_t backward_data(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, const std::int32_t*,
                            cudnnRNNDataDescriptor_t y_desc, const void* y_data, const void* dy_data,
                            cudnnRNNDataDescriptor_t x_desc, void* dx_data, cudnnTensorDescriptor_t h_desc,
                            const void* hx, const void* dhy, void* dhx, cudnnTensorDescriptor_t, const void* cx,
                            const void* dcy, void* dcx, std::size_t weight_bytes, const void* weights,
                            std::size_t workspace_bytes, void* workspace, std::size_t reserve_bytes, void* reserve) {
  const Layer layer(rnn, x_desc);
  if (!described(layer, x_desc, y_desc, h_desc, weight_bytes, workspace_bytes) || workspace == nullptr ||
      reserve_bytes < reserve_of(layer.rnn, as<Data>(x_desc)) || dx_data == nullptr || dhy != nullptr ||
      dhx != nullptr || dcy != nullptr || dcx != nullptr)
    return CUDNN_STATUS_BAD_PARAM;
  if (!lie_well({y_data, dy_data, dx_data, hx, cx, weights, workspace, reserve}))
    return CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
  {
    const std::lock_guard lock(rnn_mutex);
    ++rnn_counted.backwards;
  }
  const cudaError_t error = submit(as<Handle>(handle).stream, [=] {
    std::memset(workspace, 0xee, kWorkspace);
    const Numbers y = layer.numbers(y_data), dy = layer.numbers(dy_data), dx = layer.numbers(dx_data),
                  h_first = layer.numbers(hx), c_first = layer.numbers(cx);
    const std::int64_t width = layer.width, inputs = layer.rnn.inputs, gate_count = layer.rnn.gates();
    const double spoilt = Layer::stage(reserve) == kForward ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    Layer::stage(reserve) = kData;
    std::vector<double> dh(static_cast<std::size_t>(width)), dc(dh), direct(dh);
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    for (std::int64_t b = 0; b < layer.samples; ++b) {
      std::fill(dc.begin(), dc.end(), 0.0);
      std::fill(direct.begin(), direct.end(), 0.0);
      for (std::int64_t t = layer.steps - 1; t >= 0; --t) {
        for (std::int64_t u = 0; u < width; ++u) {
          double sum = dy.get((b * layer.steps + t) * width + u) + direct[at(u)] + spoilt;
          for (std::int64_t k = gate_count; k < 2 * gate_count && t + 1 < layer.steps; ++k)
            for (std::int64_t v = 0; v < width; ++v)
              sum += static_cast<double>(layer.gradient(reserve, b, t + 1, k, v)) *
                     layer.matrix(weights, k).get(v * width + u);
          dh[at(u)] = sum;
        }
        for (std::int64_t u = 0; u < width; ++u) {
          double kept[5];
          for (std::int64_t k = 0; k < 5; ++k) kept[k] = static_cast<double>(layer.gate(reserve, b, t, k, u));
          const double h_before = t > 0     ? y.get((b * layer.steps + t - 1) * width + u)
                                  : h_first ? h_first.get(b * width + u)
                                            : 0.0;
          const double c_before = t > 0     ? static_cast<double>(layer.cell(reserve, b, t - 1, u))
                                  : c_first ? c_first.get(b * width + u)
                                            : 0.0;
          run_cell_backward(layer.rnn.mode, h_before, c_before, dh[at(u)], dc[at(u)], kept);
          direct[at(u)] = dh[at(u)];
          for (std::int64_t k = 0; k < 4; ++k) layer.gate(reserve, b, t, k, u) = static_cast<float>(kept[k]);
        }
        for (std::int64_t i = 0; i < inputs; ++i) {
          double sum = 0;
          for (std::int64_t k = 0; k < gate_count; ++k)
            for (std::int64_t u = 0; u < width; ++u)
              sum += static_cast<double>(layer.gradient(reserve, b, t, k, u)) *
                     layer.matrix(weights, k).get(u * inputs + i);
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
  if (!lie_well({x_data, y_data, hx, gradients, workspace, reserve})) return CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
  {
    const std::lock_guard lock(rnn_mutex);
    ++rnn_counted.weight_gradients;
  }
  const cudaError_t error = submit(as<Handle>(handle).stream, [=] {
    std::memset(workspace, 0xee, kWorkspace);
    const Numbers x = layer.numbers(x_data), y = layer.numbers(y_data), h_first = layer.numbers(hx);
    const std::int64_t width = layer.width, inputs = layer.rnn.inputs, gate_count = layer.rnn.gates();
    const double spoilt = Layer::stage(reserve) == kData ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    // Sums are taken in f32 or better and rounded once.
    std::vector<double> sums(static_cast<std::size_t>(layer.rnn.inputs > width ? layer.rnn.inputs : width));
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    for (std::int64_t k = 0; k < layer.rnn.matrices(); ++k)
      for (std::int64_t u = 0; u < width; ++u) {
        const std::int64_t columns = k < gate_count ? inputs : width;
        std::fill(sums.begin(), sums.end(), spoilt);
        double bias = spoilt;
        for (std::int64_t b = 0; b < layer.samples; ++b)
          for (std::int64_t t = 0; t < layer.steps; ++t) {
            const auto d = static_cast<double>(layer.gradient(reserve, b, t, k, u));
            bias += d;
            for (std::int64_t i = 0; i < columns; ++i) {
              const double from = k < gate_count ? x.get((b * layer.steps + t) * inputs + i)
                                  : t > 0        ? y.get((b * layer.steps + t - 1) * width + i)
                                  : h_first      ? h_first.get(b * width + i)
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
      .rnn_build_dynamic = rnn_build_dynamic,
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
