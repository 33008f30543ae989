// MNIST and data sets that come in the same four files (Fashion-MNIST, KMNIST, EMNIST).
#pragma once

#include <string>

#include "data/dataset.h"

namespace lockstep::data {

inline constexpr int kMnistClasses = 10;
/// Mean and standard deviation of MNIST's training pixels in [0, 1]; pixels are normalised with them.
inline constexpr float kMnistMean = 0.1307f;
inline constexpr float kMnistStd = 0.3081f;

/// Reads train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte from
/// `directory`, each also with a dot for the last hyphen's place ("train-images.idx3-ubyte") and with ".gz" appended.
/// Samples have dims {H, W, 1}; memory holds the files' bytes, pixels become numbers when they are read. Throws IoError
/// for what is missing, cut or malformed, for counts that differ and for labels not below `classes`.
DataSplits open_mnist(const std::string& directory, int classes);

}  // namespace lockstep::data
