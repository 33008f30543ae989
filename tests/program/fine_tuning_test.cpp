// Fine-tuning as people call it: --weights with --reset-head and --freeze, in one process, on ranks, and on devices of
// one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

struct Saved {
  std::vector<std::int64_t> shape;
  std::string bytes;
};
using Weights = std::map<std::string, Saved>;

Weights weights_in(const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const auto header = json_in(file.substr(sizeof length, length));
  Weights all;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const std::size_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
    all[name] = {tensor["shape"], file.substr(sizeof length + length + begin, end - begin)};
  }
  return all;
}

struct Example {
  std::string train;             // the model, its data and how long
  std::string freeze;            // patterns
  std::set<std::string> frozen;  // how the parameters begin that they name
  std::string head;
};

class FineTuning : public ::testing::Test {
 protected:
  Weights saved(const std::string& file) const { return weights_in(read_file(directory_.path() / file)); }
  Outcome call(const std::string& line) const { return run(line, directory_.path()); }
  void expect_done(const std::string& line) const { ended_well(call(line)); }

  void check(const Example& example) const {
    expect_done("lockstep train " + example.train + " --device cpu --quiet --save base.safetensors");
    const Weights base = saved("base.safetensors");
    for (const auto& [start, devices] : {std::pair<std::string, const char*>{"lockstep train ", "--device cpu"},
                                         {on_ranks(2) + "lockstep train ", "--device cpu"},
                                         {"lockstep train ", "--parallel dp --device cpu:0,1"}}) {
      SCOPED_TRACE(start + example.train + " " + devices);
      expect_done(start + example.train + " --weights base.safetensors --reset-head --classes 13 --freeze \"" +
                  example.freeze + "\" --quiet --check-replicas 1 --save tuned.safetensors " + devices);
      const Weights tuned = saved("tuned.safetensors");
      ASSERT_EQ(tuned.size(), base.size());
      std::size_t kept = 0;
      for (const auto& [name, tensor] : tuned) {
        SCOPED_TRACE(name);
        const Saved& before = base.at(name);
        if (name.starts_with(example.head)) {
          EXPECT_EQ(before.shape.at(0), 10);
          EXPECT_EQ(tensor.shape.at(0), 13);
          continue;
        }
        EXPECT_EQ(tensor.shape, before.shape);
        const bool parameter = name.ends_with(".weight") || name.ends_with(".bias");
        const bool frozen = parameter && std::ranges::any_of(example.frozen, [&](const std::string& beginning) {
                              return name.starts_with(beginning);
                            });
        kept += frozen ? 1 : 0;
        // Not EXPECT_EQ: megabytes that differ are nothing to print.
        EXPECT_EQ(tensor.bytes == before.bytes, frozen);
      }
      EXPECT_GT(kept, 1u);
      std::filesystem::remove(directory_.path() / "tuned.safetensors");
    }
  }

  const TemporaryDirectory directory_;
};

TEST_F(FineTuning, WhatIsFrozenStays) {
  check({.train = "cnn --data digits --steps 20",
         .freeze = "conv1.*,conv2.bi?s",
         .frozen = {"conv1.", "conv2.bias"},
         .head = "fc2."});
}

// Their statistics are no parameters: they follow the data.
TEST_F(FineTuning, WhatIsFrozenOfAResNetStays) {
  check({.train = "resnet18-cifar --data random:3x8x8,24 --global-batch 8 --steps 3 --lr 0.01",
         .freeze = "conv1.*,bn1.*,layer1.*,layer2.?.conv2.weight",
         .frozen = {"conv1.", "bn1.", "layer1.", "layer2.0.conv2.weight", "layer2.1.conv2.weight"},
         .head = "fc."});
}

// At a rate of 0 nothing moves: what differs from the file has started anew, as in a model without one.
TEST_F(FineTuning, OnlyTheHeadIsReinitialized) {
  const std::string train = "lockstep train cnn --data digits --device cpu --quiet ";
  expect_done(train + "--steps 20 --save base.safetensors");
  const std::string still = train + "--steps 1 --lr 0 --seed 7 ";
  expect_done(still + "--save new.safetensors");
  expect_done(still + "--weights base.safetensors --save kept.safetensors");
  expect_done(still + "--weights base.safetensors --reset-head --save reset.safetensors");
  const Weights base = saved("base.safetensors"), anew = saved("new.safetensors"), kept = saved("kept.safetensors");
  const Weights reset = saved("reset.safetensors");
  std::size_t in_head = 0;
  for (const auto& [name, tensor] : base) {
    SCOPED_TRACE(name);
    const bool head = name.starts_with("fc2.");
    in_head += head ? 1 : 0;
    EXPECT_TRUE(tensor.bytes != anew.at(name).bytes);
    EXPECT_TRUE(kept.at(name).bytes == tensor.bytes);
    EXPECT_TRUE(reset.at(name).bytes == (head ? anew : base).at(name).bytes);
  }
  EXPECT_EQ(in_head, 2u);
}

TEST_F(FineTuning, WhatCannotBeFrozen) {
  const auto refused = [this](const std::string& arguments, const std::string& says, const std::string& remedy) {
    for (const char* start : {"", "lockstep launch -n 2 -- "}) {
      const std::string line = start + ("lockstep train cnn --data digits --steps 1 --device cpu " + arguments);
      EXPECT_THAT(call(line), fails_with(2, says, "→ " + remedy)) << line;
    }
  };
  refused("--freeze \"conv1.wieght\"", "--freeze conv1.wieght: no parameter has such a name",
          "did you mean 'conv1.weight'? * stands for any characters");
  refused("--freeze \"layer1.*\"", "--freeze layer1.*: no parameter has such a name",
          "names are such as conv1.weight; * stands for any characters");
  // One that fits does not speak for the others.
  refused("--freeze \"conv1.*,encoder*\"", "--freeze encoder*: no parameter has such a name", "");
  refused("--freeze \"*\"", "--freeze leaves no parameter to train", "freeze fewer");
  refused("--freeze \"*.weight,*.bias\"", "--freeze leaves no parameter to train", "freeze fewer");
}

}  // namespace
}  // namespace lockstep::testing
