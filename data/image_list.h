// The images of a directory that has a folder for each class.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

/// Paths and classes of many files, in little memory.
class ImageList {
 public:
  explicit ImageList(std::string directory) : directory_(std::move(directory)) {}

  void add(std::string_view path, std::int32_t label) {
    paths_ += path;
    ends_.push_back(paths_.size());
    labels_.push_back(label);
  }

  const std::string& directory() const { return directory_; }
  std::uint64_t size() const { return ends_.size(); }
  /// The whole path of file i.
  std::string path(std::uint64_t i) const {
    const std::uint64_t begin = i == 0 ? 0 : ends_[i - 1];
    return directory_ + "/" + paths_.substr(begin, ends_[i] - begin);
  }
  std::int32_t label(std::uint64_t i) const { return labels_[i]; }

 private:
  std::string directory_;
  std::string paths_;  // joined, relative to the directory
  std::vector<std::uint64_t> ends_;
  std::vector<std::int32_t> labels_;
};

/// The folders in `directory`, sorted: the classes. Hidden ones (.name) are none. Links are followed. Throws IoError
/// naming `directory` if it cannot be read or has none.
std::vector<std::string> list_classes(const std::string& directory);

/// All *.jpg, *.jpeg and *.png (of any case) in the folders that `classes` names and in folders within those, in the
/// order of torchvision's ImageFolder; hidden ones are left out, and so are images of other types, which a warning
/// says. Files are not opened. Throws IoError for folders that cannot be read, have no image or contain themselves.
ImageList list_images(const std::string& directory, const std::vector<std::string>& classes);

/// All images in `directory` and the folders within it, without classes, as list_images() has them. Throws IoError
/// where there are none.
ImageList list_all_images(const std::string& directory);

/// `text` on one line, whatever is in it: a file may be called anything.
std::string printable(std::string_view text);

}  // namespace lockstep::data
