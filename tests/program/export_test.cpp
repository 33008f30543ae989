// lockstep export: files of what has been trained, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/nn/onnx_file.h"
#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using nn::testing::OnnxFile;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

class Export : public ::testing::Test {
 protected:
  Outcome run(const std::string& line) { return lockstep::testing::run(line, directory.path()); }
  void train(const std::string& line) {
    run_well("lockstep train " + line + " --device cpu --quiet", directory.path());
  }
  OnnxFile exported(const std::string& line) {
    run_well("lockstep export onnx " + line + " --output m.onnx", directory.path());
    text = read_file(directory.path("m.onnx"));
    OnnxFile file = nn::testing::read_onnx(text);
    nn::testing::expect_sound(file);
    return file;
  }
  nlohmann::json metadata(const OnnxFile& file) {
    EXPECT_EQ(file.metadata.size(), 1u);
    return json_in(file.metadata.at("lockstep"));
  }

  const TemporaryDirectory directory;
  std::string text;
};

TEST_F(Export, SaysWhatItHasWritten) {
  train("cnn --data digits --steps 2 --save w.safetensors");
  const Outcome outcome = run("lockstep export onnx cnn --weights w.safetensors --output m.onnx");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("saved m.onnx: 213.4 kB in "), HasSubstr(", 10 nodes")));
  EXPECT_EQ(run("lockstep export onnx cnn --weights w.safetensors --output m.onnx --log-level warn").err, "");
}

TEST_F(Export, HasTheMetadataOfTheWeights) {
  train("cnn --data digits --steps 2 --save w.safetensors");
  directory.write("names.txt", "zero\none\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n");
  const auto said = metadata(exported("cnn --weights w.safetensors --class-names names.txt"));
  EXPECT_EQ(said["class_names"][3], "three");
  EXPECT_EQ(said["image"]["height"], 8);
  EXPECT_EQ(said["model"]["name"], "cnn");
}

TEST_F(Export, FilesOfOtherProgramsHaveWhatInferenceAssumes) {
  train("resnet18 --data random:3x32x32,4 --batch 2 --steps 1 --save w.safetensors");
  const OnnxFile ours = exported("resnet18 --weights w.safetensors --image-size 64");
  EXPECT_THAT(ours.inputs, ElementsAre(Pair("input", "float [batch, 3, 64, 64]")));
  EXPECT_FALSE(metadata(ours).contains("image")) << "it was trained on no images";
  write_plain(directory.path("w.safetensors"), read_file(directory.path("w.safetensors")));
  const OnnxFile theirs = exported("resnet18 --weights w.safetensors");
  EXPECT_THAT(theirs.inputs, ElementsAre(Pair("input", "float [batch, 3, 224, 224]")));
  const auto image = metadata(theirs)["image"];
  EXPECT_EQ(image["height"], 224);
  EXPECT_FLOAT_EQ(image["mean"][0].get<float>(), 0.485f);
}

TEST_F(Export, Texts) {
  std::string words;
  for (int i = 0; i < 60; ++i) words += "the quick brown fox. ";
  directory.write("fox.txt", words);
  train(
      "gpt --data text:fox.txt --context 16 --layers 1 --heads 2 --width 16 --steps 2 --batch 4 --save w.safetensors");
  const OnnxFile file = exported("gpt --weights w.safetensors");
  EXPECT_THAT(file.inputs, ElementsAre(Pair("input", "int64 [batch, length]")));
  EXPECT_EQ(metadata(file)["characters"], " .bcefhiknoqrtuwx");
}

TEST_F(Export, WhatCannotBeWrittenIsRefused) {
  train("cnn --data digits --steps 2 --save w.safetensors");
  const std::string line = "lockstep export onnx cnn --weights w.safetensors --output ";
  EXPECT_THAT(run(line + "none/m.onnx"), fails_with(3, "none/m.onnx"));
  std::filesystem::create_directory(directory.path("d.onnx"));
  EXPECT_THAT(run(line + "d.onnx"), fails_with(3, "d.onnx"));
  EXPECT_THAT(run("lockstep export onnx mlp --weights w.safetensors --output m.onnx"),
              fails_with(2, "holds a cnn, not a mlp"));
  EXPECT_THAT(run("lockstep launch -n 2 -- " + line + "m.onnx"), fails_with(2, "lockstep export as one of 2 ranks"));
  EXPECT_THAT(run("lockstep train cnn --data digits --save m.onnx"), fails_with(2, "lockstep export onnx"));
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("m.onnx"))) << "nor what was begun";
}

TEST_F(Export, ItsHelp) {
  const Outcome plain = run("lockstep export --help"), of_format = run("lockstep export onnx --help");
  EXPECT_EQ(plain.code, 0);
  EXPECT_EQ(plain.out, of_format.out);
  EXPECT_THAT(plain.out, AllOf(HasSubstr("lockstep export onnx MODEL"), HasSubstr("--output FILE.onnx")));
}

}  // namespace
}  // namespace lockstep::testing
