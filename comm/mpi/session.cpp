#include "comm/mpi/session.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/scope.h"
#include "comm/mpi/transfers.h"
#include "comm/wait.h"
#include "devices/cpus.h"
#include "lockstep/base/env.h"

namespace lockstep::comm {
namespace {

/// What each rank sends to the others at the start.
struct Introduction {
  std::array<char, 64> host{};
  devices::CpuMask cpus;
};
static_assert(std::is_trivially_copyable_v<Introduction>);

/// Settings that Open MPI reads when it starts. What the user has set stays.
void set_mpi_defaults(const World& world) {
  // All waiting is ours (comm/wait.h); this is for MPI's own, when it starts and ends.
  set_env("OMPI_MCA_mpi_yield_when_idle", "1", false);
  // What it takes anyway; looking whether POSIX segments work too, it makes one, and a process that dies then leaves
  // it.
  set_env("OMPI_MCA_shmem", "mmap", false);
  // hwloc's look for graphics cards asks for X servers by the name localhost: seconds where no name service answers.
  set_env("HWLOC_COMPONENTS", "-gl", false);
  // MPI_Init loads every transport and asks it whether it fits, which takes 230 ms; with the name given, 16 ms. ob1
  // runs over shared memory and TCP. Between hosts the user's network may have a better transport, so no name is given
  // there.
  if (world.starter == Starter::kOpenMpi && world.local_size == world.size) set_env("OMPI_MCA_pml", "ob1", false);
}

// What this process has to do with its one MPI (Note [Whose MPI]).
std::atomic<bool> started_here{false};
std::atomic<int> sessions{0};

bool mpi_says(int (*question)(int*)) {
  int answer = 0;
  check_mpi(question(&answer), "asking MPI for its state");
  return answer != 0;
}

std::string remedy_for(Starter starter) {
  switch (starter) {
    case Starter::kSlurm: return "start them with srun --mpi=pmix";
    case Starter::kTorchrun: return "unset PMIX_RANK and PMI_RANK if RANK comes from another launcher";
    default: return "start them with the mpirun that belongs to the MPI library that lockstep was built with";
  }
}

}  // namespace

std::string mpi_error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return fmt::format("MPI error {}", code);
  return {text.data(), static_cast<std::size_t>(length)};
}

void check_mpi(int code, const char* doing) {
  if (code != MPI_SUCCESS) [[unlikely]]
    throw MpiError(fmt::format("{}: {}", doing, mpi_error_text(code)), "look at the other ranks' logs");
}

bool Session::allows_threads() {
  if (!mpi_says(MPI_Initialized)) return true;
  return !mpi_says(MPI_Finalized) && mpi_says([](int* yes) {
    const int code = MPI_Query_thread(yes);
    *yes = *yes == MPI_THREAD_MULTIPLE;
    return code;
  });
}

void Session::start_or_join() {
  if (!mpi_says(MPI_Initialized)) {
    set_mpi_defaults(world_);
    int provided = MPI_THREAD_SINGLE;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "starting MPI");
    started_here = true;
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "starting MPI");
    return;
  }
  if (mpi_says(MPI_Finalized))
    throw UsageError(
        "MPI has been ended in this process, and starts only once",
        started_here ? "keep the first group, make the second one before the first is shut down, or call MPI_Init in "
                       "the program: lockstep then leaves MPI running"
                     : "make groups before MPI_Finalize");
  check_mpi_thread();
}

void check_mpi_thread() {
  if (mpi_says(MPI_Is_thread_main) || Session::allows_threads()) return;
  throw UsageError("MPI runs in this process already, and allows calls only by the thread that started it",
                   "make the group on that thread, with Progress::kInline, or start MPI by MPI_Init_thread with "
                   "MPI_THREAD_MULTIPLE");
}

MPI_Comm Session::duplicate() {
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(ranks_.comm, &comm), "starting MPI");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "starting MPI");
  comms_.push_back(comm);
  return comm;
}

MPI_Comm Session::make_comm_of(const std::vector<int>& ranks) const {
  constexpr const char* kDoing = "making a communicator of some ranks";
  constexpr int kTag = 0;
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(data_, &all), kDoing);
  check_mpi(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some), kDoing);
  check_mpi(MPI_Comm_create_group(data_, some, kTag, &comm), kDoing);
  check_mpi(MPI_Group_free(&some), kDoing);
  check_mpi(MPI_Group_free(&all), kDoing);
  return comm;
}

Session::Session(const World& world, Deadline deadline, MpiRanks ranks)
    : world_(world), ranks_(std::move(ranks)), hosts_(static_cast<std::size_t>(world.size)) {
  start_or_join();
  if (ranks_.owned) comms_.push_back(ranks_.comm);
  if (ranks_.comm == MPI_COMM_NULL) ranks_.comm = MPI_COMM_WORLD;

  int rank = 0, size = 0;
  check_mpi(MPI_Comm_rank(ranks_.comm, &rank), "starting MPI");
  check_mpi(MPI_Comm_size(ranks_.comm, &size), "starting MPI");
  if (rank != world.rank || size != world.size) {
    // A world of its own: Open MPI's files in TMPDIR go with it.
    if (size == 1 && started_here && ranks_.comm == MPI_COMM_WORLD) check_mpi(MPI_Finalize(), "ending MPI");
    throw UsageError(
        fmt::format("{} says that this is rank {} of {}, but MPI sees rank {} of {}",
                    world.starter == Starter::kTorchrun ? "the environment (RANK, WORLD_SIZE)" : name_of(world.starter),
                    world.rank, world.size, rank, size),
        remedy_for(world.starter));
  }

  data_ = duplicate();
  notices_ = duplicate();
  pairs_ = duplicate();

  void* bound = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found), "starting MPI");
  tag_upper_bound_ = found != 0 ? *static_cast<int*>(bound) : 32767;
  exchange_hosts(deadline);
  ++sessions;
}

void Session::exchange_hosts(Deadline deadline) {
  constexpr int kTag = 0;
  const auto n = static_cast<std::size_t>(size());
  // MPI writes there until all messages have come, also where this rank gives up before.
  const auto introductions = std::make_shared<std::vector<Introduction>>(n);
  bool complete = false;
  const OnExit keep([&] {
    if (!complete) keep_for_mpi(introductions);
  });
  std::vector<Introduction>& all = *introductions;
  Introduction& mine = all[static_cast<std::size_t>(rank())];
  const std::string host = host_name();
  std::copy_n(host.begin(), std::min(host.size(), mine.host.size() - 1), mine.host.begin());
  mine.cpus = devices::allowed_cpus();

  std::vector<MPI_Request> requests;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    check_mpi(MPI_Irecv(&all[static_cast<std::size_t>(peer)], sizeof(Introduction), MPI_BYTE, peer, kTag, notices_,
                        &requests.emplace_back()),
              "starting MPI");
    check_mpi(MPI_Isend(&mine, sizeof(Introduction), MPI_BYTE, peer, kTag, notices_, &requests.emplace_back()),
              "starting MPI");
  }
  WaitPolicy policy = nap_policy(true);
  policy.doing = "joining the other ranks";
  const auto all_there = [&] {
    int done = 0;
    check_mpi(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
              "exchanging host names");
    return done != 0;
  };
  if (!wait_until(
          policy, deadline, all_there, [] { return false; }, [](Clock::duration) {}, nap))
    throw TimeoutError("not all ranks answered after MPI had started",
                       "look at the other ranks' logs; --timeout-seconds gives them longer");
  complete = true;

  int local_ranks = 0;
  devices::CpuMask local_cpus;
  for (std::size_t r = 0; r < n; ++r) {
    hosts_[r] = all[r].host.data();
    if (hosts_[r] != host) continue;
    ++local_ranks;
    local_cpus |= all[r].cpus;
  }
  oversubscribed_ = ranks_.oversubscribed || static_cast<int>(local_cpus.count()) < local_ranks;
  const auto first_here = std::ranges::find(hosts_, host) - hosts_.begin();
  if (oversubscribed_ && job_ranks().are_all() && first_here == rank()) devices::warn_of_crowd(local_ranks, local_cpus);
}

std::string Session::name_of_rank(int rank) const {
  return job_ranks().text(rank, fmt::format("host {}", hosts_[static_cast<std::size_t>(rank)]));
}

void Session::finalize() {
  const bool last = --sessions == 0;
  if (started_here && last) return check_mpi(MPI_Finalize(), "ending MPI");
  for (MPI_Comm& comm : comms_) check_mpi(MPI_Comm_free(&comm), "leaving MPI");
  comms_.clear();
}

}  // namespace lockstep::comm
