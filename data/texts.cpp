// texts:DIR, a folder of text files for each class.
#include "base/error.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/labelled_texts.h"
#include "data/text_file.h"
#include "lockstep/data/families.h"

namespace lockstep::data {
namespace {

std::vector<TextRow> read_texts(const FileList& list) {
  std::vector<TextRow> rows;
  for (std::uint64_t i = 0; i < list.size(); ++i) {
    const TextFile file(list.path(i));
    rows.push_back(
        {.first = std::string(file.text()), .second = {}, .label = list.label(i), .source = printable(list.path(i))});
  }
  return rows;
}

}  // namespace

const DatasetFamily& texts_family() {
  static const DatasetFamily family = {
      .name = "texts",
      .argument = "DIR",
      .about = "text files, one folder per class",
      .remedy = "a directory with a folder for each class",
      .has_tokens = true,
      .open = [](const std::string&, const std::string& directory, const OpenOptions& options) {
        const FileParts parts = list_parts(directory, text_files(), options.parts);
        TextRows rows = {.name = "texts " + printable(parts.directory),
                         .classes = parts.classes,
                         .pairs = false,
                         .train = read_texts(parts.train),
                         .validation = read_texts(parts.validation),
                         .test = read_texts(parts.test)};
        if (!parts.divided && !options.parts.whole) hold_out(rows);
        DataSplits splits = open_labelled_texts(std::move(rows), options);
        if (parts.test_validates && options.parts.test) splits.test = splits.validation;
        return splits;
      }};
  return family;
}

}  // namespace lockstep::data
