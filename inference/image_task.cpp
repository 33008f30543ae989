
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/image_views.h"
#include "inference/ranking.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"

namespace lockstep::inference {
namespace {

namespace fs = std::filesystem;

/// What all workers look at.
struct SharedImages {
  data::ImageForm form;
  std::vector<std::string> files;              // named one by one, or
  std::unique_ptr<const data::FileList> list;  // all of a directory
  std::vector<std::string> class_names;
  int top = kDefaultTop;

  std::uint64_t size() const { return list != nullptr ? list->size() : files.size(); }
  std::string path(std::uint64_t i) const { return list != nullptr ? list->path(i) : files[i]; }
};

class ImageWorker final : public InferWorker {
 public:
  ImageWorker(const InferConfig& config, const InferModel& model, std::shared_ptr<const SharedImages> shared,
              nn::Backend& backend)
      : config_(config), model_(model), shared_(std::move(shared)), backend_(backend), tape_(backend) {
    tape_.set_recording(false);
    const auto dims = shared_->form.dims();
    x_ = backend.empty({1, dims[0], dims[1], dims[2]});
    values_.resize(static_cast<std::size_t>(x_.count()));
  }

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const auto start = Clock::now();
    const std::string path = shared_->path(job);
    try {
      reader_.read(path, shared_->form, values_);
    } catch (const IoError& error) {
      ++tally.corrupt;
      log_warn("corrupt image {}", error.what());
      if (config_.json) put(JsonObject{{"event", "image"}, {"input", path}, {"error", error.what()}}.text() + "\n");
      return;
    }
    compute();
    const double ms = 1e3 * seconds_between(start, Clock::now());
    ++tally.results;
    tally.result_ms.push_back(ms);
    put(text_of(path, ms));
  }

 private:
  // Fills logits_.
  void compute() {
    backend_.upload(std::as_bytes(std::span(values_)), x_);
    nn::Tensor x = x_;
    if (config_.precision == Precision::kBF16) {
      x = backend_.empty(x_.shape(), DType::kBF16);
      backend_.pointwise().cast(x_, x);
    }
    nn::Tensor y = model_.module->forward(tape_, tape_.input(x)).value();
    if (y.dtype() != DType::kF32) {
      const nn::Tensor narrow = y;
      y = backend_.empty(narrow.shape());
      backend_.pointwise().cast(narrow, y);
    }
    logits_.resize(static_cast<std::size_t>(y.count()));
    backend_.download(y, std::as_writable_bytes(std::span(logits_)));
    tape_.reset();
  }

  std::string name_of(int i) const {
    const auto at = static_cast<std::size_t>(i);
    return at < shared_->class_names.size() ? shared_->class_names[at] : fmt::format("class {}", i);
  }

  std::string text_of(const std::string& path, double ms) {
    const auto ranked = ranking_.of(logits_, shared_->top);
    if (config_.json) {
      std::vector<JsonText> classes;
      for (const auto& [number, probability] : ranked)
        classes.emplace_back(JsonObject{{"class", number}, {"name", name_of(number)}, {"probability", probability}});
      return JsonObject{{"event", "image"}, {"input", path}, {"classes", classes}, {"latency_ms", ms}}.text() + "\n";
    }
    std::string line = printable(path) + ":";
    for (std::size_t i = 0; i < ranked.size(); ++i)
      line += fmt::format("{} {} {:.2f} %", i > 0 ? "," : "", printable(name_of(ranked[i].number)),
                          100 * ranked[i].probability);
    return line + "\n";
  }

  const InferConfig& config_;
  const InferModel& model_;
  std::shared_ptr<const SharedImages> shared_;
  nn::Backend& backend_;
  nn::Tape tape_;
  data::ImageReader reader_;
  nn::Tensor x_;
  std::vector<float> values_, logits_;
  Ranking ranking_;
};

data::ImageForm form_of(const InferConfig& config, const InferModel& model) {
  data::ImageForm form;
  if (model.metadata && model.metadata->image != nullptr) {
    form = *model.metadata->image;
  } else {
    const auto& dims = model.spec.sample_shape;
    if (dims.size() != 3 || (dims[2] != 3 && dims[2] != 1))
      throw UsageError(fmt::format("{} takes samples of {}, not images", model.spec.name,
                                   dims.size() == 3 ? fmt::format("{} channels", dims[2])
                                                    : fmt::format("{} numbers", dims.empty() ? 0 : dims[0])),
                       "give it --input random:…, or use a model for images");
    form.height = static_cast<int>(dims[0]);
    form.width = static_cast<int>(dims[1]);
    form.channels = static_cast<int>(dims[2]);
    form.cropped =
        form.height == form.width && !nn::model_family(model.spec.name).variant(model.spec.name).whole_images;
  }
  if (config.image_size) form.height = form.width = *config.image_size;
  return form;
}

void open_files(const std::string& input, SharedImages& shared) {
  std::error_code error;
  if (fs::is_directory(input, error)) {
    std::string directory = input;
    while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
    shared.list = std::make_unique<const data::FileList>(data::list_all_files(directory, data::image_files()));
    return;
  }
  // A name may have commas itself.
  shared.files = fs::exists(input, error) ? std::vector<std::string>{input} : split(input, ',');
  for (const std::string& file : shared.files) {
    const auto status = fs::status(file, error);
    if (!fs::exists(status))
      throw IoError(fmt::format("{}: {}", printable(file), error ? error.message() : "no such file"),
                    "give image files, with commas between, or a directory of them");
    if (fs::is_directory(status))
      throw UsageError(fmt::format("--input names the directory {} among files", printable(file)), "give it alone");
  }
}

}  // namespace

InferTask image_task(const InferConfig& config, const InferModel& model) {
  const auto shared = std::make_shared<SharedImages>();
  shared->form = form_of(config, model);
  shared->top = config.top.value_or(kDefaultTop);
  if (!config.class_names.empty())
    shared->class_names = read_class_names(config.class_names, model.spec.classes);
  else if (model.metadata)
    shared->class_names = model.metadata->class_names;
  open_files(config.input, *shared);
  return {.kind = InferReport::Kind::kImages,
          .jobs = shared->size(),
          .doing = "classifying",
          .make_worker = [&config, &model, shared](nn::Backend& backend) {
            return std::make_unique<ImageWorker>(config, model, shared, backend);
          }};
}

}  // namespace lockstep::inference
