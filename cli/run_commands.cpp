// lockstep train, eval, infer and export.
#include <cstdio>

#include "cli/commands.h"
#include "inference/export.h"
#include "inference/infer.h"
#include "lockstep/trainer/train.h"
#include "trainer/options.h"

namespace lockstep::cli {

bool parse_or_refuse(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign,
                     std::optional<UsageError>& refusal, std::map<std::string, std::string>* places) {
  try {
    const auto parsed = parse_options(table, sources, foreign);
    if (places != nullptr) *places = parsed.places;
    if (!parsed.help) return false;
    std::fputs(table.help().c_str(), stdout);
    return true;
  } catch (const UsageError& error) {
    refusal = error;
    return false;
  }
}

std::string as_typed(const std::string& subcommand, const std::vector<std::string>& args) {
  std::string text = "lockstep " + subcommand;
  for (const auto& word : args) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789-_=.,:/@%+") == std::string::npos;
    text += plain ? " " + word : " '" + word + "'";
  }
  return text;
}

int train_command(const Sources& sources, const ForeignFlags& foreign) {
  trainer::TrainConfig config;
  const OptionTable table = trainer::train_options(config);
  std::optional<UsageError> refusal;
  if (parse_or_refuse(table, sources, foreign, refusal, &config.places)) return 0;
  config.command = as_typed(table.subcommand(), sources.args);
  return trainer::train(config, refusal);
}

int eval_command(const Sources& sources, const ForeignFlags& foreign) {
  trainer::TrainConfig config;
  const OptionTable table = trainer::eval_options(config);
  std::optional<UsageError> refusal;
  if (parse_or_refuse(table, sources, foreign, refusal)) return 0;
  return trainer::evaluate(config, refusal);
}

int infer_command(const Sources& sources, const ForeignFlags& foreign) {
  inference::InferConfig config;
  const OptionTable table = inference::infer_options(config);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  return inference::infer(config);
}

int export_command(const Sources& sources, const ForeignFlags& foreign) {
  inference::ExportConfig config;
  const OptionTable table = inference::export_onnx_options(config);
  Sources own = sources;
  const std::string format = own.args.empty() ? "" : own.args.front();
  const bool asks = format == "--help" || format == "-h";
  if (format != "onnx" && !asks)
    throw UsageError(
        format.empty() ? "lockstep export needs a format" : fmt::format("lockstep export writes no '{}'", format),
        "it is onnx: lockstep export onnx MODEL --weights FILE --output FILE.onnx");
  if (!asks) own.args.erase(own.args.begin());
  if (parse_options(table, own, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  return inference::export_onnx(config);
}

}  // namespace lockstep::cli
