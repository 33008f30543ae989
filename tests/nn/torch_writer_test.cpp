// What write_torch_file() writes: read back here, and by PyTorch in tests/parity/weights_in_pytorch_test.py.
#include "nn/io/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"
#include "lockstep/nn/io/weights.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using lockstep::testing::read_file;
using lockstep::testing::TemporaryDirectory;
using ::testing::HasSubstr;

HostTensor tensor(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) {
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  HostTensor made{name, dtype, shape, std::vector<std::byte>(bytes)};
  for (std::size_t i = 0; i < bytes; ++i) made.bytes[i] = static_cast<std::byte>(i * 7 % 60);
  return made;
}

std::vector<HostTensor> tensors() {
  return {tensor("a.weight", DType::kF32, {3, 5, 2}),
          tensor("counted", DType::kI64, {}),
          tensor("ä \"'\n", DType::kF64, {2}),
          tensor("i", DType::kI32, {1, 1}),
          tensor("u", DType::kU8, {70}),
          tensor("none", DType::kF32, {0, 4}),
          tensor("large", DType::kF32, {300, 300})};
}

void expect_same(const std::vector<HostTensor>& read, const std::vector<HostTensor>& written) {
  ASSERT_EQ(read.size(), written.size());
  for (std::size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i].name, written[i].name);
    EXPECT_EQ(read[i].dtype, written[i].dtype) << written[i].name;
    EXPECT_EQ(read[i].shape, written[i].shape) << written[i].name;
    EXPECT_TRUE(read[i].bytes == written[i].bytes) << written[i].name;
  }
}

class TorchWriter : public ::testing::Test {
 protected:
  std::string path(const std::string& name = "w.pt") const { return directory_.path(name); }
  const TemporaryDirectory directory_;
};

TEST_F(TorchWriter, IsReadBack) {
  write_torch_file(path(), tensors());
  expect_same(read_torch_file(path()).tensors, tensors());
  const std::string first = read_file(path());
  write_torch_file(path(), tensors());
  EXPECT_TRUE(read_file(path()) == first) << "a file is a function of what is in it";
  write_torch_file(path(), {});
  EXPECT_TRUE(read_torch_file(path()).tensors.empty());
}

TEST_F(TorchWriter, Bf16ComesAsF32) {
  write_torch_file(path(), {{"w", DType::kBF16, {1}, {std::byte{0x80}, std::byte{0x3f}}}});
  const auto read = read_torch_file(path()).tensors;
  EXPECT_EQ(read[0].dtype, DType::kF32);
  float value = 0;
  std::memcpy(&value, read[0].bytes.data(), sizeof value);
  EXPECT_EQ(value, 1.0f);
}

// As torch.save() has them: what torch.load(mmap=True) maps.
TEST_F(TorchWriter, StoragesBeginAtMultiplesOf64Bytes) {
  for (const std::uint64_t zip64_from : {std::uint64_t{0xffffffff}, std::uint64_t{1}}) {
    write_torch_file(path(), tensors(), {}, {.zip64_from = zip64_from});
    const std::string file = read_file(path());
    std::size_t entries = 0;
    for (std::size_t at = file.find("PK\3\4"); at != std::string::npos; at = file.find("PK\3\4", at + 1), ++entries) {
      const auto length = [&](std::size_t place) {
        return static_cast<std::size_t>(static_cast<unsigned char>(file[at + place])) +
               256 * static_cast<std::size_t>(static_cast<unsigned char>(file[at + place + 1]));
      };
      EXPECT_EQ((at + 30 + length(26) + length(28)) % 64, 0u) << file.substr(at + 30, length(26));
    }
    EXPECT_EQ(entries, tensors().size() + 5);
  }
}

// What does not fit into 32 bits is written otherwise: here all that is not 0.
TEST_F(TorchWriter, LargeFilesAreReadBack) {
  for (const std::uint64_t from : {1, 100, 100'000}) {
    write_torch_file(path(), tensors(), {{"lockstep", "a card"}}, {.zip64_from = from});
    expect_same(read_torch_file(path()).tensors, tensors());
    EXPECT_EQ(read_torch_metadata(path(), "lockstep"), "a card");
  }
}

TEST_F(TorchWriter, ManyTensorsAreReadBack) {
  std::vector<HostTensor> many;
  for (int i = 0; i < 70'000; ++i) many.push_back(tensor(std::to_string(i), DType::kU8, {1}));
  write_torch_file(path(), many);
  const auto read = read_torch_file(path()).tensors;
  ASSERT_EQ(read.size(), many.size());
  EXPECT_EQ(read.back().name, "69999");
}

TEST_F(TorchWriter, FileExtensionsChooseTheFormat) {
  const std::map<std::string, std::string> card = {{"format", "pt"}, {"lockstep", "{}"}};
  for (const char* name : {"a.pt", "a.pth", "a.bin", "a.PT", ".pt"}) {
    write_weights(path(name), tensors(), card);
    EXPECT_EQ(read_file(path(name)).substr(0, 2), "PK") << name;
    expect_same(read_weights(path(name)), tensors());
    EXPECT_EQ(read_weights_metadata(path(name)).at("lockstep"), "{}");
  }
  for (const char* name : {"a.safetensors", "a", "run-0.1"}) {
    write_weights(path(name), tensors(), card);
    EXPECT_NE(read_file(path(name)).substr(0, 2), "PK") << name;
    EXPECT_EQ(read_weights_metadata(path(name)).at("lockstep"), "{}");
    EXPECT_EQ(read_weights(path(name)).size(), tensors().size());
  }
  for (const char* name : {"a.onnx", "a.h5", "a.ckpt", "a.NPZ", "a.json"}) {
    EXPECT_THROW(write_weights(path(name), tensors(), card), UsageError) << name;
    EXPECT_THROW(check_weights_path(path(name)), UsageError) << name;
  }
}

TEST_F(TorchWriter, ADirectoryThatIsMissingIsNamed) {
  try {
    write_torch_file(path("none/w.pt"), tensors());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("none/w.pt"));
  }
}

}  // namespace
}  // namespace lockstep::nn
