// Models whose sizes come from a weights file: what may be built of it.
#include "checkpoint/model_metadata.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "lockstep/nn/io/state.h"
#include "tests/support/refusal.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::HasSubstr;

class ModelOfFile : public ::testing::Test {
 protected:
  std::unique_ptr<nn::Module> make(const nn::ModelSpec& spec, const std::vector<nn::HostTensor>& tensors,
                                   const SizesOf& sizes = {}) {
    nn::Context context{*backend_, generator_};
    return make_model_of_file(context, spec, tensors, "w.safetensors", sizes);
  }
  std::string refusal(const nn::ModelSpec& spec) {
    nn::HostTensor one{"fc.weight", DType::kF32, {4}, std::vector<std::byte>(16)};
    try {
      make(spec, {one});
    } catch (const IoError& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  std::unique_ptr<nn::Backend> backend_ = nn::make_cpu_backend(1);
  nn::Generator generator_ = nn::Generator::zeros();
};

nn::ModelSpec llama(std::int64_t width, std::int64_t context) {
  return {.name = "llama",
          .sample_shape = {context},
          .classes = 8,
          .settings = {{"layers", 1}, {"heads", 1}, {"width", width}, {"context", context}}};
}

nn::ModelSpec gpt(std::int64_t layers, std::int64_t heads, std::int64_t width, std::int64_t context) {
  return {.name = "gpt",
          .sample_shape = {context},
          .classes = 8,
          .settings = {{"layers", layers}, {"heads", heads}, {"width", width}, {"context", context}}};
}

TEST_F(ModelOfFile, IsBuiltIfTheFileHasItsParameters) {
  const std::vector<nn::ModelSpec> specs = {
      gpt(3, 2, 8, 16),
      llama(8, 1 << 18),  // whose angles are in no file
      {.name = "resnet18-cifar", .sample_shape = {8, 8, 3}, .classes = 4},
      {.name = "cnn", .sample_shape = {8, 8, 1}, .classes = 4},
      {.name = "mlp", .sample_shape = {5}, .classes = 3, .settings = {{"hidden", {7, 9}}}},
      {.name = "lstm", .sample_shape = {8, 8, 1}, .classes = 4, .settings = {{"layers", 2}, {"width", 12}}},
      {.name = "rnn",
       .sample_shape = {9},
       .classes = 4,
       .settings = {{"layers", 2}, {"width", 12}, {"nonlinearity", "relu"}}},
      {.name = "gru",
       .sample_shape = {8, 8, 1},
       .classes = 4,
       .settings = {{"layers", 2}, {"width", 12}, {"bidirectional", true}}},
      {.name = "linear", .sample_shape = {5}, .classes = 3}};
  for (const auto& spec : specs) {
    nn::Context context{*backend_, generator_};
    const auto tensors = nn::state_of(*nn::make_model(context, spec));
    EXPECT_NO_THROW(make(spec, tensors)) << spec.name;
    // Halves take as much memory here as what they stand for.
    auto halves = tensors;
    for (auto& tensor : halves)
      if (tensor.dtype == DType::kF32) {
        tensor.dtype = DType::kBF16;
        tensor.bytes.resize(tensor.bytes.size() / 2);
      }
    EXPECT_NO_THROW(make(spec, halves)) << spec.name;
  }
}

TEST_F(ModelOfFile, LimitsMemoryByTheFilesSize) {
  constexpr std::int64_t kMost = 1 << 24;
  for (const auto& spec :
       {gpt(kMost, 1, 64, 16), gpt(1, 1, kMost, 16), gpt(1, 1, 8, kMost), gpt(kMost, kMost, kMost, kMost),
        nn::ModelSpec{.name = "resnet18", .sample_shape = {64, 64, std::int64_t{1} << 40}, .classes = 8},
        nn::ModelSpec{.name = "linear", .sample_shape = {kMost}, .classes = kMost},
        nn::ModelSpec{.name = "mlp",
        .sample_shape = {8},
        .classes = 8,
        .settings = {{"hidden", std::vector<std::int64_t>(1024, kMost)}}},
        nn::ModelSpec{
            .name = "lstm", .sample_shape = {8, 8, 1}, .classes = 8, .settings = {{"layers", kMost}, {"width", 64}}}})
    EXPECT_THAT(refusal(spec), HasSubstr("w.safetensors: the " + spec.name + " of its sizes has more parameters"));
  EXPECT_THAT(refusal(llama(64, kMost)), HasSubstr("give at most 4194304 positions"));
  EXPECT_LT(backend_->allocator().stats().bytes_held, std::size_t{4} << 20);
  EXPECT_NO_THROW(make(gpt(2, 2, 256, 16), {}, {.metadata = true, .all_are_loaded = false}));  // what need not be in it
  nn::Context context{*backend_, generator_};
  EXPECT_NO_THROW(nn::make_model(context, gpt(2, 2, 256, 16)));  // and the limit is gone
}

TEST_F(ModelOfFile, InvalidModelInMetadataNamesTheFile) {
  EXPECT_THROW(make(gpt(1, 3, 8, 16), {}, {.metadata = false}), UsageError);
  EXPECT_THAT(refusal(gpt(1, 3, 8, 16)), HasSubstr("w.safetensors: "));
  EXPECT_THAT(refusal({.name = "mpl", .sample_shape = {5}, .classes = 3}), HasSubstr("w.safetensors: "));
}

TEST(ConfigFile, SettingsThatAreNotGiven) {
  const std::string llama = R"({"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 64,
                               "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}, "other": [1]})";
  const nn::ModelConfig given = {.name = "llama", .settings = {{"context", 32}}};
  const Settings settings = read_config_file(llama, "config.json", given);
  EXPECT_EQ(settings.integer("heads"), 8);
  EXPECT_EQ(settings.number("rope-base"), 500000.0);
  EXPECT_FALSE(settings.has("context")) << "it is given";
  EXPECT_FALSE(settings.has("norm-eps")) << "it is not there";
  const auto refusal = [&](const std::string& text) {
    return lockstep::testing::refusal_of<IoError>([&] { read_config_file(text, "config.json", given); });
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal("{"), HasSubstr("config.json: it is not JSON"));
  EXPECT_THAT(refusal("[]"), HasSubstr("config.json: it is no object"));
  EXPECT_THAT(refusal(R"({"model_type": "gemma"})"), HasSubstr(R"("model_type" is "gemma", and llama has "llama")"));
  EXPECT_THAT(refusal(R"({"rope_scaling": {"factor": 8}})"), HasSubstr(R"("rope_scaling" is {"factor":8})"));
  EXPECT_THAT(refusal(R"({"num_attention_heads": 0})"), HasSubstr(R"("num_attention_heads" is 0)"));
  EXPECT_THAT(refusal(R"({"num_attention_heads": 2.5})"), HasSubstr("of another type"));
  EXPECT_THAT(refusal(R"({"rms_norm_eps": "small"})"), HasSubstr("of another type"));
}

}  // namespace
}  // namespace lockstep::checkpoint
