#include "nn/ops/cuda/odd_sizes.h"

#include "nn/ops/cuda/attention_tiled.h"

namespace lockstep::nn::cuda {

Tensor widened(Context& context, const Tensor& rows) {
  const std::int64_t count = rows.size(0), in = rows.size(1), wide = even_inputs(in);
  const Tensor whole = Tensor::empty(context.allocator, {count + rows.zero_rows(), wide}, rows.dtype());
  check_cuda(cudaMemsetAsync(whole.raw(), 0, whole.bytes(), native(context.stream)), "clearing rows");
  const Tensor made = whole.slice(0, count);
  copy_rows(context, rows.dtype(), 1, count, in, {rows.raw(), 0, in}, {made.raw(), 0, wide});
  return made.with_zero_rows(rows.zero_rows());
}

void narrow_into(Context& context, const Tensor& rows, const Tensor& to) {
  copy_rows(context, rows.dtype(), 1, to.size(0), to.size(1), {rows.raw(), 0, rows.size(1)}, {to.raw(), 0, to.size(1)});
}

}  // namespace lockstep::nn::cuda
