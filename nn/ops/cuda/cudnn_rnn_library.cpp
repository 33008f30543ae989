#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>

#include "base/cuda/library.h"
#include "lockstep/base/env.h"
#include "nn/ops/cuda/cudnn_rnn.h"

namespace lockstep::nn::cuda {
namespace {

struct OpenedCudnnRnn {
  OpenedCudnnRnn()
      : library("cuDNN", std::array<const char*, 1>{"libcudnn.so.9"},
                fmt::format("install cuDNN 9 for CUDA {0} (cudnn9-cuda-{0}), or name its directory in LD_LIBRARY_PATH",
                            CUDART_VERSION / 1000)) {
    library.bind(functions.version, "cudnnGetVersion");
    library.bind(functions.status_text, "cudnnGetErrorString");
    library.bind(functions.last_error, "cudnnGetLastErrorString");
    library.bind(functions.create, "cudnnCreate");
    library.bind(functions.destroy, "cudnnDestroy");
    library.bind(functions.set_stream, "cudnnSetStream");
    library.bind(functions.tensor_create, "cudnnCreateTensorDescriptor");
    library.bind(functions.tensor_destroy, "cudnnDestroyTensorDescriptor");
    library.bind(functions.tensor_set, "cudnnSetTensorNdDescriptor");
    library.bind(functions.tensor_get, "cudnnGetTensorNdDescriptor");
    library.bind(functions.dropout_create, "cudnnCreateDropoutDescriptor");
    library.bind(functions.dropout_destroy, "cudnnDestroyDropoutDescriptor");
    library.bind(functions.dropout_set, "cudnnSetDropoutDescriptor");
    library.bind(functions.rnn_create, "cudnnCreateRNNDescriptor");
    library.bind(functions.rnn_destroy, "cudnnDestroyRNNDescriptor");
    library.bind(functions.rnn_set, "cudnnSetRNNDescriptor_v8");
    library.bind(functions.rnn_build_dynamic, "cudnnBuildRNNDynamic");
    library.bind(functions.data_create, "cudnnCreateRNNDataDescriptor");
    library.bind(functions.data_destroy, "cudnnDestroyRNNDataDescriptor");
    library.bind(functions.data_set, "cudnnSetRNNDataDescriptor");
    library.bind(functions.temp_space, "cudnnGetRNNTempSpaceSizes");
    library.bind(functions.weight_space, "cudnnGetRNNWeightSpaceSize");
    library.bind(functions.weight_params, "cudnnGetRNNWeightParams");
    library.bind(functions.forward, "cudnnRNNForward");
    library.bind(functions.backward_data, "cudnnRNNBackwardData_v8");
    library.bind(functions.backward_weights, "cudnnRNNBackwardWeights_v8");
  }
  SharedLibrary library;
  CudnnRnn functions;
};

}  // namespace

const CudnnRnn& cudnn_rnn() {
  // Never closed: descriptors may be let go of as late as the program's end.
  static const OpenedCudnnRnn& opened = *[] {
    // cuBLAS, which cuDNN's recurrent layers use in several streams, gives the same bits each time only if all of its
    // buffers are of one size ("Results reproducibility" in its manual). It reads this when a handle of it is made.
    set_env("CUBLAS_WORKSPACE_CONFIG", ":4096:2", false);
    return new OpenedCudnnRnn;
  }();
  return opened.functions;
}

}  // namespace lockstep::nn::cuda
