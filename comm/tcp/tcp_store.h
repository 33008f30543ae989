// A store over TCP.
#pragma once

#include <memory>

#include "comm/store.h"
#include "comm/world.h"

namespace lockstep::comm {

/// Joins the ranks of `world` at world.rendezvous, in whatever order they start: rank 0 serves there (Note
/// [Rendezvous]), the others connect until `deadline`. Returns when this rank has joined; the others may not have.
///
/// Throws UsageError when the rendezvous' name has no address, when its port is taken (on rank 0), when something else
/// than lockstep's rank 0 answers there, and when rank 0 turns this process away (another job, another world size, a
/// rank that has joined already); TimeoutError when rank 0 does not come.
std::unique_ptr<Store> make_tcp_store(const World& world, Deadline deadline);

}  // namespace lockstep::comm
