#include "session/device_choice.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "base/error.h"
#include "base/text.h"
#include "devices/visible.h"

namespace lockstep::session {
namespace {

using Kind = DeviceRequest::Kind;
using Ranks = std::vector<int>;

struct Refusal {
  std::string what, remedy;
  bool by_flag = true;  // it is about the rank's own --device: else the ranks' flags may differ
};

/// What one rank gets: a GPU, or why it cannot have one.
struct Place {
  int gpu = -1;
  std::vector<int> all;  // of one that computes on several
  std::optional<Refusal> refusal;
};

std::string counted_gpus(std::size_t count) { return fmt::format("{} GPU{}", count, count == 1 ? "" : "s"); }

std::string set_mode_text(const VisibleGpu& gpu) {
  return fmt::format("nvidia-smi -i {} -c DEFAULT, as root, changes that",
                     gpu.bus_id.empty() ? std::string("INDEX") : gpu.bus_id);
}

class Plan {
 public:
  explicit Plan(std::span<const RankView> ranks) : ranks_(ranks), places_(ranks.size()) {
    for (const auto& view : ranks_) requests_.push_back(parse_device(view.device));
    for (const auto& members : teams()) place(members);
    refuse_shared();
  }

  DeviceChoice choice_of(int rank) const {
    const auto& request = requests_[at(rank)];
    if (request.kind == Kind::kCpu) {
      check_listed(rank);
      DeviceChoice choice;
      if (view(rank).all_devices && !request.indices.empty()) choice.devices = request.indices;
      return choice;
    }
    if (request.kind == Kind::kAuto)
      if (const auto reason = lowest_refused(Kind::kAuto)) return on_the_cpu(*reason);
    const Place& place = places_[at(rank)];
    if (place.refusal) {
      const std::string flag = place.refusal->by_flag ? fmt::format("--device {}: ", view(rank).device) : "";
      throw DeviceError(flag + place.refusal->what, place.refusal->remedy);
    }
    return {.device = {DeviceKind::kCuda, place.gpu},
            .gpu = gpu_of(rank),
            .devices = view(rank).all_devices ? place.all : std::vector<int>{place.gpu},
            .why_cpu = {},
            .tell = false};
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  const RankView& view(int rank) const { return ranks_[at(rank)]; }
  const VisibleGpu& gpu_of(int rank) const { return view(rank).visible.gpus[at(places_[at(rank)].gpu)]; }
  bool is_alone(const Ranks& members) const { return members.size() == 1 && view(members.front()).all_devices; }

  /// CPU devices are as many as are named.
  void check_listed(int rank) const {
    const auto& listed = requests_[at(rank)].indices;
    if (listed.empty() || at(view(rank).local_rank) < listed.size() || view(rank).share_devices) return;
    throw DeviceError(
        fmt::format("--device {}: local rank {} of host {}, and {} CPU device{} in this list", view(rank).device,
                    view(rank).local_rank, view(rank).host, listed.size(), listed.size() == 1 ? "" : "s"),
        "name one for each rank of a host, or none: --device cpu");
  }

  void refuse(const Ranks& members, const Refusal& refusal) {
    for (const int rank : members)
      if (!places_[at(rank)].refusal) places_[at(rank)].refusal = refusal;
  }

  /// Those who divide GPUs among themselves, in the order of their local ranks.
  std::vector<Ranks> teams() const {
    std::map<std::tuple<std::string, std::string, std::vector<std::string>>, Ranks> found;
    for (int rank = 0; at(rank) < ranks_.size(); ++rank) {
      if (requests_[at(rank)].kind == Kind::kCpu) continue;
      std::vector<std::string> ids;
      for (const auto& gpu : view(rank).visible.gpus) ids.push_back(gpu.id);
      const std::string wanted = requests_[at(rank)].kind == Kind::kAuto ? "cuda" : view(rank).device;
      found[{view(rank).machine, wanted, std::move(ids)}].push_back(rank);
    }
    std::vector<Ranks> teams;
    for (auto& [key, members] : found) {
      std::ranges::stable_sort(members, {}, [&](int rank) { return view(rank).local_rank; });
      teams.push_back(std::move(members));
    }
    return teams;
  }

  /// The GPUs that a team may take, the first for its first member. Refuses the team if there is none.
  std::vector<int> offered_to(const Ranks& members) {
    const DeviceRequest& request = requests_[at(members.front())];
    const VisibleGpus& visible = view(members.front()).visible;
    if (request.most_free) return freest_of(members, visible);
    std::vector<int> offered = request.indices;
    if (offered.empty()) {
      offered.resize(visible.gpus.size());
      std::iota(offered.begin(), offered.end(), 0);
    }
    for (const int index : offered) {
      if (at(index) < visible.gpus.size()) continue;
      refuse(members,
             {fmt::format("there is no GPU {}: this process sees {}, {}", index, counted_gpus(visible.gpus.size()),
                          visible.gpus.size() == 1 ? "which is cuda:0"
                                                   : fmt::format("cuda:0 to cuda:{}", visible.gpus.size() - 1)),
              "lockstep devices shows the machine's GPUs; CUDA_VISIBLE_DEVICES may hide some"});
      return {};
    }
    return offered;
  }

  /// The first member's reading decides for all.
  std::vector<int> freest_of(const Ranks& members, const VisibleGpus& visible) {
    if (!visible.memory_problem.empty()) {
      refuse(members, {fmt::format("the free memory of the GPUs is not known: {}", visible.memory_problem),
                       "name the GPUs: --device cuda:0,1"});
      return {};
    }
    std::vector<devices::VisibleDevice> candidates;
    for (const auto& gpu : visible.gpus) {
      devices::VisibleDevice device;
      device.free_bytes = gpu.free_bytes;
      device.prohibited = gpu.prohibited;
      candidates.push_back(device);
    }
    auto offered = is_alone(members) ? devices::emptiest(candidates)
                                     : devices::most_free(candidates, static_cast<int>(members.size()));
    if (offered.empty())
      refuse(members,
             {"every GPU is 'prohibited': their compute mode takes no processes", set_mode_text(visible.gpus.front())});
    return offered;
  }

  void place(const Ranks& members) {
    const RankView& first = view(members.front());
    if (first.visible.gpus.empty()) {
      for (const int rank : members) refuse({rank}, {view(rank).visible.problem, view(rank).visible.remedy});
      return;
    }
    const auto offered = offered_to(members);
    if (offered.empty()) return;
    const bool share = std::ranges::all_of(members, [&](int rank) { return view(rank).share_devices; });
    if (members.size() > offered.size() && !share) {
      const bool named = !requests_[at(members.front())].indices.empty();
      refuse(members, {fmt::format("{} ranks on host {}, and {} {}", members.size(), first.host,
                                   counted_gpus(offered.size()), named ? "in this list" : "for them"),
                       fmt::format("start at most {} rank{} there{}, or add --share-devices: ranks that share a GPU "
                                   "share its time",
                                   offered.size(), offered.size() == 1 ? "" : "s", named ? ", name more GPUs" : "")});
      return;
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      const int rank = members[i];
      Place& place = places_[at(rank)];
      place.gpu = offered[i % offered.size()];
      place.all = is_alone(members) ? offered : std::vector<int>{place.gpu};
      for (const int index : place.all)
        if (const VisibleGpu& gpu = view(rank).visible.gpus[at(index)]; gpu.prohibited)
          refuse({rank}, {fmt::format("{} is 'prohibited': its compute mode takes no processes", to_string(gpu, index)),
                          set_mode_text(gpu)});
    }
  }

  void refuse_shared() {
    std::map<std::string, Ranks> users;
    for (int rank = 0; at(rank) < ranks_.size(); ++rank)
      if (places_[at(rank)].gpu >= 0) users[gpu_of(rank).id].push_back(rank);
    for (const auto& [id, together] : users) {
      if (together.size() == 1) continue;
      const int first = together[0], second = together[1];
      const VisibleGpu& gpu = gpu_of(first);
      const std::string who = fmt::format("rank {} and rank {} would both compute on {} of host {}", first, second,
                                          to_string(gpu, places_[at(first)].gpu), view(first).host);
      if (!std::ranges::all_of(together, [&](int rank) { return view(rank).share_devices; }))
        refuse(together, {.what = who,
                          .remedy = "give each rank a GPU of its own (--device, CUDA_VISIBLE_DEVICES), or all of them "
                                    "--share-devices",
                          .by_flag = false});
      else if (gpu.exclusive)
        refuse(
            together,
            {.what = who + ", whose compute mode takes one process", .remedy = set_mode_text(gpu), .by_flag = false});
    }
  }

  std::optional<int> lowest_refused(Kind kind) const {
    for (int rank = 0; at(rank) < ranks_.size(); ++rank)
      if (requests_[at(rank)].kind == kind && places_[at(rank)].refusal) return rank;
    return std::nullopt;
  }

  /// The same on every rank: `reason` is a rank that cannot have a GPU.
  DeviceChoice on_the_cpu(int reason) const {
    DeviceChoice choice;
    choice.why_cpu = places_[at(reason)].refusal->what;
    const bool one_host =
        std::ranges::all_of(ranks_, [&](const RankView& other) { return other.host == view(reason).host; });
    if (!one_host) choice.why_cpu = fmt::format("host {}: {}", view(reason).host, choice.why_cpu);
    for (int rank = 0; at(rank) < ranks_.size(); ++rank)
      if (requests_[at(rank)].kind == Kind::kAuto && view(rank).visible.machine_has_gpus) choice.tell = true;
    return choice;
  }

  std::span<const RankView> ranks_;
  std::vector<DeviceRequest> requests_;
  std::vector<Place> places_;
};

}  // namespace

DeviceChoice choose_device(std::span<const RankView> ranks, int rank) { return Plan(ranks).choice_of(rank); }

}  // namespace lockstep::session
