#include "trainer/resume.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/json_value.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"
#include "data/text.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

using checkpoint::CheckpointManifest;
using checkpoint::Facts;
using checkpoint::find_fact;
using data::Dataset;
using Json = nlohmann::json;

constexpr std::uint64_t kDigests = 64;
constexpr std::size_t kDigits = 16;  // of a SHA-256
// How many samples are read: all, where their values take no more than this, …
constexpr std::uint64_t kMostBytes = std::uint64_t{8} << 20;
constexpr std::uint64_t kMostFiles = 1024;  // … or, of those that may be a file each, are no more than that
constexpr std::size_t kMostText = 64 * 1024;
constexpr int kDeepest = 2;

Json class_names(const Dataset& dataset) { return dataset.class_names(); }

Json class_counts(const Dataset& dataset) { return dataset.info().class_counts; }

Json alphabet(const Dataset& dataset) {
  Json all = Json::array();
  if (dataset.characters() == nullptr) return all;
  const std::string text = dataset.characters()->text();
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at + 1;
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) ++end;
    all.push_back(text.substr(at, end - at));
    at = end;
  }
  return all;
}

/// i · whole / parts, of i <= parts.
std::uint64_t share(std::uint64_t i, std::uint64_t whole, std::uint64_t parts) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(i) * whole / parts);
}

Json sampled(const Dataset& dataset) {
  const std::uint64_t bytes_each = sizeof(float) * (dataset.sample_elements() + dataset.targets_per_sample());
  std::uint64_t most = kMostBytes / std::max<std::uint64_t>(bytes_each, 1);
  if (dataset.image() != nullptr) most = std::min(most, kMostFiles);
  const std::uint64_t count = std::min(std::max(most, kDigests), dataset.size());
  const std::uint64_t parts = std::min(kDigests, count);
  Json digests = Json::array();
  std::vector<std::byte> bytes;
  for (std::uint64_t part = 0; part < parts; ++part) {
    Sha256 hash;
    for (std::uint64_t i = share(part, count, parts); i < share(part + 1, count, parts); ++i) {
      bytes.clear();
      dataset.append_source(share(i, dataset.size(), count), bytes);
      hash.update(bytes);
    }
    digests.push_back(hash.finish().substr(0, kDigits));
  }
  return digests;
}

/// The first place at which they differ, and how many do; both are of one length.
struct Places {
  std::size_t first = 0, count = 0;

  Places(const Json& there, const Json& here) {
    for (std::size_t i = there.size(); i-- > 0;)
      if (there[i] != here[i]) first = i, ++count;
  }
  /// ", and 3 more are others"
  std::string others() const { return count > 1 ? fmt::format(", and {} more differ", count - 1) : std::string(); }
};

std::string shown(const Json& value) { return printable(value.is_string() ? value.get<std::string>() : value.dump()); }

std::string differing_names(const Json& there, const Json& here) {
  const Places places(there, here);
  return fmt::format("class {} is '{}' there and '{}' here{}", places.first, shown(there[places.first]),
                     shown(here[places.first]), places.others());
}

std::string differing_counts(const Json& there, const Json& here) {
  const Places places(there, here);
  return fmt::format("class {} has {} samples there and {} here{}", places.first, shown(there[places.first]),
                     shown(here[places.first]), places.others());
}

std::string differing_alphabet(const Json& there, const Json& here) {
  const auto lacking = [](const Json& some, const Json& others) {
    std::vector<std::string> found;
    for (const Json& one : some)
      if (std::ranges::find(others, one) == others.end()) found.push_back(fmt::format("'{}'", shown(one)));
    constexpr std::size_t kShown = 5;
    if (found.size() > kShown) {
      found.resize(kShown);
      found.emplace_back("…");
    }
    return found.empty() ? std::string("nothing") : join(found, ", ");
  };
  return fmt::format("the alphabet has {} there and {} here", lacking(there, here), lacking(here, there));
}

std::string differing_samples(const Json& there, const Json& here) {
  return fmt::format("{} of {} digests of its samples are others", Places(there, here).count, there.size());
}

struct Fact {
  const char* name;
  Json (*of)(const Dataset& dataset);                               // an array; empty: there is nothing to say
  std::string (*differences)(const Json& there, const Json& here);  // of arrays of one length that are not the same
  bool is_meaning_of_tokens = false;
};

constexpr Fact kFacts[] = {
    {"class names", class_names, differing_names},
    {"samples of classes", class_counts, differing_counts},
    {"alphabet", alphabet, differing_alphabet, /*is_meaning_of_tokens=*/true},
    {"digests", sampled, differing_samples},
};

std::string text_of(const Json& all) {
  const std::string text = all.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  if (text.size() <= kMostText) return text;
  Sha256 hash;
  hash.update(text);
  return fmt::format("{} of them, sha256 {}", all.size(), hash.finish());
}

std::optional<Json> array_in(const std::string& text) {
  try {
    Json all = parse_json(text, kDeepest);
    if (all.is_array()) return all;
  } catch (const JsonError&) {  // a digest of many
  }
  return std::nullopt;
}

std::string difference(const Fact& fact, const std::string& there, const std::string& here) {
  const auto all_there = array_in(there), all_here = array_in(here);
  if (!all_there || !all_here) return fmt::format("{} differ", fact.name);
  const bool as_many = all_there->size() == all_here->size();
  if (!as_many) return fmt::format("{}: {} there and {} here", fact.name, all_there->size(), all_here->size());
  return fact.differences(*all_there, *all_here);
}

}  // namespace

Facts data_facts_of(const Dataset& dataset) {
  Facts facts;
  for (const Fact& fact : kFacts)
    if (const Json all = fact.of(dataset); !all.empty()) facts.emplace_back(fact.name, text_of(all));
  return facts;
}

Facts data_facts_of(const Dataset& dataset, comm::ProcessGroup& group) {
  CheckpointManifest mine;
  comm::run_collectively(group, [&] {
    if (group.rank() == 0) mine.data = data_facts_of(dataset);
  });
  // Encoded as in a checkpoint, so that bytes that are not UTF-8 compare as they will be read from one.
  const auto all = group.all_gather_text(group.rank() == 0 ? encode(mine) : std::string());
  return checkpoint::decode_checkpoint_manifest(all[0], "what rank 0 says of its data").data;
}

void check_same_data(const Facts& there, const Facts& here, const std::string& path, bool accepted) {
  std::vector<std::string> differing;
  bool other_tokens = false;
  for (const Fact& fact : kFacts) {
    const std::string *const then = find_fact(there, fact.name), *const now = find_fact(here, fact.name);
    if (!then || !now || *then == *now) continue;
    differing.push_back(difference(fact, *then, *now));
    other_tokens = other_tokens || fact.is_meaning_of_tokens;
  }
  if (differing.empty()) {
    if (accepted) log_info("checkpoint {} is of the same data: --resume-data-changed was not needed", path);
    return;
  }
  const std::string what = fmt::format("checkpoint {} is of other data: {}", path, join(differing, "; "));
  if (accepted && !other_tokens) return log_warn("{}; training continues on these", what);
  throw CheckpointError(
      what, other_tokens ? "give the text that it was made with: other tokens mean something else to the model; to "
                           "train a new one, leave --resume out and give another --checkpoint-dir"
                         : "give the data that it was made with, or add --resume-data-changed to train on with these");
}

// Ranks come upon the same files in different epochs: the largest number is the nearest to that of files.
void warn_of_corrupt(const data::DataSplits& splits, comm::ProcessGroup& group) {
  for (const auto& dataset : {splits.train, splits.validation}) {
    if (dataset == nullptr) continue;
    const auto counts = group.all_gather_numbers(static_cast<std::int64_t>(dataset->corrupt()));
    const std::int64_t most = *std::ranges::max_element(counts);
    if (most == 0 || group.rank() != 0) continue;
    log_warn("{}: {} of {} samples {} corrupt{}: others took their places, and the warnings above name them",
             dataset->name(), most, dataset->size(), most == 1 ? "is" : "are",
             group.size() == 1 ? "" : ", or more, where no rank saw all of them");
  }
}

}  // namespace lockstep::trainer
