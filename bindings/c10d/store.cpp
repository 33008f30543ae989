#include "bindings/c10d/store.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::pytorch {
namespace {

/// Never waits in the store: a TCPStore serves one call at a time, and other groups of the process may need it.
class OverStore final : public comm::KeyValueStore {
 public:
  explicit OverStore(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  }
  std::optional<std::string> get(const std::string& key, Clock::duration) override {
    if (!store_->check({key})) return std::nullopt;
    const std::vector<std::uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
};

}  // namespace

std::shared_ptr<comm::KeyValueStore> over_store(c10::intrusive_ptr<::c10d::Store> store) {
  return std::make_shared<OverStore>(std::move(store));
}

}  // namespace lockstep::pytorch
