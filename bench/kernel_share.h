// How much of the time a GPU runs kernels.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::bench {

/// Asks the driver now and then, from its beginning to shares(), on a thread of its own.
class KernelShare {
 public:
  /// CUDA's numbers of GPUs.
  explicit KernelShare(std::vector<int> gpus);
  ~KernelShare();
  KernelShare(const KernelShare&) = delete;
  KernelShare& operator=(const KernelShare&) = delete;

  /// Of each, 0 to 1, what the driver calls utilisation; absent where it does not report it, and when no more than a
  /// second has passed. Ends the asking.
  std::vector<std::optional<double>> shares();

 private:
  void ask();
  void end();

  std::vector<std::string> bus_ids_;
  std::vector<double> sums_;
  std::vector<int> times_;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

}  // namespace lockstep::bench
