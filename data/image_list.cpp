#include "data/image_list.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr const char* kLayout = "a data set images:DIR is a directory with a folder of images for each class";
constexpr std::array<std::string_view, 3> kRead = {".jpg", ".jpeg", ".png"};
// Which torchvision would read, or people might expect.
constexpr std::array<std::string_view, 9> kNotRead = {".ppm",  ".bmp", ".pgm", ".tif", ".tiff",
                                                      ".webp", ".gif", ".jp2", ".avif"};

[[noreturn]] void refuse(const std::string& path, const std::string& why, const std::string& remedy = kLayout) {
  throw IoError(fmt::format("{}: {}", printable(path), why), remedy);
}

std::string suffix_of(const std::string& name) {
  const auto dot = name.rfind('.');
  if (dot == std::string::npos) return {};
  std::string suffix = name.substr(dot);
  for (char& c : suffix)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return suffix;
}

// The entries of `directory` except hidden ones, in no order: names, and whether each is a directory.
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

// The images in one class's folder and those within.
class Walk {
 public:
  explicit Walk(std::string folder) : folder_(std::move(folder)) { enter(folder_, ""); }

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
    if (open_.size() >= kDeepest) refuse(folder, "folders lie within each other more than 64 deep");
    open_.push_back(id);
    for (auto& [name, is_directory] : entries_of(folder)) {
      const std::string suffix = suffix_of(name);
      if (is_directory) {
        enter(folder + "/" + name, within.empty() ? name : within + "/" + name);
      } else if (std::ranges::find(kRead, suffix) != kRead.end()) {
        found[within].push_back(std::move(name));
      } else if (std::ranges::find(kNotRead, suffix) != kNotRead.end()) {
        if (not_read++ == 0) first_not_read = folder + "/" + name;
      }
    }
    open_.pop_back();
  }

  std::string folder_;
  std::vector<std::pair<dev_t, ino_t>> open_;  // the folders around
};

void warn_of(std::uint64_t not_read, const std::string& first, const std::string& directory) {
  if (not_read > 0)
    log_warn("{}: {} image{} of types that are not read, such as {}: convert them to JPEG or PNG", printable(directory),
             not_read, not_read == 1 ? "" : "s", printable(first));
}

}  // namespace

std::string printable(std::string_view text) {
  std::string line(text);
  for (char& c : line)
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = '?';
  return line;
}

std::vector<std::string> list_classes(const std::string& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error))
    refuse(directory,
           error                          ? error.message()
           : fs::exists(directory, error) ? "not a directory"
                                          : "no such directory",
           directory.starts_with('~') ? "shells expand ~ only at the start of a word: write images:$HOME/…" : kLayout);
  std::vector<std::string> classes;
  bool images = false;
  for (auto& [name, is_directory] : entries_of(directory)) {
    images |= !is_directory && std::ranges::find(kRead, suffix_of(name)) != kRead.end();
    if (is_directory) classes.push_back(std::move(name));
  }
  if (classes.empty())
    refuse(directory, images ? "it holds images, but no folders: their classes are not known" : "it holds no folders");
  std::ranges::sort(classes);
  return classes;
}

ImageList list_images(const std::string& directory, const std::vector<std::string>& classes) {
  ImageList list(directory);
  std::uint64_t not_read = 0;
  std::string first_not_read;
  for (std::size_t label = 0; label < classes.size(); ++label) {
    const std::string& name = classes[label];
    Walk walk(directory + "/" + name);
    if (not_read == 0) first_not_read = walk.first_not_read;
    not_read += walk.not_read;
    if (walk.found.empty())
      refuse(directory + "/" + name,
             walk.not_read > 0 ? fmt::format("the class has no JPEG or PNG, only other images, such as {}",
                                             printable(walk.first_not_read))
                               : "the class has no images",
             "add some (.jpg, .jpeg, .png), or remove the folder");
    for (auto& [within, names] : walk.found) {
      std::ranges::sort(names);
      for (const std::string& file : names)
        list.add(within.empty() ? name + "/" + file : name + "/" + within + "/" + file,
                 static_cast<std::int32_t>(label));
    }
  }
  warn_of(not_read, first_not_read, directory);
  return list;
}

ImageList list_all_images(const std::string& directory) {
  ImageList list(directory);
  Walk walk(directory);
  if (walk.found.empty())
    refuse(directory,
           walk.not_read > 0
               ? fmt::format("it has no JPEG or PNG, only other images, such as {}", printable(walk.first_not_read))
               : "it has no images",
           "give a file, or a directory with .jpg, .jpeg or .png files");
  warn_of(walk.not_read, walk.first_not_read, directory);
  for (auto& [within, names] : walk.found) {
    std::ranges::sort(names);
    for (const std::string& file : names) list.add(within.empty() ? file : within + "/" + file, 0);
  }
  return list;
}

}  // namespace lockstep::data
