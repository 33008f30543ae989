// The operations of c10d's that are collectives of lockstep's.
#include <algorithm>
#include <numeric>
#include <utility>

#include "bindings/c10d/backend.h"
#include "bindings/c10d/tensors.h"

namespace lockstep::pytorch {
namespace {

using ::c10d::OpType;
using comm::ProcessGroup;

const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* doing) {
  TORCH_CHECK(tensors.size() == 1, doing, " of ", tensors.size(), " tensors, where lockstep's backend takes one");
  check_tensor(tensors[0], doing);
  return tensors[0];
}

void check_alike(const at::Tensor& one, const at::Tensor& other, const char* doing) {
  TORCH_CHECK(one.device() == other.device(), doing, " from ", one.device(), " to ", other.device(),
              " → have both on one device");
  TORCH_CHECK(one.scalar_type() == other.scalar_type(), doing, " from ", one.scalar_type(), " to ", other.scalar_type(),
              " → make both of one type");
}

void check_parts(const at::Tensor& all, const at::Tensor& mine, std::size_t ranks, const char* doing) {
  check_tensor(all, doing);
  check_tensor(mine, doing);
  check_alike(all, mine, doing);
  TORCH_CHECK(static_cast<std::size_t>(all.numel()) == ranks * static_cast<std::size_t>(mine.numel()), doing, " of ",
              mine.numel(), " elements of each of ", ranks, " ranks, and a tensor of ", all.numel(),
              " for all of them → make it ", ranks, " times as large");
}

bool of_one_size(const std::vector<at::Tensor>& tensors) {
  return std::ranges::all_of(tensors, [&](const at::Tensor& one) { return one.numel() == tensors[0].numel(); });
}

at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape({-1}));
  return at::cat(rows);
}

/// For what spread() distributes.
at::Tensor memory_for_all(const std::vector<at::Tensor>& tensors) {
  std::int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  return at::empty({elements}, tensors.front().options());
}

void spread(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

void broadcast_from(ProcessGroup& group, const at::Tensor& tensor, int root) {
  const Elements elements(tensor.scalar_type());
  at::Tensor memory = group.rank() == root ? contiguous(tensor) : memory_for(tensor);
  broadcast(group, memory.data_ptr(), elements.count(memory), elements.dtype, root);
  if (group.rank() != root) write_back(memory, tensor);
}

void gather_all(ProcessGroup& group, const at::Tensor& input, const at::Tensor& output) {
  const Elements elements(input.scalar_type());
  const at::Tensor mine = contiguous(input);
  const at::Tensor all = memory_for(output);
  all_gather(group, mine.data_ptr(), elements.count(mine), elements.dtype, all.data_ptr());
  write_back(all, output);
}

void gather_all(ProcessGroup& group, const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
  if (!of_one_size(outputs)) {
    for (int r = 0; r < group.size(); ++r) {
      const at::Tensor& output = outputs[static_cast<std::size_t>(r)];
      if (r == group.rank()) output.copy_(input.reshape(output.sizes()));
      broadcast_from(group, output, r);
    }
    return;
  }
  const at::Tensor all = at::empty({group.size() * input.numel()}, input.options());
  gather_all(group, input, all);
  spread(all, outputs);
}

/// By an operation on bits, which lockstep's groups do not have: everybody gets everything.
at::Tensor reduced_bits(ProcessGroup& group, const at::Tensor& tensor, const Reduction& how) {
  const at::Tensor all = at::empty({group.size(), tensor.numel()}, tensor.options());
  gather_all(group, tensor, all);
  at::Tensor result = all[0];
  for (int r = 1; r < group.size(); ++r) result = how.bits(result, all[r]);
  return result;
}

void reduce_all(ProcessGroup& group, const at::Tensor& tensor, const Reduction& how) {
  if (how.bits != nullptr) return write_back(reduced_bits(group, tensor, how), tensor);
  at::Tensor memory = how.prepare(tensor);
  all_reduce(group, memory.data_ptr(), how.count(memory), how.dtype, how.op);
  how.finish(memory, tensor, group.size());
}

/// All ranks' coordinates and values, added up by PyTorch in the order of ranks.
void reduce_all_sparse(ProcessGroup& group, const at::Tensor& tensor, bool average) {
  const at::Tensor mine = tensor.coalesce();
  std::vector<std::int64_t> about = tensor.sizes().vec();
  about.insert(about.end(), {mine.sparse_dim(), mine._nnz()});
  const auto fields = static_cast<std::int64_t>(about.size());
  const at::Tensor abouts = at::empty({group.size(), fields}, at::kLong);
  gather_all(group, at::tensor(about, at::kLong), abouts);
  for (int r = 1; r < group.size(); ++r)
    if (!abouts[r].narrow(0, 0, fields - 1).equal(abouts[0].narrow(0, 0, fields - 1)))
      throw UsageError("allreduce of sparse tensors whose shapes differ: rank 0's and rank " + std::to_string(r) + "'s",
                       "give them the same sizes and the same number of sparse dimensions on all ranks");
  std::vector<at::Tensor> indices, values;
  for (int r = 0; r < group.size(); ++r) {
    const std::int64_t count = abouts[r][fields - 1].item<std::int64_t>();
    auto shape = mine.values().sizes().vec();
    shape[0] = count;
    indices.push_back(at::empty({mine.sparse_dim(), count}, at::kLong));
    values.push_back(at::empty(shape, mine.values().options()));
  }
  gather_all(group, mine.indices(), indices);
  gather_all(group, mine.values(), values);
  at::Tensor sum =
      at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values), tensor.sizes(), tensor.options()).coalesce();
  if (average) sum.div_(group.size());
  tensor.copy_(sum);
}

void scatter_reduced(ProcessGroup& group, const at::Tensor& input, const at::Tensor& output, const Reduction& how) {
  if (how.bits != nullptr) {
    const at::Tensor all = reduced_bits(group, input, how);
    output.copy_(all.narrow(0, group.rank() * output.numel(), output.numel()).view(output.sizes()));
    return;
  }
  const at::Tensor all = how.prepare(input);
  const bool direct = how.carrier == output.scalar_type();
  at::Tensor mine = direct ? memory_for(output) : at::empty(output.sizes(), output.options().dtype(how.carrier));
  reduce_scatter(group, all.data_ptr(), mine.data_ptr(), how.count(mine), how.dtype, how.op);
  how.finish(mine, output, group.size());
}

void scatter_reduced(ProcessGroup& group, const std::vector<at::Tensor>& inputs, const at::Tensor& output,
                     const Reduction& how) {
  if (of_one_size(inputs)) return scatter_reduced(group, flat(inputs), output, how);
  at::Tensor all = flat(inputs);
  reduce_all(group, all, how);
  std::int64_t begin = 0;
  for (int r = 0; r < group.rank(); ++r) begin += inputs[static_cast<std::size_t>(r)].numel();
  output.copy_(all.narrow(0, begin, output.numel()).view(output.sizes()));
}

/// Of rows of `all`, or of parts of equal size where there are none: how many elements each rank has.
std::vector<std::size_t> counts_of(const at::Tensor& all, const std::vector<std::int64_t>& rows, std::size_t ranks,
                                   const Elements& elements) {
  if (rows.empty()) {
    TORCH_CHECK(all.numel() == 0 || all.size(0) % static_cast<std::int64_t>(ranks) == 0, "all_to_all of ", all.size(0),
                " rows, which ", ranks, " ranks cannot share alike → give the sizes of the parts");
    return std::vector<std::size_t>(ranks, elements.count(all) / ranks);
  }
  TORCH_CHECK(rows.size() == ranks, "all_to_all of ", rows.size(), " parts → give one for each of the ", ranks,
              " ranks");
  const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  TORCH_CHECK(all.dim() > 0 && sum == all.size(0), "all_to_all: parts of ", sum, " rows of a tensor that has ",
              all.dim() > 0 ? all.size(0) : 0);
  std::vector<std::size_t> counts;
  for (const std::int64_t one : rows) {
    TORCH_CHECK(one >= 0, "all_to_all: a part of ", one, " rows");
    counts.push_back(sum == 0 ? 0
                              : elements.count(all) / static_cast<std::size_t>(sum) * static_cast<std::size_t>(one));
  }
  return counts;
}

std::vector<std::size_t> counts_of(const std::vector<at::Tensor>& tensors, const Elements& elements) {
  std::vector<std::size_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(elements.count(tensor));
  return counts;
}

/// From tensors by rank to tensors by rank; an empty list stands for no values. Ranks that have nothing for each other
/// do not talk.
void exchange(ProcessGroup& group, const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  const Elements elements((from.empty() ? to : from).front().scalar_type());
  const auto ranks = static_cast<std::size_t>(group.size()), own = static_cast<std::size_t>(group.rank());
  std::vector<at::Tensor> memory(2 * ranks);  // what transfers name
  std::vector<comm::Transfer> transfers;
  for (std::size_t r = 0; r < ranks; ++r) {
    const int rank = static_cast<int>(r);
    if (r == own) continue;
    if (!from.empty() && from[r].numel() > 0) {
      const at::Tensor& sent = memory[r] = contiguous(from[r]);
      transfers.push_back(group.isend(sent.data_ptr(), elements.count(sent), elements.dtype, rank));
    }
    if (!to.empty() && to[r].numel() > 0) {
      const at::Tensor& received = memory[ranks + r] = memory_for(to[r]);
      transfers.push_back(group.irecv(received.data_ptr(), elements.count(received), elements.dtype, rank));
    }
  }
  if (!from.empty() && !to.empty()) to[own].copy_(from[own].reshape(to[own].sizes()));
  for (const comm::Transfer& transfer : transfers) transfer.wait();
  for (std::size_t r = 0; r < ranks; ++r)
    if (memory[ranks + r].defined()) write_back(memory[ranks + r], to[r]);
}

/// `tensor` for rank `rank`, and nothing for the others.
std::vector<at::Tensor> only_for(const at::Tensor& tensor, std::int64_t rank, std::size_t ranks) {
  std::vector<at::Tensor> all(ranks, at::empty({0}, tensor.options()));
  all[static_cast<std::size_t>(rank)] = tensor;
  return all;
}

}  // namespace

WorkPtr Backend::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_one(tensors, "broadcast");
  check_root(options.rootRank, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  return submit(OpType::BROADCAST, "lockstep:broadcast", tensors, tensors, options.timeout,
                [=](ProcessGroup& group) { broadcast_from(group, tensor, root); });
}

WorkPtr Backend::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) {
    check_sparse(tensors[0], options.reduceOp);
    const bool average = options.reduceOp == ::c10d::ReduceOp::AVG;
    return submit(OpType::ALLREDUCE, "lockstep:all_reduce", tensors, tensors, options.timeout,
                  [tensor = tensors[0], average](ProcessGroup& group) { reduce_all_sparse(group, tensor, average); });
  }
  const at::Tensor& tensor = only_one(tensors, "allreduce");
  const Reduction how(tensor.scalar_type(), options.reduceOp);
  return submit(OpType::ALLREDUCE, "lockstep:all_reduce", tensors, tensors, options.timeout,
                [=](ProcessGroup& group) { reduce_all(group, tensor, how); });
}

WorkPtr Backend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                     const ::c10d::AllreduceCoalescedOptions& options) {
  check_tensors(tensors, "allreduce");
  std::vector<Reduction> hows;
  for (const at::Tensor& tensor : tensors) hows.emplace_back(tensor.scalar_type(), options.reduceOp);
  return submit(OpType::ALLREDUCE_COALESCED, "lockstep:all_reduce", tensors, tensors, options.timeout,
                [tensors, hows](ProcessGroup& group) {
                  for (std::size_t i = 0; i < tensors.size(); ++i) reduce_all(group, tensors[i], hows[i]);
                });
}

WorkPtr Backend::reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_one(tensors, "reduce");
  check_root(options.rootRank, "reduce");
  const Reduction how(tensor.scalar_type(), options.reduceOp);
  const int root = static_cast<int>(options.rootRank);
  const bool receives = root == getRank();
  return submit(OpType::REDUCE, "lockstep:reduce", tensors, tensors, options.timeout, [=](ProcessGroup& group) {
    if (how.bits != nullptr) {
      const at::Tensor result = reduced_bits(group, tensor, how);
      return receives ? write_back(result, tensor) : void();
    }
    at::Tensor memory = how.prepare(tensor);
    pytorch::reduce(group, memory.data_ptr(), how.count(memory), how.dtype, how.op, root);
    if (receives) how.finish(memory, tensor, group.size());
  });
}

WorkPtr Backend::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                           const ::c10d::AllgatherOptions& options) {
  const at::Tensor& input = only_one(inputs, "allgather");
  TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == ranks(), "allgather into ",
              outputs.empty() ? 0 : outputs[0].size(), " tensors → give one for each of the ", ranks(), " ranks");
  check_tensors(outputs[0], "allgather");
  for (const at::Tensor& output : outputs[0]) check_alike(input, output, "allgather");
  const at::Tensor& own = outputs[0][static_cast<std::size_t>(getRank())];
  TORCH_CHECK(own.numel() == input.numel(), "allgather of ", input.numel(), " elements into a tensor of ", own.numel());
  return submit(OpType::ALLGATHER, "lockstep:all_gather", inputs, outputs[0], options.timeout,
                [=, all = outputs[0]](ProcessGroup& group) { gather_all(group, input, all); });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) {
  check_parts(output, input, ranks(), "allgather");
  return submit(OpType::_ALLGATHER_BASE, "lockstep:_all_gather_base", {input}, {output}, options.timeout,
                [=](ProcessGroup& group) { gather_all(group, input, output); });
}

WorkPtr Backend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                     const ::c10d::AllgatherOptions& options) {
  check_tensors(inputs, "allgather");
  TORCH_CHECK(outputs.size() == ranks(), "allgather into ", outputs.size(), " lists → give one for each of the ",
              ranks(), " ranks");
  std::vector<std::vector<at::Tensor>> by_input(inputs.size());
  std::vector<at::Tensor> all;
  for (const auto& of_rank : outputs) {
    TORCH_CHECK(of_rank.size() == inputs.size(), "allgather of ", inputs.size(), " tensors into ", of_rank.size());
    check_tensors(of_rank, "allgather");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_alike(inputs[i], of_rank[i], "allgather");
      by_input[i].push_back(of_rank[i]);
    }
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  return submit(OpType::ALLGATHER_COALESCED, "lockstep:all_gather", inputs, all, options.timeout,
                [inputs, by_input](ProcessGroup& group) {
                  for (std::size_t i = 0; i < inputs.size(); ++i) gather_all(group, inputs[i], by_input[i]);
                });
}

WorkPtr Backend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                 const ::c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "allgather of ", inputs.size(), " tensors into ", outputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) check_parts(outputs[i], inputs[i], ranks(), "allgather");
  return submit(OpType::COALESCED, "lockstep:all_gather", inputs, outputs, options.timeout,
                [inputs, outputs](ProcessGroup& group) {
                  for (std::size_t i = 0; i < inputs.size(); ++i) gather_all(group, inputs[i], outputs[i]);
                });
}

WorkPtr Backend::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                const ::c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_one(outputs, "reduce_scatter");
  TORCH_CHECK(inputs.size() == 1 && inputs[0].size() == ranks(), "reduce_scatter of ",
              inputs.empty() ? 0 : inputs[0].size(), " tensors → give one for each of the ", ranks(), " ranks");
  check_tensors(inputs[0], "reduce_scatter");
  for (const at::Tensor& input : inputs[0]) check_alike(input, output, "reduce_scatter");
  const at::Tensor& own = inputs[0][static_cast<std::size_t>(getRank())];
  TORCH_CHECK(own.numel() == output.numel(), "reduce_scatter of ", own.numel(), " elements into a tensor of ",
              output.numel());
  const Reduction how(output.scalar_type(), options.reduceOp);
  return submit(OpType::REDUCE_SCATTER, "lockstep:reduce_scatter", inputs[0], outputs, options.timeout,
                [=, all = inputs[0]](ProcessGroup& group) { scatter_reduced(group, all, output, how); });
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const ::c10d::ReduceScatterOptions& options) {
  check_parts(input, output, ranks(), "reduce_scatter");
  const Reduction how(output.scalar_type(), options.reduceOp);
  return submit(OpType::_REDUCE_SCATTER_BASE, "lockstep:_reduce_scatter_base", {input}, {output}, options.timeout,
                [=](ProcessGroup& group) { scatter_reduced(group, input, output, how); });
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                 const ::c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter of ", inputs.size(), " tensors into ", outputs.size());
  std::vector<Reduction> hows;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_parts(inputs[i], outputs[i], ranks(), "reduce_scatter");
    hows.emplace_back(outputs[i].scalar_type(), options.reduceOp);
  }
  return submit(OpType::COALESCED, "lockstep:reduce_scatter", inputs, outputs, options.timeout,
                [inputs, outputs, hows](ProcessGroup& group) {
                  for (std::size_t i = 0; i < inputs.size(); ++i)
                    scatter_reduced(group, inputs[i], outputs[i], hows[i]);
                });
}

WorkPtr Backend::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                        const ::c10d::GatherOptions& options) {
  const at::Tensor& input = only_one(inputs, "gather");
  check_root(options.rootRank, "gather");
  std::vector<at::Tensor> all;
  if (options.rootRank == getRank()) {
    TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == ranks(), "gather into ",
                outputs.empty() ? 0 : outputs[0].size(), " tensors → give one for each of the ", ranks(), " ranks");
    all = outputs[0];
    check_tensors(all, "gather");
    for (const at::Tensor& output : all) check_alike(input, output, "gather");
  } else {
    TORCH_CHECK(outputs.empty() || outputs[0].empty(), "gather: outputs are for rank ", options.rootRank, " alone");
  }
  return submit_on_host(OpType::GATHER, "lockstep:gather", inputs, all, options.timeout,
                        [sent = only_for(on_host(input), options.rootRank, ranks()), received = host_memory_for(all),
                         all](ProcessGroup& group) {
                          exchange(group, sent, received);
                          write_back(received, all);
                        });
}

WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& options) {
  std::vector<at::Tensor> inputs = {input};
  std::vector<std::vector<at::Tensor>> outputs;
  if (options.rootRank == getRank()) {
    check_parts(output, input, ranks(), "gather");
    TORCH_CHECK(output.is_contiguous(), "gather into a tensor that is not contiguous");
    outputs.push_back(output.view({-1}).chunk(getSize()));
    if (input.numel() == 0) outputs[0].assign(ranks(), output.view({-1}));
  }
  return gather(outputs, inputs, options);
}

WorkPtr Backend::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const ::c10d::ScatterOptions& options) {
  const at::Tensor& output = only_one(outputs, "scatter");
  check_root(options.rootRank, "scatter");
  std::vector<at::Tensor> all;
  if (options.rootRank == getRank()) {
    TORCH_CHECK(inputs.size() == 1 && inputs[0].size() == ranks(), "scatter of ", inputs.empty() ? 0 : inputs[0].size(),
                " tensors → give one for each of the ", ranks(), " ranks");
    all = inputs[0];
    check_tensors(all, "scatter");
    for (const at::Tensor& input : all) check_alike(input, output, "scatter");
  } else {
    TORCH_CHECK(inputs.empty() || inputs[0].empty(), "scatter: inputs are of rank ", options.rootRank, " alone");
  }
  const auto memory = host_memory_for(outputs);
  return submit_on_host(OpType::SCATTER, "lockstep:scatter", all, outputs, options.timeout,
                        [sent = on_host(all), received = only_for(memory[0], options.rootRank, ranks()), memory,
                         outputs](ProcessGroup& group) {
                          exchange(group, sent, received);
                          write_back(memory, outputs);
                        });
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                               std::vector<std::int64_t>& input_rows, const ::c10d::AllToAllOptions& options) {
  check_tensor(output, "all_to_all");
  check_tensor(input, "all_to_all");
  check_alike(input, output, "all_to_all");
  const Elements elements(input.scalar_type());
  const auto from_counts = counts_of(input, input_rows, ranks(), elements);
  const auto to_counts = counts_of(output, output_rows, ranks(), elements);
  return submit_on_host(OpType::ALLTOALL_BASE, "lockstep:all_to_all", {input}, {output}, options.timeout,
                        [=, input = on_host(input), memory = host_memory_for(output)](ProcessGroup& group) {
                          const at::Tensor sent = contiguous(input), received = memory_for(memory);
                          group.all_to_all_host(sent.data_ptr(), from_counts, received.data_ptr(), to_counts,
                                                elements.dtype);
                          write_back(received, output);
                        });
}

WorkPtr Backend::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                          const ::c10d::AllToAllOptions& options) {
  TORCH_CHECK(inputs.size() == ranks() && outputs.size() == ranks(), "all_to_all of ", inputs.size(), " tensors into ",
              outputs.size(), " → give one of each for each of the ", ranks(), " ranks");
  check_tensors(inputs, "all_to_all");
  check_tensors(outputs, "all_to_all");
  for (std::size_t r = 0; r < ranks(); ++r) {
    check_alike(inputs[r], inputs[0], "all_to_all");
    check_alike(inputs[0], outputs[r], "all_to_all");
  }
  const Elements elements(inputs[0].scalar_type());
  return submit_on_host(OpType::ALLTOALL, "lockstep:all_to_all", inputs, outputs, options.timeout,
                        [=, from_counts = counts_of(inputs, elements), to_counts = counts_of(outputs, elements),
                         inputs = on_host(inputs), memory = host_memory_for(outputs)](ProcessGroup& group) {
                          const at::Tensor sent = flat(inputs), received = memory_for_all(memory);
                          group.all_to_all_host(sent.data_ptr(), from_counts, received.data_ptr(), to_counts,
                                                elements.dtype);
                          spread(received, outputs);
                        });
}

WorkPtr Backend::barrier(const ::c10d::BarrierOptions& options) {
  return submit(OpType::BARRIER, "lockstep:barrier", {}, {}, options.timeout,
                [](ProcessGroup& group) { group.barrier().wait_host(); });
}

}  // namespace lockstep::pytorch
