// A transformer from its parts, which reads digits as eight rows of eight pixels. It has the flags of `lockstep train`.
#include <lockstep/trainer.h>

#include <cmath>

using namespace lockstep;

constexpr std::int64_t kRows = 8, kWidth = 64, kHeads = 4, kHead = kWidth / kHeads;

class Block final : public nn::Module {
 public:
  explicit Block(nn::Context& context)
      : norm1_(register_module<nn::LayerNorm>("norm1", context, kWidth)),
        norm2_(register_module<nn::LayerNorm>("norm2", context, kWidth)),
        qkv_(register_module<nn::Linear>("qkv", context, kWidth, 3 * kWidth)),
        out_(register_module<nn::Linear>("out", context, kWidth, kWidth)),
        up_(register_module<nn::Linear>("up", context, kWidth, 4 * kWidth)),
        down_(register_module<nn::Linear>("down", context, 4 * kWidth, kWidth)) {}
  nn::Var forward(nn::Tape& t, nn::Var x) override {
    const nn::Var qkv = nn::reshape(t, qkv_(t, norm1_(t, x)), {-1, kRows, 3 * kHeads, kHead});
    const nn::Var heads = nn::transpose(t, qkv, 1, 2);  // (N, those of q, k and v, rows, features)
    const auto part = [&](std::int64_t i) { return nn::slice(t, heads, 1, i * kHeads, (i + 1) * kHeads); };
    const nn::Var scores = nn::matmul(t, part(0), part(1), {.b = true});
    const nn::Var weights = nn::softmax(t, nn::affine(t, scores, 1 / std::sqrt(float{kHead})));
    const nn::Var mixed = nn::transpose(t, nn::matmul(t, weights, part(2)), 1, 2);
    x = nn::add(t, x, out_(t, nn::reshape(t, mixed, {-1, kRows, kWidth})));
    return nn::add(t, x, down_(t, nn::gelu(t, up_(t, norm2_(t, x)))));
  }

 private:
  nn::LayerNorm &norm1_, &norm2_;
  nn::Linear &qkv_, &out_, &up_, &down_;
};

class Transformer final : public nn::Module {
 public:
  explicit Transformer(nn::Context& context)
      : rows_(register_module<nn::Linear>("rows", context, 8, kWidth)),
        head_(register_module<nn::Linear>("head", context, kWidth, 10)),
        positions_(register_module<nn::Embedding>("positions", context, kRows, kWidth, 0.02)),
        blocks_{&register_module<Block>("block1", context), &register_module<Block>("block2", context)} {}
  nn::Var forward(nn::Tape& t, nn::Var x) override {
    x = nn::add(t, rows_(t, nn::reshape(t, x, {-1, kRows, 8})), nn::variable(t, positions_.weight()));
    for (Block* const block : blocks_) x = (*block)(t, x);
    return head_(t, nn::mean_over(t, x, {1}));
  }

 private:
  nn::Linear &rows_, &head_;
  nn::Embedding& positions_;
  Block* blocks_[2];
};

int main(int argc, char** argv) {
  return run_main(
      [&] { return train(argc, argv, {}, {.model = nn::factory<Transformer>(), .data = data::open_data("digits")}); });
}
