#include "comm/mpi/transfers.h"

#include <algorithm>
#include <climits>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "comm/mpi/algorithms.h"

namespace lockstep::comm {

void keep_for_mpi(std::shared_ptr<void> memory) {
  static auto& kept = *new std::vector<std::shared_ptr<void>>();
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

Transfers::Transfers(const Session& session, std::size_t most_under_way)
    : session_(session), tags_(session.tag_upper_bound()) {
  requests_.reserve(most_under_way);
  transfers_.reserve(most_under_way);
  indices_.reserve(most_under_way);
  statuses_.reserve(most_under_way);
  completed_.reserve(most_under_way);
}

void Transfers::send(const Op& op, const Message& transfer, const std::byte* from) {
  LOCKSTEP_ASSERT(transfer.bytes <= INT_MAX, "a message of {} bytes", transfer.bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(from, static_cast<int>(transfer.bytes), MPI_BYTE, transfer.peer,
                             tags_.encode(tags_.fields_of(op, transfer.phase)), session_.data(), &request);
  if (code != MPI_SUCCESS) fail(code, "sending to", transfer, op);
  add(transfer, request);
}

void Transfers::receive(const Op& op, const Message& transfer, std::byte* to) {
  LOCKSTEP_ASSERT(transfer.bytes <= INT_MAX, "a message of {} bytes", transfer.bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(to, static_cast<int>(transfer.bytes), MPI_BYTE, transfer.peer,
                             tags_.encode(tags_.fields_of(op, transfer.phase)), session_.data(), &request);
  if (code != MPI_SUCCESS) fail(code, "receiving from", transfer, op);
  add(transfer, request);
}

void Transfers::add(const Message& transfer, MPI_Request request) {
  requests_.push_back(request);
  transfers_.push_back(transfer);
}

void Transfers::remove(std::size_t index) {
  requests_[index] = requests_.back();
  transfers_[index] = transfers_.back();
  requests_.pop_back();
  transfers_.pop_back();
}

bool Transfers::test() {
  if (requests_.empty()) return false;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code =
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check_mpi(code, "waiting for messages");
  if (count <= 0) return false;

  // Owners start new messages when they are notified: take everything out of the arrays first.
  completed_.clear();
  for (int i = 0; i < count; ++i) {
    const Message& transfer = transfers_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])];
    MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    if (code == MPI_SUCCESS) status.MPI_ERROR = MPI_SUCCESS;
    check_status(transfer, status);
    completed_.push_back(transfer);
  }
  std::sort(indices_.begin(), indices_.begin() + count, std::greater<>());
  for (int i = 0; i < count; ++i) remove(static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]));
  for (const Message& transfer : completed_) transfer.owner->on_complete(transfer);
  return true;
}

void Transfers::check_status(const Message& transfer, const MPI_Status& status) const {
  const Op& op = transfer.owner->op();
  const bool receives = transfer.direction == Message::Direction::kReceive;
  int error_class = MPI_SUCCESS;
  if (status.MPI_ERROR != MPI_SUCCESS) {
    MPI_Error_class(status.MPI_ERROR, &error_class);
    if (error_class != MPI_ERR_TRUNCATE)
      fail(status.MPI_ERROR, receives ? "receiving from" : "sending to", transfer, op);
  }
  if (!receives) return;
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  if (error_class == MPI_SUCCESS && static_cast<std::size_t>(bytes) == transfer.bytes) return;
  throw OutOfStepError(
      fmt::format("{} sent {} bytes of {} where this rank expects {}", session_.name_of_rank(transfer.peer),
                  error_class == MPI_SUCCESS ? std::to_string(bytes) : "more", describe(op), transfer.bytes),
      "start every rank with the same binary and options");
}

void Transfers::fail(int code, const char* doing, const Message& transfer, const Op& op) const {
  throw MpiError(fmt::format("{} {} failed in {}: {}", doing, session_.name_of_rank(transfer.peer), describe(op),
                             mpi_error_text(code)),
                 fmt::format("look at the log of rank {}, and at the network between the hosts",
                             session_.job_ranks().of(transfer.peer)));
}

std::vector<int> Transfers::missing(const CollectiveAlgorithm& owner) const {
  std::vector<int> ranks;
  for (const auto direction : {Message::Direction::kReceive, Message::Direction::kSend}) {
    for (const Message& transfer : transfers_)
      if (transfer.owner == &owner && transfer.direction == direction) ranks.push_back(transfer.peer);
    if (!ranks.empty()) break;
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace lockstep::comm
