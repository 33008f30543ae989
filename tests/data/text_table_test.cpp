// Tables as people have them: which columns are read, how fields are quoted, and in which bytes they come.
#include "data/text_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include "base/error.h"
#include "data/text_file.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using namespace std::string_literals;

class Tables : public ::testing::Test {
 protected:
  TextTable read(const std::string& text, const TextTableOptions& options = {},
                 const std::string& name = "t.csv") const {
    return read_text_table(directory_.write(name, text), options);
  }
  std::string error(const std::string& text, const TextTableOptions& options = {},
                    const std::string& name = "t.csv") const {
    return testing::refusal_of<Error>([&] { read(text, options, name); });
  }
  static std::vector<std::string> firsts(const TextTable& table) {
    std::vector<std::string> all;
    for (const auto& row : table.rows) all.push_back(row.first);
    return all;
  }

  testing::TemporaryDirectory directory_;
};

std::string gzip(const std::string& text) {
  z_stream stream = {};
  EXPECT_EQ(::deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(text.size() + 100, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(::deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  ::deflateEnd(&stream);
  return packed;
}

std::string utf16(const std::u16string& text, bool little) {
  std::string bytes;
  for (const char16_t unit : text)
    for (const int shift : {little ? 0 : 8, little ? 8 : 0}) bytes += static_cast<char>(unit >> shift & 0xff);
  return bytes;
}

TEST_F(Tables, TabsDoNotQuote) {
  const std::string text = "label\ttext\na\t\"so it goes\nb\tand\nc\ton\"\n";
  for (const char* name : {"t.tsv", "t.TSV", "t.Tsv.GZ"}) {
    SCOPED_TRACE(name);
    const auto table = read(text, {}, name);
    EXPECT_THAT(firsts(table), ElementsAre("\"so it goes", "and", "on\""));
    EXPECT_THAT(table.labels, ElementsAre("a", "b", "c"));
    EXPECT_THAT(table.summary, EndsWith(": 3 rows, the class in 'label', the text in 'text'"));
    const auto quoted = read(text, {.quotes = true}, name);
    EXPECT_THAT(firsts(quoted), ElementsAre("so it goes\nb\tand\nc\ton"));
    EXPECT_THAT(quoted.summary, HasSubstr(": 1 row (1 of several lines, the longest from line 2 to 4), the class"));
  }
  EXPECT_THAT(firsts(read("label,text\na,\"b\n\n", {.quotes = false})), ElementsAre("\"b"));
  EXPECT_THAT(error("label,text\na,\"b\n"), HasSubstr("--quotes no"));
  EXPECT_THAT(error("\"label\"\t\"text\"\n\"a\"\t\"b\"\n", {}, "t.tsv"), HasSubstr("→ give --quotes yes"));
  EXPECT_THAT(error("label\ttext\na\t\"b\tc\"\n", {}, "t.tsv"), HasSubstr("give --quotes yes"));
}

TEST_F(Tables, ColumnsAreChosenByName) {
  const std::string text = ",premise,hypothesis,idx,gold\n0,a b,c d,7,yes\n1,e f,g h,8,no\n";
  const auto pairs = read(text, {.texts = "hypothesis, premise", .label = "gold"});
  EXPECT_THAT(pairs.texts, ElementsAre("hypothesis", "premise"));
  EXPECT_THAT(pairs.labels, ElementsAre("yes", "no"));
  EXPECT_EQ(pairs.rows[1].first, "g h");
  EXPECT_EQ(pairs.rows[1].second, "e f");
  EXPECT_THAT(pairs.summary,
              EndsWith(": 2 rows, the class in 'gold', pairs of texts in 'hypothesis' and 'premise', not read: '' and "
                       "'idx'"));
  EXPECT_THAT(firsts(read("label,\"a,b\"\nx,why not\n", {.texts = "a,b"})), ElementsAre("why not"));
  // What only the class's column lacks.
  const auto texts = read("text\nso\n\"\"\n", {.classes = false});
  EXPECT_THAT(firsts(texts), ElementsAre("so", ""));
  EXPECT_THAT(texts.summary, EndsWith(": 2 rows, the text in 'text', 1 empty in 'text'"));
  EXPECT_THAT(firsts(read("label,text\n,so\n", {.classes = false})), ElementsAre("so"));
}

TEST_F(Tables, ColumnsThatAreNoTextsAreRefused) {
  EXPECT_THAT(error(",text,label\n0,so it is,a\n"),
              AllOf(HasSubstr("its column 1 has no name"), EndsWith("say which columns are texts: --text text")));
  EXPECT_THAT(error("a b,text,idx,label\nx,y,0,a\n"),
              AllOf(HasSubstr("it has 3 columns beside 'label'"),
                    EndsWith("say which are texts: --text 'a b', --text text or --text 'a b,text'")));
  EXPECT_THAT(error("text,idx,label\nx,0,a\ny,1,b\n"),
              AllOf(HasSubstr("the column 'idx' has no words in any row, only numbers and the like: '0'"),
                    HasSubstr("→ leave it out: --text text; --text text,idx reads it")));
  // Numbers, dates, prices, and what stands for none of them.
  for (const char* fields : {"1\n-2.5\n+3\n1e6\n", "2024-01-31\n12:30\n", "\"$1,200\"\n50 %\n", "1\nNaN\n\nN/A\nnull\n",
                             "True\nFalse\n", "?\n-\n"}) {
    std::string text = "label,price\n";
    for (std::string_view rest = fields; !rest.empty(); rest.remove_prefix(rest.find('\n') + 1))
      text += "a," + std::string(rest.substr(0, rest.find('\n') + 1));
    EXPECT_THAT(error(text), HasSubstr("the column 'price' has no words")) << fields;
    EXPECT_EQ(read(text, {.texts = "price"}).texts[0], "price") << fields;
  }
  EXPECT_THAT(firsts(read("label,text\na,12\nb,twelve\n")), ElementsAre("12", "twelve"));
  EXPECT_THAT(firsts(read("label,text\na,\xE5\x8D\x81\n")), ElementsAre("\xE5\x8D\x81"));

  // Without a line of names.
  EXPECT_THAT(error("\"In all, a film that I would see twice.\"\nso\n", {.classes = false}),
              AllOf(HasSubstr("seems to be a row: 'In all, a film"),
                    EndsWith("--text 'In all, a film that I would see twice.'")));
  EXPECT_THAT(error("label,0\na,so\n"), EndsWith("if it is the column's name: --text 0"));
  EXPECT_EQ(read("label,0\na,so\n", {.texts = "0"}).rows.size(), 1u);
  EXPECT_THAT(error("text,class\nx,a\n"), HasSubstr("→ say which column is the class, --label text or --label class;"));
  EXPECT_THAT(error("text;label\nx;a\n"), HasSubstr("separate fields by commas"));
  EXPECT_THAT(error("text\tlabel\nx\ta\n"), HasSubstr("call a table with tabs between its fields .tsv"));
  EXPECT_THAT(error("text,label\nx,a\n", {.texts = "txt"}), HasSubstr("did you mean --text text?"));
  EXPECT_THAT(error("text,label\nx,a\n", {.label = "class"}), HasSubstr("names no column 'class': 'text' and 'label'"));
  EXPECT_THAT(error("text,label\nx,a\n", {.texts = "label"}), HasSubstr("cannot be the class and a text"));
  EXPECT_THAT(error("a,b,c,label\nx,y,z,a\n", {.texts = "a,b,c"}), HasSubstr("--text a,b,c names 3 columns"));
  EXPECT_THAT(error("a,b,label\nx,y,a\n", {.texts = "a,a"}), HasSubstr("twice the same"));
  EXPECT_THAT(error("a,a,label\nx,y,a\n"), HasSubstr("more than one column 'a'"));
  EXPECT_THAT(error("text,label\nx,\xff\n"), HasSubstr("t.csv, line 2: byte 0 is not UTF-8"));
}

TEST_F(Tables, BytesAreWhatTheirContentShows) {
  const std::string text = "label,text\ngood,caf\xC3\xA9 \xF0\x9F\x98\x80\n";
  const std::u16string wide = u"label,text\ngood,caf\u00e9 \U0001F600\n";
  for (const std::string& bytes : {text, "\xEF\xBB\xBF" + text, gzip(text), "\xff\xfe" + utf16(wide, true),
                                   "\xfe\xff" + utf16(wide, false), gzip("\xff\xfe" + utf16(wide, true))})
    EXPECT_THAT(firsts(read(bytes)), ElementsAre("caf\xC3\xA9 \xF0\x9F\x98\x80"));
  EXPECT_THAT(error(gzip(text).substr(0, 30)), HasSubstr("the compressed data are cut off"));
  EXPECT_THAT(
      error(utf16(wide, true)),
      AllOf(HasSubstr("no byte order mark → convert it: iconv -f UTF-16LE -t UTF-8 <"), EndsWith("/utf8-t.csv")));
  EXPECT_THAT(error(utf16(wide, false)), HasSubstr("iconv -f UTF-16BE"));
  EXPECT_THAT(error("\xff\xfe" + utf16(u"label,\xD800x", true)), HasSubstr("byte 14 is not UTF-16"));
  EXPECT_THAT(error("\xff\xfe"s + "ab\0"s), HasSubstr("half a character"));
  EXPECT_THAT(error("\xff\xfe\0\0a\0\0\0"s), HasSubstr("it is UTF-32"));
  EXPECT_THAT(error("label,text\rgood,so\r"), HasSubstr("convert it: tr '\\r' '\\n' <"));
  for (const auto& [bytes, kind] : {std::pair{"PK\x03\x04more"s, "a ZIP archive"},
                                    {"PAR1\x15more"s, "a Parquet table"},
                                    {"%PDF-1.4"s, "a PDF document"},
                                    {"\x93NUMPY"s, "a NumPy array"}})
    EXPECT_THAT(error(bytes), HasSubstr("it is "s + kind));
  EXPECT_THAT(error(gzip("PK\x03\x04more")), HasSubstr("a ZIP archive"));
}

TEST(ShellWord, IsOneWord) {
  EXPECT_EQ(shell_word("a,b"), "a,b");
  EXPECT_EQ(shell_word("it's a"), "'it'\\''s a'");
  EXPECT_EQ(shell_word(""), "''");
}

}  // namespace
}  // namespace lockstep::data
