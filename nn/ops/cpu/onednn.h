// oneDNN primitives that are built once and run many times.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/hash.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn::cpu {

/// The engine, the stream, and the scratch memory that all primitives of a backend share (they run one at a time).
class OneDnn {
 public:
  OneDnn();

  const dnnl::engine& engine() const { return engine_; }
  dnnl::stream& stream() { return stream_; }
  /// At least `bytes`, 64-byte aligned, valid until the next call.
  void* scratch(std::size_t bytes);

  void count_primitive() { ++primitives_created_; }
  std::uint64_t primitives_created() const { return primitives_created_; }

 private:
  struct FreeDeleter {
    void operator()(void* data) const;
  };
  dnnl::engine engine_;
  dnnl::stream stream_;
  std::unique_ptr<void, FreeDeleter> scratch_;
  std::size_t scratch_bytes_ = 0;
  std::uint64_t primitives_created_ = 0;
};

/// A primitive with its memory objects. Arguments are bound by their DNNL_ARG_… number before each run. Neither
/// binding nor running allocates.
class HeldPrimitive {
 public:
  HeldPrimitive() = default;
  /// `arguments`: what it reads and writes, with their layouts; empty descriptors are left out. The scratchpad (user
  /// mode) is added when its size is not 0.
  HeldPrimitive(OneDnn& onednn, const dnnl::primitive& primitive,
                std::initializer_list<std::pair<int, dnnl::memory::desc>> arguments,
                const dnnl::memory::desc& scratchpad = {});

  explicit operator bool() const { return !arguments_.empty(); }
  void bind(int argument, const void* data);
  void bind(int argument, const Tensor& tensor) { bind(argument, tensor.raw()); }
  void run();

 private:
  OneDnn* onednn_ = nullptr;
  dnnl::primitive primitive_;
  std::vector<dnnl::memory> memories_;
  std::vector<dnnl_exec_arg_t> arguments_;
  std::size_t scratch_bytes_ = 0;
};

/// Shapes and options as a fixed array of numbers: what primitives are looked up by.
using PrimitiveKey = std::array<std::int64_t, 20>;

template <class Entry>
using PrimitiveMap = std::unordered_map<PrimitiveKey, Entry, NumbersHash>;

/// A primitive_attr with the scratchpad in the caller's hands.
dnnl::primitive_attr user_scratchpad();

inline dnnl::memory::dims to_dims(const Shape& shape) { return {shape.dims().begin(), shape.dims().end()}; }
/// Of activations and what computes with them: f32 or bf16.
inline dnnl::memory::desc desc_of(DType dtype, const dnnl::memory::dims& dims, dnnl::memory::format_tag tag) {
  return {dims, dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32, tag};
}
inline dnnl::memory::desc f32_desc(const dnnl::memory::dims& dims, dnnl::memory::format_tag tag) {
  return {dims, dnnl::memory::data_type::f32, tag};
}

/// Packed copies of weights, one for each layout, whoever asks. Thread-safe. Must outlive the handles that it gives
/// out.
class PackedWeights {
 public:
  PackedWeights();

  /// The weights at `w` in `layout`: made by `pack`, which fills its argument, unless they have been of this `version`
  /// (Parameter::version) before.
  Tensor get(const void* w, std::uint64_t version, const dnnl::memory::desc& layout,
             FunctionRef<void(const Tensor&)> pack);

  /// How many there are.
  std::size_t count() const;

 private:
  struct Entry {
    const void* w;
    std::uint64_t version;
    dnnl::memory::desc layout;
    Tensor memory;
  };
  CachingAllocator allocator_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace lockstep::nn::cpu
