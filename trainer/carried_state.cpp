#include "trainer/carried_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "base/error.h"
#include "comm/agree.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::trainer {
namespace {

nn::CarriesState& carrier(nn::Module& module) {
  auto* const carries = dynamic_cast<nn::CarriesState*>(&module);
  check_usage(carries != nullptr, "--stateful for a model that carries no state", "leave it out");
  return *carries;
}

std::size_t bytes_of_row(const nn::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.count() / tensor.size(0)) * sizeof(float);
}

}  // namespace

CarriedState::CarriedState(nn::Module& module, comm::ProcessGroup& group, std::uint64_t global_batch, DType activations)
    : group_(group),
      global_batch_(global_batch),
      columns_(sampler::slice_of(global_batch, static_cast<std::uint64_t>(group.rank()),
                                 static_cast<std::uint64_t>(group.size()))) {
  nn::CarriesState& carries = carrier(module);
  carries.carry_state(static_cast<std::int64_t>(std::max<std::uint64_t>(1, columns_.count)), activations);
  parts_ = carries.carried_state();
}

void CarriedState::reset() {
  for (const nn::NamedBuffer& part : parts_) part.backend->pointwise().fill(*part.tensor, 0.0f);
}

std::vector<nn::HostTensor> CarriedState::gather(int root) const {
  std::vector<std::byte> mine;
  for (const nn::NamedBuffer& part : parts_) {
    nn::Tensor f32 = *part.tensor;
    if (f32.dtype() != DType::kF32) {
      f32 = part.backend->empty(f32.shape());
      part.backend->pointwise().cast(*part.tensor, f32);
    }
    const auto values = nn::values_of(*part.backend, f32);
    const auto bytes = std::as_bytes(std::span(values)).first(columns_.count * bytes_of_row(*part.tensor));
    mine.insert(mine.end(), bytes.begin(), bytes.end());
  }
  const auto ranks = group_.gather_objects(mine, root);
  std::vector<nn::HostTensor> all;
  if (group_.rank() != root) return all;
  std::vector<std::size_t> read(ranks.size());
  for (const nn::NamedBuffer& part : parts_) {
    const auto dims = part.tensor->shape().dims();
    nn::HostTensor& made =
        all.emplace_back(nn::HostTensor{.name = part.name, .shape = {dims.begin(), dims.end()}, .bytes = {}});
    made.shape[0] = static_cast<std::int64_t>(global_batch_);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto bytes = sampler::slice_of(global_batch_, rank, ranks.size()).count * bytes_of_row(*part.tensor);
      LOCKSTEP_ASSERT(read[rank] + bytes <= ranks[rank].size(), "{} bytes of rank {}", ranks[rank].size(), rank);
      const auto begin = ranks[rank].begin() + static_cast<std::ptrdiff_t>(read[rank]);
      made.bytes.insert(made.bytes.end(), begin, begin + static_cast<std::ptrdiff_t>(bytes));
      read[rank] += bytes;
    }
  }
  return all;
}

void CarriedState::restore(const std::vector<nn::HostTensor>& all, const std::string& source, int reader) {
  std::vector<std::byte> sent;
  comm::run_collectively(group_, [&] {
    if (group_.rank() != reader) return;
    for (const nn::NamedBuffer& part : parts_) {
      const auto found = std::ranges::find(all, part.name, &nn::HostTensor::name);
      const auto dims = part.tensor->shape().dims();
      std::vector<std::int64_t> wanted(dims.begin(), dims.end());
      wanted[0] = static_cast<std::int64_t>(global_batch_);
      if (found == all.end() || found->dtype != DType::kF32 || found->shape != wanted)
        throw IoError(fmt::format("{}: it has no {} of [{}] f32", source, part.name, fmt::join(wanted, ", ")),
                      "resume from another checkpoint");
      sent.insert(sent.end(), found->bytes.begin(), found->bytes.end());
    }
  });
  const std::vector<std::byte> whole = group_.all_gather_objects(sent)[static_cast<std::size_t>(reader)];
  std::size_t at = 0;
  for (const nn::NamedBuffer& part : parts_) {
    const std::size_t row = bytes_of_row(*part.tensor);
    std::vector<float> values(static_cast<std::size_t>(part.tensor->count()));
    std::memcpy(values.data(), whole.data() + at + columns_.begin * row, columns_.count * row);
    at += global_batch_ * row;
    nn::Backend& backend = *part.backend;
    const nn::Tensor f32 = nn::tensor_of(backend, part.tensor->shape(), values);
    if (part.tensor->dtype() == DType::kF32)
      backend.pointwise().copy(f32, *part.tensor);
    else
      backend.pointwise().cast(f32, *part.tensor);
  }
}

}  // namespace lockstep::trainer
