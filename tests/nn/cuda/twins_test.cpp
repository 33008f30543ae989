// Every kernel of the interfaces in nn/ops has a definition for the CPU, one for CUDA, and a test of that; what forward
// passes call also has nodes of ONNX, or a refusal: by reading the sources.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::SizeIs;

std::string code_of(const fs::path& path) {
  std::ifstream file(path);
  std::string code, line;
  while (std::getline(file, line)) code += line.substr(0, line.find("//")) + "\n";
  return code;
}

std::vector<std::smatch> all_matches(const std::string& text, const std::regex& pattern) {
  return {std::sregex_iterator(text.begin(), text.end(), pattern), std::sregex_iterator()};
}

struct Kernel {
  std::string file;  // "conv", of lockstep/nn/ops/conv.h
  std::string interface;
  std::string name;

  std::string text() const { return fmt::format("{}::{}", interface, name); }
};

// The virtual functions of lockstep/nn/ops/*.h's classes whose names end in Kernels: pure ones, and those that do
// nothing (Note [Shapes alone]).
std::vector<Kernel> kernels_of(const fs::path& root) {
  static const std::regex kInterface(R"(class\s+(\w+Kernels)\b[^;{]*\{)");
  static const std::regex kKernel(R"(virtual\s[^;({}]*?(\w+)\s*\([^;{}]*\)[^;{}]*(=\s*0\s*;|\{\s*\}))");
  std::vector<fs::path> headers;
  for (const auto& entry : fs::directory_iterator(root / "include/lockstep/nn/ops"))
    if (entry.path().extension() == ".h") headers.push_back(entry.path());
  std::ranges::sort(headers);
  std::vector<Kernel> kernels;
  for (const fs::path& header : headers) {
    const std::string code = code_of(header);
    for (const std::smatch& found : all_matches(code, kInterface)) {
      const auto begin = static_cast<std::size_t>(found.position() + found.length());
      const std::string body = code.substr(begin, code.find("\n};", begin) - begin);
      for (const std::smatch& pure : all_matches(body, kKernel))
        kernels.push_back({header.stem(), found.str(1), pure.str(1)});
    }
  }
  return kernels;
}

// Files of a directory named STEM*ENDING, concatenated.
std::string code_of_all(const fs::path& directory, const std::string& stem, const std::vector<std::string>& endings) {
  std::string code;
  if (!fs::exists(directory)) return code;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(stem)) continue;
    for (const std::string& ending : endings)
      if (name.ends_with(ending)) code += code_of(entry.path());
  }
  return code;
}

std::vector<std::string> without_twin(const fs::path& root) {
  std::vector<std::string> missing;
  for (const Kernel& kernel : kernels_of(root)) {
    const std::regex definition(
        fmt::format(R"((\b{0}\s*\([^;{{}}]*\)\s*override\s*\{{)|(::{0}\s*\([^;{{}}]*\)\s*\{{))", kernel.name));
    if (!std::regex_search(code_of_all(root / "nn/ops/cpu", kernel.file, {".cpp"}), definition))
      missing.push_back(kernel.text() + " has no definition in nn/ops/cpu/" + kernel.file + ".cpp");
    if (!std::regex_search(code_of_all(root / "nn/ops/cuda", kernel.file, {".cu", ".cpp"}), definition))
      missing.push_back(kernel.text() + " has no definition in nn/ops/cuda/" + kernel.file + ".cu or .cpp");
    const std::regex call(fmt::format(R"((->|\.){}\s*\()", kernel.name));
    if (!std::regex_search(code_of_all(root / "tests/nn/cuda", kernel.file, {"_test.cpp"}), call))
      missing.push_back(kernel.text() + " is not called in tests/nn/cuda/" + kernel.file + "_test.cpp");
  }
  return missing;
}

// Of backward are those that no forward pass calls.
std::vector<std::string> without_nodes(const fs::path& root) {
  const std::string code = code_of_all(root / "nn/onnx", "", {".cpp"});
  std::vector<std::string> missing;
  for (const Kernel& kernel : kernels_of(root)) {
    if (kernel.name.find("backward") != std::string::npos || kernel.interface == "OptimKernels") continue;
    const std::size_t begin = code.find("public " + kernel.interface);
    const std::string body = begin == std::string::npos ? "" : code.substr(begin, code.find("\n};", begin) - begin);
    if (!std::regex_search(body, std::regex(fmt::format(R"(\b{}\s*\([^;{{}}]*\)\s*override\s*\{{)", kernel.name))))
      missing.push_back(kernel.text() + " has no nodes in nn/onnx, and is not refused there");
  }
  return missing;
}

TEST(CudaTwins, EveryKernelHasOneAndATest) {
  EXPECT_THAT(kernels_of(LOCKSTEP_SOURCE_DIR), SizeIs(::testing::Ge(30U)));
  for (const std::string& missing : without_twin(LOCKSTEP_SOURCE_DIR)) ADD_FAILURE() << missing;
}

TEST(CudaTwins, EveryKernelOfForwardPassesHasNodes) {
  for (const std::string& missing : without_nodes(LOCKSTEP_SOURCE_DIR)) ADD_FAILURE() << missing;
}

// The rules themselves, tried on a tree that breaks them.
TEST(CudaTwins, MissingOnesAreNamed) {
  const lockstep::testing::TemporaryDirectory directory;
  const fs::path tree = directory.path();
  const auto write = [&](const std::string& file, const std::string& text) { directory.write(file, text); };
  write("include/lockstep/nn/ops/scan.h",
        "class Tensor;\nclass ScanKernels {\n public:\n  virtual ~ScanKernels() = default;\n  /// up() and down()\n"
        "  virtual void up(const Tensor& x,\n                  float by) {}\n  virtual std::vector<int> down() = 0;\n"
        "  virtual int sideways() = 0;\n  int helper();\n};\nclass Scan {\n  virtual void other() = 0;\n};\n");
  write("nn/ops/cpu/scan.cpp",
        "std::vector<int> down() override { return {}; }\nint sideways() override { return 1; }\n");
  write("nn/ops/cuda/scan.cu", "// void down() override {}\nvoid up(const Tensor& x, float by) override {\n}\n");
  write("nn/ops/cuda/scan_more.cpp", "int CudaScan::sideways() { return down(); }\n");
  write("nn/ops/cuda/other.cu", "std::vector<int> down() override { return {}; }\n");
  write("tests/nn/cuda/scan_test.cpp", "scan->up(x, 1); scan.sideways();\n");
  write("tests/nn/cuda/other_test.cpp", "other->down();\n");
  EXPECT_THAT(without_twin(tree), ElementsAre("ScanKernels::up has no definition in nn/ops/cpu/scan.cpp",
                                              "ScanKernels::down has no definition in nn/ops/cuda/scan.cu or .cpp",
                                              "ScanKernels::down is not called in tests/nn/cuda/scan_test.cpp"));
  write("nn/onnx/scan.cpp",
        "class Nodes : public ScanKernels {\n  void up(const Tensor&, float) override { add(); }\n  // void down() "
        "override {}\n};\nint sideways() override { return 1; }\n");
  EXPECT_THAT(without_nodes(tree),
              ElementsAre("ScanKernels::down has no nodes in nn/onnx, and is not refused there",
                          "ScanKernels::sideways has no nodes in nn/onnx, and is not refused there"));
}

}  // namespace
}  // namespace lockstep::nn
