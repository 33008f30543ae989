// Inference as people call it: with what training has saved, on their files and texts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Eight of its characters identify their position in it, and its 43 fall on every place of a row of 16.
constexpr const char* kText = "the quick brown fox jumps over a lazy dog. ";
constexpr const char* kGpt = "--layers 2 --heads 2 --width 32 --context 16";

void write(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

/// Models that all tests use: text.safetensors (a gpt of characters), lstm.safetensors (an LSTM of them),
/// tokens.safetensors (a gpt of tokens with the vocabulary of tests/data/bpe), digits.safetensors (a cnn) and
/// animals.safetensors (a ResNet of folders).
class Infer : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = new TemporaryDirectory;
    const fs::path here = directory_->path(), tests = fs::path(LOCKSTEP_SOURCE_DIR) / "tests";
    std::string text;
    for (int i = 0; i < 100; ++i) text += kText;
    write(here / "fox.txt", text);
    for (const char* name : {"vocab.json", "merges.txt"}) fs::copy_file(tests / "data/bpe" / name, here / name);
    std::string tokens;
    for (int i = 0; i < 2000; ++i) tokens += {static_cast<char>(i % 7 + 64), 0};
    write(here / "tokens.bin", tokens);
    for (int i = 0; i < 20; ++i)
      for (const char* name : {"cat", "dog"}) {
        fs::create_directories(here / "animals" / name);
        fs::copy_file(tests / "data/golden" / (*name == 'c' ? "grey.jpg" : "rgb420.jpg"),
                      here / "animals" / name / (std::to_string(i) + ".jpg"));
      }
    for (const char* name : {"grey.jpg", "rgb.png", "rgb420.jpg"}) {
      fs::create_directories(here / "pictures/more");
      fs::copy_file(tests / "data/golden" / name, here / (name[0] == 'g' ? "pictures/more" : "pictures") / name);
    }
    const std::string gpt = kGpt;
    train("gpt --data text:fox.txt --steps 400 --batch 8 --lr 0.01 --save text.safetensors " + gpt);
    train("gpt --data tokens:tokens.bin --classes 481 --steps 60 --batch 8 --lr 0.01 --save tokens.safetensors " + gpt);
    for (const std::string name : {"lstm", "gru"})
      train(name + " --data text:fox.txt --layers 2 --width 32 --context 16 --steps 400 --batch 8 --lr 0.01 --save " +
            name + ".safetensors");
    train(
        "rnn --nonlinearity relu --data text:fox.txt --layers 1 --width 48 --context 16 --steps 600 --batch 8 --lr "
        "0.01 "
        "--save rnn.safetensors");
    train("cnn --data digits --epochs 2 --save digits.safetensors");
    train("resnet18 --data images:animals --image-size 32 --steps 2 --batch 4 --save animals.safetensors");
  }
  static void TearDownTestSuite() {
    delete directory_;
    directory_ = nullptr;
  }
  static void train(const std::string& line) {
    run_well("lockstep train " + line + " --quiet --device cpu", directory_->path());
  }
  static Outcome run(const std::string& line) { return lockstep::testing::run(line, directory_->path()); }
  static Outcome infer(const std::string& line) { return run("lockstep infer " + line); }
  static std::string text(const std::string& line) {
    const auto outcome = ended_well(infer("gpt --weights text.safetensors --quiet " + line));
    EXPECT_EQ(outcome.err, "");
    return outcome.out;
  }
  static void expect_refusal(const std::string& line, int code, const std::string& says) {
    expect_refused({"lockstep infer " + line, code, says}, directory_->path());
  }
  // The file with its last number, which is a bias of the last layer or normalisation, made NaN.
  static void corrupt(const std::string& from, const std::string& to) {
    std::string bytes = read_file(directory_->path() / from);
    const float nan = std::nanf("");
    std::memcpy(bytes.data() + bytes.size() - sizeof nan, &nan, sizeof nan);
    write(directory_->path() / to, bytes);
  }

  static TemporaryDirectory* directory_;
};
TemporaryDirectory* Infer::directory_ = nullptr;

TEST_F(Infer, ContinuesAPrompt) {
  const std::string made = text("--prompt \"the quick b\" --tokens 80 --temperature 0");
  // It has learnt its text by heart, and continues beyond its 16 positions.
  EXPECT_EQ(made, (std::string(kText) + kText + kText).substr(0, 11 + 80) + "\n");
  EXPECT_EQ(made, text("--prompt \"the quick b\" --tokens 80 --temperature 0 --threads 2"));
  EXPECT_EQ(made, text("--prompt \"the quick b\" --tokens 80 --top-k 1"));
}

// What it has learnt by heart it knows with weights of 16 and 8 bits, too.
TEST_F(Infer, ContinuesAPromptInBf16AndInt8) {
  const std::string flags = "--prompt \"the quick b\" --tokens 80 --temperature 0 --precision ";
  EXPECT_EQ(text(flags + "int8w"), text(flags + "f32"));
  EXPECT_EQ(text(flags + "int8w --device cpu:0,1 --threads 2"), text(flags + "f32"));
  if (bf16_of_cpu() == "not on this CPU")
    expect_refusal("gpt --weights text.safetensors " + flags + "bf16", 2, "bf16 needs AVX-512 at least");
  else
    EXPECT_EQ(text(flags + "bf16 2>/dev/null"), text(flags + "f32"));
  // Drawn from probabilities that are f32's to within the weights' rounding, which is not nothing.
  const std::string drawn = "--prompt t --tokens 200 --temperature 3 --seed 2 --precision ";
  EXPECT_NE(text(drawn + "int8w"), text(drawn + "f32"));
  expect_refusal("lstm --weights lstm.safetensors --prompt a --precision int8w", 2, "--precision int8w for lstm");
}

// A state continues as far as one likes, and is the same for any number of streams.
TEST_F(Infer, RecurrentModelsContinueAPrompt) {
  for (const std::string name : {"rnn", "lstm", "gru"}) {
    const std::string flags = name + " --weights " + name + ".safetensors --quiet --prompt \"the quick b\" ";
    const auto made = ended_well(infer(flags + "--tokens 80 --temperature 0"));
    EXPECT_EQ(made.out, (std::string(kText) + kText + kText).substr(0, 11 + 80) + "\n");
    const std::string drawn = flags + "--tokens 30 --samples 5 --temperature 2";
    EXPECT_EQ(infer(drawn + " --threads 1").out, infer(drawn + " --threads 3").out);
  }
  const std::string flags = "lstm --weights lstm.safetensors --quiet --prompt \"the quick b\" ";
  expect_refusal(flags + "--width 64", 2, "--width 64, but lstm.safetensors holds a model with 32");
  expect_refusal("gpt --weights lstm.safetensors --prompt a", 2, "holds a lstm, not a gpt");
  expect_refusal("gru --weights lstm.safetensors --prompt a", 2, "holds a lstm, not a gru");
  expect_refusal("rnn --weights rnn.safetensors --prompt a --nonlinearity tanh", 2,
                 "--nonlinearity tanh, but rnn.safetensors holds a model with relu");
}

TEST_F(Infer, TheSameSeedIsTheSameTextOnAnyNumberOfStreams) {
  const std::string flags = "--prompt \"the \" --tokens 30 --samples 5 --temperature 2";
  const std::string one = text(flags + " --threads 1"), three = text(flags + " --threads 3");
  EXPECT_EQ(one, three);
  EXPECT_NE(one, text(flags + " --seed 2"));
  const auto lines = lines_of(one);
  ASSERT_EQ(lines.size(), 9u) << one;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i % 2 == 0)
      EXPECT_THAT(lines[i], StartsWith("the "));
    else
      EXPECT_EQ(lines[i], "---------------");
  }
  EXPECT_NE(lines[0], lines[2]);
}

TEST_F(Infer, ReportsTimesAndThroughput) {
  const auto outcome =
      ended_well(infer("gpt --weights text.safetensors --prompt \"a lazy\" --tokens 20 --samples 3 --threads 2"));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("3 texts in"), HasSubstr("on cpu, 2 streams"), HasSubstr("60 tokens"),
                                 HasSubstr("tokens/s"), HasSubstr("p50"), HasSubstr("p90"), HasSubstr("p99")));
  const auto json =
      ended_well(infer("gpt --weights text.safetensors --prompt \"a lazy\" --tokens 20 --samples 3 --json --warmup 2"));
  const auto all = events_of(json.out);
  ASSERT_EQ(all.size(), 4u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(all[static_cast<std::size_t>(i)]["event"], "text");
    EXPECT_EQ(all[static_cast<std::size_t>(i)]["sample"], i);
    EXPECT_EQ(all[static_cast<std::size_t>(i)]["tokens"], 20);
    EXPECT_EQ(all[static_cast<std::size_t>(i)]["prompt"], "a lazy");
    EXPECT_EQ(all[static_cast<std::size_t>(i)]["text"].get<std::string>().size(), 20u);
  }
  EXPECT_EQ(all[3]["event"], "report");
  EXPECT_EQ(all[3]["tokens"], 60);
  EXPECT_EQ(all[3]["results"], 3);
  for (const char* part : {"latency_ms", "first_token_ms", "token_ms"}) {
    EXPECT_GT(all[3][part]["p50"], 0.0);
    EXPECT_GE(all[3][part]["p99"], all[3][part]["p50"]);
  }
}

TEST_F(Infer, PromptsFromFilesAndStandardInput) {
  write(directory_->path() / "prompts.txt", "a lazy\n\nthe fox\r\n");
  const auto lines = lines_of(text("--input prompts.txt --lines --tokens 3 --temperature 0"));
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_THAT(lines[0], StartsWith("a lazy "));
  EXPECT_EQ(lines[2], "");  // of an empty line: results are as many as lines
  EXPECT_THAT(lines[4], StartsWith("the fox"));
  const auto piped = run(
      "printf \"a lazy\" | lockstep infer gpt --weights text.safetensors --input - --tokens 3 --temperature 0 --quiet");
  EXPECT_EQ(piped.out, lines[0] + "\n");
}

TEST_F(Infer, ResultsGoToAFile) {
  write(directory_->path() / "prompts.txt", "a lazy\nthe fox\n");
  const std::string line = "gpt --weights text.safetensors --input prompts.txt --lines --tokens 3 --temperature 0 ";
  const auto printed = ended_well(infer(line + "--quiet"));
  EXPECT_EQ(ended_well(infer(line + "--quiet --output results.txt")).out, "");
  EXPECT_EQ(read_file(directory_->path() / "results.txt"), printed.out);
  EXPECT_FALSE(printed.out.empty());
  EXPECT_THAT(ended_well(infer(line + "--output again.out")).err, HasSubstr("saved again.out: "));
  const auto outcome = ended_well(infer(line + "--json --output results.jsonl"));
  EXPECT_EQ(events_of(outcome.out).size(), 1u) << "the report alone";
  EXPECT_EQ(events_of(directory_->path() / "results.jsonl", "text").size(), 2u);
  for (const char* file : {"prompts.txt", "./text.safetensors"})
    expect_refusal(line + "--output " + file, 2, "which is read");
  expect_refusal(line + "--output none/results.jsonl", 3, "none/results.jsonl");
  expect_refusal(line + "--layers 9 --output other.txt", 2, "--layers 9");
  EXPECT_FALSE(fs::exists(directory_->path() / "other.txt"));
}

TEST_F(Infer, TokensByNumberAndByVocabulary) {
  // 64 65 … 70 again and again: "abcdefg" in the vocabulary.
  const std::string numbers = "gpt --weights tokens.safetensors --temperature 0 --tokens 4 --quiet ";
  const auto outcome = infer(numbers + "--prompt \"64 65 66\"");
  EXPECT_EQ(outcome.out, "64 65 66 67 68 69 70\n") << outcome.err;
  const auto words = infer(numbers + "--prompt abc --vocab vocab.json --merges merges.txt");
  EXPECT_EQ(words.out, "abcdefg\n") << words.err;
  // Its name is the token between texts, after which an empty prompt begins too.
  write(directory_->path() / "nothing.txt", "");
  const std::string with_files = numbers + "--json --vocab vocab.json --merges merges.txt ";
  EXPECT_EQ(json_in(infer(with_files + "--prompt \"<|endoftext|>\"").out)["text"],
            json_in(infer(with_files + "--input nothing.txt").out)["text"]);
  expect_refusal(numbers + "--prompt abc", 3, "'abc' at byte 0 is no token");
  expect_refusal(numbers + "--prompt 481", 3, "'481'");
  expect_refusal(numbers + "--prompt abc --merges merges.txt", 2, "--merges without --vocab");
}

TEST_F(Infer, InvalidTexts) {
  const std::string gpt = "gpt --weights text.safetensors ";
  write(directory_->path() / "empty.txt", "");
  write(directory_->path() / "latin1.txt", "a lazy \xe9t\xe9");
  expect_refusal(gpt + "--prompt \"dogs!\"", 3, "U+0021 at byte 4");
  expect_refusal(gpt + "--input latin1.txt", 3, "latin1.txt: byte 7 is not UTF-8");
  expect_refusal(gpt + "--input empty.txt", 3, "empty.txt: it is empty");
  expect_refusal(gpt + "--input empty.txt --lines", 3, "empty");
  expect_refusal(gpt + "--prompt \"\"", 2, "--prompt");
  expect_refusal(gpt + "--input none.txt", 3, "none.txt");
  expect_refusal(gpt + "--input .", 3, "empty.txt: it is empty");
  expect_refusal(gpt + "--prompt a --input fox.txt", 2, "--input");
  expect_refusal(gpt, 2, "one input");
  expect_refusal("gpt --prompt a", 2, "without weights");
  expect_refusal("gpt --weights none.safetensors --prompt a", 3, "none.safetensors");
  expect_refusal(gpt + "--prompt t --heads 4", 2, "--heads 4, but text.safetensors holds a model with 2");
  expect_refusal(gpt + "--prompt t --vocab vocab.json --merges merges.txt", 2, "trained on");
  expect_refusal(gpt + "--prompt t --top 3", 2, "--top");
  expect_refusal(gpt + "--prompt t --temperature -1", 2, "--temperature");
  expect_refusal(gpt + "--prompt t --temperature nan", 2, "--temperature");
  expect_refusal(gpt + "--input random:1x17", 2, "16 positions");
  expect_refusal(gpt + "--prompt t --device cuda", 4, "--device cuda");
  expect_refusal(gpt + "--prompt t --precision int8", 2, "did you mean int8w");
  expect_refusal("gpt2 --weights text.safetensors --prompt t", 2, "holds a gpt, not a gpt2");
  expect_refusal("cnn --weights text.safetensors --input pictures", 2, "holds a gpt, not a cnn");
  expect_refusal("gtp --weights text.safetensors --prompt t", 2, "gpt");
  corrupt("text.safetensors", "nan.safetensors");
  expect_refusal("gpt --weights nan.safetensors --prompt to", 7, "NaN");
  expect_refusal("gpt --weights nan.safetensors --input random:1x4", 7, "NaN");
}

TEST_F(Infer, ClassifiesImagesInTheirOrder) {
  const auto outcome = ended_well(infer("resnet18 --weights animals.safetensors --input pictures --threads 2"));
  const auto lines = lines_of(outcome.out);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[0], AllOf(StartsWith("pictures/rgb.png: "), HasSubstr("cat "), HasSubstr("dog "), HasSubstr(" %")));
  EXPECT_THAT(lines[1], StartsWith("pictures/rgb420.jpg: "));
  EXPECT_THAT(lines[2], StartsWith("pictures/more/grey.jpg: "));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("3 images in"), HasSubstr("2 streams"), HasSubstr("images/s")));
  // One by one they are the same, bit for bit, whatever else is computed beside.
  std::string one_by_one;
  for (const char* name : {"pictures/rgb.png", "pictures/rgb420.jpg", "pictures/more/grey.jpg"})
    one_by_one += infer(std::string("resnet18 --weights animals.safetensors --quiet --input ") + name).out;
  EXPECT_EQ(one_by_one, outcome.out);
  const auto top = infer("resnet18 --weights animals.safetensors --input pictures/rgb.png,pictures/rgb420.jpg --top 1");
  ASSERT_EQ(lines_of(top.out).size(), 2u);
  EXPECT_THAT(top.out, Not(HasSubstr(",")));
}

// Their logarithms come to the loss that eval finds on the same files, and the likeliest classes to its accuracy.
TEST_F(Infer, ProbabilitiesAreThoseOfEval) {
  const fs::path tests = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/data/golden",
                 evaluated = directory_->path() / "evaluated";
  for (const char* part : {"train", "val"})
    for (const char* name : {"cat/grey.jpg", "cat/rgb.png", "dog/rgb420.jpg"}) {
      fs::create_directories((evaluated / part / name).parent_path());
      fs::copy_file(tests / fs::path(name).filename(), evaluated / part / name);
    }
  const auto outcome = ended_well(infer("resnet18 --weights animals.safetensors --input evaluated/val --json"));
  const auto all = events_of(outcome.out);
  ASSERT_EQ(all.size(), 4u);
  double loss = 0, right = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(all[i]["event"], "image");
    const fs::path input = all[i]["input"].get<std::string>();
    EXPECT_EQ(input.parent_path().parent_path(), "evaluated/val");
    const std::string label = input.parent_path().filename();
    const auto& classes = all[i]["classes"];
    ASSERT_EQ(classes.size(), 2u);
    double sum = 0, last = 1;
    for (const auto& item : classes) {
      const auto probability = item["probability"].get<double>();
      sum += probability;
      EXPECT_LE(probability, last);
      last = probability;
      EXPECT_EQ(item["name"], item["class"] == 0 ? "cat" : "dog");
      if (item["name"] == label) loss -= std::log(probability) / 3;
    }
    EXPECT_NEAR(sum, 1, 1e-9);
    right += classes[0]["name"] == label ? 1 : 0;
  }
  ended_well(
      run("lockstep eval resnet18 --weights animals.safetensors --data images:evaluated --image-size 32 "
          "--device cpu --metrics evaluated.jsonl"));
  const auto evaluation = events_of(directory_->path() / "evaluated.jsonl", "eval").at(0);
  EXPECT_EQ(evaluation["samples"], 3);
  EXPECT_NEAR(evaluation["loss"].get<double>(), loss, 1e-4 * loss);
  EXPECT_NEAR(evaluation["accuracy"].get<double>(), right / 3, 1e-9);
}

TEST_F(Infer, GreyModelsTakeColouredFiles) {
  const auto outcome = ended_well(infer("cnn --weights digits.safetensors --input pictures --top 10"));
  EXPECT_EQ(lines_of(outcome.out).size(), 3u);
  EXPECT_THAT(outcome.out, HasSubstr("class 9"));
  std::string names;
  for (int i = 0; i < 10; ++i) names += "digit " + std::to_string(i) + "\r\n";
  write(directory_->path() / "names.txt", names);
  EXPECT_THAT(infer("cnn --weights digits.safetensors --input pictures --top 10 --class-names names.txt").out,
              HasSubstr("digit 9"));
  expect_refusal("cnn --weights animals.safetensors --input pictures", 2, "holds a resnet18");
  expect_refusal("resnet18 --weights animals.safetensors --input pictures --class-names names.txt", 2, "10 names");
  expect_refusal("cnn --weights digits.safetensors --input pictures --image-size 16", 2, "--image-size");
}

TEST_F(Infer, CorruptImagesAreNamedAndSkipped) {
  write(directory_->path() / "some/1.jpg", "\xff\xd8\xff and no more");
  fs::copy_file(directory_->path() / "pictures/rgb.png", directory_->path() / "some/2.png",
                fs::copy_options::overwrite_existing);
  write(directory_->path() / "some/3.png", "");
  for (const char* threads : {"1", "2"}) {
    const auto outcome =
        infer(std::string("resnet18 --weights animals.safetensors --input some/ --threads ") + threads);
    EXPECT_EQ(outcome.code, 3);
    ASSERT_EQ(lines_of(outcome.out).size(), 1u);
    EXPECT_THAT(outcome.out, StartsWith("some/2.png: "));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("corrupt image some/1.jpg"), HasSubstr("corrupt image some/3.png"),
                                   HasSubstr("2 of 3 images could not be read"), HasSubstr("2 corrupt")));
  }
  const auto json = infer("resnet18 --weights animals.safetensors --input some --json");
  EXPECT_EQ(json.code, 3);
  const auto all = events_of(json.out);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_TRUE(all[0].contains("error") && all[1].contains("classes") && all[2].contains("error"));
  EXPECT_EQ(all[3]["corrupt"], 2);
}

// A batch's images are those that are read one by one, and a line each.
TEST_F(Infer, BatchesOfImages) {
  const auto classes_of = [](const std::string& out) {
    std::vector<std::pair<std::string, std::vector<double>>> all;
    for (const auto& event : events_of(out)) {
      if (event["event"] != "image") continue;
      auto& [input, probabilities] = all.emplace_back(event["input"].get<std::string>(), std::vector<double>(2));
      for (const auto& item : event["classes"]) probabilities[item["class"]] = item["probability"];
      EXPECT_GT(event["latency_ms"], 0.0);
    }
    return all;
  };
  const std::string all = "resnet18 --weights animals.safetensors --input pictures --json ";
  const auto one_by_one = classes_of(infer(all).out);
  ASSERT_EQ(one_by_one.size(), 3u);
  for (const char* flags : {"--batch 2", "--batch 3 --warmup 1", "-b 1000000 --threads 3", "--batch 2 --threads 2"}) {
    const auto outcome = ended_well(infer(all + flags));
    const auto batches = classes_of(outcome.out);
    ASSERT_EQ(batches.size(), 3u) << flags;
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(batches[i].first, one_by_one[i].first) << flags;
      for (std::size_t k = 0; k < 2; ++k) EXPECT_NEAR(batches[i].second[k], one_by_one[i].second[k], 1e-5) << flags;
    }
    const auto report = events_of(outcome.out).back();
    EXPECT_EQ(report["results"], 3);
    EXPECT_EQ(report["batch"], std::string(flags).find('2') != std::string::npos ? 2 : 3);
  }
}

TEST_F(Infer, CorruptImagesInABatch) {
  write(directory_->path() / "mixed/1.jpg", "\xff\xd8\xff and no more");
  write(directory_->path() / "mixed/4.png", "");
  for (const char* name : {"mixed/2.png", "mixed/3.png", "mixed/5.png"})
    fs::copy_file(directory_->path() / "pictures/rgb.png", directory_->path() / name,
                  fs::copy_options::overwrite_existing);
  for (const char* batch : {"2", "3", "4", "5"}) {
    const auto json =
        infer(std::string("resnet18 --weights animals.safetensors --input mixed --json --batch ") + batch);
    EXPECT_EQ(json.code, 3);
    EXPECT_THAT(json.err, HasSubstr("2 of 5 images could not be read"));
    const auto all = events_of(json.out);
    ASSERT_EQ(all.size(), 6u);
    for (const std::size_t i : {0u, 3u}) EXPECT_TRUE(all[i].contains("error")) << batch;
    for (const std::size_t i : {1u, 2u, 4u}) EXPECT_TRUE(all[i].contains("classes")) << batch;
    for (std::size_t i = 0; i < 5; ++i)
      EXPECT_THAT(all[i]["input"].get<std::string>(), StartsWith("mixed/" + std::to_string(i + 1)));
    EXPECT_EQ(all[5]["results"], 3);
    EXPECT_EQ(all[5]["corrupt"], 2);
  }
  corrupt("digits.safetensors", "nan_digits.safetensors");
  expect_refusal("cnn --weights nan_digits.safetensors --input pictures --batch 2", 7, "NaN");
}

TEST_F(Infer, BatchesOfSyntheticInputs) {
  const auto outcome = infer("linear --input random:4x5,5 --batch 2 --json --device cpu");
  const auto all = events_of(outcome.out);
  ASSERT_EQ(all.size(), 6u) << outcome.err;
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(all[i]["shape"].dump(), "[4,10]");
  EXPECT_EQ(all[5]["results"], 5);
  EXPECT_EQ(all[5]["batch"], 2);
  EXPECT_EQ(infer("gpt --weights text.safetensors --input random:2x8,3 --batch 3 --quiet").out,
            infer("gpt --weights text.safetensors --input random:2x8,3 --quiet").out);
  expect_refusal("gpt --weights text.safetensors --prompt t --batch 2", 2,
                 "--batch 2 on the command line: it applies to images, rows and synthetic inputs: texts are taken");
  expect_refusal("lstm --weights lstm.safetensors --prompt t --batch 2", 2, "--batch with a model of text");
  ended_well(infer("gpt --weights text.safetensors --prompt t --batch 1 --tokens 2"));
  ended_well(run("LOCKSTEP_BATCH=8 lockstep infer gpt --weights text.safetensors --prompt t --tokens 2"));
  expect_refusal("linear --input random:4x5,5 --batch 0", 2, "--batch 0");
  expect_refusal("mlp --input random:1000x1000,1000000 --batch 1000000", 2, "more than 2^30 numbers together");
}

// Each has its own copy of the weights, and the streams are shared out.
TEST_F(Infer, SeveralDevicesOnTheCpu) {
  const std::string images = "resnet18 --weights animals.safetensors --input pictures ";
  const auto one = ended_well(infer(images + "--device cpu --quiet"));
  for (const char* devices : {"cpu:0,1", "cpu:1,0 --threads 3", "cpu:0,1,2", "cpu:7"}) {
    const auto several = infer(images + "--quiet --device " + devices);
    EXPECT_EQ(several.out, one.out) << devices << several.err;
    EXPECT_EQ(several.err, "") << devices;
  }
  EXPECT_THAT(infer(images + "--device cpu:0,1").err, HasSubstr("on cpu:0,1, 2 streams"));
  EXPECT_THAT(infer(images + "--device cpu:0,1,2,5").err,
              HasSubstr("--device cpu:0,1,2,5 names 4 devices, and there are 3 inputs: the others stay unused"));
  EXPECT_EQ(text("--prompt \"the \" --samples 5 --tokens 30 --device cpu:0,1"),
            text("--prompt \"the \" --samples 5 --tokens 30"));
  EXPECT_EQ(infer("linear --input random:3x5 --quiet --device cpu:3").out, "[3, 10], cpu:3\n");
  EXPECT_EQ(infer("linear --input random:3x5 --quiet --device cpu").out, "[3, 10], cpu\n");
  const auto lines = lines_of(infer("linear --input random:3x5,9 --quiet --device cpu:4,2").out);
  ASSERT_EQ(lines.size(), 9u);
  for (const auto& line : lines) EXPECT_THAT(line, ::testing::AnyOf("[3, 10], cpu:4", "[3, 10], cpu:2"));
  expect_refusal(images + "--device cpu:0,1 --threads 1", 2,
                 "--threads 1 with --device cpu:0,1: 2 devices, and 1 stream");
  expect_refusal(images + "--device cpu:0,1,0", 2, "names CPU device 0 twice");
  expect_refusal(images + "--device cpu:0,x", 2, "'x' is no number of a CPU device");
  expect_refusal(images + "--device cuda:0,1", 4, "--device cuda:0,1");
  expect_refusal(images + "--device cpu:0,1 --precision int8w", 2,
                 "--precision int8w for resnet18: weights of int8 are for gpt, gpt2, llama and BERTs");
}

TEST_F(Infer, InvalidImages) {
  const std::string resnet = "resnet18 --weights animals.safetensors ";
  fs::create_directories(directory_->path() / "nothing");
  expect_refusal(resnet + "--input nothing", 3, "nothing: it has no images");
  expect_refusal(resnet + "--input none.jpg", 3, "none.jpg");
  expect_refusal(resnet + "--input pictures/rgb.png,none.jpg", 3, "none.jpg");
  expect_refusal(resnet + "--input pictures/rgb.png,pictures", 2, "the directory pictures");
  expect_refusal(resnet + "--input pictures/rgb.png,", 2, "--input pictures/rgb.png, has a comma without a file");
  expect_refusal(resnet + "--prompt hello", 2, "--prompt");
  expect_refusal(resnet + "--input pictures --temperature 1", 2, "--temperature");
  expect_refusal("resnet50 --weights animals.safetensors --input pictures", 2, "holds a resnet18, not a resnet50");
  write(directory_->path() / "cut.safetensors", read_file(directory_->path() / "animals.safetensors").substr(0, 5000));
  expect_refusal("resnet18 --weights cut.safetensors --input pictures", 3, "cut.safetensors");
}

TEST_F(Infer, SyntheticInputsReportSizeAndDevice) {
  EXPECT_EQ(infer("resnet18 --input random:1x3x224x224 --quiet").out, "[1, 1000], cpu\n");
  EXPECT_EQ(infer("resnet18 --weights animals.safetensors --input random:3x3x40x32,2 --quiet").out,
            "[3, 2], cpu\n[3, 2], cpu\n");
  EXPECT_EQ(infer("gpt --weights text.safetensors --input random:2x8 --quiet").out.substr(0, 7), "[2, 8, ");
  EXPECT_EQ(infer("linear --input random:4x5 --quiet").out, "[4, 10], cpu\n");
  expect_refusal("resnet18 --input random:3x224x224", 2, "3 dimensions");
  expect_refusal("resnet18 --input random:1x3x16x16", 2, "32x32");
  expect_refusal("resnet18 --weights animals.safetensors --input random:1x1x32x32", 2, "conv1.weight");
  expect_refusal("gpt --weights text.safetensors --input random:1x3x8x8", 2, "tokens");
}

// Files of others say nothing of their model: its sizes are those of their tensors.
TEST_F(Infer, FilesWithoutMetadataNeedOnlyTheirTensors) {
  std::string bytes = read_file(directory_->path() / "animals.safetensors");
  const std::size_t at = bytes.find("\"lockstep\"");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 10, "\"somebody\"");
  write(directory_->path() / "foreign.safetensors", bytes);
  const auto known = infer("resnet18 --weights animals.safetensors --input pictures --quiet");
  const auto foreign =
      ended_well(infer("resnet18 --weights foreign.safetensors --input pictures --image-size 32 --quiet"));
  EXPECT_THAT(foreign.out, HasSubstr("class 0"));
  std::string named = foreign.out;
  for (const auto& [number, name] : {std::pair{"class 0", "cat"}, std::pair{"class 1", "dog"}})
    for (std::size_t where; (where = named.find(number)) != std::string::npos;) named.replace(where, 7, name);
  EXPECT_EQ(named, known.out);
  // What a model lacks, and what it does not know, is listed.
  expect_refusal("cnn --weights foreign.safetensors --input pictures", 2, "missing ");
}

TEST_F(Infer, MetadataIsCheckedAgainstTheData) {
  std::string other, part;
  for (int i = 0; i < 60; ++i) other += "a quick dog! ", part += "a dog over the fox ";
  write(directory_->path() / "other.txt", other);
  write(directory_->path() / "part.txt", part);
  const auto eval = [&](const std::string& line) { return run("lockstep eval " + line + " --device cpu"); };
  // Sizes come from the file, and so does the vocabulary.
  for (const char* same : {"fox.txt", "part.txt"})
    ended_well(eval(std::string("gpt --weights text.safetensors --data text:") + same));
  fs::create_directories(directory_->path() / "birds");
  for (const char* name : {"cat", "emu"})
    fs::copy(directory_->path() / "animals/cat", directory_->path() / "birds" / name);
  EXPECT_THAT(eval("gpt --weights text.safetensors --data text:other.txt"),
              fails_with(3, "other.txt", "U+0021", "byte 11"));
  EXPECT_THAT(eval("gpt --weights text.safetensors --data tokens:tokens.bin"), fails_with(2, "trained on characters"));
  EXPECT_THAT(eval("cnn --weights digits.safetensors --data random:1x28x28,8"),
              fails_with(2, "digits.safetensors holds a model for samples of 8x8x1, and those of random"));
  EXPECT_THAT(eval("gpt --weights text.safetensors --data text:fox.txt --heads 1"), fails_with(2, "--heads 1"));
  EXPECT_THAT(eval("resnet18 --weights animals.safetensors --data images:birds --image-size 32"),
              fails_with(2, "'dog'", "'emu'"));
  ended_well(
      run("lockstep train resnet18 --weights animals.safetensors --reset-head --data images:birds --image-size 32 "
          "--steps 1 --batch 4 --quiet --device cpu --save birds.safetensors"));
  EXPECT_THAT(infer("resnet18 --weights birds.safetensors --input pictures").out, HasSubstr("emu"));
}

TEST_F(Infer, StopsWhenStdoutIsClosed) {
  const auto start = std::chrono::steady_clock::now();
  const auto outcome =
      run("lockstep infer gpt --weights text.safetensors --prompt to --tokens 1000000000 --threads 2 --samples 4 | "
          "head -c 40 | wc -c; echo ${PIPESTATUS[0]}");
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("40\n"), HasSubstr("141"))) << outcome.err;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(50));
  EXPECT_THAT(run("lockstep infer gpt --weights text.safetensors --prompt to --tokens 5 >/dev/full"),
              fails_with(3, "cannot write to standard output"));
}

TEST_F(Infer, StopsOnRequest) {
  for (const char* more : {"", "--json"}) {
    const auto outcome = run(std::string("timeout --preserve-status -s INT 2 lockstep infer gpt --weights "
                                         "text.safetensors --prompt to --tokens 1000000000 --threads 2 --samples 3 ") +
                             more);
    EXPECT_EQ(outcome.code, 130);
    EXPECT_THAT(outcome.err, HasSubstr("stopped by Ctrl-C while generating"));
    // As text comes, it is there.
    if (*more == 0) {
      EXPECT_GT(outcome.out.size(), 100u);
    }
  }
}

TEST_F(Infer, RefusesToRunAsARank) {
  const auto outcome =
      run("lockstep launch -n 2 -- lockstep infer gpt --weights text.safetensors --prompt to --device cpu");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err + outcome.out, HasSubstr("one of 2 ranks"));
}

}  // namespace
}  // namespace lockstep::testing
