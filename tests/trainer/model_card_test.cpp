// What weights files say of their model: as it was, and nothing on trust.
#include "trainer/model_card.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "data/open.h"
#include "tests/support/json.h"
#include "trainer/adopt_card.h"

namespace lockstep::trainer {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TrainConfig config_of(const char* model, const char* data) {
  TrainConfig config;
  config.model.name = model;
  config.data = data;
  config.seed = 9;
  return config;
}

ModelCard read_back(const ModelCard& card) {
  const auto metadata = metadata_of(card);
  EXPECT_EQ(metadata.at("format"), "pt");
  return card_among(metadata, "it").value();
}

TEST(ModelCard, OfImages) {
  const auto splits = data::open_data("digits");
  const ModelCard card = read_back(card_of(config_of("cnn", "digits"), *splits.train));
  EXPECT_EQ(card.spec.name, "cnn");
  EXPECT_THAT(card.spec.sample_shape, ElementsAre(8, 8, 1));
  EXPECT_EQ(card.spec.classes, 10);
  EXPECT_EQ(card.seed, 9u);
  EXPECT_EQ(card.data, "digits train");
  EXPECT_FALSE(card.tokens);
  EXPECT_EQ(card.characters, nullptr);
  ASSERT_NE(card.image, nullptr);
  EXPECT_THAT(card.image->dims(), ElementsAre(8, 8, 1));
  EXPECT_FALSE(card.image->cropped);
  EXPECT_EQ(card.image->normalisation.std[0], 1.0f);
}

TEST(ModelCard, OfOtherModels) {
  const auto splits = data::open_data("random:5,10");
  auto config = config_of("mlp", "random:5,10");
  config.model.settings = {{"hidden", {7, 8}}};
  const ModelCard card = read_back(card_of(config, *splits.train));
  EXPECT_THAT(card.spec.settings.integers("hidden"), ElementsAre(7, 8));
  EXPECT_EQ(card.image, nullptr);

  ModelConfig open;
  adopt(open, card, "f");
  EXPECT_THAT(open.settings.integers("hidden"), ElementsAre(7, 8));
  ModelConfig other;
  other.settings = {{"hidden", {7}}};
  EXPECT_THROW(adopt(other, card, "f"), UsageError);
  other.settings = {{"hidden", {7, 8}}};
  EXPECT_NO_THROW(adopt(other, card, "f"));
  other.name = "linear";
  EXPECT_THROW(adopt(other, card, "f"), UsageError);
}

nlohmann::json gpt() {
  return {
      {"model",
       {{"name", "gpt"}, {"sample", {16}}, {"classes", 3}, {"layers", 2}, {"heads", 4}, {"width", 8}, {"context", 16}}},
      {"tokens", true},
      {"characters", "aé\n"},
      {"seed", 1}};
}

TEST(ModelCard, OfTexts) {
  const ModelCard card = read_back(card_among({{"lockstep", gpt().dump()}}, "it").value());
  EXPECT_EQ(card.spec.settings.integer("heads"), 4);
  ASSERT_NE(card.characters, nullptr);
  EXPECT_EQ(card.characters->text(), "\naé");
  ModelConfig config;
  config.settings.set("heads", 4);
  adopt(config, card, "f");
  EXPECT_EQ(config.settings.integer("layers"), 2);
  EXPECT_EQ(config.settings.integer("context"), 16);
  config.settings.set("width", 9);
  try {
    adopt(config, card, "some.file");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("--width 9"), HasSubstr("some.file"), HasSubstr("8")));
  }
}

TEST(ModelCard, OfAHeadOfItsOwn) {
  auto json = gpt();
  EXPECT_TRUE(nn::complete(card_among({{"lockstep", json.dump()}}, "it").value().spec).settings.flag("tied"));
  json["model"]["tied"] = false;
  const ModelCard card = read_back(card_among({{"lockstep", json.dump()}}, "it").value());
  EXPECT_FALSE(card.spec.settings.flag("tied"));
  ModelConfig config;
  adopt(config, card, "f");
  EXPECT_FALSE(config.settings.flag("tied"));
}

TEST(ModelCard, AnLstmsContextIsTheFilesUnlessOneIsGiven) {
  auto json = gpt();
  json["model"] = {{"name", "lstm"}, {"sample", {33}}, {"classes", 3}, {"layers", 2}, {"width", 8}};
  const ModelCard card = read_back(card_among({{"lockstep", json.dump()}}, "it").value());
  ModelConfig config;
  adopt(config, card, "f");
  EXPECT_EQ(config.settings.integer("context"), 33);
  config.settings.set("context", 5);
  EXPECT_NO_THROW(adopt(config, card, "f"));
  EXPECT_EQ(config.settings.integer("context"), 5);
}

TEST(ModelCard, OtherFilesHaveNone) {
  EXPECT_EQ(card_among({}, "it"), std::nullopt);
  EXPECT_EQ(card_among({{"format", "pt"}}, "it"), std::nullopt);
}

TEST(ModelCard, WhatCannotBeIsRefused) {
  const auto refused = [](const nlohmann::json& json) {
    try {
      static_cast<void>(card_among({{"lockstep", json.is_string() ? json.get<std::string>() : json.dump()}}, "f.st"));
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr("f.st"));
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused(gpt()));
  for (const char* text : {"", "[]", "{", "{}", "{\"model\": 3}", "[[[[[1]]]]]"}) EXPECT_TRUE(refused(text)) << text;
  const auto with = [](const char* pointer, const nlohmann::json& value) {
    auto json = gpt();
    json[nlohmann::json::json_pointer(pointer)] = value;
    return json;
  };
  EXPECT_TRUE(refused(with("/model/layers", 0)));
  EXPECT_TRUE(refused(with("/model/layers", -1)));
  EXPECT_TRUE(refused(with("/model/width", 1e300)));
  EXPECT_TRUE(refused(with("/model/heads", "4")));
  EXPECT_TRUE(refused(with("/model/classes", 1 << 30)));
  EXPECT_TRUE(refused(with("/model/sample", {0})));
  EXPECT_TRUE(refused(with("/model/sample", nlohmann::json::array())));
  EXPECT_TRUE(refused(with("/model/sample", {1 << 24, 1 << 24, 3})));
  EXPECT_TRUE(refused(with("/model/sample", {1.5})));
  EXPECT_TRUE(refused(with("/model/sample", {16, 1.6e120})));
  EXPECT_TRUE(refused(with("/model/sample", 16)));
  EXPECT_TRUE(refused(with("/seed", 1.6e120)));
  EXPECT_TRUE(refused(with("/seed", -1)));
  EXPECT_FALSE(refused(with("/seed", std::numeric_limits<std::uint64_t>::max())));
  EXPECT_TRUE(refused(with("/characters", "ab")));
  EXPECT_TRUE(refused(with("/class_names", {"a", "b", "c", "d"})));
  EXPECT_TRUE(refused(with("/tokens", 1)));
  const nlohmann::json image = {{"height", 16},      {"width", 16},      {"channels", 3},
                                {"mean", {0, 0, 0}}, {"std", {1, 1, 1}}, {"cropped", true}};
  EXPECT_TRUE(refused(with("/image", image)));  // its samples are rows
  auto pictures = gpt();
  pictures["model"]["sample"] = {16, 16, 3};
  pictures["image"] = image;
  EXPECT_FALSE(refused(pictures));
  for (const auto& [key, value] : std::vector<std::pair<const char*, nlohmann::json>>{
           {"height", 99999}, {"channels", 2}, {"std", {1, 0, 1}}, {"mean", {0, 0}}, {"mean", "x"}, {"cropped", 1}}) {
    auto changed = pictures;
    changed["image"][key] = value;
    EXPECT_TRUE(refused(changed)) << key;
  }
}

}  // namespace
}  // namespace lockstep::trainer
