#include <algorithm>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/codec.h"
#include "base/error.h"
#include "comm/agree.h"
#include "comm/mpi/mpi_group.h"
#include "comm/subgroup.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {
namespace {

/// Note [Splitting]
/// The ranks of a part join through operations of the group that is split, in rounds: in each round every rank of the
/// group sends the values it has set since the last one, and receives those of all others. Ranks whose part is there,
/// or that are in none, take part until all are done, so every rank issues the same operations, however many rounds
/// each part needs. What a rank sets leaves it when it waits for a value next, so members must not wait for each other
/// by other means before that. A split needs no store, no port and no thread, the group itself names ranks that die or
/// do not come, and afterwards the parts do not depend on it.
class Rounds {
 public:
  Rounds(ProcessGroup& group, std::vector<int> members) : group_(group), members_(std::move(members)) {}

  void set(const std::string& key, std::string_view value) {
    values_.insert_or_assign(key, value);
    unsent_.emplace_back(key, value);
  }
  const std::string* find(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second;
  }

  enum class Round { kNothingNew, kSomethingNew };
  /// Whether any of the members has set anything.
  Round exchange() { return exchange(false); }
  /// Takes part until all ranks of the group do this.
  void finish() {
    while (!all_finished_) exchange(true);
  }

 private:
  /// What a rank sends in a round.
  struct NewValues {
    std::uint32_t finished = 0;
    std::vector<std::pair<std::string, std::string>> values = {};

    void fields(auto& io) { io(finished, rest(values)); }
  };

  Round exchange(bool finished) {
    const std::string mine = pack(NewValues{finished ? 1u : 0u, std::exchange(unsent_, {})});
    std::vector<NewValues> all;
    for (const auto& one : group_.all_gather_objects(std::as_bytes(std::span(mine))))
      all.push_back(unpack<NewValues>({reinterpret_cast<const char*>(one.data()), one.size()}));
    all_finished_ = std::ranges::all_of(all, [](const NewValues& one) { return one.finished == 1; });
    Round round = Round::kNothingNew;
    for (const int member : members_)
      for (auto& [key, value] : all[static_cast<std::size_t>(member)].values) {
        values_.insert_or_assign(std::move(key), std::move(value));
        round = Round::kSomethingNew;
      }
    return round;
  }

  ProcessGroup& group_;
  const std::vector<int> members_;
  std::unordered_map<std::string, std::string> values_;  // of the members
  std::vector<std::pair<std::string, std::string>> unsent_;
  bool all_finished_ = false;
};

/// The rendezvous of a part. Its waits are operations of the group that is split, and end by that one's timeout.
class RoundsStore final : public Store {
 public:
  RoundsStore(int rank, int size, const JobRanks& job_ranks, Rounds& rounds)
      : Store(rank, size, job_ranks), rounds_(rounds) {}

  bool lasts() const override { return false; }
  void leave(Deadline) override {}

 private:
  void do_set(const std::string& key, std::string_view value) override { rounds_.set(key, value); }
  std::vector<std::optional<std::string>> do_get(std::span<const std::string> keys, Deadline) override {
    const auto is_set = [&](const std::string& key) { return rounds_.find(key) != nullptr; };
    // All members have the same values after a round. If it brought none, those that still take part wait as this one
    // does, for a rank that has given up.
    while (!std::ranges::all_of(keys, is_set))
      if (rounds_.exchange() == Rounds::Round::kNothingNew)
        throw PeerError(static_cast<int>(ExitCode::kDevice), "another rank of the subgroup has given up");
    std::vector<std::optional<std::string>> values;
    for (const std::string& key : keys) values.emplace_back(*rounds_.find(key));
    return values;
  }
  std::vector<Attendance> attendance() override {
    return std::vector<Attendance>(static_cast<std::size_t>(size()), Attendance{true, false, kUnknownHost});
  }
  void give_up(const TimeoutError&) override {}

  Rounds& rounds_;
};

/// What a rank says of itself at first.
struct Choice {
  int color = -1;
  int key = 0;
  std::string options;  // that the ranks of a part must agree on

  std::string encode() const { return fmt::format("{} {} {}", color, key, options); }
  static Choice decode(const std::string& text) {
    Choice choice;
    std::istringstream in(text);
    in >> choice.color >> choice.key >> std::ws;
    std::getline(in, choice.options);
    return choice;
  }
};

std::vector<int> members_of(int color, const std::vector<Choice>& choices) {
  std::vector<int> members;
  for (std::size_t rank = 0; rank < choices.size(); ++rank)
    if (choices[rank].color == color) members.push_back(static_cast<int>(rank));
  std::ranges::stable_sort(members, {}, [&](int rank) { return choices[static_cast<std::size_t>(rank)].key; });
  return members;
}

/// The same text on all ranks: one of them speaks.
void check_options(const std::vector<int>& members, const std::vector<Choice>& choices) {
  const auto options_of = [&](int rank) { return choices[static_cast<std::size_t>(rank)].options; };
  const auto other =
      std::ranges::find_if(members, [&](int rank) { return options_of(rank) != options_of(members[0]); });
  if (other == members.end()) return;
  throw UsageError(fmt::format("rank {} of the group runs with {}, and rank {}, in the same subgroup, with {}",
                               members[0], options_of(members[0]), *other, options_of(*other)),
                   "make the group with the same options on all ranks");
}

}  // namespace

int ProcessGroup::job_rank(int rank) const {
  if (rank < 0 || rank >= size_)
    throw UsageError(fmt::format("rank {} of a group of {}", rank, size_), "name a rank below ProcessGroup::size()");
  return origin_ == nullptr ? rank : origin_->job_ranks.of(rank);
}

std::unique_ptr<ProcessGroup> ProcessGroup::split(int color, int key) {
  if (origin_ == nullptr)
    throw UsageError(fmt::format("a group over {} is not split", name()),
                     "split the group that make_group() has made, and use a part of it");
  failure_.throw_if_any();
  const Choice mine{
      color, key,
      fmt::format("--backend {}{}", origin_->options.backend, origin_->options.encrypt ? " --encrypt" : "")};
  std::vector<Choice> choices;
  for (const std::string& text : all_gather_text(mine.encode())) choices.push_back(Choice::decode(text));

  const auto members = color < 0 ? std::vector<int>() : members_of(color, choices);
  std::vector<int> in_job;
  for (const int member : members) in_job.push_back(job_rank(member));
  const Subgroup part{*this, store(), members, JobRanks(std::move(in_job)), oversubscribed()};
  std::unique_ptr<ProcessGroup> group;
  const auto make = [&](Rounds& rounds) {
    if (members.empty()) return;
    check_options(members, choices);
    GroupOrigin origin{origin_->world, origin_->options, part.job_ranks};
    origin.world.rank = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
    origin.world.size = static_cast<int>(members.size());
    origin.world.mpi_joins = has_mpi(part.parent_store);
    if (members.size() == 1) {
      group = std::make_unique<SelfGroup>(timeout_);
    } else {
      std::unique_ptr<Store> store =
          std::make_unique<RoundsStore>(origin.world.rank, origin.world.size, part.job_ranks, rounds);
      group = make_joined_group(origin.world, origin.options, store, &part);
    }
    GroupOrigin::set(*group, std::move(origin));
  };
  // Whatever fails in a part, its ranks take part in the rounds until all are done.
  run_collectively(*this, [&] {
    Rounds rounds(*this, members);
    try {
      make(rounds);
    } catch (...) {
      rounds.finish();
      throw;
    }
    rounds.finish();
  });
  return group;
}

}  // namespace lockstep::comm
