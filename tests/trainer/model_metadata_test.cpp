// What weights files say of their model: as it was, and nothing on trust.
#include "checkpoint/model_metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "lockstep/data/open.h"
#include "tests/support/json.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

using checkpoint::apply_metadata;
using checkpoint::find_model_metadata;
using checkpoint::metadata_of;
using checkpoint::ModelMetadata;
using checkpoint::read_model_metadata;

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

ModelMetadata read_back(const ModelMetadata& metadata) {
  const auto written = metadata_of(metadata);
  EXPECT_EQ(written.at("format"), "pt");
  return find_model_metadata(written, "it").value();
}

TEST(ModelMetadata, OfImages) {
  const auto splits = data::open_data("digits");
  const ModelMetadata metadata = read_back(model_metadata_of(config_of("cnn", "digits"), *splits.train));
  EXPECT_EQ(metadata.spec.name, "cnn");
  EXPECT_THAT(metadata.spec.sample_shape, ElementsAre(8, 8, 1));
  EXPECT_EQ(metadata.spec.classes, 10);
  EXPECT_EQ(metadata.seed, 9u);
  EXPECT_EQ(metadata.data, "digits train");
  EXPECT_FALSE(metadata.tokens);
  EXPECT_EQ(metadata.characters, nullptr);
  ASSERT_NE(metadata.image, nullptr);
  EXPECT_THAT(metadata.image->dims(), ElementsAre(8, 8, 1));
  EXPECT_FALSE(metadata.image->cropped);
  EXPECT_EQ(metadata.image->normalisation.std[0], 1.0f);
}

TEST(ModelMetadata, OfOtherModels) {
  const auto splits = data::open_data("random:5,10");
  auto config = config_of("mlp", "random:5,10");
  config.model.settings = {{"hidden", {7, 8}}};
  const ModelMetadata metadata = read_back(model_metadata_of(config, *splits.train));
  EXPECT_THAT(metadata.spec.settings.integers("hidden"), ElementsAre(7, 8));
  EXPECT_EQ(metadata.image, nullptr);

  ModelConfig open;
  apply_metadata(open, metadata, "f");
  EXPECT_THAT(open.settings.integers("hidden"), ElementsAre(7, 8));
  ModelConfig other;
  other.settings = {{"hidden", {7}}};
  EXPECT_THROW(apply_metadata(other, metadata, "f"), UsageError);
  other.settings = {{"hidden", {7, 8}}};
  EXPECT_NO_THROW(apply_metadata(other, metadata, "f"));
  other.name = "linear";
  EXPECT_THROW(apply_metadata(other, metadata, "f"), UsageError);
}

nlohmann::json gpt() {
  return {
      {"model",
       {{"name", "gpt"}, {"sample", {16}}, {"classes", 3}, {"layers", 2}, {"heads", 4}, {"width", 8}, {"context", 16}}},
      {"tokens", true},
      {"characters", "aé\n"},
      {"seed", 1}};
}

TEST(ModelMetadata, OfWordPieces) {
  const std::vector<std::string> names = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "が", "A", "<x>"};
  nlohmann::json json = {{"model",
                          {{"name", "bert"},
                           {"sample", {8}},
                           {"classes", names.size()},
                           {"layers", 1},
                           {"heads", 1},
                           {"width", 8},
                           {"inner", 0},
                           {"context", 8},
                           {"token-types", 2}}},
                         {"tokens", true},
                         {"word_pieces", names}};
  // Of versions that did not say how texts are read.
  EXPECT_TRUE(find_model_metadata({{"lockstep", json.dump()}}, "it")->word_pieces->cased());
  for (const data::WordPieceRules& rules :
       {data::WordPieceRules{.lower_case = true}, {.lower_case = true, .strip_marks = true, .added = {"<x>"}}}) {
    ModelMetadata metadata = find_model_metadata({{"lockstep", json.dump()}}, "it").value();
    metadata.word_pieces = std::make_shared<const data::WordPieces>(names, "it", rules);
    EXPECT_EQ(*read_back(metadata).word_pieces, *metadata.word_pieces);
    EXPECT_FALSE(metadata.word_pieces->cased());
    EXPECT_THROW(open_word_pieces("", true, metadata, "w"), UsageError);
    EXPECT_EQ(open_word_pieces("", false, metadata, "w"), metadata.word_pieces);
  }
}

TEST(ModelMetadata, OfTexts) {
  const ModelMetadata metadata = read_back(find_model_metadata({{"lockstep", gpt().dump()}}, "it").value());
  EXPECT_EQ(metadata.spec.settings.integer("heads"), 4);
  ASSERT_NE(metadata.characters, nullptr);
  EXPECT_EQ(metadata.characters->text(), "\naé");
  ModelConfig config;
  config.settings.set("heads", 4);
  apply_metadata(config, metadata, "f");
  EXPECT_EQ(config.settings.integer("layers"), 2);
  EXPECT_EQ(config.settings.integer("context"), 16);
  config.settings.set("width", 9);
  try {
    apply_metadata(config, metadata, "some.file");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("--width 9"), HasSubstr("some.file"), HasSubstr("8")));
  }
}

TEST(ModelMetadata, OfAHeadOfItsOwn) {
  auto json = gpt();
  EXPECT_TRUE(nn::complete(find_model_metadata({{"lockstep", json.dump()}}, "it").value().spec).settings.flag("tied"));
  json["model"]["tied"] = false;
  const ModelMetadata metadata = read_back(find_model_metadata({{"lockstep", json.dump()}}, "it").value());
  EXPECT_FALSE(metadata.spec.settings.flag("tied"));
  ModelConfig config;
  apply_metadata(config, metadata, "f");
  EXPECT_FALSE(config.settings.flag("tied"));
}

TEST(ModelMetadata, AnLstmsContextIsTheFilesUnlessOneIsGiven) {
  auto json = gpt();
  json["model"] = {{"name", "lstm"}, {"sample", {33}}, {"classes", 3}, {"layers", 2}, {"width", 8}};
  const ModelMetadata metadata = read_back(find_model_metadata({{"lockstep", json.dump()}}, "it").value());
  ModelConfig config;
  apply_metadata(config, metadata, "f");
  EXPECT_EQ(config.settings.integer("context"), 33);
  config.settings.set("context", 5);
  EXPECT_NO_THROW(apply_metadata(config, metadata, "f"));
  EXPECT_EQ(config.settings.integer("context"), 5);
}

TEST(ModelMetadata, WordsAreThoseThatThereAre) {
  auto json = gpt();
  json["model"] = {{"name", "rnn"}, {"sample", {33}}, {"classes", 3},
                   {"layers", 2},   {"width", 8},     {"nonlinearity", "relu"}};
  const ModelMetadata metadata = read_back(find_model_metadata({{"lockstep", json.dump()}}, "it").value());
  EXPECT_EQ(nn::complete(metadata.spec).settings.word("nonlinearity"), "relu");
  for (const nlohmann::json& other : {nlohmann::json("sigmoid"), nlohmann::json(""), nlohmann::json(3)}) {
    json["model"]["nonlinearity"] = other;
    EXPECT_THROW(find_model_metadata({{"lockstep", json.dump()}}, "it"), IoError) << other.dump();
  }
}

TEST(ModelMetadata, OtherFilesHaveNone) {
  EXPECT_EQ(find_model_metadata({}, "it"), std::nullopt);
  EXPECT_EQ(find_model_metadata({{"format", "pt"}}, "it"), std::nullopt);
}

TEST(ModelMetadata, InvalidMetadataIsRefused) {
  const auto refused = [](const nlohmann::json& json) {
    try {
      static_cast<void>(
          find_model_metadata({{"lockstep", json.is_string() ? json.get<std::string>() : json.dump()}}, "f.st"));
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
