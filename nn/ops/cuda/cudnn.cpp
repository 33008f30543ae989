#include "nn/ops/cuda/cudnn.h"

// cuDNN is opened when it is first used, not linked; nothing is kept as JSON.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/cuda/library.h"
#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/text.h"
#include "nn/ops/cuda/cudnn_operands.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where its functions look for cuDNN's
}

namespace lockstep::nn::cuda {
namespace {

namespace fe = cudnn_frontend;
using What = ConvProblem::What;

// Never closed: cudnn-frontend keeps the addresses of functions that it has called.
void open_cudnn() {
  static const SharedLibrary& library = *new SharedLibrary(
      "cuDNN", std::array<const char*, 1>{"libcudnn.so.9"},
      fmt::format("install cuDNN 9 for CUDA {0} (cudnn9-cuda-{0}), or name its directory in LD_LIBRARY_PATH",
                  CUDART_VERSION / 1000));
  fe::cudnn_dlhandle = library.native();
}

// The first line of cudnn-frontend's message; the rest lists all unsuitable kernels.
std::string reason(const std::string& message) { return message.substr(0, message.find('\n')); }

void check(fe::error_t error, const std::string& what, std::source_location where = std::source_location::current()) {
  if (error.is_good()) [[likely]]
    return;
  throw CudaError(fmt::format("{} failed in cuDNN {}: {}", what, Cudnn::version(), reason(error.get_message())),
                  "set CUDNN_LOGLEVEL_DBG=2 and CUDNN_LOGDEST_DBG=stderr to see what cuDNN has against it", where);
}

void check(cudnnStatus_t status, const char* what, std::source_location where = std::source_location::current()) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  throw CudaError(fmt::format("{} failed on {}: {}; {}", what, current_gpu_text(), fe::detail::get_error_string(status),
                              reason(fe::detail::get_last_error_string_())),
                  "look at nvidia-smi and the kernel's log (dmesg) for that GPU", where);
}

// See Note [Alignment for cuDNN]: what a plan was not built for may end in an error that stays.
void check_places(std::span<void* const> places, const char* what) {
  for (const void* const place : places) LOCKSTEP_ASSERT(lies_well(place), "{} with an array at {}", what, place);
}

// cudnn-frontend throws where cuDNN lacks a function, and little else.
template <class F>
auto guarded(const F& work) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CudaError(fmt::format("cuDNN failed: {}", reason(error.what())), "install a newer cuDNN 9");
  }
}

// What a plan's arrays are called.
enum Uid : std::int64_t { kX = 1, kW, kY, kB };
enum AttentionUid : std::int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kResult,
  kLogSums,
  kDResult,
  kDQuery,
  kDKey,
  kDValue,
  kLengths
};

// Graphs that are built, and their plans, which the base class does not show.
class Graph : public fe::graph::Graph {
 public:
  fe::graph::Execution_plan_list& kernels() { return plans; }
};

// Channels last, as cuDNN names it: (N, C, H, W) whatever the layout. The same for (O, Kh, Kw, C).
fe::graph::Tensor_attributes channels_last(Uid uid, const Shape& shape) {
  const std::int64_t h = shape[1], w = shape[2], c = shape[3];
  return fe::graph::Tensor_attributes()
      .set_uid(uid)
      .set_dim({shape[0], c, h, w})
      .set_stride({h * w * c, 1, w * c, c})
      .set_alignment(kCudnnAlignment);
}

fe::DataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return fe::DataType_t::BFLOAT16;
    case DType::kF16: return fe::DataType_t::HALF;
    default: return fe::DataType_t::FLOAT;
  }
}

using SharedTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

void set_output(const SharedTensor& tensor, Uid uid, const Shape& shape, const ConvProblem& problem) {
  const auto wanted = channels_last(uid, shape);
  tensor->set_output(true)
      .set_uid(uid)
      .set_dim(wanted.get_dim())
      .set_stride(wanted.get_stride())
      .set_alignment(kCudnnAlignment);
  tensor->set_data_type(type_of(problem.dtype));
}

template <class Attributes>
Attributes in_window(const Window& window) {
  return Attributes()
      .set_padding({window.padding[0], window.padding[1]})
      .set_stride({window.stride[0], window.stride[1]})
      .set_dilation({1, 1});
}

void describe_to(Graph& graph, const ConvProblem& problem) {
  graph.set_io_data_type(type_of(problem.dtype))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto given = [&](Uid uid, const Shape& shape) { return graph.tensor(channels_last(uid, shape)); };
  const auto pointwise = [](fe::PointwiseMode_t mode) { return fe::graph::Pointwise_attributes().set_mode(mode); };
  switch (problem.what) {
    case What::kForward: {
      SharedTensor y = graph.conv_fprop(given(kX, problem.x), given(kW, problem.w),
                                        in_window<fe::graph::Conv_fprop_attributes>(problem.window));
      if (problem.bias) y = graph.pointwise(y, given(kB, {1, 1, 1, problem.y[3]}), pointwise(fe::PointwiseMode_t::ADD));
      if (problem.relu) y = graph.pointwise(y, pointwise(fe::PointwiseMode_t::RELU_FWD));
      return set_output(y, kY, problem.y, problem);
    }
    case What::kBackwardInput:
      return set_output(graph.conv_dgrad(given(kY, problem.y), given(kW, problem.w),
                                         in_window<fe::graph::Conv_dgrad_attributes>(problem.window)),
                        kX, problem.x, problem);
    case What::kBackwardWeight:
      return set_output(graph.conv_wgrad(given(kY, problem.y), given(kX, problem.x),
                                         in_window<fe::graph::Conv_wgrad_attributes>(problem.window)),
                        kW, problem.w, problem);
  }
}

// A head's rows, (B, H, T, D) as cuDNN names it, of an array whose tokens are `pitch` elements apart.
fe::graph::Tensor_attributes rows_of_heads(AttentionUid uid, const AttentionProblem& p, std::int64_t pitch) {
  return fe::graph::Tensor_attributes()
      .set_uid(uid)
      .set_data_type(type_of(p.dtype))
      .set_dim({p.samples, p.heads, p.tokens, p.width})
      .set_stride({p.tokens * pitch, p.width, pitch, 1});
}

fe::graph::Tensor_attributes log_sums_of(const AttentionProblem& p) {
  return fe::graph::Tensor_attributes()
      .set_uid(kLogSums)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_dim({p.samples, p.heads, p.tokens, 1})
      .set_stride({p.heads * p.tokens, p.tokens, 1, 1});
}

void set_output(const SharedTensor& tensor, const fe::graph::Tensor_attributes& wanted) {
  tensor->set_output(true)
      .set_uid(wanted.get_uid())
      .set_dim(wanted.get_dim())
      .set_stride(wanted.get_stride())
      .set_data_type(wanted.get_data_type());
}

// Note [Attention of cuDNN]
// Backward is asked for the algorithm that gives the same bits each time, unless --deterministic no does without. That
// keeps the gradients of all scores of the samples it is given in its workspace, so it is given few at a time
// (FusedAttention). Kernels that cuDNN notes as not deterministic are left out; but the note may be the kernel's, and
// not that of the algorithm it is asked for: where nothing else is left, they are taken, and whoever runs them tries
// whether the bits are the same (FusedAttention::repeats). Nothing is asked of CUDA's
// runtime by cudnn-frontend, which would load another one than is linked here: the GPU's generation is set, and cuDNN
// versions are left alone with what takes copies from the host (padding to whole tiles, before 9.16).
constexpr std::size_t kPadsByItself = 91600, kClearsByItself = 90600;

void describe_to(Graph& graph, const AttentionProblem& p) {
  const std::size_t version = fe::detail::get_backend_version();
  const bool backward = p.what == AttentionProblem::What::kBackward;
  if (backward && (version < kClearsByItself || (version < kPadsByItself && p.tokens % 128 != 0)))
    throw CudaError(fmt::format("{} takes a newer cuDNN than {}", p.describe(), Cudnn::version()),
                    "install cuDNN 9.16 or newer");
  graph.set_io_data_type(type_of(p.dtype))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const std::int64_t row = p.heads * p.width;
  const auto given = [&](AttentionUid uid, std::int64_t pitch) { return graph.tensor(rows_of_heads(uid, p, pitch)); };
  const SharedTensor q = given(kQuery, p.pitch), k = given(kKey, p.pitch), v = given(kValue, p.pitch);
  const float scale = 1.0f / std::sqrt(static_cast<float>(p.width));
  const auto masked = [&](auto attributes) {
    attributes.set_attn_scale(scale);
    if (p.causal) attributes.set_causal_mask(true);
    if (!p.padded) return attributes;
    const SharedTensor lengths = graph.tensor(fe::graph::Tensor_attributes()
                                                  .set_uid(kLengths)
                                                  .set_data_type(fe::DataType_t::INT32)
                                                  .set_dim({p.samples, 1, 1, 1})
                                                  .set_stride({1, 1, 1, 1}));
    return attributes.set_padding_mask(true).set_seq_len_q(lengths).set_seq_len_kv(lengths);
  };
  if (!backward) {
    const auto [y, log_sums] = graph.sdpa(q, k, v, masked(fe::graph::SDPA_attributes().set_generate_stats(true)));
    set_output(y, rows_of_heads(kResult, p, row));
    set_output(log_sums, log_sums_of(p));
    return;
  }
  const SharedTensor y = given(kResult, row), dy = given(kDResult, row), log_sums = graph.tensor(log_sums_of(p));
  const auto [dq, dk, dv] =
      graph.sdpa_backward(q, k, v, y, dy, log_sums,
                          masked(fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(p.deterministic)));
  set_output(dq, rows_of_heads(kDQuery, p, p.pitch));
  set_output(dk, rows_of_heads(kDKey, p, p.pitch));
  set_output(dv, rows_of_heads(kDValue, p, p.pitch));
}

// Same bits each time, sums in f32; and where the problem is f32, its numbers as they are.
std::vector<fe::NumericalNote_t> inexact_notes(const ConvProblem& problem) {
  std::vector<fe::NumericalNote_t> unwanted = {fe::NumericalNote_t::NONDETERMINISTIC,
                                               fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION,
                                               fe::NumericalNote_t::DOWN_CONVERT_INPUTS};
  // On matrix units f32 is rounded to TF32: nothing else says so of a kernel.
  if (problem.dtype == DType::kF32 && !problem.tf32) unwanted.push_back(fe::NumericalNote_t::TENSOR_CORE);
  return unwanted;
}

const char* name_of(fe::NumericalNote_t note) {
  switch (note) {
    case fe::NumericalNote_t::TENSOR_CORE: return " tensor core";
    case fe::NumericalNote_t::DOWN_CONVERT_INPUTS: return " down-converted inputs";
    case fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION: return " reduced-precision sums";
    case fe::NumericalNote_t::NONDETERMINISTIC: return " nondeterministic";
    case fe::NumericalNote_t::STRICT_NAN_PROP: return " strict NaN";
    case fe::NumericalNote_t::NOT_SET: return "";
    default: return " transformed";  // FFT, Winograd
  }
}

}  // namespace

struct ConvPlan::Chosen {
  std::shared_ptr<fe::ExecutionPlan> plan;
  std::string name;
  std::vector<std::int64_t> uids;

  // `graph` knows its operations; heuristics and fallbacks are asked for kernels.
  static void ask(Graph& graph, const ConvProblem& problem) {
    check(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}), problem.describe());
    graph.deselect_numeric_notes(inexact_notes(problem));
    graph.set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);
  }
  static std::string name_of(Graph& graph, std::int64_t kernel, const ConvProblem& problem) {
    std::string name;
    check(graph.kernels().get_name_at_index(kernel, name), problem.describe());
    for (const fe::NumericalNote_t note : graph.kernels().numeric_notes[static_cast<std::size_t>(kernel)])
      name += cuda::name_of(note);
    return name;
  }

  // One that is built.
  Chosen(Graph& graph, std::int64_t kernel, const ConvProblem& problem)
      : plan(graph.kernels().execution_plans[static_cast<std::size_t>(kernel)]),
        name(name_of(graph, kernel, problem)),
        uids({kX, kW, kY}) {
    if (problem.bias) uids.push_back(kB);
  }

  // The first that suits.
  static std::unique_ptr<Chosen> make(Graph& graph, const ConvProblem& problem) {
    ask(graph, problem);
    // Graph::check_support() would only ask the GPU, by way of a second CUDA runtime, what build_plans() knows.
    check(graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE), problem.describe());
    return std::make_unique<Chosen>(graph, graph.kernels().candidate, problem);
  }
};

struct ConvKernelList::Listed {
  ConvProblem problem;
  Graph graph = {};
  std::vector<std::int64_t> places = {};  // in the graph's list
  std::vector<std::string> names = {};

  void ask(int most) {
    ConvPlan::Chosen::ask(graph, problem);
    const auto unwanted = inexact_notes(problem);
    const auto& notes = graph.kernels().numeric_notes;
    for (std::size_t i = 0; i < notes.size() && std::cmp_less(places.size(), most); ++i) {
      if (std::ranges::find_first_of(notes[i], unwanted) != notes[i].end()) continue;
      std::string name = ConvPlan::Chosen::name_of(graph, static_cast<std::int64_t>(i), problem);
      if (std::ranges::find(names, name) != names.end()) continue;  // both of heuristics and of fallbacks
      places.push_back(static_cast<std::int64_t>(i));
      names.push_back(std::move(name));
    }
  }
};

ConvKernelList::ConvKernelList(std::unique_ptr<Listed> listed) : listed_(std::move(listed)) {}
ConvKernelList::ConvKernelList(ConvKernelList&&) noexcept = default;
ConvKernelList& ConvKernelList::operator=(ConvKernelList&&) noexcept = default;
ConvKernelList::~ConvKernelList() = default;

const std::vector<std::string>& ConvKernelList::names() const { return listed_->names; }

ConvPlan ConvKernelList::build(std::size_t kernel) {
  const std::int64_t place = listed_->places.at(kernel);
  return guarded([&] {
    check(listed_->graph.kernels().build_plan_at_index(place), listed_->problem.describe());
    return ConvPlan(std::make_unique<ConvPlan::Chosen>(listed_->graph, place, listed_->problem));
  });
}

ConvPlan::ConvPlan(std::unique_ptr<Chosen> chosen) : chosen_(std::move(chosen)) {}
ConvPlan::ConvPlan(ConvPlan&&) noexcept = default;
ConvPlan& ConvPlan::operator=(ConvPlan&&) noexcept = default;
ConvPlan::~ConvPlan() = default;

std::size_t ConvPlan::workspace_bytes() const { return static_cast<std::size_t>(chosen_->plan->getWorkspaceSize()); }

std::string ConvPlan::describe() const { return chosen_->name; }

void ConvPlan::run(const Cudnn& cudnn, const ConvArrays& arrays, void* workspace) const {
  const std::array<void*, 4> places = {arrays.x, arrays.w, arrays.y, arrays.b};
  check_places(places, "a convolution");
  check(fe::detail::execute(static_cast<cudnnHandle_t>(cudnn.handle_), chosen_->plan.get(), places.data(),
                            chosen_->uids, workspace),
        "a convolution");
}

struct AttentionPlan::Chosen {
  Graph graph;
  std::string name;
  bool noted = false;
  std::int64_t workspace = 0;
  std::unordered_map<std::int64_t, void*> places;  // kept, so that running allocates nothing

  void choose(const AttentionProblem& problem, bool takes_noted) {
    check(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}), problem.describe());
    if (!takes_noted) graph.deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
    graph.set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);
    check(graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE), problem.describe());
    check(graph.get_workspace_size(workspace), problem.describe());
    auto& kernels = graph.kernels();
    check(kernels.get_name_at_index(kernels.candidate, name), problem.describe());
    for (const fe::NumericalNote_t note : kernels.numeric_notes[static_cast<std::size_t>(kernels.candidate)]) {
      name += cuda::name_of(note);
      noted = noted || note == fe::NumericalNote_t::NONDETERMINISTIC;
    }
  }

  /// `build` builds the graph's operations; once more where that takes a kernel with a note (Note [Attention of
  /// cuDNN]).
  template <class Build>
  static std::unique_ptr<Chosen> make(const AttentionProblem& problem, int compute_capability, const Build& build) {
    const auto attempt = [&](bool takes_noted) {
      auto chosen = std::make_unique<Chosen>();
      chosen->graph.set_sm_version(compute_capability);  // first: each node takes its own copy of it
      describe_to(chosen->graph, problem);
      build(chosen->graph);
      chosen->choose(problem, takes_noted);
      return chosen;
    };
    return guarded([&] {
      if (problem.what == AttentionProblem::What::kForward) return attempt(false);
      if (!problem.deterministic) return attempt(true);
      try {
        return attempt(false);
      } catch (const CudaError&) {
        return attempt(true);
      }
    });
  }
};

AttentionPlan::AttentionPlan(std::unique_ptr<Chosen> chosen) : chosen_(std::move(chosen)) {}
AttentionPlan::AttentionPlan(AttentionPlan&&) noexcept = default;
AttentionPlan& AttentionPlan::operator=(AttentionPlan&&) noexcept = default;
AttentionPlan::~AttentionPlan() = default;

std::size_t AttentionPlan::workspace_bytes() const { return static_cast<std::size_t>(chosen_->workspace); }

std::string AttentionPlan::describe() const { return chosen_->name; }

bool AttentionPlan::is_noted_nondeterministic() const { return chosen_->noted; }

void AttentionPlan::run(const Cudnn& cudnn, const AttentionArrays& arrays, void* workspace) {
  auto& places = chosen_->places;
  void* const all[] = {arrays.q,  arrays.k,  arrays.v,  arrays.y,  arrays.log_sums,
                       arrays.dy, arrays.dq, arrays.dk, arrays.dv, arrays.lengths};
  check_places(all, "attention");
  std::int64_t uid = kQuery;
  for (void* const place : all) places[uid++] = place;
  guarded([&] {
    check(chosen_->graph.execute(static_cast<cudnnHandle_t>(cudnn.handle_), places, workspace), "attention");
  });
}

Cudnn::Cudnn(StreamView stream) {
  open_cudnn();
  cudnnHandle_t handle = nullptr;
  check(fe::detail::create_handle(&handle), "starting cuDNN");
  handle_ = handle;
  const cudnnStatus_t status = fe::detail::set_stream(handle, native(stream));
  if (status == CUDNN_STATUS_SUCCESS) return;
  fe::detail::destroy_handle(handle);
  check(status, "starting cuDNN");
}

Cudnn::~Cudnn() { fe::detail::destroy_handle(static_cast<cudnnHandle_t>(handle_)); }

ConvPlan Cudnn::plan(const ConvProblem& problem) const {
  return guarded([&] {
    Graph graph;
    describe_to(graph, problem);
    check(graph.validate(), problem.describe());
    check(graph.build_operation_graph(static_cast<cudnnHandle_t>(handle_)), problem.describe());
    return ConvPlan(ConvPlan::Chosen::make(graph, problem));
  });
}

ConvPlan Cudnn::plan_for(const std::string& device_properties, const ConvProblem& problem) {
  open_cudnn();
  return guarded([&] {
    const auto device = std::make_shared<fe::DeviceProperties>();
    check(device->deserialize({device_properties.begin(), device_properties.end()}), "reading a GPU's properties");
    Graph graph;
    describe_to(graph, problem);
    graph.set_device_properties(device);
    check(graph.validate(), problem.describe());
    check(graph.build_operation_graph(), problem.describe());
    return ConvPlan(ConvPlan::Chosen::make(graph, problem));
  });
}

ConvKernelList Cudnn::kernels(const ConvProblem& problem, int most) const {
  return guarded([&] {
    auto listed = std::make_unique<ConvKernelList::Listed>(problem);
    describe_to(listed->graph, problem);
    check(listed->graph.validate(), problem.describe());
    check(listed->graph.build_operation_graph(static_cast<cudnnHandle_t>(handle_)), problem.describe());
    listed->ask(most);
    return ConvKernelList(std::move(listed));
  });
}

ConvKernelList Cudnn::kernels_for(const std::string& device_properties, const ConvProblem& problem, int most) {
  open_cudnn();
  return guarded([&] {
    const auto device = std::make_shared<fe::DeviceProperties>();
    check(device->deserialize({device_properties.begin(), device_properties.end()}), "reading a GPU's properties");
    auto listed = std::make_unique<ConvKernelList::Listed>(problem);
    describe_to(listed->graph, problem);
    listed->graph.set_device_properties(device);
    check(listed->graph.validate(), problem.describe());
    check(listed->graph.build_operation_graph(), problem.describe());
    listed->ask(most);
    return ConvKernelList(std::move(listed));
  });
}

AttentionPlan Cudnn::plan(const AttentionProblem& problem) const {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "asking which GPU is used");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for a GPU's age");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for a GPU's age");
  return AttentionPlan(AttentionPlan::Chosen::make(problem, 10 * major + minor, [&](Graph& graph) {
    check(graph.validate(), problem.describe());
    check(graph.build_operation_graph(static_cast<cudnnHandle_t>(handle_)), problem.describe());
  }));
}

AttentionPlan Cudnn::plan_for(const std::string& device_properties, int compute_capability,
                              const AttentionProblem& problem) {
  open_cudnn();
  const auto device = std::make_shared<fe::DeviceProperties>();
  guarded([&] {
    check(device->deserialize({device_properties.begin(), device_properties.end()}), "reading a GPU's properties");
  });
  return AttentionPlan(AttentionPlan::Chosen::make(problem, compute_capability, [&](Graph& graph) {
    graph.set_device_properties(device);
    check(graph.validate(), problem.describe());
    check(graph.build_operation_graph(), problem.describe());
  }));
}

std::string Cudnn::version() {
  open_cudnn();
  return fe::detail::get_backend_version_string();
}

}  // namespace lockstep::nn::cuda
