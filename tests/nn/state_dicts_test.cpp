// Which dictionary of a file of torch.save() is the model's.
#include "nn/io/unpickler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "lockstep/nn/io/weights.h"
#include "tests/nn/pickles.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using lockstep::testing::TemporaryDirectory;
using lockstep::testing::write_file;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::legacy;
using ::testing::Not;
using testing::Pickle;

// Values of dictionaries, without the head of a pickle.
std::string value(const Pickle& pickle) { return pickle.bytes.substr(2); }
std::string tensor(std::int64_t size = 2) { return value(Pickle().unnamed_tensor(4, 0, {size}, {1})); }
std::string number() { return "K\x05"; }
std::string object() { return "cmodels\nNet\n)R"; }

using Entries = std::vector<std::pair<std::string, std::string>>;
std::string dict(const Entries& entries) {
  Pickle made;
  made.op("}(");
  for (const auto& [key, content] : entries) made.text(key).op(content);
  return value(made.op("u"));
}
// What PyTorch's tutorials call a state dict.
std::string state(const std::string& prefix = "", std::int64_t size = 2) {
  return dict({{prefix + "weight", tensor(size)}, {prefix + "bias", tensor(1)}});
}

class StateDicts : public ::testing::Test {
 protected:
  // The names that are read, and before them the key.
  std::vector<std::string> read(const std::string& root, const std::string& key = {}) {
    write_file(path_, legacy(Pickle().op(root + ".").bytes));
    std::vector<std::string> names;
    for (const auto& tensor : read_weights(path_, {.key = key})) names.push_back(tensor.name);
    return names;
  }
  std::string refusal(const std::string& root, const std::string& key = {}) {
    try {
      read(root, key);
    } catch (const Error& error) {
      EXPECT_FALSE(error.remedy().empty());
      code_ = error.code();
      const std::string line = error.line();
      EXPECT_EQ(line.find('\n'), std::string::npos);
      return line;
    }
    return "nothing was thrown";
  }

  TemporaryDirectory directory_;
  std::string path_ = directory_.path("x.pt");
  int code_ = 0;
};

TEST_F(StateDicts, UsualKeys) {
  for (const char* key : {"state_dict", "model_state_dict", "model", "net", "network", "module", "params"})
    EXPECT_THAT(read(dict({{"epoch", number()}, {key, state()}, {"args", object()}})), ElementsAre("weight", "bias"))
        << key;
}

TEST_F(StateDicts, AnyKeyIfItIsTheOnlyOne) {
  EXPECT_THAT(read(dict({{"mine", state()}, {"epoch", number()}})), ElementsAre("weight", "bias"));
  EXPECT_THAT(read(dict({{"a", dict({{"b", dict({{"c", state()}})}})}})), ElementsAre("weight", "bias"));
}

TEST_F(StateDicts, DictionariesWithinOthers) {
  const std::string root = dict(
      {{"model", dict({{"state_dict", state("inner.")}, {"name", number()}})}, {"rng", dict({{"cpu", tensor()}})}});
  EXPECT_THAT(read(root), ElementsAre("inner.weight", "inner.bias"));
  EXPECT_THAT(read(root, "model.state_dict"), ElementsAre("inner.weight", "inner.bias"));
  EXPECT_THAT(read(root, "rng"), ElementsAre("cpu"));
}

// PyTorch's ImageNet example saves its best accuracy as a tensor.
TEST_F(StateDicts, TensorsBesideTheStateDict) {
  EXPECT_THAT(read(dict({{"arch", number()}, {"state_dict", state()}, {"best_acc1", tensor(1)}})),
              ElementsAre("weight", "bias"));
}

TEST_F(StateDicts, AnOptimizersMomentsAreNoModel) {
  const std::string moments = dict({{"exp_avg", state()}, {"exp_avg_sq", state()}});
  for (const char* key : {"optimizer", "optimizer_state_dict", "optim"})
    EXPECT_THAT(read(dict({{key, moments}, {"mine", state()}})), ElementsAre("weight", "bias")) << key;
  EXPECT_THAT(refusal(dict({{"optimizer", moments}, {"epoch", number()}})), HasSubstr("'optimizer' is no tensor"));
  EXPECT_EQ(code_, 3);
}

TEST_F(StateDicts, TheSameDictionaryUnderTwoKeysIsOne) {
  const std::string once = state() + std::string("q\0", 2), again = std::string("h\0", 2);
  EXPECT_THAT(read(dict({{"model", once}, {"state_dict", again}})), ElementsAre("weight", "bias"));
}

TEST_F(StateDicts, TwoThatFitAreRefused) {
  const std::string said = refusal(dict({{"epoch", number()}, {"state_dict", state()}, {"state_dict_ema", state()}}));
  EXPECT_THAT(said, AllOf(HasSubstr("x.pt holds several models with the same names and shapes"),
                          HasSubstr("\"state_dict\", \"state_dict_ema\""), HasSubstr("--weights-key state_dict")));
  EXPECT_EQ(code_, 2);
  // What wrappers put before all names says nothing about a model.
  EXPECT_THAT(refusal(dict({{"model", state()}, {"ema", state("module.")}})), HasSubstr("\"model\", \"ema\""));
  // Another model's are no choice: only one of them can be meant.
  EXPECT_THAT(read(dict({{"model", state()}, {"ema", state("averaged.")}})), ElementsAre("weight", "bias"));
  EXPECT_THAT(read(dict({{"model", state()}, {"ema", state("", 3)}})), ElementsAre("weight", "bias"));
}

TEST_F(StateDicts, NothingIsGuessedAmongSeveral) {
  const std::string two = dict({{"generator", state("g.")}, {"discriminator", state("d.")}});
  EXPECT_THAT(refusal(two), AllOf(HasSubstr("\"generator\", \"discriminator\""), HasSubstr("--weights-key generator")));
  EXPECT_EQ(code_, 2);
  EXPECT_THAT(read(two, "discriminator"), ElementsAre("d.weight", "d.bias"));
  const std::string usual = dict({{"net", state("g.")}, {"model", state("d.")}, {"other", state("e.")}});
  EXPECT_THAT(refusal(usual), AllOf(HasSubstr("\"net\", \"model\""), Not(HasSubstr("other"))));
  Entries many;
  for (int i = 0; i < 20; ++i) many.emplace_back(fmt::format("m{}", i), state());
  EXPECT_THAT(refusal(dict(many)), HasSubstr("\"m4\" and 15 more"));
}

TEST_F(StateDicts, AKeyThatIsNotThere) {
  const std::string root = dict({{"model", state()}, {"ema", dict({{"model", state()}})}});
  EXPECT_THAT(read(root, "ema.model"), ElementsAre("weight", "bias"));
  for (const char* key : {"emma", "ema", "model.", ".model", "odel", "a.ema.model", "ema..model"}) {
    EXPECT_THAT(refusal(root, key),
                AllOf(HasSubstr(fmt::format("under the key '{}'", key)), HasSubstr("it has \"model\", \"ema.model\"")));
    EXPECT_EQ(code_, 2);
  }
  EXPECT_THAT(refusal(state(), "model"), HasSubstr("leave --weights-key out"));
  const std::string alike = dict({{"a.b", state()}, {"a", dict({{"b", state("x.")}})}});
  EXPECT_THAT(refusal(alike, "a.b"), HasSubstr("two dictionaries"));
}

TEST_F(StateDicts, AvailableKeysAreNamed) {
  // Of several entries the one that should be the model's.
  EXPECT_THAT(refusal(dict({{"epoch", number()}, {"model", object()}})),
              HasSubstr("'model' is no tensor but an object of 'models Net'"));
  EXPECT_THAT(refusal(dict({{"epoch", number()}, {"weight", tensor()}})),
              HasSubstr("'epoch' is no tensor but a number"));
  EXPECT_THAT(refusal(dict({{"model", dict({{"weight", tensor()}, {"_extra_state", object()}})}})),
              HasSubstr("'_extra_state' is no tensor but an object"));
  EXPECT_THAT(refusal(dict({{"epochs", dict({})}})), HasSubstr("'epochs' is no tensor but a dictionary"));
  EXPECT_THAT(refusal("]"), HasSubstr("does not hold a dictionary but a list"));
  EXPECT_THAT(refusal("}(K\x01" + tensor() + "u"), HasSubstr("an entry without a name is no tensor"));
  EXPECT_EQ(code_, 3);
}

TEST_F(StateDicts, OneNameOfManyTensorsIsRefused) {
  const std::string name = "X\x01" + std::string(3, '\0') + "w" + std::string("q\0", 2), again = std::string("h\0", 2);
  EXPECT_THAT(refusal("}(" + name + tensor() + again + tensor() + "u"), HasSubstr("'w' is there twice"));
  EXPECT_THAT(refusal(dict({{std::string(5000, 'w'), tensor()}})), HasSubstr("a name of 5000 bytes"));
}

// As a hostile file may have it: found at no depth, and in no time.
TEST_F(StateDicts, NestingWithoutEnd) {
  std::string deep = state();
  for (int i = 0; i < 2000; ++i) deep = "}" + value(Pickle().text("a")) + deep + "s";
  EXPECT_THAT(refusal(deep), HasSubstr("'a' is no tensor but a dictionary"));
  EXPECT_THAT(refusal(std::string("}q\0(X\1\0\0\0ah\0u", 13)), HasSubstr("'a' is no tensor but a dictionary"));
}

TEST_F(StateDicts, SafetensorsHaveNoKeys) {
  write_safetensors(path_, {{"weight", DType::kU8, {1}, {std::byte{7}}}});
  try {
    read_weights(path_, {.key = "model"});
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.line(), HasSubstr("--weights-key model: "));
    EXPECT_THAT(error.line(), HasSubstr("which has no dictionaries"));
  }
}

}  // namespace
}  // namespace lockstep::nn
