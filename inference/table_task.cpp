// Rows of a table, each with what a model predicts of it.
#include <algorithm>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "data/table_file.h"
#include "data/table_schema.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::inference {
namespace {

constexpr std::int64_t kUsualBatch = 256;
constexpr const char* kPrediction = "prediction";

/// What all workers look at.
struct SharedTable {
  std::shared_ptr<const data::TableSchema> schema;
  std::vector<std::string> class_names;
  std::vector<std::string> rows;    // as they are written again, without their ends
  std::vector<float> numbers;       // (rows, F)
  std::vector<std::int32_t> codes;  // (rows, K)
  std::string header;               // of the result, a whole line
  char separator = ',';
  int top = kDefaultTop;
  std::uint64_t batch = kUsualBatch;
};

class TableWorker final : public InferWorker {
 public:
  TableWorker(const InferConfig& config, nn::Module& module, std::shared_ptr<const SharedTable> shared,
              nn::Backend& backend)
      : config_(config), module_(module), shared_(std::move(shared)), backend_(backend), tape_(backend) {
    tape_.set_recording(false);
    tape_.set_activations(dtype_of(config.precision));
  }

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const auto start = Clock::now();
    const std::uint64_t first = job * shared_->batch, count = std::min(shared_->batch, shared_->rows.size() - first);
    compute(first, count);
    const double ms = 1e3 * seconds_between(start, Clock::now());
    const std::size_t each = outputs_.size() / count;
    std::string text = job == 0 && !config_.json ? shared_->header : std::string();
    for (std::uint64_t i = 0; i < count; ++i) {
      text += text_of(first + i, std::span<const float>(outputs_).subspan(i * each, each), ms);
      ++tally.results;
      tally.result_ms.push_back(ms);
    }
    put(text);
  }

 private:
  template <class T>
  nn::Tensor uploaded(std::span<const T> values, const nn::Shape& shape, DType dtype) {
    nn::Tensor tensor = backend_.empty(shape, dtype);
    if (!values.empty()) backend_.upload(std::as_bytes(values), tensor);
    return tensor;
  }

  void compute(std::uint64_t first, std::uint64_t count) {
    const auto rows = static_cast<std::int64_t>(count);
    const auto numbers = static_cast<std::size_t>(shared_->schema->numbers()),
               codes = shared_->schema->categories().size();
    nn::Tensor x = uploaded(std::span(shared_->numbers).subspan(first * numbers, count * numbers),
                            {rows, static_cast<std::int64_t>(numbers)}, DType::kF32);
    if (config_.precision == InferPrecision::kBF16) {
      const nn::Tensor wide = x;
      x = backend_.empty(wide.shape(), DType::kBF16);
      backend_.pointwise().cast(wide, x);
    }
    nn::Vars inputs = tape_.input(x);
    if (codes > 0)
      inputs.push_back(tape_.input(uploaded(std::span(shared_->codes).subspan(first * codes, count * codes),
                                            {rows, static_cast<std::int64_t>(codes)}, DType::kI32)));
    outputs_ = nn::values_of(backend_, module_.forward_all(tape_, inputs)[0].value());
    tape_.reset();
  }

  std::string name_of(std::int32_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return at < shared_->class_names.size() ? shared_->class_names[at] : fmt::format("class {}", i);
  }

  std::string text_of(std::uint64_t row, std::span<const float> outputs, double ms) {
    const bool classes = shared_->schema->predicts_classes();
    if (!classes) {
      check_finite(outputs);
      const double value = shared_->schema->target.number_of(outputs[0]);
      if (config_.json)
        return JsonObject{{"event", "row"}, {"row", row + 1}, {kPrediction, value}, {"latency_ms", ms}}.text() + "\n";
      return fmt::format("{}{}{:.6g}\n", shared_->rows[row], shared_->separator, value);
    }
    const auto ranked = ranking_.of(outputs, shared_->top);
    if (!config_.json)
      return shared_->rows[row] + shared_->separator +
             data::csv_row(std::vector{name_of(ranked[0].number), fmt::format("{:.4f}", ranked[0].probability)},
                           shared_->separator) +
             "\n";
    std::vector<JsonText> all;
    for (const auto& [number, probability] : ranked)
      all.emplace_back(JsonObject{{"class", number}, {"name", name_of(number)}, {"probability", probability}});
    return JsonObject{{"event", "row"}, {"row", row + 1}, {"classes", all}, {"latency_ms", ms}}.text() + "\n";
  }

  const InferConfig& config_;
  nn::Module& module_;
  std::shared_ptr<const SharedTable> shared_;
  nn::Backend& backend_;
  nn::Tape tape_;
  std::vector<float> outputs_;
  Ranking ranking_;
};

/// A name that the table does not have.
std::string new_name(std::string name, const std::vector<std::string>& names) {
  while (std::ranges::find(names, name) != names.end()) name += "_";
  return name;
}

}  // namespace

InferTask table_task(const InferConfig& config, const InferModel& model) {
  const auto shared = std::make_shared<SharedTable>();
  shared->schema = model.metadata->table;
  const data::TableSchema& schema = *shared->schema;
  shared->class_names = class_names_of(config, model);
  shared->top = config.top.value_or(kDefaultTop);
  if (config.top && (!config.json || !schema.predicts_classes()))
    throw UsageError(
        fmt::format("--top {} for {}", *config.top,
                    schema.predicts_classes() ? "rows that are written with their likeliest class" : "a number"),
        schema.predicts_classes() ? "add --json, or leave it out" : "leave it out");
  const Settings settings = resolve(std::vector{data::quotes_setting()}, config.table, "a table");
  const bool is_standard_input = config.input == "-";
  const std::string source = is_standard_input ? "standard input" : config.input;
  data::TableFile file(is_standard_input ? std::make_unique<const data::TextFile>(read_standard_input(), source)
                                         : std::make_unique<const data::TextFile>(source),
                       source, data::quotes_of(settings), /*finds_separator=*/true);
  shared->separator = file.separator();
  std::vector<std::string> names = file.names();
  const std::string prediction = new_name(kPrediction, names);
  names.push_back(prediction);
  if (schema.predicts_classes()) names.push_back(new_name("probability", names));
  shared->header = data::csv_row(names, shared->separator) + "\n";
  data::TableEncoder encoder(schema);
  encoder.begin(file, /*target_is_wanted=*/false);
  const auto numbers = static_cast<std::size_t>(schema.numbers()), codes = schema.categories().size();
  std::vector<std::string> fields;
  while (file.next(fields)) {
    shared->rows.push_back(data::csv_row(fields, shared->separator));
    shared->numbers.resize(shared->numbers.size() + numbers);
    shared->codes.resize(shared->codes.size() + codes);
    encoder.encode(fields, std::span(shared->numbers).last(numbers), std::span(shared->codes).last(codes));
  }
  if (shared->rows.empty())
    throw IoError(fmt::format("{}: it has no row after its first line, which names the columns", file.source()),
                  "write rows");
  for (std::size_t i = 0; i < schema.columns.size(); ++i)
    if (encoder.unseen()[i] > 0 && !config.quiet)
      log_info("{}: {} of {} rows have a {} that training has not seen", file.source(), encoder.unseen()[i],
               shared->rows.size(), data::shown_name(schema.columns[i].name));
  shared->batch = static_cast<std::uint64_t>(config.batch.value_or(kUsualBatch));
  shared->batch = std::min<std::uint64_t>(shared->batch, shared->rows.size());
  return {.kind = InferReport::Kind::kRows,
          .jobs = (shared->rows.size() + shared->batch - 1) / shared->batch,
          .doing = "predicting",
          .batch = static_cast<std::int64_t>(shared->batch),
          .make_worker = [&config, &model, shared](nn::Backend& stream, std::size_t device) {
            return std::make_unique<TableWorker>(config, *model.modules[device], shared, stream);
          }};
}

}  // namespace lockstep::inference
