// Which tensor of a file goes where: prefixes, other names of GPT-2 and BERT, and what may be missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "lockstep/nn/io/state.h"
#include "nn/models/bert.h"
#include "nn/models/gpt.h"

namespace lockstep::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// What DistributedDataParallel is to PyTorch: the inner module, under the name "module".
class Wrapper final : public Module {
 public:
  Wrapper(std::unique_ptr<Module> inner, const std::string& name)
      : inner_(static_cast<Module&>(register_module(name, std::move(inner)))) {}
  Var forward(Tape& tape, Var x) override { return inner_.forward(tape, x); }

 private:
  Module& inner_;
};

std::vector<HostTensor> renamed(std::vector<HostTensor> state, const std::string& prefix) {
  for (auto& tensor : state) tensor.name = prefix + tensor.name;
  return state;
}

std::vector<std::string> names_of(const std::vector<HostTensor>& state) {
  std::vector<std::string> names;
  for (const auto& tensor : state) names.push_back(tensor.name);
  return names;
}

class StateNames : public ::testing::Test {
 protected:
  // weight, bias
  std::unique_ptr<Module> plain(std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend_, generator};
    return std::make_unique<Linear>(context, 3, 2);
  }
  std::unique_ptr<Module> wrapped(std::uint64_t seed) { return std::make_unique<Wrapper>(plain(seed), "module"); }
  std::unique_ptr<Module> gpt(std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend_, generator};
    return std::make_unique<Gpt>(context, GptSpec{.layers = 1, .heads = 1, .width = 4, .context = 3, .vocabulary = 5});
  }

  static std::string bytes_of(const Module& module) {
    std::string all;
    for (const auto& tensor : state_of(module))
      all.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    return all;
  }
  // Of a load that has to fail, and to change nothing.
  static std::string refusal(Module& module, const std::vector<HostTensor>& tensors, const LoadOptions& options = {}) {
    const std::string before = bytes_of(module);
    try {
      load_state(module, tensors, "f", options);
    } catch (const UsageError& error) {
      EXPECT_EQ(bytes_of(module), before) << "changed by a load that failed";
      return error.line();
    }
    ADD_FAILURE() << "loaded";
    return "";
  }
  static void expect_loads(Module& module, const std::vector<HostTensor>& tensors, const Module& as) {
    ASSERT_NE(bytes_of(module), bytes_of(as));
    load_state(module, tensors, "f");
    EXPECT_EQ(bytes_of(module), bytes_of(as));
  }

  std::unique_ptr<Backend> backend_ = make_cpu_backend(1);
};

TEST_F(StateNames, WrappedIntoPlain) { expect_loads(*plain(1), renamed(state_of(*plain(2)), "module."), *plain(2)); }
TEST_F(StateNames, InnerIntoPlain) { expect_loads(*plain(1), state_of(*plain(2)), *plain(2)); }
TEST_F(StateNames, WrappedIntoWrapped) {
  expect_loads(*wrapped(1), renamed(state_of(*plain(2)), "module."), *plain(2));
}
TEST_F(StateNames, PlainIntoWrapped) { expect_loads(*wrapped(1), state_of(*plain(2)), *plain(2)); }

TEST_F(StateNames, APrefixIsNeverWritten) {
  EXPECT_THAT(names_of(state_of(*wrapped(1))), ElementsAre("weight", "bias"));
  const Wrapper other(plain(1), "modules");
  EXPECT_THAT(names_of(state_of(other)), ElementsAre("modules.weight", "modules.bias"));
}

TEST_F(StateNames, OnlyALeadingPrefixIsStripped) {
  Wrapper nested(wrapped(1), "sub");  // sub.module.weight
  EXPECT_THAT(names_of(state_of(nested)), ElementsAre("sub.module.weight", "sub.module.bias"));
  const auto state = renamed(state_of(*plain(2)), "sub.module.");
  expect_loads(nested, state, *plain(2));
  expect_loads(nested, renamed(renamed(state_of(*plain(3)), "sub.module."), "module."), *plain(3));
  EXPECT_THAT(refusal(nested, renamed(state, "x.")), HasSubstr("missing \"sub.module.weight\""));
  EXPECT_THAT(refusal(nested, renamed(state_of(*plain(2)), "sub.")),
              HasSubstr("missing \"sub.module.weight\", \"sub.module.bias\"; unexpected \"sub.weight\", \"sub.bias\""));
  EXPECT_THAT(refusal(*plain(1), renamed(state_of(*plain(2)), "module.module.")),
              HasSubstr("unexpected \"module.weight\", \"module.bias\""));
}

TEST_F(StateNames, PrefixOfSomeNamesIsKept) {
  auto state = state_of(*plain(2));
  state[0].name = "module.weight";
  EXPECT_THAT(refusal(*plain(1), state), HasSubstr("missing \"weight\"; unexpected \"module.weight\""));
}

// PyTorch: Missing key(s) in state_dict: "weight", "bias". Unexpected key(s) in state_dict: "module.weight",
// "module.bias".
TEST_F(StateNames, KeptPrefixesAreListedAsPyTorchDoes) {
  const auto state = renamed(state_of(*plain(2)), "module.");
  EXPECT_THAT(refusal(*plain(1), state, {.keep_prefix = true}),
              HasSubstr("weights f do not fit the model: missing \"weight\", \"bias\"; unexpected \"module.weight\", "
                        "\"module.bias\" → leave --keep-prefix out"));
  EXPECT_THAT(refusal(*wrapped(1), state_of(*plain(2)), {.keep_prefix = true}),
              HasSubstr("missing \"module.weight\", \"module.bias\"; unexpected \"weight\", \"bias\""));
  const auto target = wrapped(1);
  load_state(*target, state, "f", {.keep_prefix = true});
  EXPECT_EQ(bytes_of(*target), bytes_of(*plain(2)));
}

TEST_F(StateNames, NonStrictListsTheRest) {
  auto state = state_of(*plain(2));
  state[1].name = "other";
  const auto target = plain(1);
  const LoadReport report = load_state(*target, state, "f", {.strict = false});
  EXPECT_THAT(report.missing, ElementsAre("bias"));
  EXPECT_THAT(report.unexpected, ElementsAre("other"));
  state[0].shape = {2, 4};
  state[0].bytes.resize(32);
  EXPECT_THAT(refusal(*plain(1), state, {.strict = false}), HasSubstr("weight is f32 [2, 4], not f32 [2, 3]"));
}

TEST_F(StateNames, ATensorThatComesTwice) {
  auto state = state_of(*plain(2));
  state.push_back(state[0]);
  EXPECT_THAT(refusal(*plain(1), state), HasSubstr("weight is there twice"));
}

// torchvision's published files are from before PyTorch counted batches.
TEST_F(StateNames, BatchesNeedNotHaveBeenCounted) {
  Generator generator(1);
  Context context{*backend_, generator};
  BatchNorm norm(context, 2);
  *norm.named_buffers()[2].tensor->data<std::int64_t>() = 5;
  auto state = state_of(norm);
  ASSERT_EQ(state.back().name, "num_batches_tracked");
  state.pop_back();
  const LoadReport report = load_state(norm, state, "f");
  EXPECT_THAT(report.missing, IsEmpty());
  EXPECT_EQ(*norm.named_buffers()[2].tensor->data<std::int64_t>(), 5);
  state.pop_back();
  EXPECT_THAT(refusal(norm, state), HasSubstr("missing \"running_var\" →"));
}

class Gpt2Names : public StateNames {
 protected:
  Gpt2Names() : state_(state_of(*gpt(2))) {}

  static HostTensor copied(const std::string& name, HostTensor tensor) {
    tensor.name = name;
    return tensor;
  }
  const HostTensor& table() const { return state_[0]; }

  std::vector<HostTensor> state_;
};

TEST_F(Gpt2Names, AsTheBareModelSavesThem) {
  ASSERT_EQ(table().name, "wte.weight");
  expect_loads(*gpt(1), state_, *gpt(2));
}

TEST_F(Gpt2Names, WithTheHeadBesideTheTransformer) {
  auto with_head = renamed(state_, "transformer.");
  expect_loads(*gpt(1), with_head, *gpt(2));
  with_head.push_back(copied("lm_head.weight", table()));
  expect_loads(*gpt(1), with_head, *gpt(2));
  expect_loads(*gpt(1), renamed(with_head, "module."), *gpt(2));
  EXPECT_THAT(refusal(*gpt(1), with_head, {.keep_prefix = true}), HasSubstr("unexpected \"transformer.wte.weight\""));
}

// Lightning's "model.", and others, are before the names of the transformer and of its head, tied or not.
TEST_F(Gpt2Names, UnderAPrefixWithAHead) {
  const LoadOptions options = {.match_other_names = true};
  auto with_head = renamed(state_, "transformer.");
  with_head.push_back(copied("lm_head.weight", table()));
  for (const char* prefix : {"model.", "lit.model.", "model._orig_mod."})
    for (const bool strict : {true, false}) {
      SCOPED_TRACE(prefix);
      const auto target = gpt(1);
      const LoadReport report =
          load_state(*target, renamed(with_head, prefix), "f", {.strict = strict, .match_other_names = true});
      EXPECT_EQ(report.prefix, prefix);
      EXPECT_THAT(report.missing, IsEmpty());
      EXPECT_EQ(parameters_sha256(*target), parameters_sha256(*gpt(2)));
    }
  // A file of other tensors is not taken for one with a prefix.
  std::vector<HostTensor> foreign = {copied("model.other", table())};
  EXPECT_THAT(load_state(*gpt(1), foreign, "f", {.strict = false, .match_other_names = true}).prefix, "");
  EXPECT_THAT(refusal(*gpt(1), foreign, options), HasSubstr("missing"));
}

TEST_F(Gpt2Names, MasksOfAttentionAreNotUsed) {
  auto with_masks = state_;
  with_masks.push_back({"h.0.attn.bias", DType::kU8, {1, 1, 3, 3}, std::vector<std::byte>(9)});
  with_masks.push_back({"h.0.attn.masked_bias", DType::kF32, {}, std::vector<std::byte>(4)});
  expect_loads(*gpt(1), with_masks, *gpt(2));
  with_masks.push_back({"other.attn.bias", DType::kF32, {}, std::vector<std::byte>(4)});
  EXPECT_THAT(refusal(*gpt(1), with_masks), HasSubstr("unexpected \"other.attn.bias\" →"));
  // What is a mask there is a stranger elsewhere.
  auto linear = state_of(*plain(2));
  linear.push_back(with_masks[with_masks.size() - 3]);
  EXPECT_THAT(refusal(*plain(1), linear), HasSubstr("unexpected \"h.0.attn.bias\""));
}

TEST_F(Gpt2Names, AHeadThatIsAnotherTableIsNotSilentlyDropped) {
  auto untied = renamed(state_, "transformer.");
  untied.push_back(copied("lm_head.weight", table()));
  untied.back().bytes[0] ^= std::byte{1};
  EXPECT_THAT(refusal(*gpt(1), untied), HasSubstr("unexpected \"lm_head.weight\""));
  const auto target = gpt(1);
  EXPECT_THAT(load_state(*target, untied, "f", {.strict = false}).unexpected, ElementsAre("lm_head.weight"));
}

TEST_F(Gpt2Names, AHeadOfItsOwnIsLoadedWhereTheModelHasOne) {
  const auto untied = [&](std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend_, generator};
    return std::make_unique<Gpt>(
        context, GptSpec{.layers = 1, .heads = 1, .width = 4, .context = 3, .vocabulary = 5, .tied = false});
  };
  const auto source = untied(2);
  const auto state = state_of(*source);
  EXPECT_EQ(state.back().name, "lm_head.weight");
  expect_loads(*untied(1), state, *source);
  auto with_transformer = renamed(state, "transformer.");
  with_transformer.back().name = "lm_head.weight";
  expect_loads(*untied(1), with_transformer, *source);
  with_transformer.pop_back();
  EXPECT_THAT(refusal(*untied(1), with_transformer), HasSubstr("missing \"lm_head.weight\" →"));
}

TEST_F(StateNames, CompiledModelsHaveAWrapperToo) {
  const auto source = plain(2);
  for (const char* prefix : {"_orig_mod.", "module._orig_mod.", "_orig_mod.module."})
    expect_loads(*plain(1), renamed(state_of(*source), prefix), *source);
  EXPECT_THAT(refusal(*plain(1), renamed(state_of(*source), "_orig_mod._orig_mod.")), HasSubstr("unexpected"));
}

TEST_F(StateNames, ErrorsListAFewOfManyTensors) {
  std::vector<HostTensor> strangers;
  for (int i = 0; i < 1000; ++i)
    strangers.push_back({std::string(500, 'x') + std::to_string(i), DType::kF32, {1}, std::vector<std::byte>(4)});
  const std::string said = refusal(*plain(1), strangers);
  EXPECT_THAT(said, HasSubstr(" and 995 more"));
  EXPECT_LT(said.size(), 1000u);
}

TEST_F(StateNames, ShapesOfManyAxesAreCut) {
  auto state = state_of(*plain(2));
  state[0].shape = std::vector<std::int64_t>(100000, 1);
  EXPECT_LT(refusal(*plain(1), state).size(), 1000u);
}

// safetensors.torch.save_model() keeps one name of each tensor.
TEST_F(Gpt2Names, TheHeadStandsForATableThatIsMissing) {
  auto once = renamed(state_, "transformer.");
  once[0].name = "lm_head.weight";
  expect_loads(*gpt(1), once, *gpt(2));
  once[0].shape = {6, 4};
  once[0].bytes.resize(96);
  EXPECT_THAT(refusal(*gpt(1), once), HasSubstr("lm_head.weight is f32 [6, 4], not f32 [5, 4]"));
  once.erase(once.begin());
  EXPECT_THAT(refusal(*gpt(1), once), HasSubstr("missing \"wte.weight\" →"));
}

class BertNames : public StateNames {
 protected:
  static BertSpec spec() { return {.layers = 1, .heads = 1, .width = 4, .context = 3, .vocabulary = 5}; }
  std::unique_ptr<Module> masked(std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend_, generator};
    return std::make_unique<BertForMaskedLM>(context, spec());
  }
  std::unique_ptr<Module> classes(std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend_, generator};
    return std::make_unique<BertForSequenceClassification>(context, spec(), 2);
  }
  static HostTensor numbers(const std::string& name, std::int64_t count) {
    return {name, DType::kF32, {count}, std::vector<std::byte>(static_cast<std::size_t>(count) * 4)};
  }
  static const HostTensor& find(const std::vector<HostTensor>& state, const std::string& name) {
    return *std::ranges::find(state, name, &HostTensor::name);
  }
};

// As the published bert-base-uncased has it: the head's table and bias twice, and layers for pairs of sentences.
TEST_F(BertNames, AFileOfMaskedTokensAsPublished) {
  const auto state = state_of(*masked(2));
  expect_loads(*masked(1), state, *masked(2));
  auto published = state;
  for (HostTensor& tensor : published) {
    const auto replace = [&](const std::string& now, const std::string& old) {
      if (tensor.name.ends_with(now)) tensor.name.replace(tensor.name.size() - now.size(), now.size(), old);
    };
    replace("LayerNorm.weight", "LayerNorm.gamma");
    replace("LayerNorm.bias", "LayerNorm.beta");
  }
  EXPECT_EQ(std::ranges::count_if(published, [](const auto& tensor) { return tensor.name.ends_with(".gamma"); }), 4);
  const auto copy = [&](const char* name, const char* of) {
    published.push_back(find(state, of));
    published.back().name = name;
  };
  copy("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight");
  copy("cls.predictions.decoder.bias", "cls.predictions.bias");
  for (const char* name : {"bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.bias"})
    published.push_back(numbers(name, 4));
  expect_loads(*masked(1), published, *masked(2));
  expect_loads(*masked(1), renamed(published, "module."), *masked(2));
  EXPECT_THAT(refusal(*masked(1), published, {.keep_prefix = true}), HasSubstr("LayerNorm.weight"));
  // A decoder of its own is not silently dropped.
  auto untied = published;
  for (HostTensor& tensor : untied)
    if (tensor.name == "cls.predictions.decoder.weight") tensor.bytes[0] ^= std::byte{1};
  EXPECT_THAT(refusal(*masked(1), untied), HasSubstr("unexpected \"cls.predictions.decoder.weight\""));
  published.push_back(numbers("cls.other.bias", 4));
  EXPECT_THAT(refusal(*masked(1), published), HasSubstr("unexpected \"cls.other.bias\" →"));
}

// As BertModel saves them.
TEST_F(BertNames, WithoutAHead) {
  const auto source = classes(2);
  std::vector<HostTensor> bare;
  for (HostTensor& tensor : state_of(*source)) {
    if (!tensor.name.starts_with("bert.")) continue;
    tensor.name.erase(0, 5);
    bare.push_back(std::move(tensor));
  }
  bare.push_back(numbers("embeddings.position_ids", 3));
  const auto target = classes(1);
  const LoadReport report = load_state(*target, bare, "f", {.without = {"classifier.", "cls."}});
  EXPECT_THAT(report.missing, IsEmpty());
  EXPECT_THAT(report.unexpected, IsEmpty());
  const auto loaded = state_of(*target), expected = state_of(*source);
  for (const auto& tensor : loaded)
    if (tensor.name.starts_with("bert.")) {
      EXPECT_EQ(tensor.bytes, find(expected, tensor.name).bytes) << tensor.name;
    }
}

TEST_F(BertNames, HeadIsReinitializedForAnotherTask) {
  const auto state = state_of(*masked(2));  // it has no pooler
  EXPECT_THAT(refusal(*classes(1), state, {.without = {"classifier.", "cls."}}), HasSubstr("bert.pooler.dense.weight"));
  const LoadReport report =
      load_state(*classes(1), state, "f", {.without = {"classifier.", "cls."}, .may_lack = {"bert.pooler."}});
  EXPECT_THAT(report.missing, ElementsAre("bert.pooler.dense.weight", "bert.pooler.dense.bias"));
  EXPECT_THAT(report.unexpected, IsEmpty());
}

}  // namespace
}  // namespace lockstep::nn
