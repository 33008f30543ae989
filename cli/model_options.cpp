#include "cli/model_options.h"

#include <fmt/format.h>

#include "base/text.h"
#include "cli/values.h"
#include "nn/models/models.h"

namespace lockstep::cli {

void add_model_name(OptionTable& table, trainer::ModelConfig& model) {
  auto names = nn::model_names();
  const std::string last = names.back();
  names.pop_back();
  table.positional({"MODEL", fmt::format("{} or {}", join(names, ", "), last), text(model.name)});
}

void add_model_sizes(OptionTable& table, trainer::ModelConfig& model, const SizePresets& presets) {
  constexpr std::int64_t kMostSize = 1 << 24;
  table.add({.name = "hidden",
             .kind = OptionKind::kList,
             .placeholder = "N,N,…",
             .help = "mlp: widths of the hidden layers",
             .default_text = presets.hidden,
             .set = integers(model.hidden, 1, kMostSize)});
  const auto add_size = [&](const char* name, const char* help, const char* preset, std::optional<int>& target) {
    table.add(
        {.name = name, .placeholder = "N", .help = help, .default_text = preset, .set = integer(target, 1, kMostSize)});
  };
  add_size("layers", "gpt: blocks; lstm: layers", presets.layers, model.layers);
  add_size("heads", "gpt: attention heads", presets.heads, model.heads);
  add_size("width", "gpt, lstm: features", presets.width, model.width);
  add_size("context", "gpt, lstm: tokens of a sample", presets.context, model.context);
}

void add_weight_file(OptionTable& table, const WeightFile& weights, const std::string& help) {
  table.add({.name = "weights",
             .placeholder = "FILE",
             .help = help + ": safetensors, an index of several, or what torch.save() has written",
             .set = text(weights.file)});
  table.add({.name = "non-strict",
             .kind = OptionKind::kFlag,
             .help = "weights that the file lacks start anew, and others that it has are not used",
             .set = boolean(weights.non_strict)});
  table.add({.name = "keep-prefix",
             .kind = OptionKind::kFlag,
             .help = "names in the file are taken as they are: a leading \"module.\" is not taken off",
             .set = boolean(weights.keep_prefix)});
}

}  // namespace lockstep::cli
