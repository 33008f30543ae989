#include "data/mixing.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "lockstep/data/families.h"

namespace lockstep::data {
namespace {

// In (0, 1].
double above_zero(SplitMix64& random) { return 1 - random.uniform(); }

// The logarithm of a gamma variate, which is a number where the variate itself is too small to be one (Marsaglia and
// Tsang, "A simple method for generating gamma variables", 2000; the normal one by Box and Muller).
double log_gamma_variate(SplitMix64& random, double alpha) {
  if (alpha < 1) {
    const double of_larger = log_gamma_variate(random, alpha + 1);
    return of_larger + std::log(above_zero(random)) / alpha;
  }
  const double d = alpha - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  while (true) {
    const double radius = std::sqrt(-2 * std::log(above_zero(random)));
    const double x = radius * std::cos(2 * std::numbers::pi * random.uniform());
    const double root = 1 + c * x;
    const double u = above_zero(random);
    if (root <= 0) continue;
    const double v = root * root * root;
    if (std::log(u) < x * x / 2 + d - d * v + d * std::log(v)) return std::log(d) + std::log(v);
  }
}

int below(SplitMix64& random, int bound) { return static_cast<int>(random.below(static_cast<std::uint32_t>(bound))); }

}  // namespace

double draw_share(SplitMix64& random, double alpha) {
  // Below that all shares are 0 or 1, as f32 has them.
  constexpr double kLeast = 1e-6;
  const double own = log_gamma_variate(random, std::max(alpha, kLeast));
  const double other = log_gamma_variate(random, std::max(alpha, kLeast));
  return 1 / (1 + std::exp(other - own));
}

Mix draw_mix(const Mixing& mixing, std::uint64_t draw, std::uint64_t samples, ImageSize size) {
  constexpr std::uint64_t kMixes = 0x6d6978;
  SplitMix64 random(mix64(draw, kMixes));
  Mix mix;
  // The product's upper word: of 2^64 values some numbers have one more than others, which nobody will notice.
  mix.partner = static_cast<std::uint64_t>(static_cast<unsigned __int128>(random.next()) * samples >> 64);
  const bool second = (random.next() >> 63) != 0;
  mix.pasted = mixing.cutmix > 0 && (mixing.mixup <= 0 || second);
  mix.share = draw_share(random, mix.pasted ? mixing.cutmix : mixing.mixup);
  if (!mix.pasted) return mix;
  const double half = std::sqrt(1 - mix.share) / 2;
  const int x = below(random, size.width), y = below(random, size.height);
  const int across = static_cast<int>(half * size.width), down = static_cast<int>(half * size.height);
  mix.left = std::max(x - across, 0);
  mix.top = std::max(y - down, 0);
  mix.width = std::min(x + across, size.width) - mix.left;
  mix.height = std::min(y + down, size.height) - mix.top;
  mix.share = 1 - static_cast<double>(mix.width) * mix.height / (static_cast<double>(size.width) * size.height);
  return mix;
}

void mix_into(std::span<float> x, std::span<const float> partner, const Mix& mix, ImageSize size) {
  LOCKSTEP_ASSERT(x.size() == partner.size() && mix.left + mix.width <= size.width &&
                  mix.top + mix.height <= size.height);
  if (!mix.pasted) {
    const auto own = static_cast<float>(mix.share), other = static_cast<float>(1 - mix.share);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = own * x[i] + other * partner[i];
    return;
  }
  const std::size_t line = x.size() / static_cast<std::size_t>(size.height);
  const std::size_t channels = line / static_cast<std::size_t>(size.width);
  for (int row = mix.top; row < mix.top + mix.height; ++row) {
    const std::size_t at = static_cast<std::size_t>(row) * line + static_cast<std::size_t>(mix.left) * channels;
    std::ranges::copy(partner.subspan(at, static_cast<std::size_t>(mix.width) * channels),
                      x.begin() + static_cast<std::ptrdiff_t>(at));
  }
}

std::vector<SettingSpec> mixing_settings() {
  const auto alpha = [](const char* name, const char* help) {
    return SettingSpec{.name = name,
                       .fallback = 0.0,
                       .help = help,
                       .role = SettingSpec::Role::kAugmentation,
                       .high = 1000,
                       .placeholder = "A",
                       .neutral = 0.0};
  };
  return {
      alpha(kMixup, "mix each training sample with another one, by a share drawn of Beta(A, A)"),
      alpha(kCutmix, "replace a rectangle of each training sample by another one's, by a share drawn of Beta(A, A)")};
}

Mixing mixing_of(const Settings& settings) {
  return {.mixup = settings.number(kMixup), .cutmix = settings.number(kCutmix)};
}

}  // namespace lockstep::data
