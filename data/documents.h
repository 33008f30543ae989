// What text:FILE,… reads: texts, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_file.h"
#include "data/vocabulary.h"

namespace lockstep::data {

/// The texts of files, which several commas separate. A file is one text; one called .jsonl or .ndjson (and .gz) has
/// one in the member "text" of each line's JSON object. A single file that is one text is it as it stands; of others
/// each ends with the vocabulary's token for that, or, where it has none, with the end of a line.
class Documents {
 public:
  /// Throws IoError as TextFile does, and naming file and line for lines that are no such objects.
  explicit Documents(const std::string& files);
  Documents(const Documents&) = delete;
  Documents& operator=(const Documents&) = delete;

  const std::string& name() const { return name_; }  // for people
  /// Of all texts in UTF-8.
  std::size_t bytes() const;
  /// All of them, with the ends of lines that are added.
  std::string_view joined() const { return joined_; }
  /// IoError as Vocabulary::encode(), naming the file and the line.
  std::vector<std::int32_t> encode(const Vocabulary& vocabulary) const;

 private:
  struct Text {
    std::string source;
    std::size_t begin = 0, bytes = 0;  // in joined_, without what ends it
  };
  void add(std::string source, std::string_view text);
  void add_lines(const std::string& path);

  std::string name_;
  bool alone_ = false;              // a single file, as it stands
  std::unique_ptr<TextFile> file_;  // that one
  std::string memory_;
  std::string_view joined_;
  std::vector<Text> texts_;
};

/// The files that text:FILE,… names.
std::vector<std::string> document_files(const std::string& files);

}  // namespace lockstep::data
