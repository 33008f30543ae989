#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "comm/store.h"
#include "comm/subgroup.h"
#include "comm/tcp/wire.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/key_value_store.h"

namespace lockstep::comm {
namespace {

// The longest wait inside the program's store: stop requests are looked at in between.
constexpr Clock::duration kMostWait = std::chrono::milliseconds(100);
// Between two looks, at first and at most, where the store does not wait.
constexpr Clock::duration kFirstPause = std::chrono::microseconds(200), kLongestPause = std::chrono::milliseconds(20);
// How often a rank that waits looks whether another one has given up.
constexpr Clock::duration kCheckEvery = std::chrono::milliseconds(500);

constexpr int kMostOfStore = 1 << 16;
constexpr const char* kFailureKey = "failure";

std::string key_of_rank(int rank) { return fmt::format("rank/{}", rank); }

/// What a rank says of itself first of all.
struct Hello {
  std::uint32_t size = 0;
  std::uint32_t encrypts = 0;
  std::string host;
  std::string nonce;  // of two processes with one rank each has another

  void fields(auto& io) {
    io(size, encrypts, bounded(host, Store::kMostKeyBytes), bounded(nonce, Store::kMostKeyBytes));
  }
};

/// A Store over a table of the program's. Nobody serves it, so the death of a rank during the rendezvous shows as a
/// timeout that names it; a rank that gives up leaves word under kFailureKey.
class KeyValueStoreAdapter final : public Store {
 public:
  KeyValueStoreAdapter(const World& world, std::shared_ptr<KeyValueStore> table, std::string prefix, JobRanks job_ranks)
      : Store(world.rank, world.size, std::move(job_ranks)),
        world_(world),
        table_(std::move(table)),
        prefix_(std::move(prefix)) {}

  /// Collective: returns when all ranks have come, with the same idea of the group.
  void join(Deadline deadline);
  void leave(Deadline) override {
    failure_.throw_if_any();
    failure_.set(std::make_exception_ptr(
        UsageError("the ranks have shut this group down", "issue nothing after shutdown(), or make another group")));
    table_.reset();
  }

 private:
  using Value = std::optional<std::string>;

  void do_set(const std::string& key, std::string_view value) override;
  std::vector<Value> do_get(std::span<const std::string> keys, Deadline deadline) override;
  std::vector<Attendance> attendance() override;
  void give_up(const TimeoutError& error) override {
    failure_.throw_if_any();
    tell_the_others(error);
    failure_.set(std::make_exception_ptr(error));
  }
  std::string joined_by() const override { return "key-value store and size"; }

  /// The value of `key`; nothing at `deadline`.
  Value await(const std::string& key, Deadline deadline);
  void check_hello(int rank, const Hello& theirs) const;

  void put(const std::string& key, std::string_view value);
  Value look(const std::string& key, Clock::duration wait = {});
  /// Whatever the program's store throws becomes an error of ours.
  template <class Question>
  static auto ask(Question&& question);
  [[noreturn]] static void fail(const char* why);
  /// Runs `action` unless the store is broken; what it throws breaks it, and the others are notified.
  template <class Action>
  auto guarded(Action&& action);
  void tell_the_others(const Error& error) noexcept;
  void throw_if_another_gave_up();

  const World world_;
  std::shared_ptr<KeyValueStore> table_;
  const std::string prefix_;
  Failure failure_;
};

void KeyValueStoreAdapter::fail(const char* why) {
  throw DeviceError(fmt::format("the key-value store through which the ranks join has failed: {}", why),
                    "look at what keeps the store, and at the log of rank 0");
}

template <class Question>
auto KeyValueStoreAdapter::ask(Question&& question) {
  try {
    return question();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("it does not say how");
  }
}

void KeyValueStoreAdapter::put(const std::string& key, std::string_view value) {
  ask([&] { table_->set(prefix_ + key, std::string(value)); });
}

KeyValueStoreAdapter::Value KeyValueStoreAdapter::look(const std::string& key, Clock::duration wait) {
  return ask([&] { return table_->get(prefix_ + key, wait); });
}

template <class Action>
auto KeyValueStoreAdapter::guarded(Action&& action) {
  return failure_.guard([&] {
    try {
      return action();
    } catch (const PeerError&) {
      throw;
    } catch (const Malformed& malformed) {
      const DeviceError error(
          fmt::format("values of ranks in the key-value store are not understood: {}", malformed.what()),
          "start every rank with the same version, and give each job keys of its own");
      tell_the_others(error);
      throw error;
    } catch (const Error& error) {
      tell_the_others(error);
      throw;
    }
  });
}

void KeyValueStoreAdapter::tell_the_others(const Error& error) noexcept {
  try {
    const std::string text = error.line().substr(0, kMostKeyBytes * 8);
    put(kFailureKey, pack(GivenUp{static_cast<std::uint32_t>(error.code()), text}));
  } catch (const std::exception&) {
    // The store may be what has failed: the others find out by themselves.
  }
}

void KeyValueStoreAdapter::do_set(const std::string& key, std::string_view value) {
  guarded([&] { put(key, value); });
}

std::vector<KeyValueStoreAdapter::Value> KeyValueStoreAdapter::do_get(std::span<const std::string> keys,
                                                                      Deadline deadline) {
  return guarded([&] {
    std::vector<Value> values;
    for (const std::string& key : keys) values.push_back(await(key, deadline));
    return values;
  });
}

void KeyValueStoreAdapter::join(Deadline deadline) {
  const Hello mine{static_cast<std::uint32_t>(size()), world_.rendezvous.encrypts ? 1u : 0u, host_name(),
                   JobSecret::random().text()};
  const auto begin = Clock::now();
  std::vector<int> missing;
  guarded([&] {
    const auto check_own = [&](bool must_be_there) {
      const Value there = look(key_of_rank(rank()));
      if (must_be_there ? there == pack(mine) : !there) return;
      throw UsageError(
          fmt::format("rank {} has joined already: another process has the same rank, or the store has the "
                      "keys of an earlier job",
                      rank()),
          "give every process a rank of its own, and each job a store or a prefix of its own");
    };
    check_own(false);
    put(key_of_rank(rank()), pack(mine));
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      const Value theirs = await(key_of_rank(r), deadline);
      if (!theirs)
        missing.push_back(r);
      else
        check_hello(r, unpack<Hello>(*theirs));
    }
    check_own(true);
  });
  if (!missing.empty()) time_out("joining the other ranks", seconds_between(begin, Clock::now()), missing);
}

void KeyValueStoreAdapter::check_hello(int rank, const Hello& theirs) const {
  if (theirs.size != static_cast<std::uint32_t>(size()))
    throw UsageError(fmt::format("this is rank {} of {}, and rank {} says that there are {}", this->rank(), size(),
                                 rank, theirs.size),
                     "give all ranks the same size, and each job a store or a prefix of its own");
  if ((theirs.encrypts != 0) != world_.rendezvous.encrypts)
    throw UsageError(fmt::format("rank {} {} encryption, and this rank, {}, {} it", rank,
                                 theirs.encrypts != 0 ? "asks for" : "is without", this->rank(),
                                 world_.rendezvous.encrypts ? "asks for" : "is without"),
                     "make the group with the same options on all ranks");
}

KeyValueStoreAdapter::Value KeyValueStoreAdapter::await(const std::string& key, Deadline deadline) {
  Clock::duration pause = kFirstPause;
  auto next_check = Clock::now() + kCheckEvery;
  for (;;) {
    const auto asked = Clock::now();
    const auto wait = std::min<Clock::duration>(kMostWait, deadline.remaining());
    if (Value value = look(key, wait)) return value;
    throw_if_stopped("waiting for the other ranks");
    const auto now = Clock::now();
    const bool last = deadline.expired();
    if (last || now >= next_check) {
      throw_if_another_gave_up();
      next_check = now + kCheckEvery;
    }
    if (last) return std::nullopt;
    if (now - asked >= wait / 2) continue;  // it has waited
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.remaining()));
    pause = std::min<Clock::duration>(2 * pause, kLongestPause);
  }
}

void KeyValueStoreAdapter::throw_if_another_gave_up() {
  const Value failure = look(kFailureKey);
  if (!failure) return;
  const auto [code, why] = unpack<GivenUp>(*failure);
  throw PeerError(failure_code(code), why);
}

std::vector<Store::Attendance> KeyValueStoreAdapter::attendance() {
  return guarded([&] {
    std::vector<Attendance> all(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      const Value hello = look(key_of_rank(r));
      if (hello) all[static_cast<std::size_t>(r)] = {true, false, unpack<Hello>(*hello).host};
    }
    return all;
  });
}

void check_numbers(int rank, int size, const std::vector<int>& job_ranks) {
  if (size < 1 || size > kMostOfStore || rank < 0 || rank >= size)
    throw UsageError(
        fmt::format("rank {} of {} ranks, where ranks count from 0 and there are 1 to {}", rank, size, kMostOfStore),
        "give every process its own rank below the size");
  if (!job_ranks.empty() && job_ranks.size() != static_cast<std::size_t>(size))
    throw UsageError(fmt::format("{} numbers in the job for {} ranks", job_ranks.size(), size),
                     "name one of each rank, or none");
}

}  // namespace

std::unique_ptr<ProcessGroup> make_group(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                         const GroupOptions& options, std::vector<int> job_ranks) {
  check_numbers(rank, size, job_ranks);
  check_usage(store != nullptr, "a group over no key-value store", "give one that all ranks see");
  if (job_ranks.empty()) set_log_identity(rank, size, host_name());
  World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size};
  world.rendezvous.host = env("MASTER_ADDR").value_or("");
  world.rendezvous.secret = JobSecret::from(env);
  const std::string prefix = fmt::format("lockstep/{}/", store->groups_++);
  return make_group_through(
      world, options, JobRanks(std::move(job_ranks)), [&](const World& joined, const JobRanks& ranks) {
        auto joining = std::make_unique<KeyValueStoreAdapter>(joined, std::move(store), prefix, ranks);
        joining->join(Deadline::after_seconds(options.timeout_seconds));
        return std::unique_ptr<Store>(std::move(joining));
      });
}

}  // namespace lockstep::comm
