// A custom model on a data set of lockstep's. It has the flags of `lockstep train`.
#include <lockstep/trainer.h>

using namespace lockstep;

class TwoLayers final : public nn::Module {
 public:
  explicit TwoLayers(nn::Context& context)
      : hidden_(register_module<nn::Linear>("hidden", context, 64, 128)),
        out_(register_module<nn::Linear>("out", context, 128, 10)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return out_.forward(tape, hidden_.forward(tape, nn::flatten(tape, x), nn::Epilogue::kRelu));
  }

 private:
  nn::Linear& hidden_;
  nn::Linear& out_;
};

int main(int argc, char** argv) {
  trainer::TrainConfig defaults;  // of the flags
  defaults.epochs = 20;
  return run_main([&] {
    return train(argc, argv, defaults,
                 {.model = nn::factory<TwoLayers>(), .data = data::open_data("digits"), .name = "two_layers"});
  });
}
