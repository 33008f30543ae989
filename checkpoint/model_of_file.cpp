#include "checkpoint/model_metadata.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

namespace lockstep::checkpoint {
namespace {

constexpr const char* kFileRemedy = "check where it came from";

// As parameters are held, in f32, beside what no file has; counters and what is aligned come on top.
std::size_t bytes_for(const nn::ModelSpec& spec, const std::vector<nn::HostTensor>& tensors) {
  constexpr std::size_t kBeside = std::size_t{1} << 20;
  constexpr double kMostConstant = 0x1p30;
  const auto& constant = nn::model_family(spec.name).constant_bytes;
  auto bytes = static_cast<std::size_t>(constant ? std::min(constant(nn::complete(spec)), kMostConstant) : 0.0);
  for (const auto& tensor : tensors) bytes += tensor.bytes.size() / size_of(tensor.dtype) * sizeof(float);
  return 2 * bytes + kBeside;
}

constexpr std::size_t kMostNewBytes = std::size_t{1} << 30;

}  // namespace

void check_not_empty(const std::vector<nn::HostTensor>& tensors, const std::string& source) {
  for (const auto& tensor : tensors)
    if (tensor.bytes.empty())
      throw IoError(fmt::format("{}: tensor '{}' is empty", source, nn::shown_name(tensor.name)), kFileRemedy);
}

std::unique_ptr<nn::Module> make_model_of_file(nn::Context& context, const nn::ModelSpec& spec,
                                               const std::vector<nn::HostTensor>& tensors, const std::string& source,
                                               const SizesOf& sizes) {
  // Without metadata the file may be of another model, whose names are then compared.
  const bool all = sizes.metadata && sizes.all_are_loaded;
  try {
    const nn::MemoryLimit limit(context.backend.allocator(), bytes_for(spec, tensors) + (all ? 0 : kMostNewBytes));
    return nn::make_model(context, spec);
  } catch (const nn::MemoryLimitReached&) {
    throw IoError(fmt::format("{}: the {} of its sizes has more parameters than the file's {} tensors", source,
                              spec.name, tensors.size()),
                  kFileRemedy);
  } catch (const UsageError& error) {
    if (!sizes.metadata) throw;
    throw IoError(fmt::format("{}: {} ({})", source, error.what(), error.remedy()), kFileRemedy);
  }
}

void log_report(const nn::LoadReport& report, const std::string& source, const char* instead) {
  if (!report.prefix.empty())
    log_info("{}: all of its names begin with '{}', which is removed", source, nn::shown_name(report.prefix));
  if (!report.renamed.empty()) {
    constexpr std::size_t kShown = 3;
    std::vector<std::string> pairs;
    for (const auto& [from, to] : std::span(report.renamed).first(std::min(kShown, report.renamed.size())))
      pairs.push_back(fmt::format("\"{}\" as {}", nn::shown_name(from), to));
    if (report.renamed.size() > kShown) pairs.push_back(fmt::format("{} more", report.renamed.size() - kShown));
    log_info("{} has other names than the model; the shapes fit in one way only: it loads {}", source, listed(pairs));
  }
  if (!report.missing.empty()) log_info("{} lacks {}: they {}", source, nn::few_of(report.missing), instead);
  if (!report.unexpected.empty()) log_info("{} also has {}: they are not used", source, nn::few_of(report.unexpected));
}

}  // namespace lockstep::checkpoint
