#include "nn/ops/cuda/backend.h"

#include <utility>
#include <vector>

#include "base/cuda/runtime.h"

namespace lockstep::nn::cuda {
namespace {

class CudaGraph final : public CapturedGraph {
 public:
  CudaGraph(cudaGraphExec_t graph, StreamView stream, std::int64_t kernels)
      : graph_(graph), stream_(stream), kernels_(kernels) {}
  ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
  void run() override { check_cuda(cudaGraphLaunch(graph_, native(stream_)), "launching a CUDA graph"); }
  std::int64_t kernels() const override { return kernels_; }

 private:
  cudaGraphExec_t graph_;
  StreamView stream_;
  std::int64_t kernels_;
};

std::int64_t kernels_of(cudaGraph_t graph) {
  std::size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "looking at a CUDA graph");
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "looking at a CUDA graph");
  std::int64_t kernels = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    check_cuda(cudaGraphNodeGetType(node, &type), "looking at a CUDA graph");
    kernels += type == cudaGraphNodeTypeKernel;
  }
  return kernels;
}

/// A capture that is under way; ends it, whatever happens.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a step");
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
    check_cuda(cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph), "capturing a step");
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
  const std::int64_t kernels = status == cudaSuccess ? kernels_of(graph) : 0;
  cudaGraphDestroy(graph);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    why_not = std::string("CUDA makes no graph of it: ") + cudaGetErrorString(status);
    return nullptr;
  }
  return std::make_unique<CudaGraph>(executable, stream, kernels);
}

}  // namespace lockstep::nn::cuda
