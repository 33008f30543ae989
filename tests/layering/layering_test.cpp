#include "tests/layering/layering.h"

#include <gmock/gmock.h>
#include <cstdlib>

#include <fstream>
#include <sstream>

#include "comm/backends.h"
#include "lockstep/data/families.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "options/sources.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::layering {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const fs::path kRoot = LOCKSTEP_SOURCE_DIR;

Dependencies declared_dependencies() {
  std::ifstream file(LOCKSTEP_DEPENDENCIES_FILE);
  std::stringstream text;
  text << file.rdbuf();
  return parse_dependencies(text.str());
}

TEST(Layering, ModulesDeclareOnlyAllowedDependencies) {
  EXPECT_THAT(undeclarable_dependencies(declared_dependencies()), IsEmpty());
}
TEST(Layering, ModulesIncludeOnlyWhatTheyDeclare) {
  EXPECT_THAT(undeclared_includes(kRoot, declared_dependencies()), IsEmpty());
}
TEST(Layering, PublicHeadersIncludeNoOtherLibrary) { EXPECT_THAT(foreign_includes(kRoot), IsEmpty()); }
TEST(Layering, OnlyBaseReadsTheEnvironment) { EXPECT_THAT(stray_getenv(kRoot), IsEmpty()); }
TEST(Layering, OneHeaderHasTheJsonLibrary) { EXPECT_THAT(stray_json(kRoot), IsEmpty()); }
TEST(Layering, BackendsAreFilesNotConditions) { EXPECT_THAT(backend_conditions(kRoot), IsEmpty()); }
TEST(Layering, FilesStayShort) { EXPECT_THAT(long_files(kRoot, 600), IsEmpty()); }

TEST(Layering, VariablesThatAreNoFlagsAreReserved) {
  const auto variables = variables_in_modules(kRoot);
  EXPECT_THAT(variables, Not(IsEmpty()));
  for (const auto& name : variables) EXPECT_TRUE(options::is_reserved_variable(name)) << name;
}

// Models, losses, optimizers, schedules and data sets are known to their registries alone: adding one is adding its
// file.
TEST(Layering, NobodyKnowsAFamilyByItsName) {
  std::set<std::string> names;
  const auto add = [&](const auto& all) { names.insert(all.begin(), all.end()); };
  add(nn::model_names());
  add(nn::optimizer_names());
  add(nn::schedule_names());
  add(nn::loss_names());
  for (const auto* family : data::dataset_families()) names.insert(family->name);
  for (const auto* family : comm::backend_families()) names.insert(family->name);
  const std::set<std::string> words = {"linear", "constant", "step",  "digits", "images", "text",     "texts", "csv",
                                       "tokens", "random",   "hosts", "mpi",    "nccl",   "restarts", "table"};
  std::vector<std::string> own = {"nn/models/", "nn/optim/", "nn/losses/", "nn/autograd/", "nn/ops/"};
  for (const auto* family : data::dataset_families()) own.push_back("data/" + family->name);
  own.insert(own.end(), {"nn/io/torch_file.cpp", "nn/io/weights.cpp"});  // what is no weights file: ".npy"
  own.emplace_back("data/cifar");                                        // of several families
  for (const char* module : {"models", "optim", "losses", "autograd", "ops"})
    own.push_back(std::string("include/lockstep/nn/") + module + "/");
  for (const auto* family : comm::backend_families()) own.push_back("comm/" + family->name + "/");
  own.emplace_back("bench/peers/");
  own.emplace_back("bench/adapters/");  // of other frameworks, with names of theirs
  EXPECT_THAT(names_elsewhere(kRoot, names, words, own), IsEmpty());
}

// The rules themselves, tried on trees that break them.
class BadTree : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) { directory_.write(file, text); }

  testing::TemporaryDirectory directory_;
  const fs::path tree_ = directory_.path();
};

TEST_F(BadTree, UndeclaredIncludes) {
  write("ddp/mpi/reducer.cpp",
        "#include <vector>\n#include \"ddp/a.h\"\n#include \"comm/a.h\"\n  #  include \"nn/a.h\"\n");
  write("sampler/a.h", "#include \"b.h\"\n#include <base/text.h>\n");
  EXPECT_THAT(undeclared_includes(tree_, parse_dependencies("ddp: comm\nsampler: \n")),
              ElementsAre(HasSubstr("ddp/mpi/reducer.cpp:4: ddp has not declared that it sees nn"),
                          HasSubstr("sampler/a.h:1: b.h is not included from the root"),
                          HasSubstr("sampler/a.h:2: sampler has not declared that it sees base")));
}

TEST_F(BadTree, PublicHeaders) {
  write("include/lockstep/comm/a.h",
        "#include <vector>\n#include \"lockstep/nn/a.h\"\n#include \"comm/b.h\"\n#include <mpi.h>\n#include "
        "<fmt/core.h>\n");
  write("include/lockstep/comm/mpi.h", "#include <mpi.h>\n#include <hwloc.h>\n");
  EXPECT_THAT(foreign_includes(tree_), ElementsAre(HasSubstr("a.h:3: comm/b.h"), HasSubstr("a.h:4: mpi.h"),
                                                   HasSubstr("a.h:5: fmt/core.h"), HasSubstr("comm/mpi.h:2: hwloc.h")));
  EXPECT_THAT(undeclared_includes(tree_, parse_dependencies("comm: base\n")),
              ElementsAre(HasSubstr("a.h:2: comm has not declared that it sees nn")));
}

TEST_F(BadTree, Adapters) {
  const std::string all =
      "#include <torch/types.h>\n#include \"lockstep/ddp.h\"\n#include \"bindings/torch/a.h\"\n#include "
      "<c10/core/Device.h>\n#include \"base/text.h\"\n#include <vector>\n";
  write("include/lockstep/torch/a.h", all);
  write("bindings/torch/a.cpp", all);
  write("include/lockstep/ddp/a.h", all);
  write("bindings/c10d/a.cpp",
        "#include <torch/types.h>\n#include \"bindings/c10d/a.h\"\n#include \"bindings/torch/a.h\"\n");
  EXPECT_THAT(foreign_includes(tree_),
              ElementsAre(HasSubstr("ddp/a.h:1: torch/types.h"), HasSubstr("ddp/a.h:3: bindings/torch/a.h"),
                          HasSubstr("ddp/a.h:4: c10/core"), HasSubstr("ddp/a.h:5: base/text.h"),
                          HasSubstr("torch/a.h:3"), HasSubstr("torch/a.h:4: c10/core"), HasSubstr("torch/a.h:5"),
                          HasSubstr("bindings/torch/a.cpp:5: base/text.h"),
                          HasSubstr("bindings/c10d/a.cpp:3: bindings/torch/a.h")));
}

TEST_F(BadTree, ForbiddenDependencies) {
  Dependencies dependencies = allowed_dependencies();
  EXPECT_THAT(undeclarable_dependencies(dependencies), IsEmpty());
  dependencies["ddp"].insert("nn");
  dependencies["attic"] = {};
  dependencies.erase("data");
  EXPECT_THAT(undeclarable_dependencies(dependencies),
              ElementsAre(HasSubstr("data: the build declares no such module"), HasSubstr("attic: no such module"),
                          "ddp: may not see nn"));
}

TEST_F(BadTree, Getenv) {
  write("base/env.cpp", "getenv(\"X\");\n");
  write("nn/a.cpp", "// getenv is elsewhere\nauto x = std::getenv(\"X\");\n");
  write("bench/a.cpp", "secure_getenv(\"X\");\n");
  EXPECT_THAT(stray_getenv(tree_), ElementsAre(HasSubstr("bench/a.cpp:1"), HasSubstr("nn/a.cpp:2")));
}

TEST_F(BadTree, JsonLibrary) {
  write("base/json_value.h", "#include <nlohmann/json.hpp>\n");
  write("base/json.h", "#include <nlohmann/json_fwd.hpp>\n");
  write("nn/a.h", "// nlohmann/json.hpp\n#include <nlohmann/json.hpp>\n");
  EXPECT_THAT(stray_json(tree_), ElementsAre(HasSubstr("nn/a.h:2")));
}

TEST_F(BadTree, BackendConditions) {
  write(
      "comm/a.cpp",
      "#ifdef LOCKSTEP_HAVE_MPI\n#endif  // MPI\n#if 0\n#elif defined(USE_NCCL)\n# if __CUDA_ARCH__\n#if 1  // CUDA\n");
  EXPECT_THAT(backend_conditions(tree_),
              ElementsAre(HasSubstr("comm/a.cpp:1: a condition on MPI"), HasSubstr("comm/a.cpp:4: a condition on NCCL"),
                          HasSubstr("comm/a.cpp:5: a condition on CUDA")));
}

TEST_F(BadTree, LongFiles) {
  write("nn/a.cpp", "1\n2\n3\n");
  write("nn/b.cpp", "1\n2\n3\n4\n");
  write("nn/b.csv", "1\n2\n3\n4\n");
  write("scripts/demo", "1\n2\n3\n4\n");
  write("tests/nn/a.cpp", "1\n2\n3\n4\n");
  EXPECT_THAT(long_files(tree_, 3), ElementsAre("nn/b.cpp: 4 lines, at most 3", "scripts/demo: 4 lines, at most 3"));
}

TEST_F(BadTree, NamesElsewhere) {
  write("trainer/a.cpp", "// \"gpt\"\nif (x == \"gpt\") f(\"a gpt-like\", \"of gpt2\");\n#include \"nn/gpt.h\"\n");
  write("trainer/b.cpp", "f(\"step\", s == \"step\", \"a step\");\n");
  write("nn/models/gpt.cpp", "f(\"gpt\");\n");
  EXPECT_THAT(names_elsewhere(tree_, {"gpt", "gpt2", "step"}, {"step"}, {"nn/models/"}),
              ElementsAre(HasSubstr("trainer/a.cpp:2: \"gpt\" knows 'gpt'"), HasSubstr("\"of gpt2\" knows 'gpt2'"),
                          HasSubstr("trainer/b.cpp:1: \"step\" knows 'step'")));
}

TEST_F(BadTree, Variables) {
  write("comm/a.cpp", "env(\"LOCKSTEP_X\"), set(\"LOCKSTEP_Y=1\"); LOCKSTEP_Z;\n");
  write("cli/a.cpp", "env(\"LOCKSTEP_CLI\");\n");
  EXPECT_THAT(variables_in_modules(tree_), ElementsAre("LOCKSTEP_X", "LOCKSTEP_Y"));
}

}  // namespace
}  // namespace lockstep::layering
