// A variational autoencoder of digits (Kingma and Welling, "Auto-Encoding Variational Bayes", 2014), convolutional. It
// has the flags of `lockstep train`.
#include <lockstep/trainer.h>

using namespace lockstep;

constexpr std::int64_t kLatent = 8;
constexpr nn::Window kHalve = {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};  // and, transposed, doubles

class Vae final : public nn::Module {
 public:
  explicit Vae(nn::Context& context)
      : down1_(register_module<nn::Conv2d>("down1", context, 1, 16, kHalve)),
        down2_(register_module<nn::Conv2d>("down2", context, 16, 32, kHalve)),
        mean_(register_module<nn::Linear>("mean", context, 128, kLatent)),
        log_variance_(register_module<nn::Linear>("log_variance", context, 128, kLatent)),
        spread_(register_module<nn::Linear>("spread", context, kLatent, 128)),
        up1_(register_module<nn::ConvTranspose2d>("up1", context, 32, 16, kHalve, std::array<std::int64_t, 2>{1, 1})),
        up2_(register_module<nn::ConvTranspose2d>("up2", context, 16, 1, kHalve, std::array<std::int64_t, 2>{1, 1})) {}
  // The image, its reconstruction, and the distribution of its code.
  nn::Vars forward_all(nn::Tape& t, const nn::Vars& inputs) override {
    const nn::Var x = inputs;  // (N, 8, 8, 1)
    const nn::Var seen = nn::reshape(t, nn::silu(t, down2_(t, nn::silu(t, down1_(t, x)))), {-1, 128});
    const nn::Var mean = mean_(t, seen), log_variance = log_variance_(t, seen);
    nn::Var code = mean;
    if (training()) {
      const nn::Var deviation = nn::exp(t, nn::affine(t, log_variance, 0.5f));
      code = nn::add(t, mean, nn::mul(t, deviation, nn::randn(t, mean.shape(), /*layer=*/0)));
    }
    const nn::Var drawn = nn::silu(t, up1_(t, nn::reshape(t, spread_(t, code), {-1, 2, 2, 32})));
    return {x, up2_(t, drawn), mean, log_variance};
  }

 private:
  nn::Conv2d &down1_, &down2_;
  nn::Linear &mean_, &log_variance_, &spread_;
  nn::ConvTranspose2d &up1_, &up2_;
};

// The error of the reconstruction, and how far the code's distribution is from the standard normal one: summed over an
// image. The targets, digits, are not read.
nn::Loss evidence(nn::Tape& t, const nn::Vars& outputs, const nn::Tensor&, float scale) {
  const auto [x, y, mean, log_variance] = outputs.as<4>();
  const nn::Var error = nn::sum_over(t, nn::square(t, nn::sub(t, nn::to_f32(t, y), nn::to_f32(t, x))), {1, 2, 3});
  const nn::Var inside = nn::sub(t, nn::add(t, nn::square(t, mean), nn::exp(t, log_variance)), log_variance);
  const nn::Var divergence = nn::sum_over(t, nn::to_f32(t, nn::affine(t, inside, 0.5f, -0.5f)), {1});
  return nn::sum(t, nn::add(t, nn::affine(t, error, 10), divergence), scale);
}

int main(int argc, char** argv) {
  trainer::TrainConfig defaults;  // of the flags
  defaults.epochs = 40;
  defaults.optimizer = "adam";
  defaults.lr = 3e-3;
  return run_main([&] {
    return train(argc, argv, defaults,
                 {.model = nn::factory<Vae>(), .data = data::open_data("digits"), .loss = evidence, .name = "vae"});
  });
}
