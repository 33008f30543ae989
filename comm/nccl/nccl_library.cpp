#include <array>
#include <memory>

#include "base/cuda/library.h"
#include "comm/nccl/nccl_api.h"

namespace lockstep::comm {
namespace {

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
  // First of all: an error about a function that an older one lacks would not help anybody.
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
  library.bind(api.send, "ncclSend");
  library.bind(api.recv, "ncclRecv");
  library.bind(api.group_start, "ncclGroupStart");
  library.bind(api.group_end, "ncclGroupEnd");
  return loaded;
}

}  // namespace

const NcclApi& load_nccl() {
  // Never closed: threads of NCCL may live for as long as the process does.
  static const Loaded* const loaded = load().release();
  return loaded->api;
}

}  // namespace lockstep::comm
