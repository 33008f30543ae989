// What oneDNN 2 and oneDNN 3 spell differently. Version 2 needs a description, from which a primitive descriptor is
// made; version 3 has one constructor. Debian 12 has 2.6, Ubuntu 24.04 and Debian 13 have 3.x.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <string_view>

namespace lockstep::nn::cpu {

/// The first of its kinds of kernels whose name begins so; itself where there is none.
template <class PrimitiveDesc>
PrimitiveDesc first_by(std::string_view kernels, PrimitiveDesc preferred) {
  PrimitiveDesc next = preferred;
  do {
    if (std::string_view(next.impl_info_str()).starts_with(kernels)) return next;
  } while (next.next_impl());
  return preferred;
}

#if DNNL_VERSION_MAJOR >= 3

using PoolingForward = dnnl::pooling_forward;
using PoolingBackward = dnnl::pooling_backward;

inline dnnl::memory::dims dims_of(const dnnl::memory::desc& desc) { return desc.get_dims(); }

template <class Primitive, class... Args>
typename Primitive::primitive_desc describe(const dnnl::engine& engine, const dnnl::primitive_attr& attributes,
                                            const Args&... args) {
  return {engine, args..., attributes};
}

template <class Primitive, class... Args>
typename Primitive::primitive_desc describe_by(std::string_view kernels, const dnnl::engine& engine,
                                               const dnnl::primitive_attr& attributes, const Args&... args) {
  return first_by(kernels, typename Primitive::primitive_desc(engine, args..., attributes));
}

template <class Primitive, class Hint, class... Args>
typename Primitive::primitive_desc describe_backward(const dnnl::engine& engine, const dnnl::primitive_attr& attributes,
                                                     const Hint& forward, const Args&... args) {
  return {engine, args..., forward, attributes};
}

#else

// Version 2's plain pooling cannot dilate; its successor there takes the arguments of version 3.
using PoolingForward = dnnl::pooling_v2_forward;
using PoolingBackward = dnnl::pooling_v2_backward;

inline dnnl::memory::dims dims_of(const dnnl::memory::desc& desc) { return desc.dims(); }

template <class Primitive, class... Args>
typename Primitive::primitive_desc describe(const dnnl::engine& engine, const dnnl::primitive_attr& attributes,
                                            const Args&... args) {
  return {typename Primitive::desc(args...), attributes, engine};
}

/// The same by kernels whose name begins with `kernels`, if there are any, in place of those that oneDNN prefers.
template <class Primitive, class... Args>
typename Primitive::primitive_desc describe_by(std::string_view kernels, const dnnl::engine& engine,
                                               const dnnl::primitive_attr& attributes, const Args&... args) {
  const typename Primitive::desc description(args...);  // the search for other kernels reads it
  return first_by(kernels, typename Primitive::primitive_desc(description, attributes, engine));
}

template <class Primitive, class Hint, class... Args>
typename Primitive::primitive_desc describe_backward(const dnnl::engine& engine, const dnnl::primitive_attr& attributes,
                                                     const Hint& forward, const Args&... args) {
  return {typename Primitive::desc(args...), attributes, engine, forward};
}

#endif

}  // namespace lockstep::nn::cpu
