// A multilayer perceptron for the rows of tables: of numbers, and of categories by their embeddings.
#include <fmt/ranges.h>

#include <numeric>

#include "base/error.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

constexpr const char *kWidths = "hidden", *kEmbedding = "embedding-dim";

// Of each hidden layer: linear – batch norm – ReLU – dropout. The first is the sum of two products, of the numbers and
// of the embeddings of all categories, which is one of both side by side: Guo and Berkhahn, "Entity Embeddings of
// Categorical Variables", 2016.
class Tabular final : public Module {
 public:
  Tabular(Context& context, const ModelSpec& spec) {
    auto widths = spec.settings.integers(kWidths);
    widths.push_back(spec.classes);
    const std::int64_t numbers = features_of(spec), dim = spec.settings.integer(kEmbedding);
    const auto columns = std::ssize(spec.categories);
    const bool normalised = widths.size() > 1;  // which takes the place of a bias
    if (columns > 0) {
      const auto codes = std::accumulate(spec.categories.begin(), spec.categories.end(), std::int64_t{0});
      embedding_ = &register_module("embedding", std::make_unique<Embedding>(context, codes, dim));
      categories_ =
          &register_module("categories", std::make_unique<Linear>(context, columns * dim, widths[0], !normalised));
    }
    if (numbers > 0)
      numbers_ = &register_module("numbers",
                                  std::make_unique<Linear>(context, numbers, widths[0], !normalised && columns == 0));
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      const std::string number = std::to_string(i + 1);
      const bool last = i + 2 == widths.size();
      norms_.push_back(&register_module("bn" + number, std::make_unique<BatchNorm>(context, widths[i])));
      dropouts_.push_back(
          &register_module("dropout" + number,
                           std::make_unique<Dropout>(spec.settings.number("dropout"), static_cast<std::int64_t>(i))));
      layers_.push_back(&register_module("fc" + std::to_string(i + 2),
                                         std::make_unique<Linear>(context, widths[i], widths[i + 1], last)));
    }
  }

  Vars forward_all(Tape& tape, const Vars& inputs) override {
    Var x = categories_ != nullptr ? both(tape, take<2>(inputs)) : numbers_->forward(tape, take<1>(inputs)[0]);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      x = dropouts_[i]->forward(tape, norms_[i]->forward(tape, x, Epilogue::kRelu));
      x = i + 1 < layers_.size() ? layers_[i]->forward(tape, x) : layers_[i]->logits(tape, x);
    }
    return {x};
  }

  std::string type_name() const override { return "Tabular"; }

 private:
  Var both(Tape& tape, const std::array<Var, 2>& inputs) {
    const auto& [numbers, codes] = inputs;
    const Var embedded = flatten(tape, embedding_->forward(tape, codes));
    const Var x = categories_->forward(tape, embedded);
    return numbers_ != nullptr ? add(tape, x, numbers_->forward(tape, numbers)) : x;
  }

  Embedding* embedding_ = nullptr;
  Linear *categories_ = nullptr, *numbers_ = nullptr;
  std::vector<BatchNorm*> norms_;
  std::vector<Dropout*> dropouts_;
  std::vector<Linear*> layers_;
};

std::vector<MatrixProduct> tabular_products(const ModelSpec& spec) {
  auto widths = spec.settings.integers(kWidths);
  widths.push_back(spec.classes);
  std::vector<MatrixProduct> all;
  if (const std::int64_t numbers = features_of(spec); numbers > 0)
    all.push_back({.in = numbers, .out = widths[0], .reads_data = true});
  if (!spec.categories.empty())
    all.push_back({.in = std::ssize(spec.categories) * spec.settings.integer(kEmbedding), .out = widths[0]});
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) all.push_back({.in = widths[i], .out = widths[i + 1]});
  return all;
}

}  // namespace

const ModelFamily& tabular_family() {
  static const ModelFamily family = {
      .variants = {{.name = "tabular", .sample_shape = {16}}},
      .settings = {hidden_setting({128, 64}), size_setting(kEmbedding, 8, "features of each category"),
                   dropout_setting()},
      .takes_vectors = true,
      .takes_categories = true,
      .batch_norm = true,
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        if (spec.sample_shape.size() != 1)
          throw UsageError(
              fmt::format("tabular takes rows of numbers, not samples of [{}]", fmt::join(spec.sample_shape, ", ")),
              "use another model for these data");
        return std::make_unique<Tabular>(context, spec);
      },
      .products = tabular_products,
  };
  return family;
}

}  // namespace lockstep::nn
