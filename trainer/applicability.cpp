#include "trainer/applicability.h"

#include <algorithm>
#include <initializer_list>
#include <span>

#include "base/error.h"
#include "nn/models/models.h"

namespace lockstep::trainer {
namespace {

/// One setting: when it is asked for, which runs it applies to, in code and in words, and what such a run is instead.
template <class Config>
struct Rule {
  const char* setting;
  bool (*asked)(const Config& config);
  bool (*applies)(const Config& config);
  const char* to;
  std::string (*here)(const Config& config);
  const char* remedy = "leave it out";
};

/// Of an unknown model nobody can say what it takes.
bool is_known(const std::string& name) { return std::ranges::find(nn::model_names(), name) != nn::model_names().end(); }
bool is_one_of(const std::string& name, std::initializer_list<const char*> models) {
  return !is_known(name) || std::ranges::any_of(models, [&](const char* model) { return name == model; });
}
bool is_resnet(const std::string& name) { return !is_known(name) || name.starts_with("resnet"); }
bool is_gpt(const std::string& name) { return is_one_of(name, {"gpt", "gpt2"}); }
bool takes_tokens(const std::string& name) { return is_one_of(name, {"gpt", "gpt2", "lstm"}); }

/// Before data are chosen (lockstep bench makes some up) they may be anything.
bool may_have_tokens(const std::string& data) {
  return data.empty() || std::ranges::any_of(std::initializer_list<const char*>{"text:", "tokens:", "random:tokens"},
                                             [&](const char* kind) { return data.starts_with(kind); });
}

template <class Config>
std::string model_of(const Config& config) {
  return "the model is " + config.model.name;
}
template <class Config>
std::string device_of(const Config& config) {
  return "this run has --device " + config.device;
}
template <class Config>
bool has_weights(const Config& config) {
  return !config.weights.empty();
}
template <class Config>
std::string no_weights(const Config&) {
  return "there is none";
}
std::string no_directory(const TrainConfig&) { return "there is none"; }
constexpr const char* kAddWeights = "add --weights FILE, or leave it out";
constexpr const char* kAddDirectory = "add --checkpoint-dir DIR, or leave it out";

bool is_on_cpu(const std::string& device) { return device.starts_with("cpu"); }

/// The sizes of models, which training and inference share.
template <class Config>
constexpr Rule<Config> kHidden = {"hidden", [](const Config& c) { return !c.model.hidden.empty(); },
                                  [](const Config& c) { return is_one_of(c.model.name, {"mlp"}); }, "mlp", model_of};
template <class Config>
constexpr Rule<Config> kLayers = {"layers", [](const Config& c) { return c.model.layers.has_value(); },
                                  [](const Config& c) { return takes_tokens(c.model.name); }, "gpt, gpt2 and lstm",
                                  model_of};
template <class Config>
constexpr Rule<Config> kHeads = {"heads", [](const Config& c) { return c.model.heads.has_value(); },
                                 [](const Config& c) { return is_gpt(c.model.name); }, "gpt and gpt2", model_of};
template <class Config>
constexpr Rule<Config> kWidth = {"width", [](const Config& c) { return c.model.width.has_value(); },
                                 [](const Config& c) { return takes_tokens(c.model.name); }, "gpt, gpt2 and lstm",
                                 model_of};
template <class Config>
constexpr Rule<Config> kNonStrict = {"non-strict", [](const Config& c) { return c.non_strict; },
                                     has_weights,  "a file of weights",
                                     no_weights,   kAddWeights};
template <class Config>
constexpr Rule<Config> kKeepPrefix = {"keep-prefix", [](const Config& c) { return c.keep_prefix; },
                                      has_weights,   "a file of weights",
                                      no_weights,    kAddWeights};

using Train = TrainConfig;
constexpr Rule<Train> kTrainRules[] = {
    {"in", [](const Train& c) { return c.model.in.has_value(); },
     [](const Train& c) { return is_one_of(c.model.name, {"linear"}); }, "linear", model_of},
    {"out", [](const Train& c) { return c.model.out.has_value(); },
     [](const Train& c) { return is_one_of(c.model.name, {"linear"}); }, "linear", model_of},
    kHidden<Train>,
    kLayers<Train>,
    kHeads<Train>,
    kWidth<Train>,
    {"context", [](const Train& c) { return c.model.context.has_value(); },
     [](const Train& c) { return takes_tokens(c.model.name) && (c.model.name != "lstm" || may_have_tokens(c.data)); },
     "gpt, gpt2 and, over tokens, lstm",
     [](const Train& c) { return c.model.name == "lstm" ? "the data is " + c.data : model_of(c); }},
    {"zero-init-residual", [](const Train& c) { return c.model.zero_init_residual; },
     [](const Train& c) { return is_resnet(c.model.name) && (c.weights.empty() || c.non_strict); },
     "ResNets that start from random parameters",
     [](const Train& c) {
       return is_resnet(c.model.name) ? "this one starts from --weights " + c.weights : model_of(c);
     }},
    {"dropout", [](const Train& c) { return c.model.dropout > 0; },
     [](const Train& c) { return takes_tokens(c.model.name); }, "gpt, gpt2 and lstm", model_of},
    kNonStrict<Train>,
    kKeepPrefix<Train>,
    {"reset-head", [](const Train& c) { return c.reset_head; }, has_weights, "a file of weights", no_weights,
     kAddWeights},
    {"momentum", [](const Train& c) { return c.momentum.has_value(); },
     [](const Train& c) { return optimizer_of(c) == Optimizer::kSgd; }, "--optimizer sgd",
     [](const Train&) { return std::string("the optimizer is adamw"); }},
    {"nesterov", [](const Train& c) { return c.nesterov; },
     [](const Train& c) { return optimizer_of(c) == Optimizer::kSgd && momentum_of(c) > 0; },
     "--optimizer sgd with a momentum above 0",
     [](const Train& c) {
       return optimizer_of(c) == Optimizer::kSgd ? std::string("the momentum is 0") : "the optimizer is adamw";
     }},
    {"betas", [](const Train& c) { return c.betas.has_value(); },
     [](const Train& c) { return optimizer_of(c) == Optimizer::kAdamW; }, "--optimizer adamw",
     [](const Train&) { return std::string("the optimizer is sgd"); }},
    {"min-lr", [](const Train& c) { return c.min_lr > 0; },
     [](const Train& c) { return c.schedule != Schedule::kConstant; }, "--schedule cosine and step",
     [](const Train&) { return std::string("the schedule is constant"); }},
    {"share-devices", [](const Train& c) { return c.share_devices; }, [](const Train& c) { return c.device != "cpu"; },
     "GPUs, and CPU devices that are listed", device_of},
    {"tf32", [](const Train& c) { return c.tf32; }, [](const Train& c) { return !is_on_cpu(c.device); }, "GPUs",
     device_of},
    {"encrypt", [](const Train& c) { return c.encrypt; },
     [](const Train& c) { return c.backend != Backend::kMpi && c.backend != Backend::kNccl; },
     "what lockstep itself sends between hosts",
     [](const Train& c) {
       return std::string(c.backend == Backend::kMpi ? "MPI (--backend mpi) does not encrypt"
                                                     : "NCCL (--backend nccl) does not encrypt");
     },
     "leave one of them out"},
    {"graphs", [](const Train& c) { return c.graphs == true; },
     [](const Train& c) { return !is_on_cpu(c.device) && !c.find_unused && c.parallel != Parallel::kDp; },
     "GPUs, without --find-unused and --parallel dp",
     [](const Train& c) {
       return is_on_cpu(c.device)
                  ? device_of(c)
                  : std::string(c.find_unused ? "this run has --find-unused" : "this run has --parallel dp");
     }},
    {"threads", [](const Train& c) { return c.threads > 0; },
     [](const Train& c) { return !c.device.starts_with("cuda"); }, "the CPU", device_of},
    {"no-broadcast-buffers", [](const Train& c) { return c.no_broadcast_buffers; },
     [](const Train& c) { return is_resnet(c.model.name); }, "models with batch normalisation: ResNets", model_of},
    {"sync-batchnorm", [](const Train& c) { return c.sync_batchnorm; },
     [](const Train& c) { return is_resnet(c.model.name); }, "models with batch normalisation: ResNets", model_of},
    {"checkpoint-every", [](const Train& c) { return c.checkpoint_every.has_value(); },
     [](const Train& c) { return !c.checkpoint_dir.empty(); }, "a directory of checkpoints", no_directory,
     kAddDirectory},
    {"keep", [](const Train& c) { return c.keep.has_value(); },
     [](const Train& c) { return !c.checkpoint_dir.empty(); }, "a directory of checkpoints", no_directory,
     kAddDirectory},
};

using Infer = InferConfig;
bool is_random(const Infer& c) { return c.input.starts_with(kRandomInput); }
bool takes_prompts(const Infer& c) { return takes_tokens(c.model.name) && !is_random(c); }
bool takes_images(const Infer& c) { return (!is_known(c.model.name) || !is_gpt(c.model.name)) && !is_random(c); }
std::string input_of(const Infer& c) { return is_random(c) ? "this run has --input " + c.input : model_of(c); }
bool draws_tokens(const Infer& c) { return takes_prompts(c) && c.temperature.value_or(1) > 0; }
constexpr const char *kTexts = "texts that gpt, gpt2 and lstm go on with", *kImages = "images that are classified";

template <auto kMember>
bool is_there(const Infer& c) {
  if constexpr (requires { (c.*kMember).has_value(); })
    return (c.*kMember).has_value();
  else if constexpr (requires { (c.*kMember).empty(); })
    return !(c.*kMember).empty();
  else
    return c.*kMember;
}

constexpr Rule<Infer> kInferRules[] = {
    kHidden<Infer>,
    kLayers<Infer>,
    kHeads<Infer>,
    kWidth<Infer>,
    {"context", [](const Infer& c) { return c.model.context.has_value(); },
     [](const Infer& c) { return is_gpt(c.model.name); }, "gpt and gpt2", model_of},
    kNonStrict<Infer>,
    kKeepPrefix<Infer>,
    {"prompt", is_there<&Infer::prompt>, takes_prompts, kTexts, input_of},
    {"lines", is_there<&Infer::lines>, [](const Infer& c) { return takes_prompts(c) && !c.prompt; },
     "texts that are read from --input",
     [](const Infer& c) { return c.prompt ? std::string("this run has --prompt") : input_of(c); }},
    {"top", is_there<&Infer::top>, takes_images, kImages, input_of},
    {"class-names", is_there<&Infer::class_names>, takes_images, kImages, input_of},
    {"image-size", is_there<&Infer::image_size>,
     [](const Infer& c) { return takes_images(c) && (is_resnet(c.model.name) || is_one_of(c.model.name, {"cnn"})); },
     "images that ResNets and cnn classify", input_of},
    {"tokens", is_there<&Infer::tokens>, takes_prompts, kTexts, input_of},
    {"samples", is_there<&Infer::samples>, takes_prompts, kTexts, input_of},
    {"temperature", is_there<&Infer::temperature>, takes_prompts, kTexts, input_of},
    {"top-k", [](const Infer& c) { return c.top_k.value_or(0) > 0; }, draws_tokens, "tokens that are drawn",
     [](const Infer& c) { return takes_prompts(c) ? std::string("the temperature is 0") : input_of(c); }},
    {"vocab", is_there<&Infer::vocabulary>, takes_prompts, kTexts, input_of},
    {"merges", is_there<&Infer::merges>, takes_prompts, kTexts, input_of},
    {"seed", is_there<&Infer::seed>,
     [](const Infer& c) { return is_random(c) || draws_tokens(c) || c.non_strict || !is_known(c.model.name); },
     "tokens that are drawn, made-up inputs and parameters that the weights lack",
     [](const Infer& c) { return takes_prompts(c) ? std::string("the temperature is 0") : input_of(c); }},
    {"tf32", [](const Infer& c) { return c.tf32; }, [](const Infer& c) { return !is_on_cpu(c.device); }, "GPUs",
     device_of},
};

template <class Config>
std::optional<Inapplicable> find(std::span<const Rule<Config>> rules, const Config& config, std::string_view setting) {
  const auto rule = std::ranges::find(rules, setting, &Rule<Config>::setting);
  if (rule == rules.end() || !rule->asked(config) || rule->applies(config)) return std::nullopt;
  return Inapplicable{fmt::format("it applies to {}, and {}", rule->to, rule->here(config)), rule->remedy};
}

template <class Config>
void check(std::span<const Rule<Config>> rules, const Config& config) {
  for (const auto& rule : rules)
    if (const auto found = find(rules, config, rule.setting))
      throw UsageError(fmt::format("--{}: {}", rule.setting, found->why), found->remedy);
}

}  // namespace

std::optional<Inapplicable> inapplicable(const TrainConfig& config, std::string_view setting) {
  return find<TrainConfig>(kTrainRules, config, setting);
}

std::optional<Inapplicable> inapplicable(const InferConfig& config, std::string_view setting) {
  return find<InferConfig>(kInferRules, config, setting);
}

void check_applicability(const TrainConfig& config) { check<TrainConfig>(kTrainRules, config); }

void check_applicability(const InferConfig& config) { check<InferConfig>(kInferRules, config); }

void check_encryption(const TrainConfig& config, DeviceKind kind, bool several_hosts) {
  if (config.encrypt && kind == DeviceKind::kCuda && several_hosts)
    throw UsageError(
        "--encrypt: gradients on GPUs travel between hosts over NCCL, which does not encrypt",
        "leave it out and connect the hosts by a network that encrypts (WireGuard, IPsec), or use --device cpu");
}

}  // namespace lockstep::trainer
