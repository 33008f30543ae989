#include "lockstep/parallel/model_averaging.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "comm/agree.h"

namespace lockstep::parallel {
namespace {

class LocalHook final : public ddp::CommHook {
 public:
  std::string name() const override { return "local"; }
  comm::Work start(const ddp::GradBucket&, comm::ProcessGroup&) override { return {}; }
  void finish(const ddp::GradBucket&, StreamView) override {}
};

// What travels at once: large enough for any link, small beside a model.
constexpr std::size_t kPieceFloats = std::size_t{4} << 20;

}  // namespace

std::shared_ptr<ddp::CommHook> make_local_hook() { return std::make_shared<LocalHook>(); }

ModelAverager::ModelAverager(comm::ProcessGroup& group, nn::Backend& backend, std::vector<nn::Tensor> tensors)
    : group_(group), backend_(backend), tensors_(std::move(tensors)) {
  comm::run_collectively(group_, [&] {
    for (const nn::Tensor& tensor : tensors_)
      check_usage(tensor.dtype() == DType::kF32 && tensor.is_contiguous(),
                  "averaging a tensor that is not f32, or whose rows lie apart", "average f32 tensors in one piece");
  });
  comm::Manifest manifest = {{"averaged tensors", fmt::to_string(tensors_.size())}};
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    manifest.emplace_back(fmt::format("averaged tensor {}", i), nn::to_string(tensors_[i].shape()));
  comm::compare_manifests(group_, manifest);
  for (const nn::Tensor& tensor : tensors_) bytes_ += tensor.bytes();
  if (group_.size() > 1 && bytes_ > 0) arena_ = group_.allocate(arena_bytes(bytes_));
}

ModelAverager::~ModelAverager() = default;

std::size_t ModelAverager::arena_bytes(std::size_t bytes) { return std::min(bytes, kPieceFloats * sizeof(float)); }

// Tensors are packed end to end; a full arena is summed, then the next one is filled.
void ModelAverager::average() {
  if (arena_ == nullptr) return;
  struct Part {
    nn::Tensor tensor, sent;
  };
  const auto flat = [](float* data, std::size_t count) {
    return nn::Tensor::view_of(data, {static_cast<std::int64_t>(count)});
  };
  const std::size_t most = arena_->bytes() / sizeof(float);
  std::vector<Part> parts;
  std::size_t used = 0;
  const auto travel = [&] {
    group_.all_reduce({.arena = arena_.get(), .count = used, .dtype = DType::kF32}, comm::ReduceOp::kSum)
        .wait(backend_.stream());
    for (const auto& [tensor, sent] : parts) {
      backend_.pointwise().fill(tensor, 0.0f);
      backend_.pointwise().add_to(sent, 1.0f / static_cast<float>(group_.size()), tensor);
    }
    parts.clear();
    used = 0;
  };
  auto* const arena = reinterpret_cast<float*>(arena_->data());
  for (const nn::Tensor& tensor : tensors_) {
    const auto count = static_cast<std::size_t>(tensor.count());
    for (std::size_t at = 0; at < count;) {
      const std::size_t n = std::min(count - at, most - used);
      parts.push_back({flat(tensor.data<float>() + at, n), flat(arena + used, n)});
      backend_.pointwise().copy(parts.back().tensor, parts.back().sent);
      at += n;
      used += n;
      if (used == most) travel();
    }
  }
  if (used > 0) travel();
}

}  // namespace lockstep::parallel
