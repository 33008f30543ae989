#include "comm/nccl/nccl_api.h"

#include <array>
#include <memory>

#include "base/cuda/library.h"
#include "base/error.h"
#include "base/text.h"

namespace lockstep::comm {
namespace {

constexpr int kOldest = NCCL_VERSION(2, 19, 1);

/// A library, and what was found in it.
struct Loaded {
  SharedLibrary library;
  NcclApi api;
};

std::unique_ptr<Loaded> load() {
  constexpr std::array kNames = {"libnccl.so.2"};
  auto loaded = std::unique_ptr<Loaded>(
      new Loaded{SharedLibrary("NCCL", kNames, "install it (libnccl2 is Debian's and Ubuntu's name for it)"), {}});
  const SharedLibrary& library = loaded->library;
  NcclApi& api = loaded->api;
  library.bind(api.get_version, "ncclGetVersion");
  library.bind(api.get_error_string, "ncclGetErrorString");
  // First of all: what is missing from an older one has a name that tells nobody anything.
  check_nccl_version(api);
  library.bind(api.get_last_error, "ncclGetLastError");
  library.bind(api.get_unique_id, "ncclGetUniqueId");
  library.bind(api.comm_init_rank_config, "ncclCommInitRankConfig");
  library.bind(api.comm_get_async_error, "ncclCommGetAsyncError");
  library.bind(api.comm_finalize, "ncclCommFinalize");
  library.bind(api.comm_destroy, "ncclCommDestroy");
  library.bind(api.comm_abort, "ncclCommAbort");
  library.bind(api.mem_alloc, "ncclMemAlloc");
  library.bind(api.mem_free, "ncclMemFree");
  library.bind(api.comm_register, "ncclCommRegister");
  library.bind(api.comm_deregister, "ncclCommDeregister");
  library.bind(api.all_reduce, "ncclAllReduce");
  library.bind(api.reduce_scatter, "ncclReduceScatter");
  library.bind(api.all_gather, "ncclAllGather");
  library.bind(api.broadcast, "ncclBroadcast");
  library.bind(api.reduce, "ncclReduce");
  library.bind(api.group_start, "ncclGroupStart");
  library.bind(api.group_end, "ncclGroupEnd");
  return loaded;
}

int version_of(const NcclApi& api) {
  int version = 0;
  return api.get_version(&version) == ncclSuccess ? version : 0;
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

const char* remedy_for(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError: return "look at the logs of the other ranks: one of them failed first, or the network did";
    case ncclSystemError:
      return "look at the network between the hosts (NCCL_SOCKET_IFNAME) and at /dev/shm; NCCL_DEBUG=WARN says more";
    case ncclUnhandledCudaError: return "look at nvidia-smi and the kernel's log (dmesg); NCCL_DEBUG=WARN says more";
    case ncclInvalidUsage: return "start every rank alike, on a GPU that NCCL can use; NCCL_DEBUG=WARN says more";
    default: return "run it with NCCL_DEBUG=WARN, which says more";
  }
}

}  // namespace

const NcclApi& load_nccl() {
  // Never closed: threads of NCCL may live for as long as the process does.
  static const Loaded* const loaded = load().release();
  return loaded->api;
}

void check_nccl_version(const NcclApi& api) {
  const int version = version_of(api);
  if (version < kOldest)
    throw NcclError(fmt::format("NCCL {} is too old", version_text(version)),
                    fmt::format("install NCCL {} or newer", version_text(kOldest)));
}

std::string nccl_version_text(const NcclApi& api) { return version_text(version_of(api)); }

std::string nccl_error_text(const NcclApi& api, ncclComm_t comm, ncclResult_t result) {
  const char* const last = api.get_last_error(comm);
  const std::string_view words = trim(last == nullptr ? "" : last);
  return words.empty() ? std::string(api.get_error_string(result))
                       : fmt::format("{}: {}", api.get_error_string(result), words);
}

void throw_nccl_error(const NcclApi& api, ncclComm_t comm, ncclResult_t result, const std::string& doing) {
  throw NcclError(fmt::format("{} failed: {}", doing, nccl_error_text(api, comm, result)), remedy_for(result));
}

}  // namespace lockstep::comm
