// The files of a directory that has a folder for each class: images, texts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/data/open.h"

namespace lockstep::data {

/// Which files are listed, by how their names end, in lower case; any case fits.
struct FileKind {
  const char* one;                         // "image"
  const char* types;                       // "JPEG or PNG"
  std::span<const std::string_view> ends;  // ".jpg"
  /// Others of the kind, which people might expect to be read: a warning says that they are not.
  std::span<const std::string_view> not_read = {};
  const char* family;       // "images": of the data set's name
  bool takes_test = false;  // DIR/test may take DIR/val's place

  /// ".jpg, .jpeg or .png"
  std::string listed_ends() const;
};
/// JPEG and PNG.
const FileKind& image_files();
/// *.txt.
const FileKind& text_files();

/// Paths and classes of many files, in little memory.
class FileList {
 public:
  explicit FileList(std::string directory) : directory_(std::move(directory)) {}

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

/// The entries of `directory` except hidden ones, in no order: names, and whether each is a directory. Throws IoError
/// naming it if it cannot be read.
std::vector<std::pair<std::string, bool>> entries_of(const std::string& directory);

/// The folders in `directory`, sorted: the classes. Hidden ones (.name) are none. Links are followed. Throws IoError
/// naming `directory` if it cannot be read or has none.
std::vector<std::string> list_classes(const std::string& directory, const FileKind& kind);

/// All files of `kind` in the folders that `classes` names and in folders within those, in the order of torchvision's
/// ImageFolder; hidden ones are left out, and so are those of other types, which a warning says. Files are not opened.
/// Throws IoError for folders that cannot be read, have no such file or contain themselves.
FileList list_files(const std::string& directory, const std::vector<std::string>& classes, const FileKind& kind);

/// All of `kind` in `directory` and the folders within it, without classes, as list_files() has them. Throws IoError
/// where there are none.
FileList list_all_files(const std::string& directory, const FileKind& kind);

/// Throws UsageError for a class, found at `place`, that is none of Parts::class_names.
[[noreturn]] void refuse_class(const std::string& place, const std::string& name,
                               const std::vector<std::string>& known);

/// A directory of files for training, validation and tests. The lists have the classes' numbers.
struct FileParts {
  std::string directory;  // as it was given, without a slash at its end
  std::vector<std::string> classes;
  bool divided = false;         // into folders; else all files are in `train`
  bool test_validates = false;  // DIR/test is `validation`
  FileList train, validation, test;
};
inline constexpr std::uint64_t kNthForValidation = 10;
/// The 10th, the 20th, …
inline bool is_for_validation(std::uint64_t i) { return i % kNthForValidation == kNthForValidation - 1; }
/// One of each ten consecutive ones, which is a pure function of their number, without a pattern: for rows, whose
/// classes may alternate.
bool is_held_out(std::uint64_t i);
/// DIR/train and DIR/val where both are there (of texts DIR/test too, in place of val), else DIR itself, in which every
/// tenth file of the sorted list is for validation unless it stays whole. DIR/test beside the two is listed if `parts`
/// asks for it; otherwise a line says that it is there. Throws IoError as list_files() does, if a part has a folder
/// that is no class, and if a tenth is no file.
FileParts list_parts(const std::string& directory, const FileKind& kind, const Parts& parts);

}  // namespace lockstep::data
