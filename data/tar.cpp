// tar:SHARDS, images in archives with webdataset's layout.
#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/images.h"
#include "data/tar_index.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

// Note [Indexed archives]
// webdataset reads archives from front to back, so it shuffles within a buffer, and hands whole archives to ranks. Here
// their headers are read once, when they are opened: where each image lies takes some bytes of memory. Then samples are
// drawn as from folders, in the sampler's order over all of them: shuffled as a whole, each exactly once on any number
// of ranks, resumed anywhere. So archives cannot be compressed.

namespace fs = std::filesystem;

namespace {

constexpr const char* kLayout =
    "samples are KEY.jpg or KEY.png and KEY.cls, the class's number, next to each other: webdataset's layout";
// More archives are opened for each read: processes may have a thousand files open.
constexpr std::size_t kMostOpen = 256;

enum class Part { kTrain, kValidation, kTest };

struct Shard {
  std::string path;
  Part part = Part::kTrain;
};

/// "imagenet-val-000123.tar": the last word before the number.
Part part_of(const std::string& path) {
  std::string stem = lower_case(fs::path(path).stem().string());
  while (!stem.empty() && std::string_view("0123456789-_.").find(stem.back()) != std::string_view::npos)
    stem.pop_back();
  const std::string word = stem.substr(stem.find_last_of("-_.") + 1);  // all of it, where there is none
  if (word == "val" || word == "valid" || word == "validation") return Part::kValidation;
  return word == "test" ? Part::kTest : Part::kTrain;
}

std::vector<std::string> archives_in(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& [name, ignored] : entries_of(directory))
    if (name.ends_with(".tar")) paths.push_back(directory + "/" + name);
  std::ranges::sort(paths);
  return paths;
}

/// "a-{000..012}.tar": a-000.tar to a-012.tar, as shells and webdataset write it.
std::vector<std::string> expanded(const std::string& pattern) {
  const auto open = pattern.find('{'), close = pattern.find('}', open), dots = pattern.find("..", open);
  if (open == std::string::npos || close == std::string::npos || dots == std::string::npos || dots > close)
    return {pattern};
  const std::string low = pattern.substr(open + 1, dots - open - 1);
  const auto first = parse_int(low), last = parse_int(pattern.substr(dots + 2, close - dots - 2));
  constexpr std::int64_t kMost = 1'000'000;
  if (!first || !last || *first < 0 || *last < *first || *last > kMost)
    throw UsageError(fmt::format("'{}' is no range of archives", printable(pattern)),
                     "give it as in train-{000..012}.tar");
  std::vector<std::string> all;
  for (std::int64_t i = *first; i <= *last; ++i)
    for (const std::string& rest : expanded(pattern.substr(close + 1)))
      all.push_back(fmt::format("{}{:0{}}{}", pattern.substr(0, open), i, low.size(), rest));
  return all;
}

std::vector<Shard> shards_of(const std::string& argument) {
  std::vector<Shard> shards;
  for (const std::string& piece : split(argument, ',')) {
    if (piece.empty())
      throw UsageError(fmt::format("data 'tar:{}' has a comma without an archive", printable(argument)),
                       "give archives with one comma between them");
    std::string path = piece;
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      for (std::string& name : expanded(path)) shards.push_back({name, part_of(name)});
      continue;
    }
    std::vector<std::string> names = archives_in(path);
    for (const std::string& name : names) shards.push_back({name, part_of(name)});
    if (!names.empty()) continue;
    static constexpr std::array<std::pair<const char*, Part>, 3> kFolders = {
        {{"train", Part::kTrain}, {"val", Part::kValidation}, {"test", Part::kTest}}};
    bool found = false;
    for (const auto& [folder, part] : kFolders) {
      if (!fs::is_directory(path + "/" + folder, error)) continue;
      for (const std::string& name : archives_in(path + "/" + folder)) {
        shards.push_back({name, part});
        found = true;
      }
    }
    if (!found)
      throw IoError(
          fmt::format("{}: neither it nor folders train, val and test in it have .tar files", printable(path)),
          "give archives, a directory of them, or a range such as train-{000..012}.tar");
  }
  return shards;
}

/// The images of some archives.
class Archives final : public ImageSource {
 public:
  explicit Archives(const std::vector<Shard>& shards, Part part) {
    for (const Shard& shard : shards)
      if (shard.part == part) paths_.push_back(shard.path);
    for (std::size_t i = 0; i < paths_.size(); ++i) {
      RandomAccessFile file(paths_[i]);
      index(static_cast<std::uint32_t>(i), file);
      if (paths_.size() <= kMostOpen) open_.push_back(std::move(file));
    }
  }

  std::uint64_t size() const override { return samples_.size(); }
  std::string name(std::uint64_t i) const override {
    const std::uint64_t begin = i == 0 ? 0 : samples_[i - 1].name_end;
    return paths_[samples_[i].shard] + "/" + names_.substr(begin, samples_[i].name_end - begin);
  }
  std::int32_t label(std::uint64_t i) const override { return samples_[i].label; }
  void read(std::uint64_t i, std::vector<std::byte>& bytes) const override {
    const Sample& sample = samples_[i];
    const auto take = [&](const RandomAccessFile& file) {
      const auto read = file.read(sample.offset, sample.bytes);
      bytes.assign(read.begin(), read.end());
    };
    open_.empty() ? take(RandomAccessFile(paths_[sample.shard])) : take(open_[sample.shard]);
  }

  int classes() const { return classes_; }

 private:
  struct Sample {
    std::uint64_t offset = 0, name_end = 0;
    std::uint32_t bytes = 0, shard = 0;
    std::int32_t label = 0;
  };
  /// What has been found of the sample whose members are coming.
  struct Found {
    std::string key;
    std::string image;  // its name
    std::uint64_t offset = 0, bytes = 0;
    bool exact = false;  // "KEY.jpg", and not "KEY.thumb.jpg"
    std::optional<std::int64_t> label;
    bool any = false;
  };

  [[noreturn]] static void fail(const RandomAccessFile& file, std::string_view name, const std::string& why) {
    throw IoError(fmt::format("{}: {}: {}", printable(file.path()), printable(name), why), kLayout);
  }

  void index(std::uint32_t shard, const RandomAccessFile& file) {
    Found found;
    const std::size_t before = samples_.size();
    read_tar(file, [&](const TarMember& member) {
      const std::string_view name = member.name.substr(member.name.starts_with("./") ? 2 : 0);
      const auto base = name.rfind('/') == name.npos ? 0 : name.rfind('/') + 1, dot = name.find('.', base);
      if (dot == name.npos || dot == base) return;  // of no sample, as for webdataset: README, .DS_Store
      const std::string_view key = name.substr(0, dot);
      if (key != found.key) {
        end_sample(found, shard, file);
        found = Found();
        found.key = key;
      }
      take(found, lower_case(std::string(name.substr(dot))), name, member, file);
    });
    end_sample(found, shard, file);
    if (samples_.size() == before) throw IoError(fmt::format("{}: it has no sample", printable(file.path())), kLayout);
  }

  static void take(Found& found, const std::string& end, std::string_view name, const TarMember& member,
                   const RandomAccessFile& file) {
    if (end == ".cls") {
      if (found.label) fail(file, name, "a second class of the same sample");
      constexpr std::uint64_t kMostDigits = 64;
      std::string text;
      if (member.bytes <= kMostDigits) {
        const auto bytes = file.read(member.offset, static_cast<std::size_t>(member.bytes));
        text = trim({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      }
      found.label = parse_int(text);
      if (!found.label || *found.label < 0 || *found.label >= kMostClasses)
        fail(file, name, fmt::format("'{}' is no class: a number from 0", printable(text)));
      return;
    }
    const auto& ends = image_files().ends;
    const bool exact = std::ranges::find(ends, std::string_view(end)) != ends.end();
    if (!exact && std::ranges::none_of(ends, [&](std::string_view one) { return end.ends_with(one); })) return;
    if (!found.image.empty() && found.exact == exact)
      fail(file, name, fmt::format("a second image of the same sample, besides {}", printable(found.image)));
    if (found.exact) return;
    if (member.bytes > kMostImageBytes) fail(file, name, fmt::format("an image of {} bytes", member.bytes));
    found.image = name;
    found.offset = member.offset;
    found.bytes = member.bytes;
    found.exact = exact;
  }

  void end_sample(const Found& found, std::uint32_t shard, const RandomAccessFile& file) {
    if (found.image.empty() && !found.label) return;  // of something else
    if (found.image.empty()) fail(file, found.key, "a class without a JPEG or PNG");
    if (!found.label) fail(file, found.image, "an image without a class");
    names_ += found.image;
    samples_.push_back({.offset = found.offset,
                        .name_end = names_.size(),
                        .bytes = static_cast<std::uint32_t>(found.bytes),
                        .shard = shard,
                        .label = static_cast<std::int32_t>(*found.label)});
    classes_ = std::max(classes_, samples_.back().label + 1);
  }

  static constexpr std::int64_t kMostClasses = 1 << 20;
  std::vector<std::string> paths_;
  std::vector<RandomAccessFile> open_;  // by shard; empty: they are too many
  std::vector<Sample> samples_;
  std::string names_;  // joined
  int classes_ = 0;
};

}  // namespace

DataSplits open_tar(const std::string& argument, ImagesOptions options) {
  std::vector<Shard> shards = shards_of(argument);
  const auto has = [&](Part part) {
    return std::ranges::any_of(shards, [&](const Shard& s) { return s.part == part; });
  };
  // One part alone is divided as all are that have no parts.
  const bool divided = has(Part::kTrain) && has(Part::kValidation);
  if (!divided && !has(Part::kTrain))
    for (Shard& shard : shards) shard.part = Part::kTrain;
  const auto train = std::make_shared<const Archives>(shards, Part::kTrain);
  const auto validation = std::make_shared<const Archives>(shards, Part::kValidation);
  const bool tests = has(Part::kTest);
  if (tests && !options.parts.test)
    log_info("tar {}: the archives for tests are left untouched: lockstep eval --split test measures them",
             printable(argument));
  const auto test =
      std::make_shared<const Archives>(tests && options.parts.test ? shards : std::vector<Shard>(), Part::kTest);
  const int classes = std::max({train->classes(), validation->classes(), test->classes()});
  if (options.classes > 0 && options.classes < classes)
    throw UsageError(fmt::format("--classes {} for {}, whose largest class is {}", options.classes, printable(argument),
                                 classes - 1),
                     fmt::format("leave --classes out, or give {} or more", classes));
  if (options.classes == 0) options.classes = classes;
  const std::string name = fmt::format("tar {}", printable(argument));
  const auto all = [&](const char* part, const std::shared_ptr<const Archives>& source) {
    return images_of(name + part, source, all_of(*source, argument), {}, options);
  };
  if (divided)
    return {.train = all(" train", train),
            .validation = all(" validation", validation),
            .test = test->size() > 0 ? all(" test", test) : nullptr};
  if (options.parts.whole) return {.whole = all("", train)};
  std::vector<std::uint32_t> mine, others;
  for (const std::uint32_t i : all_of(*train, argument)) (is_held_out(i) ? others : mine).push_back(i);
  if (mine.empty() || others.empty())
    throw IoError(fmt::format("{}: {} images are too few: one of ten is for validation", name, train->size()),
                  "give more, or archives called …-train-….tar and …-val-….tar");
  return {.train = images_of(name + " train", train, std::move(mine), {}, options),
          .validation = images_of(name + " validation", train, std::move(others), {}, options)};
}

const DatasetFamily& tar_family() {
  static const DatasetFamily family = {
      .name = "tar",
      .argument = "SHARDS",
      .about = "JPEG and PNG in .tar files, with webdataset's layout",
      .remedy = "archives, a directory of them, or a range such as train-{000..012}.tar",
      .settings = image_settings(),
      .any_image_size = true,
      .open = [](const std::string&, const std::string& argument,
                 const OpenOptions& options) { return open_tar(argument, images_options(options)); },
      .files =
          [](const std::string& argument) {
            std::vector<std::string> paths;
            for (const Shard& shard : shards_of(argument)) paths.push_back(shard.path);
            return paths;
          }};
  return family;
}

}  // namespace lockstep::data
