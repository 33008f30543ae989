// Tables: what is read is written, with all fields in quotes, so that it is read the same; and whole files, in whatever
// bytes, with the choice of their columns, as texts and as
// numbers and categories.
#include "data/table_file.h"

#include "data/table.h"
#include "data/table_schema.h"
#include "data/text_table.h"

#include "tests/fuzz/fuzz.h"

namespace {

using Rows = std::vector<std::vector<std::string>>;

Rows rows_of(std::string_view text) {
  lockstep::data::CsvReader reader(text, ',', "input");
  Rows rows;
  std::vector<std::string> fields;
  while (reader.next(fields)) rows.push_back(fields);
  return rows;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = lockstep::fuzz::file_of(data, size);
  lockstep::fuzz::parse([&] {
    const auto table = lockstep::data::read_text_table(path, {});
    if (table.labels.size() != table.rows.size() || table.texts.empty() || table.texts.size() > 2) std::abort();
  });
  lockstep::fuzz::parse([&] {
    const std::string target = lockstep::data::TableFile(path, std::nullopt, /*finds_separator=*/true).names()[0];
    const auto settings = lockstep::resolve(lockstep::data::table_settings(), {{"target", target}}, "a table");
    const auto splits = lockstep::data::open_table(path, {.settings = settings});
    if (splits.train->info().table->columns.empty()) std::abort();
    std::vector<std::byte> bytes;
    for (std::uint64_t i = 0; i < splits.validation->size(); ++i) splits.validation->append_source(i, bytes);
  });
  return lockstep::fuzz::parse([&] {
    const Rows rows = rows_of(lockstep::fuzz::text_of(data, size));
    std::string written;
    for (const auto& fields : rows) {
      for (std::size_t i = 0; i < fields.size(); ++i) {
        written += i > 0 ? ",\"" : "\"";
        for (const char c : fields[i]) written += c == '"' ? std::string("\"\"") : std::string(1, c);
        written += '"';
      }
      written += '\n';
    }
    if (rows_of(written) != rows) std::abort();
  });
}
