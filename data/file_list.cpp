#include "data/file_list.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/splitmix.h"
#include "base/text.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr std::array<std::string_view, 3> kImageEnds = {".jpg", ".jpeg", ".png"};
// Which torchvision would read, or people might expect.
constexpr std::array<std::string_view, 9> kOtherImages = {".ppm",  ".bmp", ".pgm", ".tif", ".tiff",
                                                          ".webp", ".gif", ".jp2", ".avif"};
constexpr std::array<std::string_view, 1> kTextEnds = {".txt"};
constexpr std::array<std::string_view, 7> kOtherTexts = {".text", ".md", ".html", ".xml", ".pdf", ".docx", ".gz"};

std::string layout_of(const FileKind& kind) {
  return fmt::format("a data set {0}:DIR is a directory with a folder of {1}s for each class", kind.family, kind.one);
}

[[noreturn]] void refuse(const std::string& path, const std::string& why, const std::string& remedy) {
  throw IoError(fmt::format("{}: {}", printable(path), why), remedy);
}

bool contains(std::span<const std::string_view> all, std::string_view one) {
  return std::ranges::find(all, one) != all.end();
}

std::string suffix_of(const std::string& name) {
  const auto dot = name.rfind('.');
  if (dot == std::string::npos) return {};
  return lower_case(name.substr(dot));
}

// The files in one class's folder and those within.
class Walk {
 public:
  Walk(std::string folder, const FileKind& kind) : folder_(std::move(folder)), kind_(kind) { enter(folder_, ""); }

  /// Folder within the class ("" or "a/b") → names.
  std::map<std::string, std::vector<std::string>> found;
  std::uint64_t not_read = 0;
  std::string first_not_read;

 private:
  void enter(const std::string& folder, const std::string& within) {
    struct stat status {};
    if (::stat(folder.c_str(), &status) != 0) refuse(folder, errno_text(errno), "check the path and its permissions");
    const std::pair id(status.st_dev, status.st_ino);
    if (std::ranges::find(open_, id) != open_.end()) refuse(folder, "the folder contains itself", "remove the link");
    constexpr std::size_t kDeepest = 64;
    if (open_.size() >= kDeepest) refuse(folder, "folders lie within each other more than 64 deep", layout_of(kind_));
    open_.push_back(id);
    for (auto& [name, is_directory] : entries_of(folder)) {
      const std::string suffix = suffix_of(name);
      if (is_directory) {
        enter(folder + "/" + name, within.empty() ? name : within + "/" + name);
      } else if (contains(kind_.ends, suffix)) {
        found[within].push_back(std::move(name));
      } else if (contains(kind_.not_read, suffix)) {
        if (not_read++ == 0) first_not_read = folder + "/" + name;
      }
    }
    open_.pop_back();
  }

  std::string folder_;
  const FileKind& kind_;
  std::vector<std::pair<dev_t, ino_t>> open_;  // the folders around
};

void warn_of(std::uint64_t not_read, const std::string& first, const std::string& directory, const FileKind& kind) {
  if (not_read > 0)
    log_warn("{}: {} {}{} of types that are not read, such as {}: convert them to {}", printable(directory), not_read,
             kind.one, not_read == 1 ? "" : "s", printable(first), kind.types);
}

bool has_directory(const std::string& directory, const char* name) {
  std::error_code error;
  return fs::is_directory(directory + "/" + name, error);
}

// The files of `directory`, with the places of its folders' names among `classes`, which the folder `where` has; the
// weights, where it is empty.
FileList list_known(const std::string& directory, const std::vector<std::string>& classes, const std::string& where,
                    const FileKind& kind) {
  const auto found = list_classes(directory, kind);
  const FileList own = list_files(directory, found, kind);
  std::vector<std::int32_t> places;
  for (const std::string& name : found) {
    const auto place = std::ranges::find(classes, name);
    if (place == classes.end() && where.empty()) refuse_class(printable(directory), name, classes);
    if (place == classes.end())
      throw IoError(fmt::format("{}/{}: no such class is in {}", printable(directory), printable(name), where),
                    "all parts have the same classes, a folder for each");
    places.push_back(static_cast<std::int32_t>(place - classes.begin()));
  }
  FileList list(directory);
  for (std::uint64_t i = 0; i < own.size(); ++i)
    list.add(own.path(i).substr(directory.size() + 1), places[static_cast<std::size_t>(own.label(i))]);
  return list;
}

// Of a directory that has no classes as folders, but parts, one of which is missing.
[[noreturn]] void refuse_parts(const std::string& directory, const std::vector<std::string>& folders,
                               const FileKind& kind) {
  const bool has_train = std::ranges::count(folders, "train") > 0;
  throw IoError(fmt::format("{}: its folders ({}) are neither classes nor the parts train and val",
                            printable(directory), join(folders, ", ")),
                has_train ? fmt::format("rename the part to validate on to val, or give {}:{}/train: then every tenth "
                                        "{} of it is for validation",
                                        kind.family, printable(directory), kind.one)
                          : fmt::format("call them train and val, or give one itself: {}:{}/{}", kind.family,
                                        printable(directory), folders[0]));
}

}  // namespace

const FileKind& image_files() {
  static const FileKind kind = {
      .one = "image", .types = "JPEG or PNG", .ends = kImageEnds, .not_read = kOtherImages, .family = "images"};
  return kind;
}

const FileKind& text_files() {
  static const FileKind kind = {.one = "text",
                                .types = "plain text (.txt)",
                                .ends = kTextEnds,
                                .not_read = kOtherTexts,
                                .family = "texts",
                                .takes_test = true};
  return kind;
}

std::vector<std::pair<std::string, bool>> entries_of(const std::string& directory) {
  std::vector<std::pair<std::string, bool>> entries;
  std::error_code error;
  fs::directory_iterator at(directory, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    std::string name = at->path().filename().string();
    std::error_code unknown;  // a link to nowhere, which whoever opens it will notice
    if (name.front() != '.') entries.emplace_back(std::move(name), at->is_directory(unknown));
  }
  if (error) refuse(directory, error.message(), "check the path and its permissions");
  return entries;
}

std::string FileKind::listed_ends() const {
  const std::vector<std::string> all(ends.begin(), ends.end());
  return listed(all, "or");
}

std::vector<std::string> list_classes(const std::string& directory, const FileKind& kind) {
  std::error_code error;
  if (!fs::is_directory(directory, error))
    refuse(directory,
           error                          ? error.message()
           : fs::exists(directory, error) ? "not a directory"
                                          : "no such directory",
           directory.starts_with('~')
               ? fmt::format("shells expand ~ only at the start of a word: write {}:$HOME/…", kind.family)
               : layout_of(kind));
  std::vector<std::string> classes;
  bool files = false;
  for (auto& [name, is_directory] : entries_of(directory)) {
    files |= !is_directory && contains(kind.ends, suffix_of(name));
    if (!is_directory && suffix_of(name).empty() && fs::is_symlink(directory + "/" + name, error) &&
        !fs::exists(directory + "/" + name, error))
      refuse(directory + "/" + name, "a link to nowhere, perhaps of a class", "mend the link, or remove it");
    if (is_directory) classes.push_back(std::move(name));
  }
  if (classes.empty())
    refuse(directory,
           files ? fmt::format("it holds {}s, but no folders: their classes are not known", kind.one)
                 : std::string("it holds no folders"),
           layout_of(kind));
  std::ranges::sort(classes);
  return classes;
}

FileList list_files(const std::string& directory, const std::vector<std::string>& classes, const FileKind& kind) {
  FileList list(directory);
  std::uint64_t not_read = 0;
  std::string first_not_read;
  for (std::size_t label = 0; label < classes.size(); ++label) {
    const std::string& name = classes[label];
    Walk walk(directory + "/" + name, kind);
    if (not_read == 0) first_not_read = walk.first_not_read;
    not_read += walk.not_read;
    if (walk.found.empty())
      refuse(directory + "/" + name,
             walk.not_read > 0 ? fmt::format("the class has no {}, only other {}s, such as {}", kind.types, kind.one,
                                             printable(walk.first_not_read))
                               : fmt::format("the class has no {}s", kind.one),
             fmt::format("add some ({}), or remove the folder", kind.listed_ends()));
    for (auto& [within, names] : walk.found) {
      std::ranges::sort(names);
      for (const std::string& file : names)
        list.add(within.empty() ? name + "/" + file : name + "/" + within + "/" + file,
                 static_cast<std::int32_t>(label));
    }
  }
  warn_of(not_read, first_not_read, directory, kind);
  return list;
}

FileList list_all_files(const std::string& directory, const FileKind& kind) {
  FileList list(directory);
  Walk walk(directory, kind);
  if (walk.found.empty())
    refuse(directory,
           walk.not_read > 0 ? fmt::format("it has no {}, only other {}s, such as {}", kind.types, kind.one,
                                           printable(walk.first_not_read))
                             : fmt::format("it has no {}s", kind.one),
           fmt::format("give a file, or a directory with {} files", kind.listed_ends()));
  warn_of(walk.not_read, walk.first_not_read, directory, kind);
  for (auto& [within, names] : walk.found) {
    std::ranges::sort(names);
    for (const std::string& file : names) list.add(within.empty() ? file : within + "/" + file, 0);
  }
  return list;
}

void refuse_class(const std::string& place, const std::string& name, const std::vector<std::string>& known) {
  constexpr std::size_t kShown = 8;
  std::vector<std::string> shown;
  for (const auto& one : std::span(known).first(std::min(known.size(), kShown)))
    shown.push_back(fmt::format("'{}'", printable(one)));
  if (known.size() > kShown) shown.push_back(fmt::format("{} more", known.size() - kShown));
  throw UsageError(
      fmt::format("{}: the weights know no class '{}', but {}", place, printable(utf8_prefix(name, 40)), listed(shown)),
      "use data of these classes; lockstep train --reset-head trains others");
}

bool is_held_out(std::uint64_t i) {
  return mix64(i / kNthForValidation, 0) % kNthForValidation == i % kNthForValidation;
}

FileParts list_parts(const std::string& given, const FileKind& kind, const Parts& wanted) {
  std::string directory = given;
  while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
  const std::string val = directory + "/val", test = directory + "/test";
  const bool has_train = has_directory(directory, "train"), has_test = has_train && has_directory(directory, "test");
  const bool has_val = has_train && has_directory(directory, "val");
  FileParts parts = {.directory = directory,
                     .classes = {},
                     .divided = has_val || (has_test && kind.takes_test),
                     .test_validates = has_test && !has_val && kind.takes_test,
                     .train = FileList(directory),
                     .validation = FileList(val),
                     .test = FileList(test)};
  const std::string train = parts.divided ? directory + "/train" : directory;
  parts.classes = list_classes(train, kind);
  constexpr std::array<std::string_view, 5> kParts = {"train", "val", "test", "valid", "validation"};
  if (!parts.divided &&
      std::ranges::all_of(parts.classes, [&](const auto& name) { return std::ranges::count(kParts, name) > 0; }))
    refuse_parts(directory, parts.classes, kind);
  if (wanted.class_names.empty()) {
    parts.train = list_files(train, parts.classes, kind);
  } else {
    parts.classes = wanted.class_names;
    parts.train = list_known(train, parts.classes, "", kind);
  }
  if (!parts.divided) {
    if (!wanted.whole && parts.train.size() < kNthForValidation)
      throw IoError(fmt::format("{}: {} {}s are too few: every tenth is for validation", printable(directory),
                                parts.train.size(), kind.one),
                    fmt::format("add {}s, or divide them into DIR/train and DIR/val", kind.one));
    return parts;
  }
  parts.validation = list_known(has_val ? val : test, parts.classes, printable(train), kind);
  if (!has_test || parts.test_validates) return parts;
  if (wanted.test)
    parts.test = list_known(test, parts.classes, printable(train), kind);
  else
    log_info("{} is left untouched: lockstep eval --split test measures it", printable(test));
  return parts;
}

}  // namespace lockstep::data
