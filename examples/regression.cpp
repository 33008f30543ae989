// A custom regression: own data with numbers for targets, own model, own loss, trained by lockstep. It has the
// flags of `lockstep train`: --epochs, --lr, --schedule, --clip-norm, --checkpoint-dir, --resume, --metrics and others.
#include <lockstep/trainer.h>

#include <cmath>
#include <memory>

using namespace lockstep;

namespace {

// Two numbers, and a wave of them to be learnt.
class Waves final : public data::Dataset {
 public:
  Waves(const char* name, std::uint64_t size, std::uint64_t first)
      : Dataset({.name = name, .size = size, .dims = {2}, .target_dims = {1}, .numeric_targets = true}),
        first_(first) {}
  void read_sample(std::uint64_t index, const data::Sample& sample) const override {
    const auto i = static_cast<float>(first_ + index);
    sample.x[0] = std::fmod(i * 0.618f, 2.0f) - 1;
    sample.x[1] = std::fmod(i * 0.414f, 2.0f) - 1;
    sample.targets[0] = std::sin(3 * sample.x[0]) + sample.x[1] * sample.x[1];
  }

 private:
  std::uint64_t first_;
};

class Net final : public nn::Module {
 public:
  Net(nn::Context& context, std::int64_t width)
      : hidden_(register_module<nn::Linear>("hidden", context, 2, width)),
        out_(register_module<nn::Linear>("out", context, width, 1)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return out_.forward(tape, nn::gelu(tape, hidden_.forward(tape, x)));
  }

 private:
  nn::Linear& hidden_;
  nn::Linear& out_;
};

// √(1 + d²) − 1: half the square of a small error, and hardly more than the size of a large one.
nn::Loss pseudo_huber(nn::Tape& tape, nn::Var y, const nn::Tensor& targets, float scale) {
  const nn::Var d = nn::square(tape, nn::sub(tape, y, tape.input(targets)));
  return nn::sum(tape, nn::affine(tape, nn::sqrt(tape, nn::affine(tape, d, 1, 1)), 1, -1), scale);
}

}  // namespace

int main(int argc, char** argv) {
  trainer::TrainConfig defaults;  // of the flags
  defaults.epochs = 30;
  defaults.lr = 0.02;
  defaults.schedule = "cosine";
  defaults.clip_norm = 1;
  return run_main([&] {
    return train(argc, argv, defaults,
                 {.model = nn::factory<Net>(64),
                  .data = {.train = std::make_shared<Waves>("waves", 4000, 0),
                           .validation = std::make_shared<Waves>("waves to test", 500, 4000)},
                  .loss = pseudo_huber,
                  .name = "net"});
  });
}
