#include "nn/ops/cuda/graph_capture.h"

#include <utility>

#include "base/cuda/runtime.h"

namespace lockstep::nn::cuda {
namespace {

class CudaGraph final : public CapturedGraph {
 public:
  CudaGraph(cudaGraphExec_t graph, StreamView stream) : graph_(graph), stream_(stream) {}
  ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
  void run() override { check_cuda(cudaGraphLaunch(graph_, native(stream_)), "launching a CUDA graph"); }

 private:
  cudaGraphExec_t graph_;
  StreamView stream_;
};

/// A capture that is under way; ends it, whatever happens.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a step");
  }
  ~Capture() {
    if (stream_ == nullptr) return;
    cudaGraph_t cut_off = nullptr;
    cudaStreamEndCapture(stream_, &cut_off);
    if (cut_off != nullptr) cudaGraphDestroy(cut_off);
    static_cast<void>(cudaGetLastError());  // a capture that broke says so again when it ends
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  cudaGraph_t end() {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph), "recording a step");
    return graph;
  }

 private:
  cudaStream_t stream_;
};

}  // namespace

std::unique_ptr<CapturedGraph> capture_graph(StreamView stream, FunctionRef<void()> work, std::string& why_not) {
  cudaGraph_t graph = nullptr;
  try {
    Capture capture(native(stream));
    work();
    graph = capture.end();
  } catch (const CudaError& error) {
    why_not = error.what();
    return nullptr;
  } catch (const NcclError& error) {
    why_not = error.what();
    return nullptr;
  }
  cudaGraphExec_t executable = nullptr;
  // Else all of it would run with the priority of the stream that it is launched in, collectives too.
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    why_not = std::string("CUDA makes no graph of it: ") + cudaGetErrorString(status);
    return nullptr;
  }
  return std::make_unique<CudaGraph>(executable, stream);
}

}  // namespace lockstep::nn::cuda
