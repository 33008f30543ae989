// CUDA's batch normalisation against the CPU's, and against f64 where f32 sums could go wrong.
#include "nn/ops/elementwise_rules.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

constexpr double kNormEps = 1e-5;

const Shape kNormShapes[] = {{1, 1},    {2, 1},     {1, 3},    {5, 3},     {3, 2, 2, 64},
                             {7, 64},   {33, 1000}, {1, 1000}, {777, 1},   {65, 12},
                             {2500, 4}, {1031, 33}, {600, 64}, {2100, 31}, {9, 2056}};  // 66 chunks of rows

// In f64, whose sums can be taken for exact.
struct Exact {
  Exact(CachingAllocator& allocator, const Shape& shape)
      : spread(Tensor::empty(allocator, shape)),
        first(Tensor::empty(allocator, {columns_of(shape)})),
        second(Tensor::empty(allocator, {columns_of(shape)})) {}

  Tensor spread;         // y, dx
  Tensor first, second;  // mean and variance, dgamma and dbeta
};

Exact forward_exactly(CachingAllocator& allocator, const Tensor& x, const Tensor& gamma, const Tensor& beta) {
  Exact made(allocator, x.shape());
  const std::int64_t columns = gamma.count(), rows = x.count() / columns;
  for (std::int64_t c = 0; c < columns; ++c) {
    double mean = 0, variance = 0;
    for (std::int64_t r = 0; r < rows; ++r) mean += static_cast<double>(x.f32()[r * columns + c]);
    mean /= static_cast<double>(rows);
    for (std::int64_t r = 0; r < rows; ++r)
      variance += std::pow(static_cast<double>(x.f32()[r * columns + c]) - mean, 2);
    variance /= static_cast<double>(rows);
    const double scale = static_cast<double>(gamma.f32()[c]) / std::sqrt(variance + kNormEps);
    for (std::int64_t i = c; i < x.count(); i += columns)
      made.spread.f32()[i] =
          static_cast<float>((static_cast<double>(x.f32()[i]) - mean) * scale + static_cast<double>(beta.f32()[c]));
    made.first.f32()[c] = static_cast<float>(mean);
    made.second.f32()[c] = static_cast<float>(variance);
  }
  return made;
}

Exact backward_exactly(CachingAllocator& allocator, const Tensor& x, const Tensor& dy, const Tensor& gamma,
                       const Tensor& mean, const Tensor& variance, bool given) {
  Exact made(allocator, x.shape());
  const std::int64_t columns = gamma.count(), rows = x.count() / columns;
  for (std::int64_t c = 0; c < columns; ++c) {
    const double one_of_deviation = 1.0 / std::sqrt(static_cast<double>(variance.f32()[c]) + kNormEps);
    const auto hat = [&](std::int64_t i) {
      return (static_cast<double>(x.f32()[i]) - static_cast<double>(mean.f32()[c])) * one_of_deviation;
    };
    double dgamma = 0, dbeta = 0;
    for (std::int64_t i = c; i < x.count(); i += columns) {
      dgamma += static_cast<double>(dy.f32()[i]) * hat(i);
      dbeta += static_cast<double>(dy.f32()[i]);
    }
    const double share = given ? 0.0 : 1.0 / static_cast<double>(rows);
    for (std::int64_t i = c; i < x.count(); i += columns)
      made.spread.f32()[i] = static_cast<float>(static_cast<double>(gamma.f32()[c]) * one_of_deviation *
                                                (static_cast<double>(dy.f32()[i]) - share * (dbeta + hat(i) * dgamma)));
    made.first.f32()[c] = static_cast<float>(dgamma);
    made.second.f32()[c] = static_cast<float>(dbeta);
  }
  return made;
}

// What an error of a mean or of a difference is multiplied with.
double steepest(const Tensor& variance) {
  double smallest = 1.0;
  for (const float v : variance.span<float>()) smallest = std::min(smallest, static_cast<double>(v));
  return 1.0 / std::sqrt(smallest + kNormEps);
}

class CudaNorm : public DeviceTest {
 protected:
  // Uniform in [from, from + 1).
  Tensor statistics(std::int64_t columns, std::uint64_t seed, float from) {
    const Tensor made = random_tensor(*cpu, {columns}, seed);
    for (float& v : made.span<float>()) v = from + 0.5f * (v + 1.0f);
    return made;
  }

  std::unique_ptr<NormKernels> norm = cuda::make_norm_kernels(context);
};

TEST_P(CudaNorm, Forward) {
  for (const Shape& shape : kNormShapes) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = columns_of(shape), rows = shape.count() / columns;
    const Operand x = activations(random(shape, 1)), gamma = plains(statistics(columns, 2, 0.5f));
    const Operand beta = plains(random_tensor(*cpu, {columns}, 3));
    const Exact exact = forward_exactly(cpu->allocator(), x.host, gamma.host, beta.host);
    const double steep = steepest(exact.second);
    const double cpu_ulps = 8.0 + static_cast<double>(rows) / 8.0;  // it adds up the rows of a column one by one
    const auto trained = compare(cpu->norm(), *norm, {activation_like(shape), {{columns}}, {{columns}}},
                                 {{type(), cpu_ulps, 2.0 * steep}, {DType::kF32, cpu_ulps}, {DType::kF32, cpu_ulps}},
                                 [&](auto& on, Side at, const auto& out) {
                                   on.forward_train(at(x), at(gamma), at(beta), kNormEps, out[0], out[1], out[2]);
                                 });
    expect_close(exact.first, trained.got[1], {});
    expect_close(exact.second, trained.got[2], {});
    expect_close(exact.spread, trained.got[0], {type(), 8.0, 2.0 * steep});

    const Operand m = plains(random_tensor(*cpu, {columns}, 4)), v = plains(statistics(columns, 5, 0.3f));
    compare(cpu->norm(), *norm, {activation_like(shape)}, {{type(), 8.0, 4.0}},
            [&](auto& on, Side at, const auto& out) {
              on.forward_infer(at(x), at(gamma), at(beta), at(m), at(v), kNormEps, out[0]);
            });
  }
}

TEST_P(CudaNorm, Backward) {
  for (const Shape& shape : kNormShapes)
    for (const bool given : {false, true}) {
      SCOPED_TRACE(to_string(shape) + (given ? " given" : ""));
      const std::int64_t columns = columns_of(shape), rows = shape.count() / columns;
      const Operand x = activations(random(shape, 1)), dy = activations(random(shape, 2));
      const Operand gamma = plains(statistics(columns, 3, 0.5f));
      Operand m = plains(random_tensor(*cpu, {columns}, 5)), v = plains(statistics(columns, 6, 0.3f));
      if (!given) {
        const Exact forward = forward_exactly(cpu->allocator(), x.host, gamma.host, m.host);
        m = plains(forward.first), v = plains(forward.second);
      }
      const double steep = steepest(v.host), sum = std::sqrt(static_cast<double>(rows));  // as a random walk's
      const double cpu_ulps = 8.0 + static_cast<double>(rows) / 8.0;
      // A sample alone, or two: dy − dbeta / M − … is the difference of equal numbers, made larger by `steep` twice.
      const double dx_scale = 4.0 * steep * (rows < 3 ? steep : 1.0);
      const auto [expected, got] = compare(
          cpu->norm(), *norm, {activation_like(shape), {{columns}}, {{columns}}},
          {{type(), cpu_ulps, dx_scale}, {DType::kF32, cpu_ulps, 2.0 * steep * sum}, {DType::kF32, cpu_ulps, sum}},
          [&](auto& on, Side at, const auto& out) {
            on.backward(at(x), at(dy), at(gamma), at(m), at(v), given, kNormEps, out[0], out[1], out[2]);
          });
      const Exact exact = backward_exactly(cpu->allocator(), x.host, dy.host, gamma.host, m.host, v.host, given);
      expect_close(exact.first, got[1], {DType::kF32, 8.0, 2.0 * steep * sum});
      expect_close(exact.second, got[2], {DType::kF32, 8.0, sum});
      expect_close(exact.spread, got[0], {type(), 8.0, dx_scale});
    }
}

TEST_P(CudaNorm, WithRelu) {
  for (const Shape& shape : kNormShapes)
    for (const auto& [fused, added] :
         {std::pair{Epilogue::kRelu, false}, {Epilogue::kRelu, true}, {Epilogue::kRelu6, false}}) {
      const bool capped = fused == Epilogue::kRelu6;
      SCOPED_TRACE(to_string(shape) + (added ? " and a residual" : capped ? " ReLU6" : ""));
      const std::int64_t columns = columns_of(shape), rows = shape.count() / columns;
      const Operand x = activations(random(shape, 1)), gamma = plains(statistics(columns, 2, 0.5f));
      const Tensor shift = random_tensor(*cpu, {columns}, 3);
      if (capped)  // about 6: many are rounded to it
        for (float& value : shift.span<float>()) value += 5.75f;
      const Operand beta = plains(shift);
      const Operand residual = activations(added ? random(shape, 7) : Tensor());
      const double cpu_ulps = 8.0 + static_cast<double>(rows) / 8.0, sum = std::sqrt(static_cast<double>(rows));
      const auto trained = compare(cpu->norm(), *norm, {activation_like(shape), {{columns}}, {{columns}}}, {},
                                   [&, does = fused](auto& on, Side at, const auto& out) {
                                     on.forward_train_relu(at(x), at(gamma), at(beta), kNormEps, does, at(residual),
                                                           out[0], out[1], out[2]);
                                   });
      const double steep = steepest(trained.expected[2]);
      expect_close(trained.expected[0], trained.got[0], {type(), cpu_ulps, (capped ? 8.0 : 2.0) * steep});
      for (std::size_t i = 1; i < 3; ++i) expect_close(trained.expected[i], trained.got[i], {DType::kF32, cpu_ulps});

      // With a residual y may be anything. Without, it is of x, which is all that a device may read of the two.
      const Operand m = {trained.expected[1], plain(trained.got[1])}, v = {trained.expected[2], plain(trained.got[2])};
      const Operand y = activations(added ? random(shape, 5) : trained.got[0]);
      const Tensor dy_host = random(shape, 4);
      const Output like_dy = activation_like(shape, dy_host);
      std::vector<Tolerance> tolerances = {{type(), cpu_ulps, 4.0 * steep * (rows < 3 ? steep : 1.0)},
                                           {DType::kF32, cpu_ulps, 2.0 * steep * sum},
                                           {DType::kF32, cpu_ulps, sum}};
      if (added) tolerances.push_back(kSame);
      const auto apart =
          compare(cpu->norm(), *norm, {activation_like(shape), {{columns}}, {{columns}}, like_dy}, tolerances,
                  [&, does = fused, with = added](auto& on, Side at, const auto& out) {
                    on.backward_relu(at(x), at(y), does, with, out[3], at(gamma), at(beta), at(m), at(v), kNormEps,
                                     out[0], out[1], out[2]);
                  })
              .got;
      const auto in_place =
          results({like_dy, {{columns}}, {{columns}}}, [&, does = fused, with = added](const auto& out) {
            norm->backward_relu(x.device, y.device, does, with, out[0], gamma.device, beta.device, m.device, v.device,
                                kNormEps, out[0], out[1], out[2]);
          });
      expect_same(apart[0], in_place[0]);
      if (added) continue;
      // Neither is y read, nor dy written.
      const Tensor garbage = activation(cpu->empty(shape));
      check_cuda(cudaMemsetAsync(garbage.raw(), 0xff, garbage.bytes(), stream.get()), "garbage");
      const auto without_y =
          results({activation_like(shape), {{columns}}, {{columns}}, like_dy}, [&, does = fused](const auto& out) {
            norm->backward_relu(x.device, garbage, does, false, out[3], gamma.device, beta.device, m.device, v.device,
                                kNormEps, out[0], out[1], out[2]);
          });
      for (std::size_t i = 0; i < 3; ++i) expect_same(apart[i], without_y[i]);
      expect_same(dy_host, without_y[3]);
    }
}

// As of their sum.
TEST_P(CudaNorm, GradientInTwoParts) {
  for (const Shape& shape : kNormShapes) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = columns_of(shape);
    const Tensor first = random(shape, 2), second = random(shape, 3), sum = cpu->empty(shape);
    cpu->pointwise().binary(BinaryOp::kAdd, first, second, sum);
    rounded(sum);
    const Tensor x = activation(random(shape, 1)), y = activation(random(shape, 4)), more = activation(second);
    const Tensor g = plain(statistics(columns, 5, 0.5f)), m = plain(random_tensor(*cpu, {columns}, 6));
    const Tensor v = plain(statistics(columns, 7, 0.3f));
    ASSERT_TRUE(norm->adds_gradients());
    const auto outputs_with = [&](const Tensor& dy) {
      return std::vector<Output>{activation_like(shape), {{columns}}, {{columns}}, activation_like(shape, dy)};
    };
    const auto expected = results(outputs_with(sum), [&](const auto& out) {
      norm->backward_relu(x, y, Epilogue::kRelu, true, out[3], g, g, m, v, kNormEps, out[0], out[1], out[2]);
    });
    const auto got = results(outputs_with(first), [&](const auto& out) {
      norm->backward_relu_added(x, y, out[3], more, g, m, v, kNormEps, out[0], out[1], out[2]);
    });
    for (std::size_t i = 0; i < got.size(); ++i) expect_same(expected[i], got[i]);
  }
}

// Rows that three ranks have, of which the second has none, against all of them at once.
TEST_P(CudaNorm, RowsOfSeveralRanks) {
  for (const Shape& shape : {Shape{5, 3}, Shape{65, 12}, Shape{600, 64}, Shape{1031, 33}}) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = shape[1], rows = shape[0], cut = rows / 3, size = 2 * columns + 1;
    const Tensor x_host = random(shape, 1), dy_host = random(shape, 2), gamma = statistics(columns, 3, 0.5f);
    const Exact forward = forward_exactly(cpu->allocator(), x_host, gamma, gamma);
    const Exact backward =
        backward_exactly(cpu->allocator(), x_host, dy_host, gamma, forward.first, forward.second, false);
    const std::int64_t begins[] = {0, cut, cut}, ends[] = {cut, cut, rows};
    const auto slice_of = [&](const Tensor& all, int rank) {
      const Tensor rows_of_it = all.slice(begins[rank], ends[rank]), made = cpu->empty(rows_of_it.shape());
      std::ranges::copy(rows_of_it.span<float>(), made.f32());
      return activation(made);
    };
    const Tensor parts = cpu->empty({3, size + 3});
    for (int rank = 0; rank < 3; ++rank) {
      const Tensor x = slice_of(x_host, rank);
      const auto part = results({{{size}}}, [&](const auto& out) { norm->moments(x, out[0]); });
      std::ranges::copy(part[0].template span<float>(), parts.f32() + rank * (size + 3));
    }
    const Tensor running_mean = random_tensor(*cpu, {columns}, 7), running_variance = statistics(columns, 8, 0.5f);
    const Tensor all_parts = plain(parts);
    const auto joined =
        results({{{columns}},
                 {{columns}},
                 {{1}},
                 {{columns}, DType::kF32, running_mean},
                 {{columns}, DType::kF32, running_variance}},
                [&](const auto& out) { norm->join_moments(all_parts, 0.1, out[0], out[1], out[2], out[3], out[4]); });
    expect_close(forward.first, joined[0], {});
    expect_close(forward.second, joined[1], {});
    cpu->norm().update_running(forward.first, forward.second, rows, 0.1, running_mean, running_variance);
    expect_close(running_mean, joined[3], {});
    expect_close(running_variance, joined[4], {});
    EXPECT_EQ(joined[2].f32()[0], static_cast<float>(rows));

    const Tensor m = plain(forward.first), v = plain(forward.second), g = plain(gamma);
    const Tensor sums = cpu->zeros({2 * columns}), count = cpu->empty({1});
    count.f32()[0] = static_cast<float>(rows);
    const double steep = steepest(forward.second), walk = std::sqrt(static_cast<double>(rows));
    for (int rank = 0; rank < 3; ++rank) {
      const Tensor x = slice_of(x_host, rank), dy = slice_of(dy_host, rank);
      const auto part =
          results({{{2 * columns}}}, [&](const auto& out) { norm->backward_sums(x, dy, m, v, kNormEps, out[0]); });
      for (std::int64_t i = 0; i < sums.count(); ++i) sums.f32()[i] += part[0].f32()[i];
    }
    expect_close(backward.first, sums.slice(0, columns), {DType::kF32, 16.0, 4.0 * steep * walk});
    expect_close(backward.second, sums.slice(columns, 2 * columns), {DType::kF32, 16.0, 4.0 * walk});
    const Tensor all_sums = plain(sums), all_rows = plain(count), x = slice_of(x_host, 2), dy = slice_of(dy_host, 2);
    const auto got = results({activation_like({rows - cut, columns})}, [&](const auto& out) {
      norm->backward_input(x, dy, g, m, v, all_rows, all_sums, kNormEps, out[0]);
    });
    expect_close(backward.spread.slice(cut, rows), got[0], {type(), 16.0, 8.0 * steep});
  }
}

// So wide that a block's threads go over their rows in several rounds, the last of them without all rows. The columns
// repeat themselves.
TEST_P(CudaNorm, Wide) {
  const std::int64_t rows = 35, columns = GetParam().offset > 0 ? 8224 : 34048, period = 8;
  const auto repeated = [&](const Tensor& few) {
    const std::int64_t lines = few.count() / period;
    const Tensor many = cpu->empty({lines, columns});
    for (std::int64_t i = 0; i < many.count(); ++i) many.f32()[i] = few.f32()[i / columns * period + i % period];
    return many;
  };
  const Tensor x_few = random({rows, period}, 1), dy_few = random({rows, period}, 2);
  const Tensor gamma_few = statistics(period, 3, 0.5f), beta_few = random_tensor(*cpu, {period}, 4);
  const Exact forward = forward_exactly(cpu->allocator(), x_few, gamma_few, beta_few);
  const Exact backward =
      backward_exactly(cpu->allocator(), x_few, dy_few, gamma_few, forward.first, forward.second, false);
  const Tensor x = activation(repeated(x_few)), dy = activation(repeated(dy_few)), g = plain(repeated(gamma_few));
  const Tensor b = plain(repeated(beta_few)), m = plain(repeated(forward.first)), v = plain(repeated(forward.second));
  const Shape shape = {rows, columns};
  const auto trained = results({activation_like(shape), {{columns}}, {{columns}}}, [&](const auto& out) {
    norm->forward_train(x, g, b, kNormEps, out[0], out[1], out[2]);
  });
  expect_close(repeated(forward.first), trained[1], {});
  expect_close(repeated(forward.second), trained[2], {});
  expect_close(repeated(forward.spread), trained[0], {type(), 8.0, 4.0});
  const auto got = results({activation_like(shape), {{columns}}, {{columns}}}, [&](const auto& out) {
    norm->backward(x, dy, g, m, v, false, kNormEps, out[0], out[1], out[2]);
  });
  expect_close(repeated(backward.first), got[1], {DType::kF32, 8.0, 8.0});
  expect_close(repeated(backward.second), got[2], {DType::kF32, 8.0, 8.0});
  expect_close(repeated(backward.spread), got[0], {type(), 8.0, 8.0});
}

// Means that are thousands of deviations away from 0, where Σx² − (Σx)²/M would be noise.
TEST_P(CudaNorm, FarFromZero) {
  const std::int64_t rows = 3000, columns = 5;
  const Tensor host = random_tensor(*cpu, {rows, columns}, 1);
  for (std::int64_t i = 0; i < host.count(); ++i)
    host.f32()[i] = host.f32()[i] + 4000.0f * static_cast<float>(i % columns);
  rounded(host);
  const Tensor x = activation(host), mean = cpu->empty({columns}), variance = cpu->empty({columns});
  const Tensor ones = cpu->empty({columns}), zeros = cpu->zeros({columns});
  cpu->pointwise().fill(ones, 1.0f);
  for (std::int64_t c = 0; c < columns; ++c) {
    double sum = 0, squares = 0;
    for (std::int64_t r = 0; r < rows; ++r) sum += static_cast<double>(host.f32()[r * columns + c]);
    sum /= static_cast<double>(rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      const double apart = static_cast<double>(host.f32()[r * columns + c]) - sum;
      squares += apart * apart;
    }
    mean.f32()[c] = static_cast<float>(sum);
    variance.f32()[c] = static_cast<float>(squares / static_cast<double>(rows));
  }
  const Tensor g = plain(ones), b = plain(zeros);
  const auto got = results({activation_like({rows, columns}), {{columns}}, {{columns}}},
                           [&](const auto& out) { norm->forward_train(x, g, b, kNormEps, out[0], out[1], out[2]); });
  expect_close(mean, got[1], {});
  // The means between which squares are taken are rounded to an ulp of 16000.
  expect_close(variance, got[2], {DType::kF32, 4000.0});
}

// Distances are taken from some rows, of which one is far from all others.
TEST_P(CudaNorm, FirstRowFarFromTheRest) {
  const std::int64_t rows = 3000, columns = 8;
  const Tensor host = random({rows, columns}, 1);
  for (std::int64_t c = 0; c < columns; ++c) host.f32()[c] = 1000.0f;
  const Tensor ones = cpu->empty({columns});
  cpu->pointwise().fill(ones, 1.0f);
  const Exact exact = forward_exactly(cpu->allocator(), host, ones, ones);
  const Tensor x = activation(host), g = plain(ones);
  const auto got = results({activation_like({rows, columns}), {{columns}}, {{columns}}},
                           [&](const auto& out) { norm->forward_train(x, g, g, kNormEps, out[0], out[1], out[2]); });
  // The squares of a block's distances are up to 64 times those that count.
  expect_close(exact.first, got[1], {DType::kF32, 256.0});
  expect_close(exact.second, got[2], {DType::kF32, 256.0});
}

TEST_P(CudaNorm, NaNAndInfinityStayInTheirColumns) {
  for (const std::int64_t columns : {3, 64}) {
    const Shape shape = {100, columns};
    const Tensor host = random(shape, 1), dy_host = random(shape, 2);
    host.f32()[50 * columns + 1] = kNaN;
    dy_host.f32()[70 * columns + 2] = kInfinity;
    const Tensor x = activation(host), dy = activation(dy_host), g = plain(statistics(columns, 3, 0.5f));
    const Tensor b = plain(random_tensor(*cpu, {columns}, 4));
    const auto forward = results({activation_like(shape), {{columns}}, {{columns}}}, [&](const auto& out) {
      norm->forward_train(x, g, b, kNormEps, out[0], out[1], out[2]);
    });
    const Tensor m = plain(forward[1]), v = plain(forward[2]);
    const auto backward = results({activation_like(shape), {{columns}}, {{columns}}}, [&](const auto& out) {
      norm->backward(x, dy, g, m, v, false, kNormEps, out[0], out[1], out[2]);
    });
    for (std::int64_t c = 0; c < columns; ++c) {
      EXPECT_EQ(std::isfinite(forward[1].f32()[c]), c != 1);
      EXPECT_EQ(std::isfinite(forward[2].f32()[c]), c != 1);
      EXPECT_EQ(std::isfinite(backward[1].f32()[c]), c != 1 && c != 2);
      EXPECT_EQ(std::isfinite(backward[2].f32()[c]), c != 2);
      for (std::int64_t r = 0; r < 100; ++r) {
        EXPECT_EQ(std::isfinite(forward[0].f32()[r * columns + c]), c != 1);
        EXPECT_EQ(std::isfinite(backward[0].f32()[r * columns + c]), c != 1 && c != 2);
      }
    }
  }
}

TEST_P(CudaNorm, NoRows) {
  const Tensor none = activation(cpu->empty({0, 5})), ones = plain(statistics(5, 1, 0.5f));
  const auto got = results({{{5}}, {{5}}}, [&](const auto& out) {
    norm->forward_infer(none, ones, ones, ones, ones, kNormEps, none);
    norm->backward(none, none, ones, ones, ones, true, kNormEps, none, out[0], out[1]);
  });
  expect_same(cpu->zeros({5}), got[0]);
  expect_same(cpu->zeros({5}), got[1]);
}

TEST_P(CudaNorm, UpdateRunning) {
  for (const std::int64_t columns : {1, 64, 1000})
    for (const std::int64_t rows : {1, 2, 100}) {
      const Tensor mean = random_tensor(*cpu, {columns}, 1), variance = statistics(columns, 2, 0.1f);
      const Tensor running_mean = random_tensor(*cpu, {columns}, 3), running_variance = statistics(columns, 4, 0.1f);
      const Operand m = plains(mean), v = plains(variance);
      compare(cpu->norm(), *norm, {{{columns}, DType::kF32, running_mean}, {{columns}, DType::kF32, running_variance}},
              {{}, {}},
              [&](auto& on, Side at, const auto& out) { on.update_running(at(m), at(v), rows, 0.1, out[0], out[1]); });
    }
}

// As in two calls.
TEST_P(CudaNorm, ForwardThatMovesRunningStatistics) {
  for (const Shape& shape : {Shape{2, 3}, Shape{65, 12}, Shape{600, 64}, Shape{31, 33}})
    for (const bool relu : {false, true}) {
      SCOPED_TRACE(to_string(shape) + (relu ? " relu" : ""));
      const std::int64_t columns = shape[1];
      const Tensor x = activation(random(shape, 1)), residual = relu ? activation(random(shape, 5)) : Tensor();
      const Tensor g = plain(statistics(columns, 2, 0.5f)), b = plain(random_tensor(*cpu, {columns}, 3));
      const Tensor running_mean = random_tensor(*cpu, {columns}, 6), running_variance = statistics(columns, 7, 0.1f);
      const Tensor batches = cpu->empty({}, DType::kI64);
      *batches.data<std::int64_t>() = (std::int64_t{1} << 32) - 1;
      const std::vector<Output> outputs = {activation_like(shape),
                                           {{columns}},
                                           {{columns}},
                                           {{columns}, DType::kF32, running_mean},
                                           {{columns}, DType::kF32, running_variance},
                                           {{}, DType::kI64, batches}};
      const auto expected = results(outputs, [&](const auto& out) {
        if (relu)
          norm->forward_train_relu(x, g, b, kNormEps, Epilogue::kRelu, residual, out[0], out[1], out[2]);
        else
          norm->forward_train(x, g, b, kNormEps, out[0], out[1], out[2]);
        norm->update_running(out[1], out[2], shape[0], 0.1, out[3], out[4]);
      });
      const auto got = results(outputs, [&](const auto& out) {
        ASSERT_TRUE(norm->counts_batches());
        norm->forward_train_moving(x, g, b, kNormEps, relu ? Epilogue::kRelu : Epilogue::kNone, residual,
                                   {out[3], out[4], 0.1, &out[5]}, out[0], out[1], out[2]);
      });
      EXPECT_EQ(*got[5].data<std::int64_t>(), std::int64_t{1} << 32);
      for (std::size_t i = 0; i < 3; ++i) expect_same(expected[i], got[i]);
      for (std::size_t i = 3; i < 5; ++i) expect_close(expected[i], got[i], {DType::kF32, 2.0});
    }
}

INSTANTIATE_TEST_SUITE_P(, CudaNorm, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
