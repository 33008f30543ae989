// Which of the libraries' kernels are the fastest here: timed once, and noted in a file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/hash.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::nn::cuda {

struct Context;

/// Note [Autotuning]
/// cuBLASLt and cuDNN order their kernels by what they expect; the first is not always the fastest. So the first few
/// are timed when a problem comes for the first time, in a step that is never captured. All of them are exact (Cudnn,
/// ProductPlan), but they add up in different orders. So that a run can be repeated bit for bit, what was chosen is
/// noted in a file, and whoever finds the problem there times nothing. The ranks of a host share the file: all of them
/// time, each on its own GPU, and take what the first of them has noted. Nobody holds the file's lock while a GPU
/// works: that work may wait for a collective (a kernel that is loaded at its first launch waits for all of a GPU's
/// streams), and so for a rank that would wait for the lock. Where there is no file to note in, the libraries' first
/// kernel is taken.
///
/// The file is text with a checksum, replaced as a whole. One that is cut or is somebody else's is ignored, with a
/// warning, and replaced with the next choice. What is noted for another GPU or version of a library has another name,
/// and stays.

/// One for each process and file. Thread-safe.
class PlanChoices {
 public:
  /// `file` need not exist, nor its directory.
  explicit PlanChoices(std::string file);

  /// Which of `names`, which are the kernels for `problem`, the library's favourite first, is to be taken. `seconds_of`
  /// times one of them; it is called with none noted alone. Both texts have no line break, a name no tab.
  std::size_t choose(const std::string& problem, const std::vector<std::string>& names,
                     FunctionRef<double(std::size_t)> seconds_of);
  /// The same where nothing can be timed: the one that is noted, or the first.
  std::size_t noted(const std::string& problem, const std::vector<std::string>& names);

  /// A kernel is preferred to the library's favourite only if it takes this share of its time at most.
  static constexpr double kClearlyFaster = 0.97;
  /// How many of a library's kernels are timed.
  static constexpr int kCandidates = 8;

 private:
  void read();
  void write() const;
  std::size_t find(const std::string& problem, const std::vector<std::string>& names) const;
  void give_up(const std::string& why);

  const std::string file_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> chosen_;  // by problem
  bool usable_ = true;                         // the file
  bool warned_ = false;                        // of what it holds
};

/// Seconds of what `run` gives to the context's stream: the least of a few times, after one that does not count. Waits
/// for the GPU; not in a capture.
double seconds_of(Context& context, FunctionRef<void()> run);

/// Which of `names`, a library's kernels for `problem`, is taken (Note [Autotuning]); the context has choices.
/// `seconds_of_kernel` times one, with seconds_of(). If memory for the results of the trials is missing, the first one
/// is taken and not recorded.
std::size_t choose_kernel(Context& context, const std::string& problem, const std::vector<std::string>& names,
                          FunctionRef<double(std::size_t)> seconds_of_kernel);

// What plans are kept and looked up by.

/// Sizes and options as a fixed array of numbers: looking one up allocates nothing.
using PlanKey = std::array<std::int64_t, 24>;

template <class Plan>
using PlanMap = std::unordered_map<PlanKey, Plan, NumbersHash>;

/// The plan for `key`, made by make_it() when it is asked for first.
template <class Plan, class Make>
Plan& find(PlanMap<Plan>& plans, const PlanKey& key, const Make& make_it) {
  const auto at = plans.find(key);
  return at != plans.end() ? at->second : plans.emplace(key, make_it()).first->second;
}

}  // namespace lockstep::nn::cuda
