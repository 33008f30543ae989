// An ONNX file of recorded passes: which extents are free, and the messages of the format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/nn/io/onnx.h"
#include "nn/onnx/graph.h"

namespace lockstep::nn::onnx {

/// A recorded pass over so many samples of so many tokens.
struct Pass {
  Graph graph;
  std::int64_t batch = 0, length = 0;
};

/// Note [Free extents]
/// The passes of one module differ in the batch, and where lengths are free in the length: two or three of them, whose
/// graphs have to be the same but for their extents. An extent that is the same in all of them is one of the graph;
/// others have to be a multiple of the batch, of the length or of both. Reshapes then say 0, "as before", or -1, "what
/// is left"; where that does not do, nodes compute the shape from those of the inputs. A pass decides nothing from the
/// values of extents that the next one could not decide otherwise: then the graphs differ, and the model is refused.
/// `scale` · batch ^ batches · length ^ lengths.
struct Extent {
  std::int64_t scale = 0;
  int batches = 0, lengths = 0;

  bool is_free() const { return batches + lengths > 0; }
  friend auto operator<=>(const Extent&, const Extent&) = default;
};

/// The file's bytes, without those of its weights.
struct ModelFile {
  /// `bytes`, then those of `weights`, in file layout, if there are any.
  struct Piece {
    std::string bytes;
    const Constant* weights = nullptr;
  };
  std::vector<Piece> pieces;
  std::uint64_t bytes = 0;
  /// Weights of a file of their own, in its order, each at a multiple of kAlignment bytes.
  static constexpr std::uint64_t kAlignment = 64;
  std::vector<const Constant*> beside;
  std::uint64_t bytes_beside = 0;
  std::size_t nodes = 0;
};

/// Where weights are that do not go into the file at `path`.
std::string data_path(const std::string& path);

/// Of passes of one module: the first two have different batches, a third one another length. `path`: where the file is
/// going to be. The passes must outlive the result. Throws UsageError where the graphs differ, and for names of outputs
/// that do not go with them.
ModelFile make_model_file(const std::vector<Pass>& passes, const std::string& path, const OnnxOptions& options);

}  // namespace lockstep::nn::onnx
