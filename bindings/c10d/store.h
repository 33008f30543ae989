// PyTorch's stores as one of lockstep's.
#pragma once

#include "lockstep/comm.h"

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::pytorch {

/// Over a TCPStore, FileStore, HashStore or one of a program's own, mostly in a PrefixStore.
std::shared_ptr<comm::KeyValueStore> over_store(c10::intrusive_ptr<::c10d::Store> store);

}  // namespace lockstep::pytorch
