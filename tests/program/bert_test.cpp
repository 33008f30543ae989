// BERT as people call it: trained on masked tokens and on classes of texts, fine-tuned, evaluated, and asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <vector>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kSmall = "--layers 2 --heads 2 --width 64 --max-length 48 ";

std::string csv_field(const std::string& text) {
  std::string field = "\"";
  for (const char c : text) field += c == '"' ? std::string("\"\"") : std::string(1, c);
  return field + "\"";
}

/// Lines of `files` that are long enough for a model; of those between two ``` none.
std::vector<std::string> lines_of_files(const std::vector<fs::path>& files, bool prose) {
  std::vector<std::string> all;
  for (const fs::path& file : files) {
    bool block = false;
    for (std::string line : lines_of(read_file(file))) {
      line.erase(0, std::min(line.find_first_not_of(' '), line.size()));
      if (prose && line.starts_with("```")) block = !block;
      const bool other = prose ? block || line.starts_with('|') || line.starts_with('#')
                               : line.starts_with("//") || line.starts_with('#');
      if (!other && line.size() >= 30) all.push_back(line);
    }
  }
  return all;
}

std::vector<fs::path> files_in(const char* directory, const char* extension) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(fs::path(LOCKSTEP_SOURCE_DIR) / directory))
    if (entry.path().extension() == extension) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

/// This project's own texts: kind.csv has lines of its documents and of its sources, the two classes;
/// docs.txt is what the documents say.
class Bert : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = new TemporaryDirectory;
    auto prose = lines_of_files(files_in("docs", ".md"), true), code = lines_of_files(files_in("comm", ".cpp"), false);
    const std::size_t count = std::min({prose.size(), code.size(), std::size_t{1000}});
    ASSERT_GE(count, 500u);
    std::string csv = "text,label\n", text;
    for (std::size_t i = 0; i < count; ++i)
      csv += csv_field(prose[i * prose.size() / count]) + ",prose\n" + csv_field(code[i * code.size() / count]) +
             ",code\n";
    for (const auto& line : prose) text += line + "\n";
    directory_->write("kind.csv", csv);
    directory_->write("docs.txt", text);
  }
  static void TearDownTestSuite() {
    delete directory_;
    directory_ = nullptr;
  }
  static Outcome call(const std::string& line) { return run(line, directory_->path()); }
  static Outcome expect_done(const std::string& line) { return ended_well(call(line)); }
  static void expect_refusal(const std::string& line, int code, const std::string& what) {
    EXPECT_THAT(call("lockstep " + line), fails_with(code, what)) << line;
  }

  static inline TemporaryDirectory* directory_ = nullptr;
};

// The same classes on any number of ranks, and on devices of one process.
TEST_F(Bert, ClassifiesTexts) {
  const std::string train =
      std::string("lockstep train bert --data csv:kind.csv --global-batch 24 --lr 5e-4 --metrics m.jsonl --quiet ") +
      kSmall;
  expect_done(train + "--epochs 3 --device cpu --save kind.safetensors");
  const auto alone = read_metrics(directory_->path() / "m.jsonl");
  EXPECT_GE(alone.final["accuracy"].get<double>(), 0.95);
  for (const std::string& line : {on_ranks(2) + train + "--device cpu", on_ranks(3) + train + "--device cpu",
                                  train + "--parallel dp --device cpu:0,1"}) {
    SCOPED_TRACE(line);
    expect_done(line + " --steps 20");  // later, what is rounded otherwise has grown: docs/numerics.md
    const auto losses = read_metrics(directory_->path() / "m.jsonl").losses;
    ASSERT_EQ(losses.size(), 20u);
    for (std::size_t i = 0; i < 20; ++i) EXPECT_NEAR(losses[i], alone.losses[i], 1e-5 * losses[i]) << "step " << i + 1;
  }

  EXPECT_THAT(expect_done("lockstep eval bert --data csv:kind.csv --split val --weights kind.safetensors").out,
              AllOf(HasSubstr("validation: loss"), HasSubstr("accuracy"), Not(HasSubstr("perplexity"))));
  directory_->write("ask.txt",
                    "const auto found = table.find(key);\n\nEvery rank reads its own shard of every batch.\n");
  directory_->write("texts/a.txt", "one");
  directory_->write("texts/more/b.txt", "two");
  EXPECT_THAT(lines_of(expect_done("lockstep infer bert --weights kind.safetensors --input texts/ --quiet").out),
              ElementsAre(StartsWith("texts/a.txt: "), StartsWith("texts/more/b.txt: ")));
  expect_refusal("infer bert --weights kind.safetensors --input texts --lines", 2, "each of its files is a text");
  EXPECT_THAT(expect_done("lockstep infer bert --weights kind.safetensors --input ask.txt --lines --quiet").out,
              AllOf(ContainsRegex("^[^\n]*table.find\\(key\\);: code 9[0-9]\\.[0-9]* %, prose[^\n]*\n: "),
                    ContainsRegex("every batch.: prose 9[0-9]\\.[0-9]* %, code")));
  // A table's first line is no text, and its rows line up with the results.
  const std::string ask = "lockstep infer bert --weights kind.safetensors --lines --top 1 --quiet --input ";
  directory_->write("ask.CSV", "text,label\n\"Every rank, alone, reads its shard.\",code\n,prose\n\"a\tb\",code\n");
  const auto rows = lines_of(expect_done(ask + "ask.CSV").out);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_THAT(rows[0], ContainsRegex("^Every rank, alone, reads its shard.: prose 9"));
  EXPECT_THAT(rows[1], ContainsRegex("^: (prose|code)"));
  directory_->write("pairs.tsv", "first\tsecond\n\"quite\tso\n");
  EXPECT_EQ(lines_of(expect_done(ask + "pairs.tsv").out).size(), 1u);
  EXPECT_THAT(expect_done(ask + "pairs.tsv --text second").out, ::testing::StartsWith("so: "));
  expect_refusal(ask.substr(9) + "pairs.tsv --text third", 3, "names no column 'third'");
  directory_->write("asked.csv", "text,kind\nquite so,prose\nelse,code\n");
  expect_refusal(ask.substr(9) + "asked.csv", 2, "one text of the pair is a class of kind.safetensors");
  directory_->write("index.csv", ",text\n0,quite so\n");
  expect_refusal(ask.substr(9) + "index.csv", 3, "its column 1 has no name");
  expect_refusal("infer bert --weights kind.safetensors --input ask.CSV", 2, "give --lines");
  const auto answer =
      json_in(expect_done("lockstep infer bert --weights kind.safetensors --prompt \"Every rank reads its own "
                          "shard of every batch.\" --json --quiet --top 1")
                  .out);
  ASSERT_EQ(answer["classes"].size(), 1u);
  EXPECT_EQ(answer["classes"][0]["name"], "prose");
}

TEST_F(Bert, PredictsMaskedTokensAndIsFineTuned) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "the quick brown fox jumps over a lazy dog. ";
  directory_->write("fox.txt", text);
  expect_done(
      "lockstep train bert --data text:fox.txt --layers 2 --heads 2 --width 64 --max-length 24 --steps 400 --lr 2e-3 "
      "--device cpu --quiet --save fox.safetensors --metrics m.jsonl");
  EXPECT_GE(read_metrics(directory_->path() / "m.jsonl").final["accuracy"].get<double>(), 0.9);
  EXPECT_THAT(expect_done("lockstep eval bert --data text:fox.txt --weights fox.safetensors").out,
              AllOf(HasSubstr("perplexity"), HasSubstr("accuracy")));
  // A row as training has them: 22 tokens, from the first of the ten on.
  const std::string masked =
      "the quick [MASK] fox jumps [MASK] a lazy dog. the quick brown fox jumps over a lazy dog. the quick";
  const auto answer = json_in(
      expect_done("lockstep infer bert --weights fox.safetensors --json --quiet --top 2 --prompt \"" + masked + "\"")
          .out);
  ASSERT_EQ(answer["masks"].size(), 2u);
  EXPECT_EQ(answer["masks"][0]["tokens"][0]["name"], "brown");
  EXPECT_EQ(answer["masks"][1]["tokens"][0]["name"], "over");
  EXPECT_THAT(expect_done("lockstep infer bert --weights fox.safetensors --quiet --prompt \"" + masked + "\"").out,
              AllOf(HasSubstr("  [MASK] 1: brown"), HasSubstr("  [MASK] 2: over")));

  expect_refusal("infer bert --weights fox.safetensors --input random:1x513", 2, "give --input random:1x512");
  // Results are as many as lines.
  directory_->write("lines.txt", masked + "\n\n" + masked + "\n");
  EXPECT_THAT(
      expect_done("lockstep infer bert --weights fox.safetensors --json --quiet --lines --input lines.txt").out,
      ContainsRegex("\"masks\":\\[\\{[^\n]*\n[^\n]*\"input\":\"\",\"masks\":\\[\\][^\n]*\n[^\n]*\"masks\":\\[\\{"));

  // Another task: the last layer starts anew, and the word pieces are the file's.
  const std::string tune = "train bert --data csv:kind.csv --weights fox.safetensors --device cpu --quiet --steps 3 ";
  expect_refusal(tune, 2, "--reset-head");
  expect_done("lockstep " + tune + "--reset-head --save tuned.safetensors");
  expect_refusal("train bert --data text:fox.txt --weights tuned.safetensors --device cpu --quiet --steps 1", 2,
                 "holds a model for classes of texts");
  expect_refusal("train bert --data text:fox.txt --weights fox.safetensors --reset-head --quiet --steps 1", 2,
                 "whose last layer is its embedding");
}

TEST_F(Bert, ResumesToTheSameBits) {
  const std::string train =
      std::string("lockstep train bert --data csv:kind.csv --dropout 0.1 --device cpu --quiet ") + kSmall;
  const auto hash = [&](const std::string& more) {
    expect_done(train + more + " --metrics m.jsonl");
    return read_metrics(directory_->path() / "m.jsonl").final["params_sha256"].get<std::string>();
  };
  const auto whole = hash("--steps 8");
  hash("--steps 5 --checkpoint-dir kept --checkpoint-every 5");
  EXPECT_EQ(hash("--steps 8 --checkpoint-dir kept --resume auto"), whole);
  // A text that other word pieces are learned from is another run.
  directory_->write("other.csv", read_file(directory_->path() / "kind.csv") + "zyxw zyxw zyxw,prose\n");
  expect_refusal(
      "train bert --data csv:other.csv --dropout 0.1 --device cpu --quiet --steps 9 --checkpoint-dir kept --resume "
      "auto " +
          std::string(kSmall),
      6, "");
}

TEST_F(Bert, InvalidOptionsAreRefused) {
  expect_refusal("train bert --data digits", 2, "takes tokens");
  expect_refusal("train gpt --data csv:kind.csv --steps 1", 2, "has a class for each text");
  expect_refusal("train cnn --data csv:kind.csv --steps 1", 2, "csv");
  expect_refusal("train bert --data csv:missing.csv", 3, "missing.csv");
  expect_refusal("train bert --data csv:kind.csv --vocab missing.txt", 3, "missing.txt");
  expect_refusal("train bert --data csv:kind.csv --vocab v.txt --vocab-size 100", 2, "--vocab-size");
  expect_refusal("train gpt --data text:docs.txt --vocab-size 99", 2, "the model is gpt");
  expect_refusal("train bert --data csv:kind.csv --max-length 600", 2, "samples of 600 tokens");
  expect_refusal("train bert --data csv:kind.csv --heads 3 --steps 1", 2, "multiple of --heads");
  expect_refusal("infer bert --weights kind.safetensors --prompt x --temperature 0.5", 2, "--temperature");
  expect_refusal("infer bert --weights kind.safetensors --prompt x --merges m.txt", 2, "--merges");
  expect_done(
      std::string("lockstep train bert --data text:docs.txt --steps 1 --device cpu --quiet --save docs.safetensors ") +
      kSmall);
  expect_refusal("infer bert --weights docs.safetensors --prompt none", 2, "write [MASK]");
  directory_->write("v.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n");
  expect_refusal("infer bert --weights docs.safetensors --vocab v.txt --prompt [MASK]", 2, "has other word pieces");
  expect_refusal("train bert --data text:docs.txt --weights docs.safetensors --vocab v.txt --quiet", 2,
                 "has other word pieces");
  for (const char* command : {"infer bert --prompt [MASK]", "train bert --data text:docs.txt --quiet"})
    expect_refusal(std::string(command) + " --weights docs.safetensors --cased yes", 2,
                   "--cased yes, but the texts of docs.safetensors were read in lower case");
  directory_->write("tokenizer_config.json", R"({"do_basic_tokenize": false})");
  expect_refusal("train bert --data csv:kind.csv --vocab v.txt", 3, "do_basic_tokenize is false");
  fs::remove(directory_->path() / "tokenizer_config.json");
}

}  // namespace
}  // namespace lockstep::testing
