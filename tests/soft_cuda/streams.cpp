#include "streams.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

// Every stream is a queue of closures. Eager streams are run at each call; lazy ones when somebody waits for them: the
// host, or another stream that gets to a mark of theirs. Those that were given work while streams had threads keep
// theirs.

namespace lockstep::soft_cuda {
namespace {

constexpr auto kLate = std::chrono::milliseconds(3);

using Work = std::function<void()>;

// Nodes of a graph, by their index.
using Nodes = std::vector<std::size_t>;

struct Graph {
  struct Node {
    Work work;
    Nodes after;
    cudaGraphNodeType type = cudaGraphNodeTypeKernel;
  };
  std::vector<Node> nodes;
  Nodes collectives;  // the last one
  int streams_apart = 0;
  bool broken = false;  // by a call that cannot be captured
};

// What this thread captures, unless it has asked for leave to call anything meanwhile.
thread_local std::shared_ptr<Graph> strict_capture;

struct Stream {
  int device = 0;
  int priority = 0;
  std::deque<Work> queue;
  std::uint64_t submitted = 0, done = 0;
  bool runs = false;  // on some thread
  std::shared_ptr<Graph> capture;
  bool began_capture = false;
  std::uint64_t captured = 0;  // pieces of work, ever
  std::weak_ptr<Graph> last_capture;
  Nodes last;  // of it: what is captured next comes after these
  std::thread worker;
  std::uint64_t wanted = 0;  // so much of it somebody waits for
  bool ends = false;         // the worker's
  bool is_made = false;      // not a default stream
};

struct Event {
  bool timing = false;
  int device = 0;
  std::shared_ptr<Stream> stream;  // of the last record
  std::uint64_t position = 0;      // done when the stream has done as many
  std::shared_ptr<Graph> capture;  // recorded while this was captured
  std::uint64_t captured = 0;      // the stream's, then
  Nodes last;
  std::shared_ptr<double> ms = std::make_shared<double>(0.0);
};

std::recursive_mutex mutex;
// Threads of streams that nobody destroys wait for it when the process ends.
std::condition_variable_any& changed = *new std::condition_variable_any;
std::unordered_map<const void*, std::shared_ptr<Stream>> streams;
std::unordered_map<const void*, std::unique_ptr<Event>> events;
std::unordered_map<const void*, std::shared_ptr<Graph>> graphs;
std::map<int, std::shared_ptr<Stream>> default_streams;
Counts counted;

using Lock = std::unique_lock<std::recursive_mutex>;

std::shared_ptr<Stream> find(cudaStream_t stream) {
  use_device();
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    auto& made = default_streams[current_device()];
    if (made == nullptr) {
      made = std::make_shared<Stream>();
      made->device = current_device();
    }
    return made;
  }
  const auto at = streams.find(stream);
  return at == streams.end() ? nullptr : at->second;
}

Event* find(cudaEvent_t event) {
  use_device();
  const auto at = events.find(event);
  return at == events.end() ? nullptr : at->second.get();
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What is first in a queue; without the lock while it runs.
void run_first(Lock& lock, const std::shared_ptr<Stream>& stream) {
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->runs = true;
  std::exception_ptr fault;
  lock.unlock();
  try {
    work();
  } catch (...) {
    fault = std::current_exception();
  }
  lock.lock();
  stream->runs = false;
  ++stream->done;
  changed.notify_all();
  if (fault) std::rethrow_exception(fault);
}

void work_by_itself(const std::shared_ptr<Stream>& stream) {
  Lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return stream->ends || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    if (machine().streams == Streams::kLate)
      changed.wait_for(lock, kLate, [&] { return stream->ends || stream->wanted > stream->done; });
    if (stream->queue.empty()) continue;
    run_first(lock, stream);
  }
}

// Whoever runs it need not be late any more.
void want(const std::shared_ptr<Stream>& stream, std::uint64_t position) {
  if (stream->wanted >= position) return;
  stream->wanted = position;
  changed.notify_all();
}

// Runs the queue until `position` of it is done, or waits for whoever does.
void run_until(Lock& lock, const std::shared_ptr<Stream>& stream, std::uint64_t position) {
  want(stream, position);
  while (stream->done < position) {
    if (stream->runs || stream->worker.joinable())
      changed.wait(lock);
    else
      run_first(lock, stream);
  }
}

cudaError_t broken(const std::shared_ptr<Graph>& capture) {
  capture->broken = true;
  return noted(cudaErrorStreamCaptureUnsupported);
}

void add(Nodes& to, const Nodes& more) {
  for (const std::size_t node : more)
    if (std::ranges::find(to, node) == to.end()) to.push_back(node);
}

// Each node once, after all that it comes after, and otherwise in any order: as a GPU may run it.
void run_graph(const Graph& graph) {
  std::vector<std::size_t> missing(graph.nodes.size());
  std::vector<Nodes> before(graph.nodes.size());
  Nodes ready;
  for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
    missing[node] = graph.nodes[node].after.size();
    for (const std::size_t first : graph.nodes[node].after) before[first].push_back(node);
    if (missing[node] == 0) ready.push_back(node);
  }
  while (!ready.empty()) {
    {
      const Lock lock(mutex);
      std::swap(ready[random_for_graphs() % ready.size()], ready.back());
    }
    const std::size_t node = ready.back();
    ready.pop_back();
    graph.nodes[node].work();
    for (const std::size_t next : before[node])
      if (--missing[next] == 0) ready.push_back(next);
  }
}

cudaError_t append(Lock& lock, const std::shared_ptr<Stream>& stream, Work work,
                   cudaGraphNodeType type = cudaGraphNodeTypeKernel, bool is_collective = false) {
  if (stream->capture != nullptr) {
    if (stream->capture->broken) return noted(cudaErrorStreamCaptureInvalidated);
    Graph& graph = *stream->capture;
    if (is_collective) add(stream->last, graph.collectives);
    const Nodes made = {graph.nodes.size()};
    graph.nodes.push_back({std::move(work), std::exchange(stream->last, made), type});
    if (is_collective) graph.collectives = made;
    ++stream->captured;
    return cudaSuccess;
  }
  stream->queue.push_back(std::move(work));
  ++stream->submitted;
  const bool by_threads = machine().streams == Streams::kThreads || machine().streams == Streams::kLate;
  if (by_threads && !stream->worker.joinable() && stream->is_made)
    stream->worker = std::thread([stream] { work_by_itself(stream); });
  changed.notify_all();
  if (machine().streams == Streams::kEager) run_until(lock, stream, stream->submitted);
  return cudaSuccess;
}

cudaError_t make_stream(cudaStream_t* out, int priority) {
  use_device();
  const std::lock_guard lock(mutex);
  auto made = std::make_shared<Stream>();
  made->device = current_device();
  made->priority = priority;
  made->is_made = true;
  *out = reinterpret_cast<cudaStream_t>(made.get());
  streams.emplace(*out, std::move(made));
  return cudaSuccess;
}

cudaError_t make_event(cudaEvent_t* out, unsigned flags) {
  use_device();
  const std::lock_guard lock(mutex);
  auto made = std::make_unique<Event>();
  made->timing = (flags & cudaEventDisableTiming) == 0;
  made->device = current_device();
  *out = reinterpret_cast<cudaEvent_t>(made.get());
  events.emplace(*out, std::move(made));
  return cudaSuccess;
}

}  // namespace

std::recursive_mutex& machine_mutex() { return mutex; }

cudaError_t submit(cudaStream_t stream, std::function<void()> work) {
  Lock lock(mutex);
  const auto found = find(stream);
  if (found == nullptr || found->device != current_device()) return noted(cudaErrorInvalidResourceHandle);
  return append(lock, found, std::move(work));
}

cudaError_t submit_collective(cudaStream_t stream, std::function<void()> work) {
  Lock lock(mutex);
  const auto found = find(stream);
  if (found == nullptr || found->device != current_device()) return noted(cudaErrorInvalidResourceHandle);
  return append(lock, found, std::move(work), cudaGraphNodeTypeKernel, true);
}

cudaError_t submit_copy(cudaStream_t stream, std::function<void()> work) {
  Lock lock(mutex);
  const auto found = find(stream);
  if (found == nullptr) return noted(cudaErrorInvalidResourceHandle);
  return append(lock, found, std::move(work), cudaGraphNodeTypeMemcpy);
}

cudaError_t finish(cudaStream_t stream) {
  Lock lock(mutex);
  const auto found = find(stream);
  if (found == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (found->capture != nullptr) return broken(found->capture);
  run_until(lock, found, found->submitted);
  return cudaSuccess;
}

bool finish_device(int device) {
  Lock lock(mutex);
  std::vector<std::shared_ptr<Stream>> all;
  for (const auto& [handle, stream] : streams)
    if (stream->device == device) all.push_back(stream);
  if (const auto at = default_streams.find(device); at != default_streams.end()) all.push_back(at->second);
  bool has_waited = false;
  for (const auto& stream : all) {
    has_waited = has_waited || stream->done < stream->submitted;
    run_until(lock, stream, stream->submitted);
  }
  return has_waited;
}

cudaError_t refuse_while_capturing() {
  if (strict_capture == nullptr) return cudaSuccess;
  const std::lock_guard lock(mutex);
  return broken(strict_capture);
}

int device_of(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const auto found = find(stream);
  return found == nullptr ? -1 : found->device;
}

bool is_capturing(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const auto found = find(stream);
  return found != nullptr && found->capture != nullptr;
}

void count_grid(std::uint64_t early_returns) {
  const std::lock_guard lock(mutex);
  ++counted.launches;
  counted.early_returns += early_returns;
}

void count_copy() {
  const std::lock_guard lock(mutex);
  ++counted.copies;
}

void count_fused_attention() {
  const std::lock_guard lock(mutex);
  ++counted.fused_attentions;
}

void count_loading(bool has_waited) {
  const std::lock_guard lock(mutex);
  if (has_waited) ++counted.loading_waits;
}

void count_wait() {
  const std::lock_guard lock(mutex);
  ++counted.host_waits;
}

void count_streams(Counts& counts) {
  const std::lock_guard lock(mutex);
  counts = counted;
  counts.live_streams = streams.size();
  counts.live_events = events.size();
}

}  // namespace lockstep::soft_cuda

using namespace lockstep::soft_cuda;

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make_stream(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  return make_stream(stream, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(mutex);
  const auto found = stream == nullptr ? nullptr : find(stream);
  if (found == nullptr) return noted(cudaErrorInvalidResourceHandle);
  streams.erase(stream);
  run_until(lock, found, found->submitted);  // a GPU too does what was given before
  if (found->worker.joinable()) {
    found->ends = true;
    changed.notify_all();
    lock.unlock();
    found->worker.join();
  }
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count_wait();
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  return finish(stream);
}

// Each question lets a lazy stream get on by one piece of work.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  Lock lock(mutex);
  const auto found = find(stream);
  if (found == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (found->capture != nullptr) return broken(found->capture);
  if (found->done == found->submitted) return cudaSuccess;
  want(found, found->submitted);
  if (!found->runs && !found->worker.joinable()) run_until(lock, found, found->done + 1);
  return noted(cudaErrorNotReady);  // as the real one does, though it is none
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  const auto found = find(stream);
  Event* const mark = find(event);
  if (found == nullptr || mark == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (mark->capture != nullptr) {
    if (found->capture == nullptr) {  // this stream joins what is captured
      found->capture = mark->capture;
      ++found->capture->streams_apart;
      // It may have left this capture before: what it did stays before what it does.
      if (found->last_capture.lock() != found->capture) found->last.clear();
      found->last_capture = found->capture;
    } else if (found->began_capture && mark->stream != found && mark->stream->capture == found->capture &&
               mark->captured == mark->stream->captured) {  // nothing of it is after the mark
      mark->stream->capture = nullptr;                      // and that one leaves it
      --found->capture->streams_apart;
    }
    if (found->capture == mark->capture) add(found->last, mark->last);
    return cudaSuccess;
  }
  if (found->capture != nullptr) return noted(cudaErrorStreamCaptureIsolation);
  if (mark->stream == nullptr) return cudaSuccess;
  return append(lock, found, [from = mark->stream, position = mark->position] {
    Lock inner(mutex);
    run_until(inner, from, position);
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  const std::lock_guard lock(mutex);
  const auto found = find(stream);
  if (found == nullptr) return noted(cudaErrorInvalidResourceHandle);
  *priority = found->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  const int of = device_of(stream);
  if (of < 0) return noted(cudaErrorInvalidResourceHandle);
  *device = of;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return submit(stream, [=] { function(data); });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return make_event(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { return make_event(event, flags); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(mutex);
  return events.erase(event) == 1 ? cudaSuccess : noted(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(mutex);
  const auto found = find(stream);
  Event* const mark = find(event);
  if (found == nullptr || mark == nullptr || found->device != mark->device)
    return noted(cudaErrorInvalidResourceHandle);
  mark->capture = found->capture;
  mark->captured = found->captured;
  mark->last = found->last;
  mark->stream = found;
  if (found->capture != nullptr) return cudaSuccess;
  mark->position = found->submitted + 1;
  return append(lock, found, [ms = mark->ms] { *ms = now_ms(); });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  Lock lock(mutex);
  const Event* const mark = find(event);
  if (mark == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (mark->capture != nullptr) return noted(cudaErrorCapturedEvent);
  const auto stream = mark->stream;
  if (stream == nullptr || stream->done >= mark->position) return cudaSuccess;
  want(stream, mark->position);
  if (!stream->runs && !stream->worker.joinable()) run_until(lock, stream, stream->done + 1);
  return noted(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count_wait();
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  Lock lock(mutex);
  const Event* const mark = find(event);
  if (mark == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (mark->capture != nullptr) return noted(cudaErrorCapturedEvent);
  if (mark->stream != nullptr) run_until(lock, mark->stream, mark->position);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const std::lock_guard lock(mutex);
  const Event* const from = find(begin);
  const Event* const to = find(end);
  if (from == nullptr || to == nullptr || !from->timing || !to->timing || from->stream == nullptr ||
      to->stream == nullptr)
    return noted(cudaErrorInvalidResourceHandle);
  if (from->stream->done < from->position || to->stream->done < to->position) return cudaErrorNotReady;
  *ms = static_cast<float>(*to->ms - *from->ms);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(mutex);
  const auto found = find(stream);
  if (found == nullptr) return noted(cudaErrorInvalidResourceHandle);
  if (stream == nullptr || found->capture != nullptr) return noted(cudaErrorStreamCaptureUnsupported);
  found->capture = std::make_shared<Graph>();
  found->last_capture = found->capture;
  found->last.clear();
  found->began_capture = true;
  if (mode != cudaStreamCaptureModeRelaxed) strict_capture = found->capture;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(mutex);
  const auto found = find(stream);
  if (found == nullptr || found->capture == nullptr) return noted(cudaErrorInvalidValue);
  if (!found->began_capture) return noted(cudaErrorStreamCaptureUnmatched);
  const auto made = std::exchange(found->capture, nullptr);
  found->began_capture = false;
  if (strict_capture == made) strict_capture = nullptr;
  *graph = nullptr;
  for (const auto& [handle, other] : streams)
    if (other->capture == made) other->capture = nullptr;
  if (made->broken) return noted(cudaErrorStreamCaptureInvalidated);
  if (made->streams_apart > 0) return noted(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(made.get());
  graphs.emplace(*graph, made);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  const std::lock_guard lock(mutex);
  if ((flags & ~std::uint64_t{cudaGraphInstantiateFlagUseNodePriority}) != 0) return noted(cudaErrorInvalidValue);
  if (flags != 0) ++counted.prioritised_graphs;
  const auto at = graphs.find(graph);
  if (at == graphs.end()) return noted(cudaErrorInvalidValue);
  const auto copy = std::make_shared<Graph>(*at->second);
  *made = reinterpret_cast<cudaGraphExec_t>(copy.get());
  graphs.emplace(*made, copy);
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  std::shared_ptr<Graph> found;
  {
    const std::lock_guard lock(mutex);
    const auto at = graphs.find(graph);
    if (at == graphs.end()) return noted(cudaErrorInvalidValue);
    found = at->second;
  }
  return submit(stream, [found] { run_graph(*found); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const std::lock_guard lock(mutex);
  return graphs.erase(graph) == 1 ? cudaSuccess : noted(cudaErrorInvalidValue);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  const std::lock_guard lock(mutex);
  return graphs.erase(graph) == 1 ? cudaSuccess : noted(cudaErrorInvalidValue);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  const std::lock_guard lock(mutex);
  const auto at = graphs.find(graph);
  if (at == graphs.end()) return noted(cudaErrorInvalidValue);
  auto& all = at->second->nodes;
  for (std::size_t i = 0; nodes != nullptr && i < std::min(*count, all.size()); ++i)
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(&all[i]);
  *count = all.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<const Graph::Node*>(node)->type;
  return cudaSuccess;
}
