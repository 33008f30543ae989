
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "data/image_list.h"
#include "data/image_views.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"

namespace lockstep::inference {
namespace {

namespace fs = std::filesystem;

/// What all workers look at.
struct SharedImages {
  data::ImageForm form;
  std::vector<std::string> files;               // named one by one, or
  std::unique_ptr<const data::ImageList> list;  // all of a directory
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
  // Fills probabilities_ and order_.
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
    for (const float logit : logits_)
      if (!std::isfinite(logit))
        throw DivergedError(fmt::format("the model's results are {}", std::isnan(logit) ? "NaN" : "infinite"),
                            "its weights are corrupt, or its training diverged");
    order_.resize(logits_.size());
    std::iota(order_.begin(), order_.end(), 0);
    const auto top = std::min(order_.size(), static_cast<std::size_t>(shared_->top));
    std::ranges::partial_sort(order_, order_.begin() + static_cast<std::ptrdiff_t>(top), [&](int a, int b) {
      const float x_a = logits_[static_cast<std::size_t>(a)], x_b = logits_[static_cast<std::size_t>(b)];
      return x_a > x_b || (x_a == x_b && a < b);
    });
    order_.resize(top);
    const double largest = *std::ranges::max_element(logits_);
    sum_ = 0;
    for (const float logit : logits_) sum_ += std::exp(double{logit} - largest);
    probabilities_.clear();
    for (const int i : order_)
      probabilities_.push_back(std::exp(double{logits_[static_cast<std::size_t>(i)]} - largest) / sum_);
  }

  std::string name_of(int i) const {
    const auto at = static_cast<std::size_t>(i);
    return at < shared_->class_names.size() ? shared_->class_names[at] : fmt::format("class {}", i);
  }

  std::string text_of(const std::string& path, double ms) const {
    if (config_.json) {
      std::vector<JsonText> classes;
      for (std::size_t i = 0; i < order_.size(); ++i)
        classes.emplace_back(
            JsonObject{{"class", order_[i]}, {"name", name_of(order_[i])}, {"probability", probabilities_[i]}});
      return JsonObject{{"event", "image"}, {"input", path}, {"classes", classes}, {"latency_ms", ms}}.text() + "\n";
    }
    std::string line = data::printable(path) + ":";
    for (std::size_t i = 0; i < order_.size(); ++i)
      line +=
          fmt::format("{} {} {:.2f} %", i > 0 ? "," : "", data::printable(name_of(order_[i])), 100 * probabilities_[i]);
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
  std::vector<int> order_;             // the likeliest classes
  std::vector<double> probabilities_;  // theirs
  double sum_ = 0;
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

std::vector<std::string> read_names(const std::string& path, std::int64_t classes) {
  const MappedFile file(path);
  std::vector<std::string> names;
  for (const std::string& line : split(file.text(), '\n')) names.emplace_back(trim(line));
  while (!names.empty() && names.back().empty()) names.pop_back();
  if (std::cmp_not_equal(names.size(), classes))
    throw UsageError(fmt::format("{} has {} names, and the model {} classes", path, names.size(), classes),
                     "give a file with one name per line, in the classes' order");
  return names;
}

void open_files(const std::string& input, SharedImages& shared) {
  std::error_code error;
  if (fs::is_directory(input, error)) {
    std::string directory = input;
    while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
    shared.list = std::make_unique<const data::ImageList>(data::list_all_images(directory));
    return;
  }
  // A name may have commas itself.
  shared.files = fs::exists(input, error) ? std::vector<std::string>{input} : split(input, ',');
  for (const std::string& file : shared.files) {
    const auto status = fs::status(file, error);
    if (!fs::exists(status))
      throw IoError(fmt::format("{}: {}", data::printable(file), error ? error.message() : "no such file"),
                    "give image files, with commas between, or a directory of them");
    if (fs::is_directory(status))
      throw UsageError(fmt::format("--input names the directory {} among files", data::printable(file)),
                       "give it alone");
  }
}

}  // namespace

InferTask image_task(const InferConfig& config, const InferModel& model) {
  const auto shared = std::make_shared<SharedImages>();
  shared->form = form_of(config, model);
  shared->top = config.top.value_or(kDefaultTop);
  if (!config.class_names.empty())
    shared->class_names = read_names(config.class_names, model.spec.classes);
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
