#include "bench/statistics.h"

#include <cmath>
#include <cstdint>
#include <numeric>

namespace lockstep::bench {
namespace {

/// Its continued fraction (Abramowitz and Stegun, 26.5.8), by Lentz's method.
double beta_fraction(double x, double a, double b) {
  constexpr double kTiny = 1e-300;
  const auto nonzero = [](double value) { return std::abs(value) < kTiny ? kTiny : value; };
  double c = 1, d = 1 / nonzero(1 - (a + b) * x / (a + 1)), fraction = d;
  for (int m = 1; m < 500; ++m) {
    double before = fraction;
    for (const double term : {m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                              -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))}) {
      d = 1 / nonzero(1 + term * d);
      c = nonzero(1 + term / c);
      fraction *= c * d;
    }
    if (std::abs(fraction - before) < 1e-15 * std::abs(fraction)) break;
  }
  return fraction;
}

/// The regularised incomplete beta function.
double incomplete_beta(double x, double a, double b) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  const double scale =
      std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x));
  // The fraction converges fast below the mean.
  return x < (a + 1) / (a + b + 2) ? scale * beta_fraction(x, a, b) / a : 1 - scale * beta_fraction(1 - x, b, a) / b;
}

double student_t_probability(double t, double degrees) {
  const double tail = incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2;
  return t > 0 ? 1 - tail : tail;
}

/// Twice the rank of each value among all, so that mean ranks of equal values are whole numbers; and the sum of
/// t³ - t over groups of t equal values.
struct Ranks {
  std::vector<std::int64_t> doubled;
  double ties = 0;

  explicit Ranks(const std::vector<double>& values) : doubled(values.size()) {
    std::vector<std::size_t> order(values.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
    for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      while (end < order.size() && values[order[end]] == values[order[begin]]) ++end;
      for (std::size_t i = begin; i < end; ++i) doubled[order[i]] = static_cast<std::int64_t>(begin + 1 + end);
      const auto count = static_cast<double>(end - begin);
      ties += count * count * count - count;
    }
  }
};

/// The share of all choices of `count` of `ranks` with a sum at least as far from the middle as `sum`.
double exact_p(const std::vector<std::int64_t>& ranks, std::size_t count, std::int64_t sum) {
  const auto total = static_cast<std::size_t>(std::accumulate(ranks.begin(), ranks.end(), std::int64_t{0}));
  // ways[k][s]: choices of k ranks that sum up to s.
  std::vector<std::vector<double>> ways(count + 1, std::vector<double>(total + 1));
  ways[0][0] = 1;
  for (const std::int64_t rank : ranks)
    for (std::size_t k = count; k > 0; --k)
      for (auto s = static_cast<std::size_t>(rank); s <= total; ++s)
        ways[k][s] += ways[k - 1][s - static_cast<std::size_t>(rank)];
  // The middle is count · total / ranks.size(): compared without a division.
  const auto distance = [&](std::int64_t s) {
    return std::abs(s * static_cast<std::int64_t>(ranks.size()) -
                    static_cast<std::int64_t>(count) * static_cast<std::int64_t>(total));
  };
  double all = 0, far = 0;
  for (std::size_t s = 0; s <= total; ++s) {
    all += ways[count][s];
    if (distance(static_cast<std::int64_t>(s)) >= distance(sum)) far += ways[count][s];
  }
  return far / all;
}

}  // namespace

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double standard_deviation(std::span<const double> values) {
  const double middle = mean(values);
  double squares = 0;
  for (const double value : values) squares += (value - middle) * (value - middle);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

double student_t_quantile(double probability, double degrees) {
  double low = -1, high = 1;
  while (student_t_probability(low, degrees) > probability) low *= 2;
  while (student_t_probability(high, degrees) < probability) high *= 2;
  for (int i = 0; i < 200 && high - low > 1e-14 * std::max(1.0, std::abs(low)); ++i) {
    const double middle = (low + high) / 2;
    (student_t_probability(middle, degrees) < probability ? low : high) = middle;
  }
  return (low + high) / 2;
}

Interval ratio_interval(std::span<const double> ratios) {
  std::vector<double> logarithms;
  for (const double ratio : ratios) logarithms.push_back(std::log(ratio));
  const double middle = mean(logarithms);
  if (ratios.size() < 2) return {std::exp(middle), std::exp(middle), std::exp(middle)};
  const auto free = static_cast<double>(ratios.size() - 1);
  // The deviation of what they were drawn from, divided by √n, is that of the values divided by √(n - 1).
  const double half =
      student_t_quantile((1 + kConfidence) / 2, free) * standard_deviation(logarithms) / std::sqrt(free);
  return {std::exp(middle), std::exp(middle - half), std::exp(middle + half)};
}

double mann_whitney_p(std::span<const double> a, std::span<const double> b) {
  if (a.empty() || b.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::vector<double> all(a.begin(), a.end());
  all.insert(all.end(), b.begin(), b.end());
  const Ranks ranks(all);
  const std::int64_t sum =
      std::accumulate(ranks.doubled.begin(), ranks.doubled.begin() + std::ssize(a), std::int64_t{0});
  if (all.size() <= kMostExact) return exact_p(ranks.doubled, a.size(), sum);
  const auto n = static_cast<double>(a.size()), m = static_cast<double>(b.size()), together = n + m;
  const double u = static_cast<double>(sum) / 2 - n * (n + 1) / 2;
  const double variance = n * m / 12 * (together + 1 - ranks.ties / (together * (together - 1)));
  if (variance <= 0) return 1;  // all are equal
  const double z = std::max(0.0, std::abs(u - n * m / 2) - 0.5) / std::sqrt(variance);
  return std::erfc(z / std::sqrt(2.0));
}

double least_mann_whitney_p(std::size_t a, std::size_t b) {
  const auto n = static_cast<double>(a), m = static_cast<double>(b);
  return std::min(1.0, 2 * std::exp(std::lgamma(n + 1) + std::lgamma(m + 1) - std::lgamma(n + m + 1)));
}

}  // namespace lockstep::bench
