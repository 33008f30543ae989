
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "data/resample.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::inference {
namespace {

namespace fs = std::filesystem;

/// What all workers look at.
struct SharedImages {
  data::ImageForm form;
  std::shared_ptr<const ImageFiles> files;
  std::vector<std::string> class_names;
  int top = kDefaultTop;
  std::uint64_t batch = 1;  // images of a job, but for the last one
};

class ImageWorker final : public InferWorker {
 public:
  ImageWorker(const InferConfig& config, nn::Module& module, std::shared_ptr<const SharedImages> shared,
              nn::Backend& backend)
      : config_(config), module_(module), shared_(std::move(shared)), backend_(backend), tape_(backend) {
    tape_.set_recording(false);
    const auto dims = shared_->form.dims();
    x_ = backend.empty({static_cast<std::int64_t>(shared_->batch), dims[0], dims[1], dims[2]});
    values_.resize(static_cast<std::size_t>(x_.count()));
  }

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const auto start = Clock::now();
    if (!read(job)) return;
    const auto whole = std::ranges::count(images_, std::string(), &Image::error);
    if (whole > 0) compute(whole);
    const double ms = 1e3 * seconds_between(start, Clock::now());
    std::size_t row = 0;
    for (const auto& [path, error] : images_) {
      if (!error.empty()) {
        ++tally.corrupt;
        if (config_.json) put(JsonObject{{"event", "image"}, {"input", path}, {"error", error}}.text() + "\n");
        continue;
      }
      ++tally.results;
      tally.result_ms.push_back(ms);
      put(text_of(path, row++, ms));
    }
  }

 private:
  struct Image {
    std::string path;
    std::string error;  // of a corrupt one
  };

  // Fills images_, and values_ with those that are whole. False: a stop has been asked for.
  bool read(std::uint64_t job) {
    images_.clear();
    const std::size_t size = values_.size() / shared_->batch;
    std::size_t whole = 0;
    const std::uint64_t first = job * shared_->batch, end = std::min(first + shared_->batch, shared_->files->size());
    for (std::uint64_t i = first; i < end; ++i) {
      if (stop_signal() != 0) return false;
      Image& image = images_.emplace_back(Image{shared_->files->path(i), {}});
      try {
        reader_.read(image.path, shared_->form, std::span(values_).subspan(whole * size, size));
        ++whole;
      } catch (const IoError& error) {
        image.error = error.what();
        log_warn("corrupt image {}", image.error);
      }
    }
    return true;
  }

  // Fills logits_ with those of the first `count` images of values_.
  void compute(std::int64_t count) {
    nn::Tensor x = x_.slice(0, count);
    backend_.upload(std::as_bytes(std::span(values_).first(static_cast<std::size_t>(x.count()))), x);
    if (config_.precision == InferPrecision::kBF16) {
      const nn::Tensor wide = x;
      x = backend_.empty(wide.shape(), DType::kBF16);
      backend_.pointwise().cast(wide, x);
    }
    logits_ = nn::values_of(backend_, module_.forward(tape_, tape_.input(x)).value());
    tape_.reset();
    classes_ = logits_.size() / static_cast<std::size_t>(count);
  }

  std::string name_of(int i) const {
    const auto at = static_cast<std::size_t>(i);
    return at < shared_->class_names.size() ? shared_->class_names[at] : fmt::format("class {}", i);
  }

  // Of a row of logits_.
  std::string text_of(const std::string& path, std::size_t row, double ms) {
    const auto ranked = ranking_.of(std::span(logits_).subspan(row * classes_, classes_), shared_->top);
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
  nn::Module& module_;
  std::shared_ptr<const SharedImages> shared_;
  nn::Backend& backend_;
  nn::Tape tape_;
  data::ImageReader reader_;
  nn::Tensor x_;  // of a whole batch
  std::vector<float> values_, logits_;
  Ranking ranking_;
  std::size_t classes_ = 0;
  std::vector<Image> images_;  // of the job
};

}  // namespace

data::ImageForm image_form_of(const InferConfig& config, const InferModel& model) {
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

ImageFiles::ImageFiles(const std::string& input) {
  std::error_code error;
  if (fs::is_directory(input, error)) {
    std::string directory = input;
    while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
    list_ = std::make_unique<const data::FileList>(data::list_all_files(directory, data::image_files()));
    return;
  }
  // A name may have commas itself.
  files_ = fs::exists(input, error) ? std::vector<std::string>{input} : split(input, ',');
  for (const std::string& file : files_) {
    if (file.empty())
      throw UsageError(fmt::format("--input {} has a comma without a file", printable(input)),
                       "give image files, with commas between, or a directory of them");
    const auto status = fs::status(file, error);
    if (!fs::exists(status))
      throw IoError(fmt::format("{}: {}", printable(file), error ? error.message() : "no such file"),
                    "give image files, with commas between, or a directory of them");
    if (fs::is_directory(status))
      throw UsageError(fmt::format("--input names the directory {} among files", printable(file)), "give it alone");
  }
}

InferTask image_task(const InferConfig& config, const InferModel& model, std::shared_ptr<const ImageFiles> files) {
  const auto shared = std::make_shared<SharedImages>();
  shared->form = image_form_of(config, model);
  shared->top = config.top.value_or(kDefaultTop);
  shared->class_names = class_names_of(config, model);
  shared->files = files != nullptr ? std::move(files) : std::make_shared<const ImageFiles>(config.input);
  const std::uint64_t images = shared->files->size();
  shared->batch = std::min(static_cast<std::uint64_t>(config.batch.value_or(1)), images);
  return {.kind = InferReport::Kind::kImages,
          .jobs = (images + shared->batch - 1) / shared->batch,
          .doing = "classifying",
          .batch = static_cast<std::int64_t>(shared->batch),
          .make_worker = [&config, &model, shared](nn::Backend& stream, std::size_t device) {
            return std::make_unique<ImageWorker>(config, *model.modules[device], shared, stream);
          }};
}

}  // namespace lockstep::inference
