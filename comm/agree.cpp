#include "comm/agree.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>

#include "base/error.h"
#include "base/status_report.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/failure.h"

namespace lockstep::comm {
namespace {

/// What a rank's work came to, as the others get to know it.
struct Outcome {
  bool failed = false;
  int code = 0;
  std::string line;

  std::string encode() const { return failed ? fmt::format("{}\n{}", code, line) : std::string(); }
  static Outcome decode(const std::string& text) {
    if (text.empty()) return {};
    const auto newline = text.find('\n');
    return {true, failure_code(parse_int(text.substr(0, newline)).value_or(0)), text.substr(newline + 1)};
  }
};

// Manifests travel as text; these two never occur in names and values.
constexpr char kFieldEnd = '\x1f';
constexpr char kEntryEnd = '\x1e';
constexpr const char* kHostKey = "";  // the entry that carries the host's name

using SortedManifest = std::map<std::string, std::string>;

std::string encode(const Manifest& manifest) {
  std::string text;
  for (const auto& [key, value] : manifest) text += key + kFieldEnd + value + kEntryEnd;
  return text;
}

SortedManifest decode(const std::string& text) {
  SortedManifest manifest;
  for (const std::string& entry : split(text, kEntryEnd)) {
    const auto end = entry.find(kFieldEnd);
    if (end != std::string::npos) manifest[entry.substr(0, end)] = entry.substr(end + 1);
  }
  return manifest;
}

std::string entry_text(const SortedManifest& manifest, const std::string& key) {
  constexpr std::size_t kLongest = 80;
  const auto found = manifest.find(key);
  if (found == manifest.end()) return fmt::format("no {}", key);
  const std::string& value = found->second;
  return fmt::format("{}={}", key, value.size() > kLongest ? value.substr(0, kLongest) + "…" : value);
}

std::vector<std::string> differing_keys(const SortedManifest& a, const SortedManifest& b) {
  SortedManifest all = a;
  all.insert(b.begin(), b.end());
  std::vector<std::string> keys;
  for (const auto& entry : all) {
    const std::string& key = entry.first;
    if (key == kHostKey) continue;
    const auto in_a = a.find(key), in_b = b.find(key);
    if (in_a == a.end() || in_b == b.end() || in_a->second != in_b->second) keys.push_back(key);
  }
  return keys;
}

std::string host_of(const SortedManifest& manifest) {
  const auto found = manifest.find(kHostKey);
  return found == manifest.end() ? "?" : found->second;
}

/// "rank 2 (host b) has lr=0.2, seed=2 where rank 0 (host a) has lr=0.1, seed=1".
std::string difference_text(int rank, const SortedManifest& theirs, const SortedManifest& first,
                            const std::vector<std::string>& keys) {
  constexpr std::size_t kNamed = 5;
  std::vector<std::string> has, wants;
  for (std::size_t i = 0; i < std::min(keys.size(), kNamed); ++i) {
    has.push_back(entry_text(theirs, keys[i]));
    wants.push_back(entry_text(first, keys[i]));
  }
  const std::string more = keys.size() > kNamed ? fmt::format(" (and {} more differ)", keys.size() - kNamed) : "";
  return fmt::format("rank {} (host {}) has {} where rank 0 (host {}) has {}{}", rank, host_of(theirs), join(has, ", "),
                     host_of(first), join(wants, ", "), more);
}

}  // namespace

void run_collectively(ProcessGroup& group, const std::function<void()>& work) {
  Outcome mine;
  std::exception_ptr own;
  try {
    work();
  } catch (const Error& error) {
    mine = {true, error.code(), error.line()};
    own = std::current_exception();
  } catch (const std::bad_alloc& error) {
    mine = {true, static_cast<int>(ExitCode::kDevice), error.what()};
    own = std::current_exception();
  } catch (const std::exception& error) {
    mine = {true, static_cast<int>(ExitCode::kInternal), error.what()};
    own = std::current_exception();
  } catch (...) {
    mine = {true, static_cast<int>(ExitCode::kInternal), "the thrown object is no std::exception"};
    own = std::current_exception();
  }

  const auto texts = group.all_gather_text(mine.encode());
  const auto lowest = std::find_if(texts.begin(), texts.end(), [](const std::string& text) { return !text.empty(); });
  if (lowest == texts.end()) return;
  const int failing_rank = static_cast<int>(lowest - texts.begin());
  const Outcome first = Outcome::decode(*lowest);
  if (own != nullptr && (group.rank() == failing_rank || mine.line != first.line)) std::rethrow_exception(own);
  // This rank may be the first to end, and its code could be of its own device. So the record names the rank that it
  // waited for.
  if (first.code == static_cast<int>(ExitCode::kDevice)) report_missing_ranks({{failing_rank}});
  throw PeerError(first.code, fmt::format("rank {} failed: {}", failing_rank, first.line));
}

std::vector<double> largest_of_ranks(ProcessGroup& group, std::span<const double> mine) {
  std::vector<double> largest(mine.begin(), mine.end());
  const auto all = group.all_gather_objects(std::as_bytes(mine));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() != mine.size_bytes())
      throw OutOfStepError(fmt::format("rank {} has {} values where rank {} has {}", rank,
                                       all[rank].size() / sizeof(double), group.rank(), mine.size()),
                           "let all ranks pass equally many");
    std::vector<double> theirs(mine.size());
    std::ranges::copy(all[rank], std::as_writable_bytes(std::span(theirs)).begin());
    std::ranges::transform(largest, theirs, largest.begin(), [](double a, double b) { return std::max(a, b); });
  }
  return largest;
}

void compare_manifests(ProcessGroup& group, const Manifest& mine) {
  Manifest with_host = mine;
  with_host.emplace_back(kHostKey, host_name());
  const auto texts = group.all_gather_text(encode(with_host));

  const SortedManifest first = decode(texts[0]);
  for (int rank = 1; rank < group.size(); ++rank) {
    const SortedManifest theirs = decode(texts[static_cast<std::size_t>(rank)]);
    const auto keys = differing_keys(first, theirs);
    if (keys.empty()) continue;
    const std::string what = difference_text(rank, theirs, first, keys);
    if (group.rank() == rank) throw OutOfStepError(what, "start every rank with the same binary and options");
    throw PeerError(static_cast<int>(ExitCode::kTimeout), what);
  }
}

devices::Binding bind_to_share(ProcessGroup& group, const EnvLookup& lookup, const devices::Locality& device) {
  const auto claims = group.all_gather_text(devices::binding_claim(lookup, device));
  return devices::bind_to_share(claims, group.rank(), lookup, device);
}

Division divide(std::span<const std::uint64_t> values) {
  std::map<std::uint64_t, std::size_t> counts;
  for (const std::uint64_t value : values) ++counts[value];
  const std::uint64_t* best = nullptr;
  for (const std::uint64_t& value : values)
    if (best == nullptr || counts[value] > counts[*best]) best = &value;
  Division division;
  for (std::size_t rank = 0; rank < values.size(); ++rank)
    (values[rank] == *best ? division.most : division.others).push_back(static_cast<int>(rank));
  return division;
}

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 8;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(ranks.size(), kNamed); ++i) names.push_back(fmt::to_string(ranks[i]));
  const std::string more = ranks.size() > kNamed ? fmt::format(" and {} more", ranks.size() - kNamed) : "";
  return fmt::format("{} {}{}", ranks.size() == 1 ? "rank" : "ranks", join(names, ", "), more);
}

}  // namespace lockstep::comm
