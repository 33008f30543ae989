#include "bindings/c10d/tensors.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

#include "bindings/c10d/gpu.h"

namespace lockstep::pytorch {
namespace {

constexpr const char* kReduced =
    "float, double, bfloat16, half, int, long, short, char, byte, bool, and the sums of complex numbers";

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

using Bits = at::Tensor (*)(const at::Tensor&, const at::Tensor&);
struct KnownOp {
  ::c10d::ReduceOp::RedOpType type;
  const char* name;
  comm::ReduceOp op;
  Bits bits = nullptr;  // of those that no group has
};
constexpr KnownOp kOps[] = {
    {::c10d::ReduceOp::SUM, "SUM", comm::ReduceOp::kSum},
    {::c10d::ReduceOp::AVG, "AVG", comm::ReduceOp::kSum},
    {::c10d::ReduceOp::PRODUCT, "PRODUCT", comm::ReduceOp::kProd},
    {::c10d::ReduceOp::MIN, "MIN", comm::ReduceOp::kMin},
    {::c10d::ReduceOp::MAX, "MAX", comm::ReduceOp::kMax},
    {::c10d::ReduceOp::BAND, "BAND", comm::ReduceOp::kSum, at::bitwise_and},
    {::c10d::ReduceOp::BOR, "BOR", comm::ReduceOp::kSum, at::bitwise_or},
    {::c10d::ReduceOp::BXOR, "BXOR", comm::ReduceOp::kSum, at::bitwise_xor},
    {::c10d::ReduceOp::PREMUL_SUM, "PREMUL_SUM", comm::ReduceOp::kSum},
};

const KnownOp& known(const ::c10d::ReduceOp& op) {
  std::string names;
  for (const KnownOp& one : kOps) {
    if (op == one.type) return one;
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  TORCH_CHECK(false, "lockstep does not reduce by this operation → it has ", names);
}

}  // namespace

void check_tensor(const at::Tensor& tensor, const char* doing) {
  TORCH_CHECK(tensor.defined(), doing, " of an undefined tensor");
  if (!tensor.is_cpu()) {
    const std::string problem = tensor.is_cuda() ? GpuOperations::why_not() : "it has CPUs and GPUs of NVIDIA alone";
    TORCH_CHECK(problem.empty(), doing, " of a tensor on ", tensor.device(),
                ", for which this lockstep_c10d is not: ", problem,
                " → call .cpu(), or give that device a backend of its own: "
                "init_process_group(\"cpu:lockstep,cuda:nccl\")");
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, doing, " of a tensor of layout ", tensor.layout(),
              ", and lockstep's backend takes dense ones → call .to_dense()");
}

void check_tensors(at::TensorList tensors, const char* doing) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, doing);
    TORCH_CHECK(tensor.device() == tensors[0].device(), doing, " of tensors on ", tensors[0].device(), " and on ",
                tensor.device(), " → have them on one device");
  }
}

void check_sparse(const at::Tensor& tensor, const ::c10d::ReduceOp& op) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kSparse, "allreduce of a tensor on ", tensor.device(),
              " of layout ", tensor.layout(), ", and lockstep's backend takes dense and COO ones on the CPU");
  TORCH_CHECK(op == ::c10d::ReduceOp::SUM || op == ::c10d::ReduceOp::AVG,
              "lockstep reduces sparse tensors by SUM and AVG, not by ", known(op).name);
}

Elements::Elements(at::ScalarType type) {
  switch (type) {
    case at::kFloat: dtype = DType::kF32; break;
    case at::kDouble: dtype = DType::kF64; break;
    case at::kBFloat16: dtype = DType::kBF16; break;
    case at::kHalf: dtype = DType::kF16; break;
    case at::kInt: dtype = DType::kI32; break;
    case at::kLong: dtype = DType::kI64; break;
    default: per_element = c10::elementSize(type);
  }
}

Reduction::Reduction(at::ScalarType type, const ::c10d::ReduceOp& by)
    : carrier(type), op(known(by).op), bits(known(by).bits) {
  average = by == ::c10d::ReduceOp::AVG;
  if (bits != nullptr) {
    TORCH_CHECK(c10::isIntegralType(type, /*includeBool=*/true), known(by).name, " is of integers and bool, not of ",
                type);
    return;
  }
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kInt:
    case at::kLong: dtype = Elements(type).dtype; break;
    case at::kByte:
      // The average of numbers that fit does, and their sum need not.
      if (average) carrier = at::kInt;
      dtype = average ? DType::kI32 : DType::kU8;
      break;
    case at::kBool:
      TORCH_CHECK(!average, "lockstep has no average of bool → convert the tensor");
      dtype = DType::kU8;
      // True and false as 1 and 0: a sum is whether any is true, a product whether all are.
      if (op == comm::ReduceOp::kSum) op = comm::ReduceOp::kMax;
      if (op == comm::ReduceOp::kProd) op = comm::ReduceOp::kMin;
      break;
    case at::kChar:
    case at::kShort:
      carrier = at::kInt;
      dtype = DType::kI32;
      break;
    case at::kComplexFloat:
    case at::kComplexDouble:
      TORCH_CHECK(op == comm::ReduceOp::kSum, "lockstep reduces complex numbers by SUM and AVG, not by ",
                  known(by).name);
      dtype = type == at::kComplexFloat ? DType::kF32 : DType::kF64;
      per_element = 2;
      break;
    default: TORCH_CHECK(false, "lockstep does not reduce ", type, " → convert the tensor to one of these: ", kReduced);
  }
  if (by == ::c10d::ReduceOp::PREMUL_SUM) {
    TORCH_CHECK(at::isFloatingType(type), "PREMUL_SUM is of floating-point numbers, not of ", type);
    const auto* const given = static_cast<const ::c10d::NCCLPreMulSumSupplement*>(by.supplement_.get());
    TORCH_CHECK(given != nullptr, "PREMUL_SUM without a factor → torch.distributed._make_nccl_premul_sum");
    factor = given->tensor_factor.defined() ? given->tensor_factor : at::scalar_tensor(given->double_factor, type);
  }
}

at::Tensor Reduction::prepare(const at::Tensor& tensor) const {
  if (carrier != tensor.scalar_type()) return contiguous(tensor.to(carrier));
  if (factor.defined()) return contiguous(at::mul(tensor, factor.to(tensor.scalar_type())));
  return contiguous(tensor);
}

void Reduction::finish(at::Tensor& memory, const at::Tensor& tensor, int size) const {
  if (average && size > 1) {
    if (c10::isIntegralType(carrier, false))
      memory.div_(size, "trunc");
    else
      memory.div_(size);
  }
  write_back(memory, tensor);
}

// ---- Memory ----

namespace {

/// Of operations on a GPU: `on_gpu` issues one. All later work in the producer's order comes after it.
template <class OnHost, class OnGpu>
void where_it_is(comm::ProcessGroup& group, OnHost&& on_host, OnGpu&& on_gpu) {
  if (group.device().kind == DeviceKind::kCpu) return on_host();
  auto& gpus = static_cast<comm::DeviceGroup&>(group);
  on_gpu(gpus).wait(gpus.producer_stream());
}

/// The same of an operation in place. Values in memory that all ranks see (Operations::allocate()) are reduced or moved
/// there: `on_region` issues that.
template <class OnRegion, class OnHost, class OnGpu>
void in_place(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, OnRegion&& on_region,
              OnHost&& on_host, OnGpu&& on_gpu) {
  const auto on_cpu = [&] {
    const comm::Arena* const arena = group.arena_of(values, count * size_of(dtype));
    if (arena == nullptr) return on_host();
    const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(values) - arena->data());
    on_region(comm::Region{arena, offset, count, dtype}).wait_host();
  };
  where_it_is(group, on_cpu, on_gpu);
}

}  // namespace

void all_reduce(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, comm::ReduceOp op) {
  in_place(
      group, values, count, dtype, [&](const comm::Region& region) { return group.all_reduce(region, op); },
      [&] { group.all_reduce_host(values, count, dtype, op); },
      [&](comm::DeviceGroup& gpus) { return gpus.all_reduce(values, count, dtype, op); });
}

void broadcast(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, int root) {
  in_place(
      group, values, count, dtype, [&](const comm::Region& region) { return group.broadcast(region, root); },
      [&] { group.broadcast_host(values, count, dtype, root); },
      [&](comm::DeviceGroup& gpus) { return gpus.broadcast(values, count, dtype, root); });
}

void reduce(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, comm::ReduceOp op, int root) {
  where_it_is(
      group, [&] { group.reduce_host(values, count, dtype, op, root); },
      [&](comm::DeviceGroup& gpus) { return gpus.reduce(values, count, dtype, op, root); });
}

void all_gather(comm::ProcessGroup& group, const void* mine, std::size_t count, DType dtype, void* all) {
  where_it_is(
      group, [&] { group.all_gather_host(mine, count, dtype, all); },
      [&](comm::DeviceGroup& gpus) { return gpus.all_gather(mine, count, dtype, all); });
}

void reduce_scatter(comm::ProcessGroup& group, const void* all, void* mine, std::size_t count, DType dtype,
                    comm::ReduceOp op) {
  where_it_is(
      group, [&] { group.reduce_scatter_host(all, mine, count, dtype, op); },
      [&](comm::DeviceGroup& gpus) { return gpus.reduce_scatter(all, mine, count, dtype, op); });
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  TORCH_WARN_ONCE(
      "lockstep: sends, receives, gather, scatter and all_to_all of tensors on GPUs go through the host's memory, "
      "which "
      "takes longer than NCCL's own → for programs that live by them: "
      "init_process_group(\"cpu:lockstep,cuda:nccl\")");
  return tensor.cpu();
}

at::Tensor host_memory_for(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  // What the program's stream does with it now is over before another thread writes it.
  c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
}

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) all.push_back(on_host(tensor));
  return all;
}

std::vector<at::Tensor> host_memory_for(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) all.push_back(host_memory_for(tensor));
  return all;
}

void write_back(const std::vector<at::Tensor>& memory, const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) write_back(memory[i], tensors[i]);
}

at::Tensor contiguous(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor memory_for(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options());
}

void write_back(const at::Tensor& memory, const at::Tensor& tensor) {
  if (!memory.is_same(tensor)) tensor.copy_(memory.view(tensor.sizes()));
}

}  // namespace lockstep::pytorch
