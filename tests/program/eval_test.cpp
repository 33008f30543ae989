// lockstep eval: what it says of saved weights is what training said of them, at any number of ranks, and what
// inference, sample by sample, comes to.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/splitmix.h"
#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kClasses = 8, kTrained = 30, kEvaluated = 15;  // of patches; images of a class

// 8 × 8 pixels of RGB.
std::string png(const std::string& pixels) {
  const auto chunk = [](const std::string& kind, const std::string& data) {
    const std::string body = kind + data;
    const auto sum = ::crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()));
    return big_endian(static_cast<std::uint32_t>(data.size())) + body + big_endian(static_cast<std::uint32_t>(sum));
  };
  std::string rows;
  for (std::size_t row = 0; row < 8; ++row) rows += '\0' + pixels.substr(row * 24, 24);
  auto size = ::compressBound(rows.size());
  std::string packed(size, '\0');
  ::compress(reinterpret_cast<Bytef*>(packed.data()), &size, reinterpret_cast<const Bytef*>(rows.data()), rows.size());
  packed.resize(size);
  return "\x89PNG\r\n\x1a\n" +
         chunk("IHDR", big_endian(8) + big_endian(8) + std::string{8, 2, 0, 0, 0}) +  // 8 bits, RGB
         chunk("IDAT", packed) + chunk("IEND", "");
}

// Each class has a colour, which every image misses by much: some are taken for a class of a colour nearby.
void draw_patches(const fs::path& directory, int of_a_class) {
  for (int label = 0; label < kClasses; ++label) {
    const fs::path folder = directory / ("class" + std::to_string(label));
    fs::create_directories(folder);
    for (int image = 0; image < of_a_class; ++image) {
      const auto key = static_cast<std::uint64_t>(label) * 1000 + static_cast<std::uint64_t>(image);
      const auto noise = [&](std::uint64_t i, int most) {
        return static_cast<int>(SplitMix64::word(key, i) % static_cast<std::uint64_t>(2 * most + 1)) - most;
      };
      int colour[3];
      for (int channel = 0; channel < 3; ++channel)
        colour[channel] = ((label >> channel & 1) != 0 ? 150 : 105) + noise(static_cast<std::uint64_t>(channel), 50);
      std::string pixels;
      for (std::uint64_t i = 0; i < 192; ++i)
        pixels += static_cast<char>(std::clamp(colour[i % 3] + noise(3 + i, 40), 0, 255));
      write_file(folder / (std::to_string(image) + ".png"), png(pixels));
    }
  }
}

class Eval : public ::testing::Test {
 protected:
  Outcome call(const std::string& line) const { return run_well(line, directory_.path()); }
  std::vector<nlohmann::json> metrics() const { return events_of(read_file(directory_.path() / "m.jsonl")); }

  // Trains on one rank; what its last line of metrics says.
  nlohmann::json train(const std::string& line) const {
    call("lockstep train " + line + " --quiet --device cpu --metrics m.jsonl");
    return metrics().back();
  }

  struct EvalResult {
    std::string printed;
    double loss = 0, accuracy = 0, top5 = 0;
    std::int64_t samples = 0;
  };
  EvalResult eval(int ranks, const std::string& line) const {
    const auto outcome = call(on_ranks(ranks) + "lockstep eval " + line + " --device cpu --metrics m.jsonl");
    const auto all = metrics();
    EXPECT_EQ(all.size(), 2u) << "only rank 0 writes, and two lines";
    EXPECT_EQ(all.at(0)["event"], "data");
    const auto& one = all.at(1);
    EXPECT_EQ(all.at(0)["samples"], one["samples"]);
    EXPECT_EQ(one["event"], "eval");
    EXPECT_EQ(lines_of(outcome.out).size(), 1u) << outcome.out;
    return {outcome.out, one["loss"], one["accuracy"], one.value("top5", -1.0), one["samples"]};
  }

  const TemporaryDirectory directory_;
};

TEST_F(Eval, MatchesTrainingAtAnyNumberOfRanks) {
  const auto trained = train("cnn --data digits --epochs 2 --save digits.safetensors");
  const double loss = trained["loss"], accuracy = trained["accuracy"];
  double top5 = -1;
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    const EvalResult result = eval(ranks, "cnn --data digits --weights digits.safetensors");
    // Every sample once: each of its 360 is one in the counts, whatever the number of ranks.
    EXPECT_EQ(result.samples, 360);
    EXPECT_NEAR(result.loss, loss, 1e-6 * loss);
    EXPECT_EQ(result.accuracy, accuracy);
    if (ranks == 1) top5 = result.top5;
    EXPECT_EQ(result.top5, top5);
    EXPECT_EQ(result.printed, fmt::format("digits test: loss {:.4f}  accuracy {:.2f} %  top-5 {:.2f} %  360 of "
                                          "1797 samples\n",
                                          result.loss, 100 * accuracy, 100 * top5));
  }
  EXPECT_GT(accuracy, 0.5);
  EXPECT_LT(accuracy, top5);
  EXPECT_LE(top5, 1);
}

TEST_F(Eval, ReportsEachClassAtAnyNumberOfRanks) {
  train("cnn --data digits --epochs 1 --save w.safetensors");
  nlohmann::json alone;
  for (const int ranks : {1, 3}) {
    const auto outcome =
        call(on_ranks(ranks) + "lockstep eval cnn --data digits --device cpu --weights w.safetensors " +
             "--report --metrics m.jsonl");
    EXPECT_THAT(outcome.out, ::testing::HasSubstr("class       precision  recall      F1  support\n"));
    const auto all = metrics();
    ASSERT_EQ(all.size(), 3u);
    const auto& classes = all[2];
    EXPECT_EQ(classes["event"], "classes");
    std::int64_t right = 0, samples = 0;
    for (std::size_t i = 0; i < 10; ++i)
      for (std::size_t j = 0; j < 10; ++j) {
        samples += classes["confusion"][i][j].get<std::int64_t>();
        if (i == j) right += classes["confusion"][i][j].get<std::int64_t>();
      }
    EXPECT_EQ(samples, 360);
    EXPECT_EQ(static_cast<double>(right) / 360, all[1]["accuracy"].get<double>());
    if (ranks == 1) alone = classes;
    EXPECT_EQ(classes, alone);
  }
  write_file(directory_.path() / "t.txt", std::string(3000, 'a') + "bc");
  train("lstm --data text:t.txt --steps 1 --batch 2 --context 16 --save t.safetensors");
  EXPECT_THAT(run("lockstep eval lstm --data text:t.txt --weights t.safetensors --report", directory_.path()),
              fails_with(2, "figures of classes"));
}

TEST_F(Eval, SmoothedLabelsAreForTrainingAlone) {
  const auto first_loss = [&] {
    const auto all = metrics();
    const auto step = std::ranges::find(all, "step", [](const auto& event) { return event["event"]; });
    return step->at("loss").template get<double>();
  };
  train("cnn --data digits --steps 1");
  const double plain = first_loss();
  const double loss = train("cnn --data digits --steps 30 --label-smoothing 0.2 --save smooth.safetensors")["loss"];
  EXPECT_NE(first_loss(), plain);
  EXPECT_NEAR(eval(1, "cnn --data digits --weights smooth.safetensors").loss, loss, 1e-6 * loss);
}

// Loss, accuracy and top five once more, from the probabilities that inference gives each file of the test part.
TEST_F(Eval, CountsAgreeWithInference) {
  draw_patches(directory_.path() / "patches/train", kTrained);
  draw_patches(directory_.path() / "patches/val", kEvaluated);
  const auto trained =
      train("cnn --data images:patches --image-size 8 --augment no --epochs 2 --save patches.safetensors");

  const auto told = events_of(call("lockstep infer cnn --weights patches.safetensors --input patches/val "
                                   "--top 8 --json --device cpu")
                                  .out);
  ASSERT_EQ(told.size(), kClasses * kEvaluated + 1u);
  constexpr double kSamples = kClasses * kEvaluated;
  double loss = 0;
  int first = 0, among_five = 0;
  for (const auto& image : told) {
    if (image["event"] != "image") continue;
    const std::string folder = fs::path(image["input"].get<std::string>()).parent_path().filename();
    const auto& classes = image["classes"];
    ASSERT_EQ(classes.size(), 8u);
    for (std::size_t place = 0; place < 8; ++place) {
      if (classes[place]["name"] != folder) continue;
      loss -= std::log(classes[place]["probability"].get<double>()) / kSamples;
      first += place < 1 ? 1 : 0;
      among_five += place < 5 ? 1 : 0;
    }
  }
  // They are three distinct numbers.
  ASSERT_GT(first, 0);
  ASSERT_LT(first, among_five);
  ASSERT_LT(among_five, kSamples);
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    const EvalResult result = eval(ranks, "cnn --data images:patches --image-size 8 --weights patches.safetensors");
    EXPECT_EQ(result.samples, kClasses * kEvaluated);
    EXPECT_NEAR(result.loss, loss, 1e-5 * loss);
    EXPECT_NEAR(result.loss, trained["loss"].get<double>(), 1e-6 * loss);
    EXPECT_NEAR(result.accuracy * kSamples, first, 1e-9);
    EXPECT_NEAR(result.top5 * kSamples, among_five, 1e-9);
    EXPECT_THAT(result.printed, HasSubstr(fmt::format("accuracy {:.2f} %  top-5 {:.2f} %  120 of 360 samples",
                                                      100 * first / kSamples, 100 * among_five / kSamples)));
  }
}

// Sizes that are not given are the file's: those of images too, which a ResNet would take at any.
TEST_F(Eval, ImagesAreOfTheFilesSize) {
  draw_patches(directory_.path() / "patches/train", 4);
  draw_patches(directory_.path() / "patches/val", 4);
  for (const char* size : {"--image-size 12 ", ""}) {  // by itself: 32, CIFAR-10's
    SCOPED_TRACE(size);
    const auto trained = train(std::string("resnet18-cifar --data images:patches --augment no --batch 16 --steps 2 ") +
                               size + "--save patches.safetensors");
    const double loss = trained["loss"];
    EXPECT_NEAR(eval(1, "resnet18-cifar --data images:patches --weights patches.safetensors").loss, loss, 1e-5 * loss);
    // Training starts from there, at the same size: a rate of 0 finds the same loss.
    const auto again = train(
        "resnet18-cifar --data images:patches --augment no --batch 16 --steps 1 --lr 0 --weights patches.safetensors "
        "--save again.safetensors");
    EXPECT_THAT(read_file(directory_.path() / "again.safetensors"),
                HasSubstr(*size != '\0' ? R"(sample\":[12,12,3])" : R"(sample\":[32,32,3])"));
  }
  // What is given is meant.
  const double small =
      eval(1, "resnet18-cifar --data images:patches --weights patches.safetensors --image-size 8").loss;
  EXPECT_NE(small, eval(1, "resnet18-cifar --data images:patches --weights patches.safetensors").loss);
}

std::string sums() {
  std::string text;
  for (int i = 0; i < 120; ++i) text += fmt::format("{} and {} make {}. ", i % 7, i % 11, i % 7 + i % 11);
  return text;
}

TEST_F(Eval, ALstmsContextIsTheFiles) {
  write_file(directory_.path() / "sums.txt", sums());
  const auto trained =
      train("lstm --data text:sums.txt --layers 1 --width 16 --context 9 --steps 30 --batch 8 --save sums.safetensors");
  const double loss = trained["loss"];
  const std::string given = "lstm --data text:sums.txt --split val --weights sums.safetensors";
  EXPECT_NEAR(eval(1, given).loss, loss, 1e-6 * loss);
  EXPECT_GT(std::abs(eval(1, given + " --context 40").loss - loss), 1e-4 * loss);
}

TEST_F(Eval, SizesOfOtherProgramsFilesAreReadFromTheirShapes) {
  write_file(directory_.path() / "sums.txt", sums());
  for (const std::string model :
       {"gpt --layers 1 --heads 2 --width 16 --context 12", "lstm --layers 1 --width 24 --context 20"}) {
    SCOPED_TRACE(model);
    const auto trained = train(model + " --data text:sums.txt --steps 20 --batch 2 --save own.safetensors");
    write_plain(directory_.path() / "plain.safetensors", read_file(directory_.path() / "own.safetensors"));
    const std::string name = model.substr(0, model.find(' '));
    const std::string given = name + " --data text:sums.txt --weights plain.safetensors" +
                              (name == "gpt" ? " --heads 2" : " --context 20");  // which no shape shows
    const double loss = trained["loss"];
    EXPECT_NEAR(eval(1, given + " --split val").loss, loss, 1e-6 * loss);
    const auto again = train(given + " --steps 1 --lr 0 --weight-decay 0");
    EXPECT_NEAR(again["loss"].get<double>(), loss, 1e-6 * loss);
  }
  const auto trained = train("mlp --data digits --hidden 20,12 --steps 20 --save own.safetensors");
  write_plain(directory_.path() / "plain.safetensors", read_file(directory_.path() / "own.safetensors"));
  EXPECT_EQ(eval(1, "mlp --data digits --weights plain.safetensors").accuracy, trained["accuracy"]);
  const auto heads = run("lockstep eval gpt --data text:sums.txt --context 20 --weights plain.safetensors --device cpu",
                         directory_.path());
  EXPECT_EQ(heads.code, 2) << heads.err;  // it is no gpt's
}

// As a LightningModule saves its `self.model`; with a layer for classes, whose names begin otherwise than the
// encoder's.
TEST_F(Eval, APrefixOfAllNamesIsTakenOffByEvalTrainAndInfer) {
  std::string rows = "text,label\n";
  for (int i = 0; i < 60; ++i)
    rows += fmt::format("it was {} again {},{}\n", i % 2 ? "good" : "bad", i * i % 7, i % 2 ? "pos" : "neg");
  write_file(directory_.path() / "t.csv", rows);
  const std::string sizes = "bert --layers 1 --heads 2 --width 16 --max-length 12 ";
  const auto trained = train(sizes + "--data csv:t.csv --steps 5 --save own.safetensors");
  const std::string file = read_file(directory_.path() / "own.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const nlohmann::json header = json_in(file.substr(sizeof length, length));
  nlohmann::json named;
  for (const auto& [name, tensor] : header.items()) named[name == "__metadata__" ? name : "model." + name] = tensor;
  const std::string text = named.dump(), rest = file.substr(sizeof length + length);
  length = text.size();
  write_file(directory_.path() / "lit.safetensors",
             std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + rest);
  EXPECT_EQ(eval(1, "bert --data csv:t.csv --split val --weights lit.safetensors").accuracy, trained["accuracy"]);
  const std::string again = "bert --data csv:t.csv --steps 1 --lr 0 --weight-decay 0 --weights lit.safetensors";
  EXPECT_EQ(train(again)["params_sha256"], trained["params_sha256"]);
  EXPECT_EQ(train(again + " --non-strict")["params_sha256"], trained["params_sha256"]);
  call("lockstep infer bert --weights lit.safetensors --prompt \"it was good\" --quiet --device cpu");
}

TEST_F(Eval, ReadsWhatIsSavedForPyTorch) {
  const auto trained = train("mlp --data digits --hidden 20 --steps 20 --save digits.pt");
  EXPECT_EQ(read_file(directory_.path() / "digits.pt").substr(0, 2), "PK");
  EXPECT_EQ(eval(1, "mlp --data digits --weights digits.pt").accuracy, trained["accuracy"]);
  EXPECT_THAT(
      run("lockstep train mlp --data digits --epochs 100000 --device cpu --save digits.onnx", directory_.path()),
      fails_with(2, "digits.onnx"));
}

// What Hugging Face's from_pretrained() reads.
TEST_F(Eval, ADirectoryForOtherPrograms) {
  const fs::path here = directory_.path();
  for (const char* const name : {"vocab.json", "merges.txt"})
    fs::copy_file(fs::path(LOCKSTEP_SOURCE_DIR) / "tests/data/bpe" / name, here / name);
  std::string text;
  for (int i = 0; i < 300; ++i) text += fmt::format("Line {} of a text about {} bridges.\n", i, i * 7 % 13);
  directory_.write("bridges.txt", text);
  const auto trained = train(
      "llama --data text:bridges.txt --vocab vocab.json --width 16 --heads 2 --layers 1 --context 16 --rope-base 500 "
      "--steps 20 --lr 0.01 --save made/here/");
  const auto config = json_in(read_file(here / "made/here/config.json"));
  EXPECT_EQ(config["num_key_value_heads"], 2);
  EXPECT_EQ(config["vocab_size"], 481);
  EXPECT_EQ(config["rope_parameters"]["rope_theta"], 500.0);
  EXPECT_EQ(read_file(here / "made/here/merges.txt"), read_file(here / "merges.txt"));
  EXPECT_EQ(eval(1,
                 "llama --data text:bridges.txt --split val --weights made/here/model.safetensors --vocab "
                 "made/here/vocab.json")
                .loss,
            trained["loss"]);
  call(
      "lockstep train bert --data text:bridges.txt --vocab-size 90 --width 16 --heads 2 --layers 1 --steps 2 --quiet "
      "--save bert/");
  EXPECT_EQ(json_in(read_file(here / "bert/tokenizer_config.json"))["do_lower_case"], true);
  EXPECT_THAT(read_file(here / "bert/vocab.txt"), HasSubstr("[MASK]\n"));
  EXPECT_THAT(read_file(here / "made/here/tokenizer_config.json"), HasSubstr("GPT2Tokenizer"));
  EXPECT_THAT(run("lockstep train gpt --data text:bridges.txt --vocab vocab.json --steps 1 --save bert/", here),
              fails_with(2, "there is a vocab.txt already"));
  fs::create_directories(here / "taken/config.json");
  EXPECT_THAT(run("lockstep train gpt --data text:bridges.txt --steps 1 --save taken/", here),
              fails_with(3, "taken/config.json"));
  EXPECT_THAT(run("lockstep train cnn --data digits --steps 1 --save cnn/", here),
              fails_with(2, "there is no config.json of cnn"));
  EXPECT_THAT(run("lockstep train gpt --data text:bridges.txt --steps 1 --save bridges.txt/", here),
              fails_with(3, "bridges.txt/"));
}

// What is named is measured: a folder and a table without parts are not divided, as training would.
TEST_F(Eval, MeasuresAllOfWhatWasNamed) {
  draw_patches(directory_.path() / "patches/train", kTrained);
  draw_patches(directory_.path() / "patches/val", kEvaluated);
  train("cnn --data images:patches --image-size 8 --epochs 2 --save patches.safetensors");
  const std::string weights = " --weights patches.safetensors";
  const EvalResult divided = eval(1, "cnn --data images:patches" + weights);
  const EvalResult folder = eval(2, "cnn --data images:patches/val" + weights);
  EXPECT_EQ(folder.samples, kClasses * kEvaluated);
  EXPECT_EQ(folder.accuracy, divided.accuracy);
  EXPECT_NEAR(folder.loss, divided.loss, 1e-6 * divided.loss);
  EXPECT_THAT(folder.printed, AllOf(HasSubstr("images patches/val: loss"), HasSubstr("  120 of 120 samples")));
  EXPECT_EQ(eval(1, "cnn --data images:patches/val --split val" + weights).samples, kClasses * kEvaluated / 10);
  EXPECT_EQ(eval(1, "cnn --data images:patches/val --split train" + weights).samples, kClasses * kEvaluated * 9 / 10);
  EXPECT_EQ(eval(1, "cnn --data images:patches --split train" + weights).samples, kClasses * kTrained);
  EXPECT_EQ(eval(1, "cnn --data images:patches --split all" + weights).samples, kClasses * (kTrained + kEvaluated));

  const std::string test = "lockstep eval cnn --data images:patches --split test --device cpu" + weights;
  EXPECT_THAT(run(test, directory_.path()), fails_with(2, "images:patches has no part for --split test"));
  fs::create_directories(directory_.path() / "patches/test");
  fs::copy(directory_.path() / "patches/val/class3", directory_.path() / "patches/test/class3",
           fs::copy_options::recursive);
  EXPECT_EQ(eval(1, "cnn --data images:patches --split test" + weights).samples, kEvaluated);
  EXPECT_EQ(eval(1, "cnn --data images:patches/test" + weights).samples, kEvaluated) << "of one class of the weights'";
  EXPECT_THAT(call("lockstep train cnn --data images:patches --image-size 8 --steps 1 --device cpu").err,
              HasSubstr("patches/test is left untouched"));
}

TEST_F(Eval, InvalidWeightsAndFiles) {
  train("mlp --data digits --steps 2 --save digits.safetensors");
  const std::string line = "lockstep eval mlp --data digits --device cpu --weights digits.safetensors";
  EXPECT_THAT(run(line + " --metrics /dev/full", directory_.path()), fails_with(3, "/dev/full"));
  EXPECT_EQ(run(line + " >/dev/full", directory_.path()).code, 3);
  EXPECT_THAT(
      run(line + " --metrics m.json", directory_.path()),
      fails_with(2, "--metrics m.json: metrics are lines of JSON (.jsonl) or a table (.csv) → call it m.jsonl"));
  run_well(line + " --metrics m.csv", directory_.path());
  EXPECT_THAT(read_file(directory_.path() / "m.csv"), HasSubstr("\neval,0,,"));

  // A checkpoint's directory, and that of all of them.
  fs::create_directories(directory_.path() / "c/step-0000000002");
  fs::copy(directory_.path() / "digits.safetensors", directory_.path() / "c/step-0000000002/weights.safetensors");
  for (const char* named : {"c", "c/step-0000000002"}) {
    EXPECT_THAT(run("lockstep eval mlp --data digits --device cpu --weights " + std::string(named), directory_.path()),
                fails_with(3, "a directory, not a file of weights → give c/step-0000000002/weights.safetensors"));
  }

  std::string file = read_file(directory_.path() / "digits.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t at = sizeof length + length; at + sizeof nan <= file.size(); at += sizeof nan)
    std::memcpy(file.data() + at, &nan, sizeof nan);
  write_file(directory_.path() / "digits.safetensors", file);
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(run(on_ranks(ranks) + line, directory_.path()),
                fails_with(7, "the evaluation loss of digits.safetensors is NaN"));
  }
}

TEST_F(Eval, PerplexityIsThatOfTheLoss) {
  write_file(directory_.path() / "sums.txt", sums());
  const auto trained = train(
      "gpt --data text:sums.txt --layers 1 --heads 2 --width 16 --context 16 --steps 40 --batch 8 --lr 0.01 "
      "--save sums.safetensors");
  EvalResult alone;
  for (const int ranks : {1, 3}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    const EvalResult result = eval(ranks, "gpt --data text:sums.txt --split val --weights sums.safetensors");
    if (ranks == 1) alone = result;
    EXPECT_GT(result.samples, 3);
    EXPECT_EQ(result.samples, alone.samples);
    const double loss = trained["loss"];
    EXPECT_NEAR(result.loss, loss, 1e-6 * loss);
    EXPECT_EQ(result.accuracy, trained["accuracy"]);
    EXPECT_THAT(result.printed, HasSubstr(fmt::format("loss {:.4f}  perplexity {:.3f}  bits per byte {:.4f}  ",
                                                      result.loss, std::exp(result.loss), result.loss / std::log(2.0))))
        << "of ASCII, a byte each";
    EXPECT_EQ(result.printed, alone.printed);
  }
}

}  // namespace
}  // namespace lockstep::testing
