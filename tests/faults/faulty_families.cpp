// The model `faulty` and the data `faulty`: cnn and digits, with places where injection.h lets something go wrong.
#include <cstdlib>
#include <memory>
#include <utility>

#include "lockstep/data/families.h"
#include "lockstep/nn/models/models.h"
#include "tests/faults/injection.h"

namespace lockstep::faults {
namespace {

class BackwardNode final : public nn::Node {
 public:
  BackwardNode(nn::Var output, nn::Var x) : Node(output), x_(x) {}
  void backward(nn::Tape& tape) override {
    reach(Place::kBackward);
    tape.contribute(x_, tape.take_grad(output()));
  }

 private:
  nn::Var x_;
};

class Faulty final : public nn::Module {
 public:
  Faulty(nn::Context& context, const nn::ModelSpec& spec)
      : body_(register_module("body", nn::make_model(context, spec))),
        head_(register_module<nn::Linear>("head", context, spec.classes, spec.classes)) {}

  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    // The estimate of memory has a first pass of its own, without values.
    if (first_) return compute(tape, x, false);
    reach(training() ? Place::kForward : Place::kEvaluation);
    return compute(tape, x, true);
  }
  std::string type_name() const override { return "Faulty"; }
  void set_real() { first_ = false; }

 private:
  nn::Var compute(nn::Tape& tape, nn::Var x, bool real) {
    x = body_.forward(tape, x);
    if (real && tape.recording()) {
      const nn::Var through = tape.make_var(x.value(), x.needs_grad());
      tape.record<BackwardNode>(through, x);
      x = through;
    }
    return head_.forward(tape, x);
  }

  nn::Module& body_;
  nn::Linear& head_;
  bool first_ = true;
};

class FaultyData final : public data::Dataset {
 public:
  explicit FaultyData(std::shared_ptr<const data::Dataset> real)
      : Dataset({.name = "faulty " + real->name(),
                 .size = real->size(),
                 .dims = real->sample_dims(),
                 .classes = real->classes(),
                 .image = real->image()}),
        real_(std::move(real)) {}
  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    reach(Place::kData);
    real_->read(index, x, label);
  }

 private:
  std::shared_ptr<const data::Dataset> real_;
};

bool register_families() {
  nn::register_model({.variants = {{.name = "faulty", .sample_shape = {8, 8, 1}}},
                      .takes_images = true,
                      .build = [](nn::Context& context, const nn::ModelSpec& spec) -> std::unique_ptr<nn::Module> {
                        nn::ModelSpec inner = spec;
                        inner.name = "cnn";
                        auto model = std::make_unique<Faulty>(context, inner);
                        static bool estimated = false;  // the one with shapes alone is built first
                        if (std::exchange(estimated, true)) model->set_real();
                        return model;
                      }});
  data::register_dataset({.name = "faulty",
                          .about = "digits, with faults",
                          .open = [](const std::string&, const std::string&, const data::OpenOptions& options) {
                            reach(Place::kStart);
                            data::DataSplits real = data::open_data("digits", options);
                            return data::DataSplits{std::make_shared<FaultyData>(real.train),
                                                    std::make_shared<FaultyData>(real.validation)};
                          }});
  std::atexit([] { reach(Place::kExit); });
  reach(Place::kMain);
  return true;
}

const bool registered = register_families();

}  // namespace
}  // namespace lockstep::faults
