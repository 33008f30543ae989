#include "comm/mpi/mpi_store.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "comm/mpi/transfers.h"
#include "comm/wait.h"

namespace lockstep::comm {
namespace {

constexpr int kTag = 0;

// A message: the key's length, the key, the value.
std::string encode(const std::string& key, std::string_view value) {
  const auto length = static_cast<std::uint32_t>(key.size());
  std::string message(sizeof length, '\0');
  std::memcpy(message.data(), &length, sizeof length);
  return message.append(key).append(value);
}

std::pair<std::string, std::string> decode(const std::string& message) {
  std::uint32_t length = 0;
  LOCKSTEP_ASSERT(message.size() >= sizeof length);
  std::memcpy(&length, message.data(), sizeof length);
  LOCKSTEP_ASSERT(message.size() - sizeof length >= length);
  return {message.substr(sizeof length, length), message.substr(sizeof length + length)};
}

}  // namespace

MpiStore::MpiStore(const World& world, Deadline deadline, MpiRanks ranks)
    : Store(world.rank, world.size, ranks.job_ranks),
      session_(world, deadline, std::move(ranks)),
      comm_(session_.duplicate()) {}

MpiStore::~MpiStore() {
  if (!sending_.empty()) keep_for_mpi(std::make_shared<std::list<Outgoing>>(std::move(sending_)));
  if (receiving_) keep_for_mpi(std::move(receiving_));
}

void MpiStore::do_set(const std::string& key, std::string_view value) {
  failure_.guard([&] {
    values_.insert_or_assign(key, value);
    Outgoing& outgoing = sending_.emplace_back();
    outgoing.message = encode(key, value);
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank())
        check_mpi(MPI_Isend(outgoing.message.data(), static_cast<int>(outgoing.message.size()), MPI_BYTE, peer, kTag,
                            comm_, &outgoing.requests.emplace_back()),
                  "sending a value to the other ranks");
    advance();
  });
}

std::vector<std::optional<std::string>> MpiStore::do_get(std::span<const std::string> keys, Deadline deadline) {
  return failure_.guard([&] {
    advance_until(
        [&] { return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return values_.contains(key); }); },
        deadline);
    std::vector<std::optional<std::string>> values;
    for (const std::string& key : keys) {
      const auto found = values_.find(key);
      values.push_back(found == values_.end() ? std::nullopt : std::optional(found->second));
    }
    return values;
  });
}

bool MpiStore::advance() {
  bool moved = receive();
  while (!sending_.empty()) {
    Outgoing& first = sending_.front();
    int done = 0;
    check_mpi(MPI_Testall(static_cast<int>(first.requests.size()), first.requests.data(), &done, MPI_STATUSES_IGNORE),
              "sending a value to the other ranks");
    if (done == 0) break;
    sending_.pop_front();
    moved = true;
  }
  return moved;
}

bool MpiStore::receive() {
  constexpr const char* kDoing = "reading the other ranks' values";
  bool moved = false;
  for (;;) {
    int found = 0;
    if (!receiving_) {
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check_mpi(MPI_Improbe(MPI_ANY_SOURCE, kTag, comm_, &found, &message, &status), kDoing);
      if (found == 0) return moved;
      int bytes = 0;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      Incoming& incoming = *(receiving_ = std::make_unique<Incoming>());
      incoming.message.resize(static_cast<std::size_t>(bytes));
      check_mpi(MPI_Imrecv(incoming.message.data(), bytes, MPI_BYTE, &message, &incoming.request), kDoing);
    }
    check_mpi(MPI_Test(&receiving_->request, &found, MPI_STATUS_IGNORE), kDoing);
    if (found == 0) return moved;
    auto [key, value] = decode(receiving_->message);
    values_.insert_or_assign(std::move(key), std::move(value));
    receiving_.reset();
    moved = true;
  }
}

template <class Condition>
bool MpiStore::advance_until(Condition&& done, Deadline deadline) {
  advance();
  return wait_until(
      nap_policy(session_.oversubscribed()), deadline, done, [&] { return advance(); }, [](Clock::duration) {}, nap);
}

std::vector<Store::Attendance> MpiStore::attendance() {
  // MPI starts all of them or none.
  std::vector<Attendance> all;
  for (int r = 0; r < size(); ++r) all.push_back({true, false, session_.host_of_rank(r)});
  return all;
}

void MpiStore::give_up(const TimeoutError& error) { failure_.set(std::make_exception_ptr(error)); }

void MpiStore::leave(Deadline deadline) {
  // The last value of every rank: with it all that they have ever sent is here, and all that this one has sent is
  // there.
  barrier("leaving", deadline);
  failure_.guard([&] {
    const auto begin = Clock::now();
    if (!advance_until([&] { return sending_.empty(); }, deadline))
      throw TimeoutError(fmt::format("leaving timed out after {:.3g} s: values are still on their way",
                                     seconds_between(begin, Clock::now())),
                         "look at the other ranks' logs");
    session_.finalize();
  });
}

}  // namespace lockstep::comm
