// What groups on several hosts have in common, whoever moves them on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/hosts/host_engine.h"
#include "comm/process_group.h"
#include "comm/store.h"

namespace lockstep::comm {

class HostsGroup : public ProcessGroup {
 public:
  std::string name() const override { return "hosts"; }
  std::size_t preferred_bucket_bytes() const override { return std::size_t{4} << 20; }
  Store* store() override { return store_.get(); }
  bool encrypts() const override { return engine_.encrypts(); }

 protected:
  HostsGroup(std::unique_ptr<Store> store, HostMeeting met, Clock::duration timeout);

  /// Gives the engine its next operation; its op_index.
  virtual std::uint64_t hand_over(const HostEngine::Order& order) = 0;
  virtual void wait_for_index(std::uint64_t index, Deadline deadline) = 0;
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override;
  std::vector<std::string> exchange(const std::string& mine) override;
  void start(const Op& op) override;

  HostEngine engine_;
  std::unique_ptr<Store> store_;

 private:
  void run(const HostEngine::Order& order);
};

}  // namespace lockstep::comm
